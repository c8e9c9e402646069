"""Attention that a library's custom call computes: its sizes, from the call's configuration."""

from stablecast.ir.accounting.custom_config import config_of, integers, section
from stablecast.ir.program import Op
from stablecast.ir.types import as_tensor
from stablecast.lowering.attention_shape import AttentionShape

_MASKS = ("CAUSAL", "PADDING_CAUSAL", "CAUSAL_BOTTOM_RIGHT")


def library_attention(op: Op) -> AttentionShape | None:
    """The sizes of cuDNN's attention call `op`, None where its configuration does not say them.

    The configuration holds the shape of the scores, [batch, query heads, queries, keys]; width and key heads follow
    from the sizes of queries and keys, whatever their layout.
    """
    config = section(config_of(op), "cudnn_fmha_backend_config")
    scores = integers(section(config, "intermediate_tensor_shape"), "dimensions")
    if len(scores) != 4 or not all(scores) or len(op.operand_types) < 3:
        return None
    batch, heads, queries, keys = scores
    width = as_tensor(op.operand_types[0]).elements // (batch * heads * queries)
    key_heads = as_tensor(op.operand_types[1]).elements // max(1, batch * keys * width)
    if not width or not key_heads:
        return None
    return AttentionShape(
        batch,
        heads,
        key_heads,
        queries,
        keys,
        width,
        int(str(config.get("mask_type", "")) in _MASKS),
        int(config.get("sliding_window_length") or 0),
        "bwd" if "Backward" in str(op.attrs.get("call_target_name", "")) else "fwd",
    )
