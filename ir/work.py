"""The cost algebra: FLOPs and bytes that add, scale and compare."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stablecast.ir.types import Count, Symbol


@dataclass(frozen=True, slots=True)
class Work:
    """What a piece of program does on one device.

    `matmul_flops`: 2 per multiply-add on the matrix unit. `vector_flops`: everything else, one per element and
    arithmetic op. `transcendentals`: element evaluations of exp, log, tanh and the like, not contained in
    `vector_flops`. `bytes_read`, `bytes_written`: traffic with the device memory.
    """

    matmul_flops: float = 0
    vector_flops: float = 0
    transcendentals: float = 0
    bytes_read: float = 0
    bytes_written: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.vector_flops + other.vector_flops,
            self.transcendentals + other.transcendentals,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )

    def __mul__(self, count: float) -> "Work":
        return Work(*(part * count for part in self.parts))

    __rmul__ = __mul__

    @property
    def parts(self) -> tuple[float, float, float, float, float]:
        return (self.matmul_flops, self.vector_flops, self.transcendentals, self.bytes_read, self.bytes_written)

    @property
    def flops(self) -> float:
        """All arithmetic, each transcendental counted as one."""
        return self.matmul_flops + self.vector_flops + self.transcendentals

    @property
    def nbytes(self) -> float:
        return self.bytes_read + self.bytes_written

    def maximum(self, other: "Work") -> "Work":
        """The larger of each part."""
        return Work(*map(max, self.parts, other.parts))

    def minimum(self, other: "Work") -> "Work":
        """The smaller of each part."""
        return Work(*map(min, self.parts, other.parts))

    def to_dict(self) -> dict[str, float]:
        """The parts by name, whole numbers as integers."""
        return {
            name: int(value) if float(value).is_integer() else value
            for name, value in zip(PARTS, self.parts, strict=True)
        }


PARTS = ("matmul_flops", "vector_flops", "transcendentals", "bytes_read", "bytes_written")
NO_WORK = Work()

Key = tuple[Symbol, ...]
"""The symbols whose product multiplies a share of the work, sorted by name; empty for the constant share."""


@dataclass(frozen=True, slots=True)
class SymbolicWork:
    """Work whose loops may have unknown counts: total = sum over keys of product(key) * terms[key]."""

    terms: Mapping[Key, Work] = field(default_factory=lambda: {(): NO_WORK})

    def __add__(self, other: "SymbolicWork") -> "SymbolicWork":
        terms = dict(self.terms)
        for key, work in other.terms.items():
            terms[key] = terms[key] + work if key in terms else work
        return SymbolicWork(terms)

    def times(self, count: Count) -> "SymbolicWork":
        """Scaled by a number, or by a symbol, which then joins every key."""
        if isinstance(count, int):
            return SymbolicWork({key: work * count for key, work in self.terms.items()})
        return SymbolicWork({tuple(sorted((*key, count), key=lambda s: s.name)): w for key, w in self.terms.items()})

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """Every symbol that occurs, by name."""
        found = {symbol.name: symbol for key in self.terms for symbol in key}
        return tuple(found[name] for name in sorted(found))

    def evaluate(self, values: Mapping[str, int] | None = None) -> tuple[Work, bool]:
        """The total, and whether it is exact.

        A symbol takes its value from `values`, else its default; one that has neither counts `low` times and the
        total is then a lower bound (second result False).
        """
        given = values or {}
        total, exact = NO_WORK, True
        for key, work in self.terms.items():
            factor = 1
            for symbol in key:
                value = given.get(symbol.name, symbol.default)
                exact = exact and value is not None
                factor *= symbol.low if value is None else value
            total = total + work * factor
        return total, exact


def total(parts: Iterable[Work]) -> Work:
    """The sum of `parts`."""
    result = NO_WORK
    for part in parts:
        result = result + part
    return result
