"""Which share of a matrix product a causal or banded mask lets through, read from the program.

An abstract run of the program: integers that are affine in their indices, comparisons of them (half planes), tensors
that a product made, and tensors that such half planes have masked. A product whose result is masked before anything
else needs it, and one that takes a masked factor, are useful only where the mask lets them through.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stablecast.ir.accounting.planes import Plane, inverted, moved, share
from stablecast.ir.attributes import Dense
from stablecast.ir.dtypes import DTypeKind
from stablecast.ir.program import Block, Op, Program
from stablecast.ir.types import TensorType, ValueType

Path = tuple[int, ...]
"""The calls on the way to an op, by their first result."""


@dataclass(frozen=True, slots=True)
class Affine:
    """An integer tensor: `constant` plus the sum of coefficient x index over dimensions."""

    plane: Plane


@dataclass(frozen=True, slots=True)
class Mask:
    """A boolean tensor that is true within all `planes` (it may be false in places there, too)."""

    planes: tuple[Plane, ...]


@dataclass(frozen=True, slots=True)
class Never:
    """A boolean tensor that is false, or a number to fill masked places with."""


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor whose elements each come from the products `by`, element by element."""

    by: frozenset[tuple[Path, int]]


@dataclass(frozen=True, slots=True)
class Masked:
    """A tensor that matters only within `planes`."""

    planes: tuple[Plane, ...]


@dataclass(frozen=True, slots=True)
class Offsets:
    """A tensor that is zero within `planes` and a fill elsewhere, to be added."""

    planes: tuple[Plane, ...]


Known = Affine | Mask | Never | Made | Masked | Offsets
_PASSING = frozenset({"convert", "optimization_barrier", "sharding_constraint", "copy", "reduce_precision", "bitcast"})
_MOST_MADE = 8
"""A sum of more products than this is a residual stream, not scores."""

_CONDITIONS = {"GE": (1, 0), "GT": (1, -1), "LE": (-1, 0), "LT": (-1, -1)}


def masked_shares(program: Program) -> dict[tuple[Path, int], float]:
    """The share of each product that masks let through, by path of calls and result; products without are absent."""
    finder = _Finder(program)
    finder.block(program.main.body, {}, ())
    return finder.shares


@dataclass(slots=True)
class _Finder:
    program: Program
    shares: dict[tuple[Path, int], float] = field(default_factory=dict[tuple[Path, int], float])

    def block(self, block: Block, known: dict[int, Known], path: Path) -> list[Known | None]:
        """Run `block`, to which `known` values come in; what is known of the values that it returns."""
        for op in block.ops:
            if op.regions or op.callee:
                self._nested(op, known, path)
                continue
            found = self._value(op, [known.get(value) for value in op.operands], path)
            if found is not None and op.results:
                known[op.result] = found
        return [known.get(value) for value in block.returns]

    def _nested(self, op: Op, known: dict[int, Known], path: Path) -> None:
        function = self.program.functions.get(op.callee)
        if function is not None:
            inner = _passed(function.body.args, [known.get(value) for value in op.operands])
            returned = self.block(function.body, inner, (*path, op.result if op.results else -1))
            known.update(_passed(op.results, returned))
        elif op.name.endswith(".while"):
            body = op.regions[1]
            carried = zip(op.operands, body.args, body.returns, strict=True)
            kept = [known.get(operand) if value == arg else None for operand, arg, value in carried]
            self.block(body, {**known, **_passed(body.args, kept)}, path)
        elif op.name.endswith((".case", ".if")):
            for region in op.regions:
                self.block(region, dict(known), path)

    def _value(self, op: Op, operands: list[Known | None], path: Path) -> Known | None:
        name = op.name.partition(".")[2]
        if name == "dot_general":
            return self._product(op, operands, path)
        if name == "iota":
            rank = _rank(op.result_type)
            axis = int(op.attrs["iota_dimension"])
            return Affine(Plane(tuple(int(d == axis) for d in range(rank)), 0))
        if name == "constant":
            return _constant(op)
        if name in ("broadcast_in_dim", "reshape", "transpose"):
            return _relaid(op, name, operands[0])
        if name == "compare":
            return _compared(op, operands)
        if name == "select":
            return self._selected(op, operands)
        if name in _PASSING:
            return operands[0]
        return self._combined(op, name, operands)

    def _product(self, op: Op, operands: list[Known | None], path: Path) -> Known:
        key = (path, op.result)
        for kind, operand in zip(op.operand_types, operands, strict=False):
            if isinstance(operand, Masked) and isinstance(kind, TensorType):
                self._record(frozenset({key}), operand.planes, kind.shape)
        return Made(frozenset({key}))

    def _record(self, keys: frozenset[tuple[Path, int]], planes: tuple[Plane, ...], shape: tuple[int, ...]) -> None:
        part = share(planes, shape)
        if part is not None and part < 1:
            for key in keys:
                self.shares[key] = min(part, self.shares.get(key, 1.0))

    def _selected(self, op: Op, operands: list[Known | None]) -> Known | None:
        mask, yes, no = operands
        if not isinstance(mask, Mask):
            return None
        if isinstance(no, (Never, Affine)) and not isinstance(yes, (Never, Affine)):
            return self._kept(op, mask.planes, yes)
        if isinstance(yes, (Never, Affine)) and not isinstance(no, (Never, Affine)):
            flipped = inverted(mask.planes)
            return None if flipped is None else self._kept(op, flipped, no)
        return Offsets(mask.planes)

    def _kept(self, op: Op, planes: tuple[Plane, ...], value: Known | None) -> Known:
        """`value` where `planes` hold and a fill elsewhere."""
        if isinstance(value, Mask):
            return Mask(planes + value.planes)
        if isinstance(value, Made):
            self._record(value.by, planes, _shape(op.result_type))
        return Masked(planes + (value.planes if isinstance(value, Masked) else ()))

    def _combined(self, op: Op, name: str, operands: list[Known | None]) -> Known | None:
        integers = [operand.plane for operand in operands if isinstance(operand, Affine)]
        if len(integers) == len(operands) == 2:
            return _arithmetic(name, integers[0], integers[1])
        masks = [plane for operand in operands if isinstance(operand, Mask) for plane in operand.planes]
        if name == "and":
            return Mask(tuple(masks)) if masks else None
        if name == "not" and isinstance(operands[0], Mask):
            flipped = inverted(operands[0].planes)
            return None if flipped is None else Mask(flipped)
        if _elements(op.operand_types) != {op.result_type.elements}:
            return None
        return self._elementwise(op, name, operands)

    def _elementwise(self, op: Op, name: str, operands: list[Known | None]) -> Known | None:
        made = frozenset(key for operand in operands if isinstance(operand, Made) for key in operand.by)
        masked = tuple(plane for operand in operands if isinstance(operand, Masked) for plane in operand.planes)
        offsets = tuple(plane for operand in operands if isinstance(operand, Offsets) for plane in operand.planes)
        if offsets and name == "add":
            self._record(made, offsets, _shape(op.result_type))
            return Masked(offsets + masked)
        if masked:
            if name in ("multiply", "divide"):
                self._record(made, masked, _shape(op.result_type))
            return Masked(masked)
        return Made(made) if 0 < len(made) <= _MOST_MADE else None


