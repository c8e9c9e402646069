"""Shardy's collectives as StableHLO's, over groups of devices, with local shapes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stablecast.ir.program import Axis, Op, Sharding
from stablecast.ir.types import TensorType, ValueType, as_tensor
from stablecast.lowering.partition.site import Site

REDUCTIONS = frozenset({"add", "maximum", "minimum", "multiply", "and", "or", "xor"})
"""What a reduction over the network may compute; anything else is taken as a sum."""


def all_gather(site: Site) -> list[Op]:
    """One gather a dimension, the last dimension first, as XLA's partitioner makes them; constants are made whole."""
    maker = site.producer(site.op.operands[0])
    if maker is not None and maker.name in ("sdy.constant", "stablehlo.constant"):
        name, types, results = "stablehlo.constant", site.result_local, site.op.results
        return [site.builder.op(name, (), (), types, maker.attrs, results=results, location=site.op.location)]
    gathered: Sequence[tuple[Axis, ...]] = site.op.attrs["gathering_axes"]
    return _by_dimension(site, gathered, "all_gather", "all_gather_dim", grow=True)


def reduce_scatter(site: Site) -> list[Op]:
    """One reduce-scatter a dimension, or one sum and a slice where the target's compiler leaves it at that."""
    scattered: Sequence[tuple[Axis, ...]] = site.op.attrs["reduce_scatter_axes"]
    if not site.scatter:
        return _summed_and_cut(site, [axis for axes in scattered for axis in axes])
    return _by_dimension(site, scattered, "reduce_scatter", "scatter_dimension", grow=False, reduce_op=reduction(site))


def _summed_and_cut(site: Site, axes: Sequence[Axis]) -> list[Op]:
    """The whole sum on every device, of which each keeps its part."""
    kind, ops, value = site.local[0], list[Op](), site.operands[0]
    for part in _by_reduced_dimension(site, axes):
        groups = site.layout.groups(mesh_of(site), part)
        ops.append(
            site.builder.collective("all_reduce", value, kind, kind, groups, site.op.location, None, reduction(site))
        )
        value = ops[-1].result
    own = site.layout.groups(mesh_of(site), axes)
    return [*ops, slice_op(site, value, kind, site.result_local[0], own_part=own)]


def _by_dimension(
    site: Site, per_dim: Sequence[tuple[Axis, ...]], kind: str, label: str, *, grow: bool, reduce_op: str = ""
) -> list[Op]:
    dims = [dim for dim in reversed(range(len(per_dim))) if per_dim[dim]]
    ops: list[Op] = []
    value, current = site.operands[0], as_tensor(site.local[0])
    final = as_tensor(site.result_local[0])
    for place, dim in enumerate(dims):
        groups = site.layout.groups(mesh_of(site), per_dim[dim])
        full = final.shape[dim]
        size = current.shape[dim] * groups.size if grow and full >= groups.size else full
        after = _resized(current, dim, size)
        last = place == len(dims) - 1 and after == final
        result = site.op.result if last else None
        op = site.builder.collective(
            kind, value, current, after, groups, site.op.location, result, reduce_op, {label: dim}
        )
        ops.append(op)
        value, current = op.result, after
    if not ops or current != final:
        ops.append(slice_op(site, value, current, final))
    return ops


def _resized(kind: TensorType, dim: int, size: int) -> TensorType:
    return TensorType((*kind.shape[:dim], size, *kind.shape[dim + 1 :]), kind.dtype)


def all_reduce(site: Site) -> list[Op]:
    """One all-reduce for each dimension that the operand was reduced over, as XLA's partitioner makes them."""
    maker = site.producer(site.op.operands[0])
    if maker is not None and maker.name == "stablehlo.reduce" and len(maker.results) > 1:
        return _variadic(site, maker)
    kind = site.local[0]
    parts = _by_reduced_dimension(site, site.op.attrs["reduction_axes"])
    reduce_op, ops = reduction(site), list[Op]()
    value = site.operands[0]
    for place, axes in enumerate(parts):
        groups = site.layout.groups(mesh_of(site), axes)
        result = site.op.result if place == len(parts) - 1 else None
        op = site.builder.collective("all_reduce", value, kind, kind, groups, site.op.location, result, reduce_op)
        ops.append(op)
        value = op.result
    return ops


def _variadic(site: Site, maker: Op) -> list[Op]:
    """Partial results of a reduction of several values at once (argmax): gathered, then reduced on each device."""
    groups = site.layout.groups(mesh_of(site), site.op.attrs["reduction_axes"])
    local = as_tensor(site.local[0])
    gathered: list[Op] = []
    kinds: list[TensorType] = []
    for value, kind in zip(maker.results, maker.result_types, strict=True):
        part = TensorType((1, *local.shape), as_tensor(kind).dtype)
        full = TensorType((groups.size, *local.shape), part.dtype)
        op = site.builder.collective(
            "all_gather", site.emitted(value), part, full, groups, site.op.location, attrs={"all_gather_dim": 0}
        )
        gathered.append(op)
        kinds.append(full)
    count = len(kinds)
    initial = [site.emitted(value) for value in maker.operands[count:]]
    results = [site.op.result if value == site.op.operands[0] else site.builder.value() for value in maker.results]
    again = site.builder.op(
        "stablehlo.reduce",
        [*(op.result for op in gathered), *initial],
        [*kinds, *maker.operand_types[count:]],
        [TensorType(local.shape, kind.dtype) for kind in kinds],
        {**maker.attrs, "dimensions": (0,)},
        results=results,
        regions=maker.regions,
        location=site.op.location,
    )
    return [*gathered, again]


