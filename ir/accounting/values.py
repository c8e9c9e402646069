"""What a work rule returns, and the conventions that totals are counted by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelClass
from stablecast.ir.work import Work


class Basis(StrEnum):
    """How well a rule knows an op: `exact` counts, `formula` estimates with a source, `default` is a generic guess,
    `opaque` knows only the bytes. The last two count as unmodelled."""

    EXACT = "exact"
    FORMULA = "formula"
    DEFAULT = "default"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class OpWork:
    """Work of one op run once, without the regions of control flow.

    `matmul_flops` as a dense loop over the window executes them; of these `padded_flops` multiply zeros of padding or
    dilation, and `dilation_flops` (a part of `padded_flops`) zeros that a dilated input brings. `reads[i]`: bytes of
    operand i that it touches; `writes[i]`: bytes of result i. `klass`: the kernel it makes when it stands alone.
    `note`: what was assumed, empty if nothing.
    """

    matmul_flops: float = 0
    padded_flops: float = 0
    vector_flops: float = 0
    transcendentals: float = 0
    reads: tuple[float, ...] = ()
    writes: tuple[float, ...] = ()
    klass: KernelClass = KernelClass.ELEMENTWISE
    basis: Basis = Basis.EXACT
    note: str = ""
    dilation_flops: float = 0

    @property
    def modelled(self) -> bool:
        return self.basis in (Basis.EXACT, Basis.FORMULA)

    @property
    def useful_flops(self) -> float:
        """Matrix FLOPs that multiply no zeros of padding or dilation."""
        return self.matmul_flops - self.padded_flops

    @property
    def nbytes(self) -> float:
        return sum(self.reads) + sum(self.writes)

    @property
    def work(self) -> Work:
        """The op by itself, unfused, every zero of padding and dilation executed."""
        return Work(self.matmul_flops, self.vector_flops, self.transcendentals, sum(self.reads), sum(self.writes))

    def counted(self, padding: str) -> Work:
        """The op by itself under a padding convention: `in` counts edge padding, `out` counts no zeros.

        Zeros that dilation brings are FLOPs under neither.
        """
        skipped = self.padded_flops if padding == "out" else self.dilation_flops
        return Work(
            self.matmul_flops - skipped, self.vector_flops, self.transcendentals, sum(self.reads), sum(self.writes)
        )


_NO_COUNTS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Conventions:
    """How to count where two ways are fair.

    `padding`: `in` counts the positions of a window that fall on edge padding, `out` does not; zeros of a dilated input
    never count. `causal`: `full` counts masked products of attention, `exact` only the pairs that the mask lets
    through. `branch`: which branch of `case` and `if`: the `max`, the `min`, or the probability of the first. `loops`:
    trips of loops whose count is a symbol, `dims`: sizes of dynamic dimensions, both by name.
    """

    padding: str = "in"
    causal: str = "full"
    branch: str | float = "max"
    loops: Mapping[str, int] = field(default_factory=lambda: _NO_COUNTS)
    dims: Mapping[str, int] = field(default_factory=lambda: _NO_COUNTS)

    def __post_init__(self) -> None:
        _one_of("padding", self.padding, ("in", "out"))
        _one_of("causal", self.causal, ("full", "exact"))
        if isinstance(self.branch, str):
            _one_of("branch", self.branch, ("max", "min"))
        elif not 0 <= self.branch <= 1:
            raise InputError(f"branch probability {self.branch} is not between 0 and 1")
        for kind, given, least in (("loop", self.loops, 0), ("dimension", self.dims, 1)):
            for name, value in given.items():
                if value < least:
                    raise InputError(f"{kind} {name}={value} is less than {least}")

    def to_dict(self) -> dict[str, Any]:
        """By name, with the two that cannot be chosen: 1 multiply-add = 2 FLOP, bytes before fusion."""
        return {
            "padding": self.padding,
            "causal": self.causal,
            "branch": self.branch,
            "loops": dict(self.loops),
            "dims": dict(self.dims),
            "flops_per_multiply_add": 2,
            "bytes": "unfused",
        }


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name}={value} is not a convention", f"choose {' or '.join(allowed)}")