def _passed(values: tuple[int, ...], known: list[Known | None]) -> dict[int, Known]:
    return {value: found for value, found in zip(values, known, strict=False) if found is not None}


def _elements(kinds: tuple[ValueType, ...]) -> set[int]:
    return {kind.elements for kind in kinds if not isinstance(kind, TensorType) or kind.shape}


def _rank(kind: ValueType) -> int:
    return len(_shape(kind))


def _shape(kind: ValueType) -> tuple[int, ...]:
    return kind.shape if isinstance(kind, TensorType) else ()


def _constant(op: Op) -> Known | None:
    """A number that every element has. Booleans are masks, floats only serve as fills."""
    held, kind = op.attrs.get("value"), op.result_type
    if not isinstance(kind, TensorType) or not isinstance(held, Dense) or held.scalar is None:
        return None
    if kind.dtype.kind is DTypeKind.BOOL:
        return Mask(()) if held.scalar else Never()
    if kind.dtype.kind in (DTypeKind.INT, DTypeKind.UINT):
        return Affine(Plane((0,) * kind.rank, int(held.scalar)))
    return Never()


def _compared(op: Op, operands: list[Known | None]) -> Known | None:
    left, right = operands
    condition = _CONDITIONS.get(str(op.attrs.get("comparison_direction")))
    if condition is None or not isinstance(left, Affine) or not isinstance(right, Affine):
        return None
    sign, offset = condition
    difference = left.plane.plus(right.plane.times(-1)).times(sign)
    return Mask((Plane(difference.coefficients, difference.constant + offset),))


def _arithmetic(name: str, left: Plane, right: Plane) -> Known | None:
    if name == "add":
        return Affine(left.plus(right))
    if name == "subtract":
        return Affine(left.plus(right.times(-1)))
    if name == "multiply":
        for plane, other in ((left, right), (right, left)):
            if not any(other.coefficients):
                return Affine(plane.times(other.constant))
    return None


def _relaid(op: Op, name: str, value: Known | None) -> Known | None:
    """`value` in another layout; forgotten where a dimension that matters is split or merged."""
    if value is None or isinstance(value, Never):
        return value
    old, new = _shape(op.operand_types[0]), _shape(op.result_type)
    if isinstance(value, Made):
        return value if op.operand_types[0].elements == op.result_type.elements else None
    where = _moves(op, name, old, new)
    planes = (value.plane,) if isinstance(value, Affine) else value.planes
    found = [moved(plane, where, len(new)) for plane in planes]
    kept = tuple(plane for plane in found if plane is not None)
    if len(kept) < len(found):
        return None
    return Affine(kept[0]) if isinstance(value, Affine) else type(value)(kept)


def _moves(op: Op, name: str, old: tuple[int, ...], new: tuple[int, ...]) -> Mapping[int, int]:
    """Old dimension -> new dimension, for those that stay whole."""
    if name == "transpose":
        return {axis: place for place, axis in enumerate(op.attrs["permutation"])}
    if name == "broadcast_in_dim":
        dims: tuple[int, ...] = op.attrs["broadcast_dimensions"]
        return {axis: place for axis, place in enumerate(dims) if old[axis] == new[place]}
    before = np.cumprod((1, *old)).tolist()
    starts = zip(np.cumprod((1, *new)).tolist(), new, strict=False)
    after = {start_and_size: place for place, start_and_size in enumerate(starts)}
    places = ((axis, after.get((before[axis], size))) for axis, size in enumerate(old) if size != 1)
    return {axis: place for axis, place in places if place is not None}
