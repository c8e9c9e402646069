"""Slices, pads, concatenations and reversals of a sharded dimension."""

from collections.abc import Callable
from typing import Any

from stablecast.ir.program import Axis, Op
from stablecast.ir.types import TensorType, ValueType, as_tensor
from stablecast.lowering.partition.halo import FAR_NOTE, Exchange, Halo, final, halo, rounds
from stablecast.lowering.partition.site import Site

CONCAT_NOTE = (
    "a concatenation along a sharded dimension goes through another dimension by all-to-alls, or through a gather"
)


def slice_rule(site: Site) -> list[Op] | None:
    """Rows that a slice moves from one shard to another."""
    attrs = site.op.attrs
    starts, strides = attrs["start_indices"], attrs["strides"]

    def first(dim: int, k: int, results: int) -> int:
        return starts[dim] + k * results * strides[dim]

    def last(dim: int, k: int, results: int) -> int:
        return starts[dim] + ((k + 1) * results - 1) * strides[dim] + 1

    whole = site.operand_type(0).shape
    cut = [dim for dim in range(len(whole)) if whole[dim] != site.result_type.shape[dim] or starts[dim]]
    return _moved(site, cut, first, last)


def pad_rule(site: Site) -> list[Op] | None:
    """Rows that a pad moves from one shard to another."""
    attrs = site.op.attrs
    low, high, interior = (attrs[name] for name in ("edge_padding_low", "edge_padding_high", "interior_padding"))

    def first(dim: int, k: int, results: int) -> int:
        return -(-(k * results - low[dim]) // (interior[dim] + 1))

    def last(dim: int, k: int, results: int) -> int:
        return ((k + 1) * results - 1 - low[dim]) // (interior[dim] + 1) + 1

    cut = [dim for dim in range(len(low)) if low[dim] or high[dim] or interior[dim]]
    return _moved(site, cut, first, last)


def _moved(
    site: Site, cut: list[int], first: Callable[[int, int, int], int], last: Callable[[int, int, int], int]
) -> list[Op] | None:
    exchange = Exchange.of(site, 0)
    mesh = site.shardings[0].mesh
    for dim in cut:
        parts, axes = site.parts(0, dim), site.axes(0, dim)
        if parts == 1 or axes != site.result_axes(dim):
            continue
        size, results = site.local_shape(0)[dim], site.result_shape[dim]
        around = halo(
            parts, size, lambda k, d=dim, r=results: first(d, k, r), lambda k, d=dim, r=results: last(d, k, r)
        )
        if max(around.left, around.right) <= size:
            exchange.widen(dim, axes, mesh, around)
            continue
        site.note(FAR_NOTE)
        spans = rounds(
            parts,
            size,
            lambda k, d=dim, r=results: first(d, k, r),
            lambda k, d=dim, r=results: last(d, k, r),
            site.operand_type(0).shape[dim],
        )
        exchange.fetch(dim, axes, mesh, spans)
    if not exchange.ops:
        return None
    attrs = _whole_slice(site, exchange.kind) if site.op.name == "stablehlo.slice" else None
    return [*exchange.ops, final(site, [exchange.value, *site.operands[1:]], [exchange.kind, *site.local[1:]], attrs)]


def _whole_slice(site: Site, kind: TensorType) -> dict[str, Any]:
    shape = site.result_shape
    return {**site.op.attrs, "start_indices": (0,) * kind.rank, "limit_indices": shape, "strides": (1,) * kind.rank}


def concatenate(site: Site) -> list[Op] | None:
    """Reshard to another dimension, concatenate there, and come back; gather where no other dimension is free."""
    dim = int(site.op.attrs["dimension"])
    axes = site.result_axes(dim)
    parts = site.result_parts(dim)
    if parts == 1 or not any(site.axes(operand, dim) == axes for operand in range(len(site.operands))):
        return None
    rotated = _rotation(site, dim)
    if rotated is not None:
        return rotated
    site.note(CONCAT_NOTE)
    target = _free_dimension(site, dim, parts)
    if target is None:
        return _gathered(site, dim)
    ops: list[Op] = []
    values: list[int] = []
    types: list[ValueType] = []
    for operand in range(len(site.operands)):
        value, kind = site.operands[operand], as_tensor(site.local[operand])
        if site.axes(operand, dim) == axes:
            moved = _swapped(kind, dim, target, parts, site.operand_type(operand).shape[dim])
            op = _all_to_all(site, value, kind, moved, axes, dim, target, parts)
            ops.append(op)
            value, kind = op.result, moved
        values.append(value)
        types.append(kind)
    local = as_tensor(site.result_local[0])
    joined = _swapped(local, dim, target, parts, site.result_type.shape[dim])
    whole = site.builder.op(site.op.name, values, types, (joined,), site.op.attrs, location=site.op.location)
    back = _all_to_all(site, whole.result, joined, local, axes, target, dim, parts, site.op.result)
    return [*ops, whole, back]


def _rotation(site: Site, dim: int) -> list[Op] | None:
    """A concatenation of the two parts of one value in the other order: its rows move round by a fixed distance."""
    parts = [site.producer(value) for value in site.op.operands]
    if len(parts) != 2 or any(part is None or part.name != "stablehlo.slice" for part in parts):
        return None
    tail, head = (part for part in parts if part is not None)
    at = tail.attrs["start_indices"][dim]
    whole = as_tensor(tail.operand_types[0]).shape
    if tail.operands != head.operands or whole != site.result_type.shape or head.attrs["limit_indices"][dim] != at:
        return None
    source = site.sharding_of(tail.operands[0])
    shift = min(at, whole[dim] - at)
    if source.dims != site.result_shardings[0].dims or shift > site.result_shape[dim]:
        return None
    kind = as_tensor(site.result_local[0])
    exchange = Exchange(site, site.emitted(tail.operands[0]), kind, [])
    around = Halo(0, shift) if shift == at else Halo(shift, 0)
    exchange.widen(dim, site.result_axes(dim), site.result_shardings[0].mesh, around)
    attrs = {"start_indices": (0,) * kind.rank, "limit_indices": kind.shape, "strides": (1,) * kind.rank}
    cut = site.builder.op(
        "stablehlo.slice",
        (exchange.value,),
        (exchange.kind,),
        (kind,),
        attrs,
        results=site.op.results,
        location=site.op.location,
    )
    return [*exchange.ops, cut]


def _free_dimension(site: Site, dim: int, parts: int) -> int | None:
    for target, size in enumerate(site.result_shape):
        if target != dim and size % parts == 0:
            return target
    return None


def _swapped(kind: TensorType, source: int, target: int, parts: int, whole: int) -> TensorType:
    shape = list(kind.shape)
    shape[source] = whole
    shape[target] = -(-shape[target] // parts)
    return TensorType(tuple(shape), kind.dtype)


def _all_to_all(
    site: Site,
    value: int,
    before: TensorType,
    after: TensorType,
    axes: tuple[Axis, ...],
    source: int,
    target: int,
    parts: int,
    result: int | None = None,
) -> Op:
    groups = site.layout.groups(site.result_shardings[0].mesh, axes)
    attrs = {"split_dimension": target, "concat_dimension": source, "split_count": parts}
    return site.builder.collective("all_to_all", value, before, after, groups, site.op.location, result, attrs=attrs)


def _gathered(site: Site, dim: int) -> list[Op]:
    ops: list[Op] = []
    values: list[int] = []
    types: list[ValueType] = []
    mesh = site.result_shardings[0].mesh
    for operand in range(len(site.operands)):
        value, kind = site.operands[operand], as_tensor(site.local[operand])
        if site.parts(operand, dim) > 1:
            shape = list(kind.shape)
            shape[dim] = site.operand_type(operand).shape[dim]
            full = TensorType(tuple(shape), kind.dtype)
            groups = site.layout.groups(mesh, site.axes(operand, dim))
            op = site.builder.collective(
                "all_gather", value, kind, full, groups, site.op.location, attrs={"all_gather_dim": dim}
            )
            ops.append(op)
            value, kind = op.result, full
        values.append(value)
        types.append(kind)
    return [*ops, final(site, values, types)]


def reverse(site: Site) -> list[Op] | None:
    """Whole shards change places."""
    exchange = Exchange.of(site, 0)
    dims: tuple[int, ...] = site.op.attrs["dimensions"]
    for dim in dims:
        if site.parts(0, dim) > 1 and site.axes(0, dim) == site.result_axes(dim):
            op = exchange.permuted(dim, site.axes(0, dim), site.shardings[0].mesh, exchange.kind.shape[dim], 1)
            exchange.value = op.result
    return [*exchange.ops, final(site, [exchange.value], [exchange.kind])] if exchange.ops else None
