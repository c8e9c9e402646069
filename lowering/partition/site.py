"""One op of the global program as the rules see it."""

from collections.abc import Callable
from dataclasses import dataclass

from stablecast.ir.program import Axis, Op, Sharding
from stablecast.ir.types import TensorType, ValueType, as_tensor
from stablecast.lowering.partition.build import Builder
from stablecast.lowering.partition.layout import Layout


@dataclass(frozen=True, slots=True)
class Site:
    """An op with what is known around it.

    `op`: as in the global program. `operands`: value ids in the local program. `local`, `shardings`: of each operand;
    `result_local`, `result_shardings`: of each result. `note` records what a rule assumed.
    `producer`, `sharding_of`: of a value of the global program; `emitted`: its id in the local one. `scatter`: whether
    sums of which each device keeps its part become reduce-scatters.
    """

    op: Op
    operands: tuple[int, ...]
    local: tuple[ValueType, ...]
    shardings: tuple[Sharding, ...]
    result_local: tuple[ValueType, ...]
    result_shardings: tuple[Sharding, ...]
    layout: Layout
    builder: Builder
    note: Callable[[str], None]
    producer: Callable[[int], Op | None]
    sharding_of: Callable[[int], Sharding]
    emitted: Callable[[int], int]
    scatter: bool = True

    def parts(self, operand: int, dim: int) -> int:
        """Number of parts of dimension `dim` of an operand."""
        return self.layout.parts(self.shardings[operand], dim)

    def result_parts(self, dim: int, result: int = 0) -> int:
        """Number of parts of dimension `dim` of a result."""
        return self.layout.parts(self.result_shardings[result], dim)

    def axes(self, operand: int, dim: int) -> tuple[Axis, ...]:
        """Axes that split dimension `dim` of an operand."""
        dims = self.shardings[operand].dims
        return dims[dim] if dim < len(dims) else ()

    def result_axes(self, dim: int, result: int = 0) -> tuple[Axis, ...]:
        """Axes that split dimension `dim` of a result."""
        dims = self.result_shardings[result].dims
        return dims[dim] if dim < len(dims) else ()

    def operand_type(self, operand: int) -> TensorType:
        """Global type of an operand."""
        return as_tensor(self.op.operand_types[operand])

    @property
    def result_type(self) -> TensorType:
        """Global type of the first result."""
        return as_tensor(self.op.result_type)

    def local_shape(self, operand: int) -> tuple[int, ...]:
        """Local shape of an operand."""
        return as_tensor(self.local[operand]).shape

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Local shape of the first result."""
        return as_tensor(self.result_local[0]).shape
