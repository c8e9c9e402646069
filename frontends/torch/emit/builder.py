"""A thin layer over jaxlib's StableHLO builders: typed values, implicit constants, one method an op."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stablecast.ir import mlir
from stablecast.ir.dtypes import DTYPES, DTypeKind
from stablecast.ir.errors import InputError


class Val(NamedTuple):
    """An MLIR value with its shape and element type."""

    value: Any
    shape: tuple[int, ...]
    dtype: str

    @property
    def rank(self) -> int:
        return len(self.shape)


_FLOATS = {"f64": "F64Type", "f32": "F32Type", "f16": "F16Type", "bf16": "BF16Type"}
_SMALL_FLOATS = {
    "f8e4m3fn": "Float8E4M3FNType",
    "f8e5m2": "Float8E5M2Type",
    "f8e4m3fnuz": "Float8E4M3FNUZType",
    "f8e5m2fnuz": "Float8E5M2FNUZType",
    "f8e8m0fnu": "Float8E8M0FNUType",
}


def is_float(dtype: str) -> bool:
    return DTYPES[dtype].kind is DTypeKind.FLOAT


def is_complex(dtype: str) -> bool:
    return DTYPES[dtype].kind is DTypeKind.COMPLEX


def is_integer(dtype: str) -> bool:
    return DTYPES[dtype].kind in (DTypeKind.INT, DTypeKind.UINT)


def lowest(dtype: str) -> Any:
    """The smallest value of an element type."""
    kind = DTYPES[dtype]
    if kind.kind is DTypeKind.BOOL:
        return False
    if kind.is_float:
        return -math.inf
    return 0 if kind.kind is DTypeKind.UINT else -(1 << (kind.bits - 1))


def highest(dtype: str) -> Any:
    """The largest value of an element type."""
    kind = DTYPES[dtype]
    if kind.kind is DTypeKind.BOOL:
        return True
    if kind.is_float:
        return math.inf
    return (1 << kind.bits) - 1 if kind.kind is DTypeKind.UINT else (1 << (kind.bits - 1)) - 1


class Builder:
    """Appends StableHLO ops at the current insertion point.

    `count`: ops appended to the entry function so far; the number of an op is its place there.
    """

    def __init__(self) -> None:
        self.ir = mlir.bindings()
        from jaxlib.mlir.dialects import chlo, func, stablehlo

        self.hlo = stablehlo
        self.chlo = chlo
        self.func = func
        self.count = 0
        self.constants: dict[Any, Val] = {}
        self.highest = self.highest_convolutions = False
        self._types: dict[tuple[tuple[int, ...], str], Any] = {}
        self._elements: dict[str, Any] = {}
        self._ints: dict[tuple[int, ...], Any] = {}

    # types and attributes

    def element(self, dtype: str) -> Any:
        """The MLIR element type called `dtype`."""
        found = self._elements.get(dtype)
        if found is None:
            found = self._elements[dtype] = self._element(dtype)
        return found

    def _element(self, dtype: str) -> Any:
        ir = self.ir
        name = _FLOATS.get(dtype) or _SMALL_FLOATS.get(dtype)
        if name is not None:
            return getattr(ir, name).get()
        if dtype in ("c64", "c128"):
            return ir.ComplexType.get(self.element("f32" if dtype == "c64" else "f64"))
        if dtype == "i1":
            return ir.IntegerType.get_signless(1)
        if dtype.startswith("ui"):
            return ir.IntegerType.get_unsigned(int(dtype[2:]))
        return ir.IntegerType.get_signless(int(dtype[1:]))

    def type(self, shape: Sequence[int], dtype: str) -> Any:
        key = (tuple(shape), dtype)
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = self.ir.RankedTensorType.get(list(shape), self.element(dtype))
        return found

    def ints(self, values: Sequence[int]) -> Any:
        key = tuple(values)
        found = self._ints.get(key)
        if found is None:
            found = self._ints[key] = self.ir.DenseI64ArrayAttr.get([int(value) for value in key])
        return found

    def scalar(self, value: Any, dtype: str) -> Any:
        """An MLIR attribute for a Python number."""
        ir = self.ir
        if is_float(dtype):
            return ir.FloatAttr.get(self.element(dtype), float(value))
        return ir.IntegerAttr.get(self.element(dtype), int(value))

    def done(self, value: Any, shape: Sequence[int], dtype: str) -> Val:
        """Count an op that was just appended, and type its result."""
        self.count += 1
        return Val(value, tuple(shape), dtype)

    # constants

    def splat(self, value: Any, shape: Sequence[int], dtype: str) -> Val:
        """A tensor whose every element is `value`."""
        key = (repr(value), tuple(shape), dtype)
        found = self.constants.get(key)
        if found is None:
            found = self.constants[key] = self._splat(value, shape, dtype)
        return found

    def _splat(self, value: Any, shape: Sequence[int], dtype: str) -> Val:
        kind = self.type(shape, dtype)
        if is_complex(dtype):
            held = np.full(shape, value, np.complex64 if dtype == "c64" else np.complex128)
            attribute = self.ir.DenseElementsAttr.get(held, type=kind)
        else:
            attribute = self.ir.DenseElementsAttr.get_splat(kind, self.scalar(value, dtype))
        return self.done(self.hlo.constant(attribute), shape, dtype)

    def data(self, array: npt.NDArray[Any], dtype: str) -> Val:
        """A constant from data."""
        shape = array.shape
        if array.size and (array.size == 1 or (array == array.flat[0]).all()):
            first = array.flat[0].item()
            return self.splat(first, shape, dtype)
        if array.size == 0:
            return self.splat(0, shape, dtype)
        if dtype in ("bf16", "f16") or dtype.startswith("f8"):
            return self.convert(self.data(array.astype(np.float32), "f32"), dtype)
        if dtype == "i1":
            array = array.astype(np.bool_)
        attribute = self.ir.DenseElementsAttr.get(
            np.ascontiguousarray(array), type=self.element(dtype), shape=list(shape)
        )
        return self.done(self.hlo.constant(attribute), shape, dtype)

    def iota(self, shape: Sequence[int], dim: int, dtype: str = "i64") -> Val:
        return self.done(self.hlo.iota(self.type(shape, dtype), dim), shape, dtype)

    # shapes

    def reshape(self, x: Val, shape: Sequence[int]) -> Val:
        shape = tuple(shape)
        if shape == x.shape:
            return x
        return self.done(self.hlo.reshape(self.type(shape, x.dtype), x.value), shape, x.dtype)

    def broadcast_in_dim(self, x: Val, shape: Sequence[int], dims: Sequence[int]) -> Val:
        if tuple(shape) == x.shape:
            return x
        made = self.hlo.broadcast_in_dim(self.type(shape, x.dtype), x.value, self.ints(dims))
        return self.done(made, shape, x.dtype)

    def broadcast(self, x: Val, shape: Sequence[int]) -> Val:
        """Broadcast by torch's rules: dimensions are aligned at the end."""
        if tuple(shape) == x.shape:
            return x
        return self.broadcast_in_dim(x, shape, range(len(shape) - x.rank, len(shape)))

    def transpose(self, x: Val, order: Sequence[int]) -> Val:
        if list(order) == list(range(x.rank)):
            return x
        shape = tuple([x.shape[axis] for axis in order])
        return self.done(self.hlo.transpose(x.value, self.ints(order)), shape, x.dtype)

    def slice(self, x: Val, start: Sequence[int], limit: Sequence[int], strides: Sequence[int] | None = None) -> Val:
        steps = tuple(strides) if strides else (1,) * x.rank
        shape = tuple([max(0, -(-(b - a) // s)) for a, b, s in zip(start, limit, steps, strict=True)])
        if shape == x.shape:
            return x
        made = self.hlo.slice(x.value, self.ints(start), self.ints(limit), self.ints(steps))
        return self.done(made, shape, x.dtype)

    def slice_dim(self, x: Val, dim: int, start: int, limit: int, step: int = 1) -> Val:
        lows, highs, steps = [0] * x.rank, list(x.shape), [1] * x.rank
        lows[dim], highs[dim], steps[dim] = start, limit, step
        return self.slice(x, lows, highs, steps)

    def pad(
        self, x: Val, value: Val, low: Sequence[int], high: Sequence[int], interior: Sequence[int] | None = None
    ) -> Val:
        inner = tuple(interior) if interior else (0,) * x.rank
        if not any(low) and not any(high) and not any(inner):
            return x
        shape = tuple(
            [size + a + b + max(size - 1, 0) * c for size, a, b, c in zip(x.shape, low, high, inner, strict=True)]
        )
        made = self.hlo.pad(x.value, value.value, self.ints(low), self.ints(high), self.ints(inner))
        return self.done(made, shape, x.dtype)

    def concat(self, parts: Sequence[Val], dim: int) -> Val:
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        made = self.hlo.concatenate([part.value for part in parts], dim)
        return self.done(made, shape, parts[0].dtype)

    def reverse(self, x: Val, dims: Sequence[int]) -> Val:
        return self.done(self.hlo.reverse(x.value, self.ints(dims)), x.shape, x.dtype)

    def update(self, x: Val, part: Val, start: Sequence[int]) -> Val:
        """`x` with the block at `start` replaced by `part`."""
        starts = [self.splat(index, (), "i32").value for index in start]
        return self.done(self.hlo.dynamic_update_slice(x.value, part.value, starts), x.shape, x.dtype)

    # elements

    def convert(self, x: Val, dtype: str) -> Val:
        if x.dtype == dtype:
            return x
        if is_complex(x.dtype) and not is_complex(dtype):
            x = self.real(x)
            return self.convert(x, dtype)
        if dtype == "i1":
            zero = self.splat(0, x.shape, x.dtype)
            return self.compare(x, zero, "NE")
        return self.done(self.hlo.convert(self.type(x.shape, dtype), x.value), x.shape, dtype)

    def bitcast(self, x: Val, shape: Sequence[int], dtype: str) -> Val:
        made = self.hlo.bitcast_convert(self.type(shape, dtype), x.value)
        return self.done(made, shape, dtype)

    def unary(self, name: str, x: Val) -> Val:
        """A StableHLO (or `chlo.`) op of one operand that keeps its type."""
        dialect = self.chlo if name.startswith("chlo.") else self.hlo
        return self.done(getattr(dialect, name.removeprefix("chlo."))(x.value), x.shape, x.dtype)

    def binary(self, name: str, x: Val, y: Val) -> Val:
        """A StableHLO op of two operands of one type."""
        return self.done(getattr(self.hlo, name)(x.value, y.value), x.shape, x.dtype)

    def add(self, x: Val, y: Val) -> Val:
        return self.done(self.hlo.add(x.value, y.value), x.shape, x.dtype)

    def sub(self, x: Val, y: Val) -> Val:
        return self.done(self.hlo.subtract(x.value, y.value), x.shape, x.dtype)

    def mul(self, x: Val, y: Val) -> Val:
        return self.done(self.hlo.multiply(x.value, y.value), x.shape, x.dtype)

    def div(self, x: Val, y: Val) -> Val:
        return self.done(self.hlo.divide(x.value, y.value), x.shape, x.dtype)

    def neg(self, x: Val) -> Val:
        return self.unary("negate", x)

    def scale(self, x: Val, factor: float) -> Val:
        """`x` times a Python number."""
        return x if factor == 1 else self.mul(x, self.splat(factor, x.shape, x.dtype))

    def shift(self, x: Val, offset: float) -> Val:
        """`x` plus a Python number."""
        return x if offset == 0 else self.add(x, self.splat(offset, x.shape, x.dtype))

    def compare(self, x: Val, y: Val, direction: str) -> Val:
        hlo = self.hlo
        kind = None
        if is_float(x.dtype):
            kind = hlo.ComparisonTypeAttr.get("FLOAT")
        elif not is_complex(x.dtype):
            unsigned = x.dtype == "i1" or x.dtype.startswith("ui")
            kind = hlo.ComparisonTypeAttr.get("UNSIGNED" if unsigned else "SIGNED")
        made = hlo.compare(x.value, y.value, hlo.ComparisonDirectionAttr.get(direction), compare_type=kind)
        return self.done(made, x.shape, "i1")

    def select(self, chosen: Val, x: Val, y: Val) -> Val:
        return self.done(self.hlo.select(chosen.value, x.value, y.value), x.shape, x.dtype)

    def real(self, x: Val) -> Val:
        return self.done(self.hlo.real(x.value), x.shape, "f32" if x.dtype == "c64" else "f64")

    def imag(self, x: Val) -> Val:
        return self.done(self.hlo.imag(x.value), x.shape, "f32" if x.dtype == "c64" else "f64")

    def complex(self, real: Val, imag: Val) -> Val:
        made = self.hlo.complex(real.value, imag.value)
        return self.done(made, real.shape, "c64" if real.dtype == "f32" else "c128")

    # regions

    def body(self, op: Any, dtypes: Sequence[str], build: Callable[..., Sequence[Val]]) -> None:
        """Fill the first region of `op` with a scalar body over arguments of these types."""
        kinds = [self.type((), dtype) for dtype in dtypes]
        block = op.regions[0].blocks.append(*kinds)
        before, held = self.count, self.constants
        self.constants = {}
        try:
            with self.ir.InsertionPoint(block):
                arguments = [Val(value, (), dtype) for value, dtype in zip(block.arguments, dtypes, strict=True)]
                self.hlo.return_([value.value for value in build(*arguments)])
        except Exception:
            op.operation.erase()
            raise
        finally:
            self.count, self.constants = before, held

    def reduce(self, x: Val, dims: Sequence[int], how: str, initial: Any = None) -> Val:
        """Fold dimensions with `add`, `multiply`, `maximum`, `minimum`, `and` or `or`."""
        if not dims:
            return x
        start = self.splat(_INITIAL[how](x.dtype) if initial is None else initial, (), x.dtype)
        shape = tuple([size for axis, size in enumerate(x.shape) if axis not in dims])
        op = self.hlo.ReduceOp([self.type(shape, x.dtype)], [x.value], [start.value], self.ints(sorted(dims)))
        self.body(op, (x.dtype, x.dtype), lambda a, b: [self.binary(_FOLD.get(how, how), a, b)])
        return self.done(op.results[0], shape, x.dtype)

    def dot(
        self,
        x: Val,
        y: Val,
        contract: tuple[Sequence[int], Sequence[int]],
        batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
        dtype: str | None = None,
    ) -> Val:
        """`dot_general`; the result has the batch, then the left, then the right dimensions."""
        out = dtype or x.dtype
        left = [axis for axis in range(x.rank) if axis not in contract[0] and axis not in batch[0]]
        right = [axis for axis in range(y.rank) if axis not in contract[1] and axis not in batch[1]]
        shape = (
            [x.shape[axis] for axis in batch[0]] + [x.shape[axis] for axis in left] + [y.shape[axis] for axis in right]
        )
        numbers = self.hlo.DotDimensionNumbers.get(list(batch[0]), list(batch[1]), list(contract[0]), list(contract[1]))
        made = self.hlo.dot_general(
            self.type(shape, out), x.value, y.value, numbers, precision_config=self.precision(x.dtype)
        )
        return self.done(made, shape, out)

    def precision(self, dtype: str, *, convolution: bool = False) -> Any:
        """torch multiplies f32 matrices in full unless told otherwise, and convolves in TF32; others have one way."""
        if dtype != "f32" or not (self.highest_convolutions if convolution else self.highest):
            return None
        return self.ir.ArrayAttr.get([self.hlo.PrecisionAttr.get("HIGHEST")] * 2)

    def gather(self, x: Val, index: Val, numbers: dict[str, Any], sizes: Sequence[int], shape: Sequence[int]) -> Val:
        dims = self.hlo.GatherDimensionNumbers.get(**numbers)
        op = self.hlo.GatherOp(x.value, index.value, dims, self.ints(sizes))
        return self.done(op.result, shape, x.dtype)

    def scatter(
        self, x: Val, index: Val, updates: Val, numbers: dict[str, Any], how: str = "add", unique: bool = False
    ) -> Val:
        dims = self.hlo.ScatterDimensionNumbers.get(**numbers)
        op = self.hlo.ScatterOp(
            [self.type(x.shape, x.dtype)],
            [x.value],
            index.value,
            [updates.value],
            dims,
            unique_indices=self.ir.BoolAttr.get(unique),
        )
        fold = (lambda a, b: [b]) if how == "set" else (lambda a, b: [self.binary(_FOLD.get(how, how), a, b)])
        self.body(op, (x.dtype, x.dtype), fold)
        return self.done(op.results[0], x.shape, x.dtype)


_INITIAL: dict[str, Callable[[str], Any]] = {
    "add": lambda dtype: 0,
    "multiply": lambda dtype: 1,
    "maximum": lowest,
    "minimum": highest,
    "and": lambda dtype: True,
    "or": lambda dtype: False,
}
_FOLD = {"and": "and_", "or": "or_"}


def axis_of(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise InputError(f"dimension {dim} is outside a tensor of rank {rank}")
    return dim + rank if dim < 0 else dim


def axes_of(dims: Any, rank: int) -> list[int]:
    """Dimensions counted from the front; None or an empty list means all."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    if isinstance(dims, int):
        dims = [dims]
    return sorted({axis_of(dim, rank) for dim in dims}) if rank else []
