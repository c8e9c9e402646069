"""The sizes of an attention kernel, however it is written, and its row of the kernel table."""

from dataclasses import dataclass
from typing import Any

from stablecast.ir.kernels import KernelClass, KernelRow


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`batch` x `hq` query heads on `hkv` key heads, `sq` queries and `skv` keys of size `d`.

    `causal`: query i of the last `sq` positions sees the keys up to its own. `window`: keys that a query sees at most,
    0 for all. `direction`: `fwd` or `bwd`.
    """

    batch: int
    hq: int
    hkv: int
    sq: int
    skv: int
    d: int
    causal: int = 0
    window: int = 0
    direction: str = "fwd"

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head, masked or not."""
        return self.sq * self.skv

    @property
    def flops(self) -> float:
        """Matrix FLOPs over all pairs: two products forward, five backward (the scores are computed again)."""
        products = 5 if self.direction == "bwd" else 2
        return products * 2.0 * self.batch * self.hq * self.pairs * self.d


def visible_pairs(sq: int, skv: int, causal: int, window: int) -> float:
    """(query, key) pairs that are not masked."""
    if not causal:
        return float(sq * skv) if not window else float(sq * min(window, skv))
    first = max(skv - sq + 1, 1)
    limit = min(window, skv) if window else skv
    full = max(0, skv - max(limit, first) + 1) if limit < skv else 0
    below = sq - full
    return (first + first + below - 1) * below / 2.0 + full * float(limit) if below > 0 else full * float(limit)


def attention_row(shape: AttentionShape, math: str, **common: Any) -> KernelRow:
    """The row of one attention kernel; `common`: its other columns (dtypes, bytes, transcendentals, ...).

    What the mask hides is in `padded_flops`.
    """
    hidden = 1.0 - visible_pairs(shape.sq, shape.skv, shape.causal, shape.window) / shape.pairs
    return KernelRow(
        klass=KernelClass.ATTENTION,
        math=math,
        batch=shape.batch,
        hq=shape.hq,
        hkv=shape.hkv,
        sq=shape.sq,
        skv=shape.skv,
        d=shape.d,
        causal=shape.causal,
        window=shape.window,
        direction=shape.direction,
        phase="decode" if shape.sq == 1 and shape.skv > 1 else "prefill",
        matmul_flops=shape.flops,
        padded_flops=shape.flops * hidden,
        **common,
    )
