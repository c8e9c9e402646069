"""Tensor types, counts and source locations: the small values that every room shares."""

import math
from dataclasses import dataclass, field

from stablecast.ir.dtypes import DType, DTypeKind
from stablecast.ir.errors import InputError

DYNAMIC = -1
"""Stands in a shape for a dimension whose size the program does not say."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A ranked tensor.

    `shape`: sizes, `DYNAMIC` where unknown. `elements` and `nbytes` (sub-byte types packed) are worked out once.
    """

    shape: tuple[int, ...]
    dtype: DType
    elements: int = field(init=False, compare=False)
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        elements = math.prod(self.shape)
        object.__setattr__(self, "elements", elements)
        object.__setattr__(self, "nbytes", self.dtype.nbytes(elements))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_dynamic(self) -> bool:
        return DYNAMIC in self.shape

    @property
    def is_token(self) -> bool:
        return self.dtype.kind is DTypeKind.TOKEN

    def __str__(self) -> str:
        dims = ",".join("?" if size == DYNAMIC else str(size) for size in self.shape)
        return f"{self.dtype.name}[{dims}]"


@dataclass(frozen=True, slots=True)
class TupleType:
    """Several values carried as one, as HLO's tuples are."""

    parts: tuple["ValueType", ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def elements(self) -> int:
        return sum(part.elements for part in self.parts)

    @property
    def is_dynamic(self) -> bool:
        return any(part.is_dynamic for part in self.parts)

    def __str__(self) -> str:
        return "(" + ", ".join(map(str, self.parts)) + ")"


ValueType = TensorType | TupleType


def as_tensor(kind: ValueType) -> TensorType:
    """`kind` as a tensor; raises `InputError` for a tuple where only a tensor can stand."""
    if isinstance(kind, TensorType):
        return kind
    raise InputError(f"a tuple {kind} stands where a tensor is needed")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A number that the program does not fix, such as the trip count of a data-dependent loop.

    `low` and `high` (None: unbounded) are inclusive; `default` (None: not set) is what totals use until the user
    sets it.
    """

    name: str
    low: int = 0
    high: int | None = None
    default: int | None = None

    def __str__(self) -> str:
        return self.name


Count = int | Symbol
"""How often something happens: a number, or a symbol that the user may set."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where an op came from.

    `scope`: name stack as in `jit(step)/jvp(layer0)/attn/dot_general`, empty if unknown. `file`, `line`: the user's
    source; `line` is 0 if unknown.
    """

    scope: str = ""
    file: str = ""
    line: int = 0

    @property
    def source(self) -> str:
        """`file:line`, or an empty string."""
        return f"{self.file}:{self.line}" if self.file else ""


UNKNOWN_LOCATION = Location()