def _by_reduced_dimension(site: Site, axes: Sequence[Axis]) -> list[tuple[Axis, ...]]:
    """`axes` by the dimension that each splits in what the operand was made from, the last dimension first."""
    maker = site.producer(site.op.operands[0])
    if maker is None or len(axes) < 2 or not maker.operands:
        return [tuple(axes)]
    dims = site.sharding_of(maker.operands[0]).dims
    found = [tuple(axis for axis in axes if axis in dim) for dim in reversed(dims)]
    parts = [part for part in found if part]
    return parts if sum(map(len, parts)) == len(axes) else [tuple(axes)]


def all_to_all(site: Site) -> list[Op]:
    """One all-to-all for each pair of dimensions; what does not come out even is padded before and cut after."""
    params: Sequence[tuple[tuple[Axis, ...], int, int]] = site.op.attrs["params"]
    ops: list[Op] = []
    value, current = site.operands[0], as_tensor(site.local[0])
    final = as_tensor(site.result_local[0])
    for place, (axes, source, target) in enumerate(params):
        count = site.layout.size(mesh_of(site), axes)
        padded = _resized(current, target, -(-current.shape[target] // count) * count)
        if padded != current:
            ops += _padded(site, value, current, padded)
            value, current = ops[-1].result, padded
        after = _resized(current, source, current.shape[source] * count)
        after = _resized(after, target, after.shape[target] // count)
        groups = site.layout.groups(mesh_of(site), axes)
        attrs = {"split_dimension": target, "concat_dimension": source, "split_count": count}
        result = site.op.result if place == len(params) - 1 and after == final else None
        op = site.builder.collective("all_to_all", value, current, after, groups, site.op.location, result, attrs=attrs)
        ops.append(op)
        value, current = op.result, after
    if current != final:
        ops.append(slice_op(site, value, current, final))
    return ops


def _padded(site: Site, value: int, before: TensorType, after: TensorType) -> list[Op]:
    """Zeros behind the end of each dimension of `before` that is longer in `after`."""
    zero, location = TensorType((), before.dtype), site.op.location
    constant = site.builder.op("stablehlo.constant", (), (), (zero,), {"value": 0}, location=location)
    none = (0,) * before.rank
    high = tuple(long - short for short, long in zip(before.shape, after.shape, strict=True))
    attrs = {"edge_padding_low": none, "edge_padding_high": high, "interior_padding": none}
    pad = site.builder.op("stablehlo.pad", (value, constant.result), (before, zero), (after,), attrs, location=location)
    return [constant, pad]


def collective_permute(site: Site) -> list[Op]:
    """A permutation of the shards among the devices that differ along the axes that move."""
    axes = moved_axes(site.shardings[0], site.result_shardings[0])
    groups = site.layout.groups(mesh_of(site), axes)
    return [
        site.builder.collective(
            "collective_permute",
            site.operands[0],
            site.local[0],
            site.result_local[0],
            groups,
            site.op.location,
            site.op.result,
        )
    ]


def moved_axes(before: Sharding, after: Sharding) -> tuple[Axis, ...]:
    """Axes of the dimensions that two shardings split differently."""
    moved: dict[Axis, None] = {}
    for old, new in zip(before.dims, after.dims, strict=False):
        if old != new:
            moved |= dict.fromkeys((*old, *new))
    whole = {axis.name for axis in moved if axis.sub is None}
    return tuple(axis for axis in moved if axis.sub is None or axis.name not in whole)


def all_slice(site: Site) -> list[Op]:
    """Each device keeps its part of what it holds: no communication."""
    per_dim: Sequence[tuple[Axis, ...]] = site.op.attrs["slicing_axes"]
    groups = site.layout.groups(mesh_of(site), [axis for axes in per_dim for axis in axes])
    return [slice_op(site, site.operands[0], site.local[0], site.result_local[0], own_part=groups)]


def slice_op(site: Site, value: int, before: ValueType, after: ValueType, **more: Any) -> Op:
    """A slice at the device's own place; its start is not written down, its size is."""
    shape = as_tensor(after).shape
    attrs = {"start_indices": (0,) * len(shape), "limit_indices": shape, "strides": (1,) * len(shape), **more}
    return site.builder.op(
        "stablehlo.slice", (value,), (before,), (after,), attrs, results=(site.op.result,), location=site.op.location
    )


def mesh_of(site: Site) -> str:
    """The mesh over which a collective of Shardy's runs."""
    return site.result_shardings[0].mesh or site.shardings[0].mesh


def reduction(site: Site) -> str:
    """What the partial results of the operand are combined with: the body of the reduction that made them."""
    op = site.producer(site.op.operands[0])
    while op is not None and op.name in _PASS and op.operands:
        op = site.producer(op.operands[0])
    if op is None or op.name != "stablehlo.reduce" or not op.regions or not op.regions[0].ops:
        return "add"
    name = op.regions[0].ops[-1].name.removeprefix("stablehlo.")
    return name if name in REDUCTIONS else "add"


_PASS = frozenset({"sdy.all_reduce", "sdy.reduce_scatter", "stablehlo.reshape", "stablehlo.convert"})

RESHARDS: Mapping[str, Callable[[Site], list[Op]]] = {
    "sdy.all_gather": all_gather,
    "sdy.all_reduce": all_reduce,
    "sdy.all_slice": all_slice,
    "sdy.all_to_all": all_to_all,
    "sdy.collective_permute": collective_permute,
    "sdy.reduce_scatter": reduce_scatter,
}
"""How each collective of Shardy's is written."""
