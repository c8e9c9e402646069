"""Attention that a framework calls by name: sizes from the composite or custom call."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stablecast.ir.accounting.context import target_of
from stablecast.ir.program import Op
from stablecast.ir.types import TensorType
from stablecast.lowering.attention_shape import AttentionShape
from stablecast.lowering.graph import Graph

_ATEN = "aten._scaled_dot_product_"
_KINDS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")

FIRST_OPERAND: Mapping[str, tuple[int, str]] = MappingProxyType(
    {f"{_ATEN}{kind}": (0, "fwd") for kind in _KINDS} | {f"{_ATEN}{kind}_backward": (1, "bwd") for kind in _KINDS}
)
"""Composite -> place of the queries among its operands (keys follow), and direction."""


def composite_attention(graph: Graph, nodes: Sequence[int]) -> AttentionShape | None:
    """The sizes of the attention that `nodes` are the body of, None if they are of no attention composite."""
    units = {graph.unit_of[node] for node in nodes} - {-1}
    for number in sorted(units):
        shape = attention_of(graph.units[number].op)
        if shape is not None:
            return shape
    return None


def attention_of(op: Op) -> AttentionShape | None:
    """The sizes of a composite that is attention: queries [b, h, s, d], keys [b, h_kv, s_kv, d]."""
    found = FIRST_OPERAND.get(target_of(op))
    if found is None:
        return None
    place, direction = found
    query, key = op.operand_types[place], op.operand_types[place + 1]
    if not (isinstance(query, TensorType) and isinstance(key, TensorType) and len(query.shape) == len(key.shape) == 4):
        return None
    attributes: Mapping[str, Any] = op.attrs.get("composite_attributes") or {}
    batch, hq, sq, d = query.shape
    causal = int(bool(attributes.get("is_causal", False)))
    return AttentionShape(batch, hq, key.shape[1], sq, key.shape[2], d, causal, direction=direction)
