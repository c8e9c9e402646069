"""Products whose operands and result an axis splits in different ways: which of them is resharded, as XLA decides.

Shardy settles such conflicts by the sizes of the tensors, XLA's partitioner by what each axis splits; elementwise ops
follow their result. Runs in the child, between propagation and the collectives: operands that XLA would reshard are, so
that no conflict is left.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from stablecast.ir import mlir

_PRODUCTS = frozenset({"stablehlo.dot_general", "stablehlo.dot"})
_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "remainder", "and", "or", "xor"),
        *("compare", "select", "clamp", "atan2", "convert", "negate", "exponential", "log", "tanh", "rsqrt", "sqrt"),
        *("logistic", "abs", "sign", "floor", "ceil", "cosine", "sine", "not", "log_plus_one", "exponential_minus_one"),
    )
)
_CONSTRAINTS = frozenset({"sdy.sharding_constraint", "sdy.reshard"})
Dims = list[list[Any]]
"""Axes, or parts of them, of each dimension of one tensor, major to minor."""


def settle(module: Any) -> None:
    """Puts reshards before the ops in `module` that need them."""
    sizes = _sizes(module)
    for op in mlir.walk(module):
        if op.name in _PRODUCTS:
            _settle(op, sizes)
        elif op.name in _ELEMENTWISE:
            _follow(op)


def _sizes(module: Any) -> dict[str, dict[str, int]]:
    """Axis sizes of each mesh of the module, by its reference."""
    from jaxlib.mlir.dialects import sdy

    found: dict[str, dict[str, int]] = {}
    for view in module.body.operations:
        if view.operation.name == "sdy.mesh":
            axes = [sdy.MeshAxisAttr(axis) for axis in sdy.MeshAttr(view.operation.attributes["mesh"]).axes]
            found["@" + view.operation.attributes["sym_name"].value] = {axis.name: axis.size for axis in axes}
    return found


def _follow(op: Any) -> None:
    """Reshards operands of an elementwise op as its result is split."""
    ranked = mlir.bindings().ShapedType
    whole = ranked(op.results[0].type).rank
    if not whole:
        return
    held, _ = _sharding(op.results[0])
    for place, value in enumerate(op.operands):
        given, manual = _sharding(value)
        if manual or (given is not None and held is not None and given == held):
            continue
        rank = ranked(value.type).rank
        if rank == whole and _axes(given, rank) != _axes(held, rank):
            _reshard(op, place, held or given, _axes(held, rank))


def decide(lhs: Dims, rhs: Dims, result: Dims, roles: "Roles") -> tuple[Dims, Dims] | None:
    """How the operands are to be split for a result split as it is; None where this says nothing.

    By axis: one that splits a batch dimension of the result and of one operand splits that of the other too; one that
    splits a free dimension of the result and of its operand is gathered in the other, and moves there where the other
    is whole; one that does not split the result, but a contracted dimension of one operand only, is gathered. Sums over
    a dimension that both operands are split along stay as they are.
    """
    axes = dict.fromkeys(axis for dims in (lhs, rhs, result) for dim in dims for axis in dim)
    new: tuple[Dims, Dims] = [[] for _ in lhs], [[] for _ in rhs]
    for axis in axes:
        left, right, out = (_place(dims, axis) for dims in (lhs, rhs, result))
        chosen = roles.choose(left, right, out)
        if chosen is None:
            return None
        for dims, place in zip(new, chosen, strict=True):
            if place is not None:
                dims[place].append(axis)
    return new


def _place(dims: Dims, axis: Any) -> int | None:
    return next((place for place, held in enumerate(dims) if axis in held), None)


class Roles:
    """What each dimension of a product is: of the operands and where it lies in the result."""

    def __init__(self, batch: Sequence[tuple[int, int]], contracted: Sequence[tuple[int, int]], ranks: tuple[int, int]):
        self._batch = batch
        self._contracted = set(contracted)
        taken = [{pair[side] for pair in (*batch, *contracted)} for side in (0, 1)]
        self._free = [[dim for dim in range(ranks[side]) if dim not in taken[side]] for side in (0, 1)]

    def choose(self, left: int | None, right: int | None, out: int | None) -> tuple[int | None, int | None] | None:
        """The dimensions of both operands that an axis is to split which splits these of operands and result."""
        if out is None:
            return self._whole(left, right)
        if out < len(self._batch):
            pair = self._batch[out]
            return pair if left == pair[0] or right == pair[1] else None
        place = out - len(self._batch)
        on_left = place < len(self._free[0])
        source = self._free[0][place] if on_left else self._free[1][place - len(self._free[0])]
        own, other = (left, right) if on_left else (right, left)
        if own == source or other is None:
            return (source, None) if on_left else (None, source)
        return (left, right) if (left, right) in self._contracted else None

    def _whole(self, left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
        """For an axis that does not split the result."""
        summed = {pair[0] for pair in self._contracted}, {pair[1] for pair in self._contracted}
        if (right is None and left in summed[0]) or (left is None and right in summed[1]):
            return None, None
        if left is None or right is None or (left, right) in self._contracted:
            return left, right
        free = left in self._free[0], right in self._free[1]
        return (None, None) if any(free) and not all(free) else None


def _settle(op: Any, sizes: Mapping[str, Mapping[str, int]]) -> None:
    ir = mlir.bindings()
    values = [*op.operands, op.results[0]]
    held = [_sharding(value) for value in values]
    known = next((sharding for sharding, _ in held if sharding is not None), None)
    if known is None:
        return
    refs = [
        _refs(sharding, manual, ir.ShapedType(value.type).rank)
        for (sharding, manual), value in zip(held, values, strict=True)
    ]
    mesh = sizes.get(str(known.mesh_or_ref), {})
    if any(name not in mesh for dims in refs for dim in dims for name, _, _ in dim):
        return
    cuts = _cuts(refs, mesh)
    before = [[[piece for ref in dim for piece in _pieces(ref, mesh, cuts)] for dim in dims] for dims in refs]
    made = decide(before[0], before[1], before[2], _roles(op))
    if made is None or list(made) == before[:2]:
        return
    for place, (old, new) in enumerate(zip(before, made, strict=False)):
        if old != new:
            _reshard(op, place, known, [_written(axes, mesh) for axes in new])


Piece = tuple[str, int, int]
"""An axis or a part of it: its name, the parts before it, its own size; size 0 for the whole axis."""


def _cuts(refs: Sequence[Sequence[Sequence[Piece]]], mesh: Mapping[str, int]) -> dict[str, list[int]]:
    """Where the tensors of an op cut each axis, in order."""
    cuts: dict[str, set[int]] = {}
    for name, before, size in (ref for dims in refs for dim in dims for ref in dim):
        cuts.setdefault(name, {1, mesh[name]}).update((before, before * size) if size else ())
    return {name: sorted(places) for name, places in cuts.items()}


def _pieces(ref: Piece, mesh: Mapping[str, int], cuts: Mapping[str, list[int]]) -> list[Piece]:
    name, before, size = ref
    end = before * size if size else mesh[name]
    places = [place for place in cuts[name] if before <= place <= end]
    return [(name, low, high // low) for low, high in pairwise(places)]


def _written(pieces: Sequence[Piece], mesh: Mapping[str, int]) -> list[str]:
    """Pieces as an attribute has them, neighbours that belong together as one."""
    joined: list[Piece] = []
    for name, before, size in pieces:
        if joined and joined[-1][0] == name and joined[-1][1] * joined[-1][2] == before:
            _, first, length = joined.pop()
            before, size = first, length * size
        joined.append((name, before, size))
    return [f'"{name}"' if size == mesh[name] else f'"{name}":({before}){size}' for name, before, size in joined]


def _reshard(op: Any, place: int, known: Any, dims: Sequence[Sequence[str]]) -> None:
    """Puts a reshard before operand `place` of `op`, over the mesh of `known`; axes as they are written."""
    from jaxlib.mlir.dialects import sdy

    ir = mlir.bindings()
    text = ", ".join("{" + ", ".join(axes) + "}" for axes in dims)
    with op.context, ir.InsertionPoint(op), op.location:
        sharding = ir.Attribute.parse(f"#sdy.sharding<{known.mesh_or_ref}, [{text}]>")
        op.operands[place] = sdy.ReshardOp(op.operands[place], sharding).result


def _axes(sharding: Any, rank: int) -> list[list[str]]:
    """The axes of each dimension, parts of axes too, as they are written."""
    if sharding is None:
        return [[] for _ in range(rank)]
    from jaxlib.mlir.dialects import sdy

    entries = [sdy.DimensionShardingAttr(entry) for entry in sharding.dimension_shardings]
    return [[str(axis).removeprefix("#sdy<axis_ref").removesuffix(">") for axis in entry.axes] for entry in entries]


def _refs(sharding: Any, manual: Sequence[str], rank: int) -> list[list[Piece]]:
    """The axes of each dimension that are not manual."""
    if sharding is None:
        return [[] for _ in range(rank)]
    from jaxlib.mlir.dialects import sdy

    dims: list[list[Piece]] = []
    for entry in sharding.dimension_shardings:
        axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(entry).axes]
        dims.append([_ref(axis) for axis in axes if axis.name not in manual])
    return dims


def _ref(axis: Any) -> Piece:
    from jaxlib.mlir.dialects import sdy

    if axis.sub_axis_info is None:
        return axis.name, 1, 0
    info: Any = sdy.SubAxisInfoAttr(axis.sub_axis_info)
    return axis.name, info.pre_size, info.size


def _sharding(value: Any) -> tuple[Any, Sequence[str]]:
    """The sharding of a value after propagation, None where it has none, and axes in it that do not count."""
    from jaxlib.mlir.dialects import sdy

    ir = mlir.bindings()

    def one(several: Any, place: int) -> Any:
        return (
            None
            if several is None
            else sdy.TensorShardingAttr(sdy.TensorShardingPerValueAttr(several).shardings[place])
        )

    if not isinstance(value, ir.BlockArgument):
        maker = value.owner
        if maker.name in _CONSTRAINTS:
            return sdy.TensorShardingAttr(maker.attributes["sharding"]), ()
        label = "out_shardings" if maker.name == "sdy.manual_computation" else "sdy.sharding"
        return one(maker.attributes.get(label, None), value.result_number), ()
    owner = value.owner.owner.operation
    if owner.name == "func.func":
        given = owner.attributes.get("arg_attrs", None)
        entry: Any = given[value.arg_number] if given is not None else ()
        return (sdy.TensorShardingAttr(entry["sdy.sharding"]) if "sdy.sharding" in entry else None), ()
    if owner.name == "sdy.manual_computation":
        manual: Any = sdy.ManualAxesAttr(owner.attributes["manual_axes"])
        return one(owner.attributes["in_shardings"], value.arg_number), list(map(str, manual))
    loop = owner.name == "stablehlo.while"
    return (one(owner.attributes.get("sdy.sharding", None), value.arg_number) if loop else None), ()


def _roles(op: Any) -> Roles:
    from jaxlib.mlir.dialects import stablehlo

    ranks = tuple(mlir.bindings().ShapedType(value.type).rank for value in op.operands)
    if op.name == "stablehlo.dot":
        return Roles((), ((ranks[0] - 1, 0),), (ranks[0], ranks[1]))
    dims = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    batch = list(zip(dims.lhs_batching_dimensions, dims.rhs_batching_dimensions, strict=True))
    contracted = list(zip(dims.lhs_contracting_dimensions, dims.rhs_contracting_dimensions, strict=True))
    return Roles(batch, contracted, (ranks[0], ranks[1]))
