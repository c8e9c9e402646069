"""Ragged products and top-k, which Shardy shards by our rule but does not reshard: their collectives are made here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stablecast.ir.attributes import RaggedDotDims
from stablecast.ir.program import Axis, Op
from stablecast.ir.types import TensorType, ValueType, as_tensor
from stablecast.lowering.partition.halo import Exchange
from stablecast.lowering.partition.reshards import mesh_of
from stablecast.lowering.partition.rules import STANDS_FOR
from stablecast.lowering.partition.site import Site

RAGGED_NOTE = (
    "a ragged product with sharded groups: each device is taken to multiply an equal share of the rows, its result "
    "summed over the groups' axes; XLA on CPU expands it to a dense product instead"
)
_LABEL = "ragged_dot_dimension_numbers"
_HIDDEN = frozenset(
    ("call_target_name", "has_side_effect", "api_version", "backend_config", "called_computations", "sdy.sharding_rule")
) | {STANDS_FOR}
_NAMES = {"mhlo.ragged_dot": "chlo.ragged_dot", "mhlo.topk": "chlo.top_k"}


def restored(op: Op, prefix: str) -> Op:
    """The op that a custom call or an elementwise op made by `rules.teach` stands for."""
    name = str(op.attrs.get(STANDS_FOR) or op.attrs["call_target_name"]).removeprefix(prefix)
    attrs = {label: value for label, value in op.attrs.items() if label not in _HIDDEN}
    return replace(op, name=_NAMES.get(name, name), attrs=attrs)


def top_k(site: Site) -> list[Op] | None:
    """All of the operand is gathered, every device works on it and keeps its part, as in XLA."""
    exchange = Exchange.of(site, 0)
    for dim in reversed(range(exchange.kind.rank)):
        if site.parts(0, dim) > 1:
            size = site.operand_type(0).shape[dim]
            exchange.gather_to(dim, site.axes(0, dim), site.shardings[0].mesh, size)
    if not exchange.ops:
        return None
    whole = site.builder.op(
        site.op.name,
        (exchange.value,),
        (exchange.kind,),
        tuple(map(site.layout.intern, site.op.result_types)),
        site.op.attrs,
        location=site.op.location,
    )
    parts = zip(whole.results, site.op.results, whole.result_types, site.result_local, strict=True)
    return [*exchange.ops, whole, *(_own_part(site, *part) for part in parts)]


def _own_part(site: Site, value: int, result: int, before: ValueType, after: ValueType) -> Op:
    shape = as_tensor(after).shape
    attrs = {"start_indices": (0,) * len(shape), "limit_indices": shape, "strides": (1,) * len(shape)}
    return site.builder.op(
        "stablehlo.slice", (value,), (before,), (after,), attrs, results=(result,), location=site.op.location
    )


def ragged_dot(site: Site) -> list[Op] | None:
    """Each device multiplies the rows of its own groups, taken to be an equal share of all.

    Rows that are split over the groups' axes are gathered. Ragged rows: the product is put back among zeros and summed
    over the axes of groups and contraction. Ragged contraction: summed over the axes of the rows. None for a ragged
    batch, which is an ordinary product.
    """
    dims: RaggedDotDims = site.op.attrs[_LABEL]
    if not dims.rhs_group and not set(dims.lhs_ragged) & set(dims.dot.lhs_contracting):
        return None
    return _rows(site, dims) if dims.rhs_group else _contraction(site, dims)


@dataclass(slots=True)
class _Side:
    """One operand on its way: gathered where its rows share axes with the groups, then cut to the device's share."""

    exchange: Exchange
    dim: int
    axes: tuple[Axis, ...]

    @staticmethod
    def of(site: Site, operand: int, dim: int, groups: Sequence[Axis]) -> "_Side":
        side = _Side(Exchange.of(site, operand), dim, site.axes(operand, dim))
        if set(side.axes) & set(groups):
            side.exchange.gather_to(dim, side.axes, site.shardings[operand].mesh, site.operand_type(operand).shape[dim])
            side.axes = ()
        return side

    def cut(self, parts: int) -> None:
        kind = self.exchange.kind
        if parts == 1:
            return
        shape = (*kind.shape[: self.dim], -(-kind.shape[self.dim] // parts), *kind.shape[self.dim + 1 :])
        attrs = {"start_indices": (0,) * kind.rank, "limit_indices": shape, "strides": (1,) * kind.rank}
        self.exchange.append("stablehlo.slice", [self.exchange.value], [kind], TensorType(shape, kind.dtype), attrs)


def _rows(site: Site, dims: RaggedDotDims) -> list[Op]:
    row = dims.lhs_ragged[0]
    groups = site.axes(1, dims.rhs_group[0])
    side = _Side.of(site, 0, row, groups)
    whole_rows = side.exchange.kind.shape[row]
    parts = site.parts(1, dims.rhs_group[0])
    if parts > 1:
        site.note(RAGGED_NOTE)
    side.cut(parts)
    kind = side.exchange.kind
    free = [dim for dim in range(kind.rank) if dim not in (*dims.dot.lhs_batch, *dims.dot.lhs_contracting)]
    place = len(dims.dot.lhs_batch) + free.index(row)
    local = as_tensor(site.result_local[0])
    part = _resized(local, place, kind.shape[row])
    chain = _Chain(site, list(side.exchange.ops))
    chain.product([side.exchange.value, *site.operands[1:]], [kind, *site.local[1:]], part)
    if parts > 1:
        chain.pad(place, whole_rows)
    summed = [*groups, *_contracted(site, dims)]
    chain.sum(summed, place, site.result_axes(place))
    return chain.finish(local)


def _contraction(site: Site, dims: RaggedDotDims) -> list[Op]:
    row = dims.lhs_ragged[0]
    other = dims.dot.rhs_contracting[dims.dot.lhs_contracting.index(row)]
    groups = site.result_axes(0)
    sides = _Side.of(site, 0, row, groups), _Side.of(site, 1, other, groups)
    parts = site.result_parts(0)
    if parts > 1:
        site.note(RAGGED_NOTE)
    for side in sides:
        side.cut(parts)
    local = as_tensor(site.result_local[0])
    chain = _Chain(site, [op for side in sides for op in side.exchange.ops])
    values = [*(side.exchange.value for side in sides), *site.operands[2:]]
    chain.product(values, [*(side.exchange.kind for side in sides), *site.local[2:]], local)
    chain.sum([axis for axis in sides[0].axes if axis in sides[1].axes], 0, ())
    return chain.finish(local)


def _contracted(site: Site, dims: RaggedDotDims) -> list[Axis]:
    pairs = zip(dims.dot.lhs_contracting, dims.dot.rhs_contracting, strict=True)
    return [axis for left, right in pairs for axis in site.axes(0, left) if axis in site.axes(1, right)]


@dataclass(slots=True)
class _Chain:
    """What follows the product, one op after the other; the last gets the name of the op's result."""

    site: Site
    ops: list[Op]

    def product(self, values: list[int], types: list[ValueType], result: TensorType) -> None:
        self._add(self.site.op.name, values, types, result, dict(self.site.op.attrs))

    def pad(self, dim: int, size: int) -> None:
        last = self.ops[-1]
        kind = as_tensor(last.result_type)
        zero = TensorType((), kind.dtype)
        constant = self.site.builder.op("stablehlo.constant", (), (), (zero,), {"value": 0}, location=last.location)
        self.ops.append(constant)
        high = tuple(size - kind.shape[dim] if axis == dim else 0 for axis in range(kind.rank))
        none = (0,) * kind.rank
        attrs = {"edge_padding_low": none, "edge_padding_high": high, "interior_padding": none}
        self._add("stablehlo.pad", [last.result, constant.result], [kind, zero], _resized(kind, dim, size), attrs)

    def sum(self, axes: Sequence[Axis], dim: int, kept: Sequence[Axis]) -> None:
        """Add up over `axes`; those in `kept` scatter the result along `dim`."""
        scattered = [axis for axis in axes if axis in kept]
        whole = [axis for axis in axes if axis not in kept]
        for kind, over in (("all_reduce", whole), ("reduce_scatter", scattered)):
            if not over:
                continue
            last = self.ops[-1]
            before = as_tensor(last.result_type)
            groups = self.site.layout.groups(self._mesh(), over)
            after, more = before, dict[str, Any]()
            if kind == "reduce_scatter":
                after, more = _resized(before, dim, -(-before.shape[dim] // groups.size)), {"scatter_dimension": dim}
            self.ops.append(
                self.site.builder.collective(kind, last.result, before, after, groups, last.location, None, "add", more)
            )

    def finish(self, local: TensorType) -> list[Op]:
        last = self.ops[-1]
        named = replace(last, results=(self.site.op.result,), result_types=(local,))
        return [*self.ops[:-1], named]

    def _mesh(self) -> str:
        return next((held.mesh for held in self.site.shardings if held.mesh), mesh_of(self.site))

    def _add(
        self, name: str, values: list[int], types: list[ValueType], result: TensorType, attrs: dict[str, Any]
    ) -> None:
        self.ops.append(self.site.builder.op(name, values, types, (result,), attrs, location=self.site.op.location))


def _resized(kind: TensorType, dim: int, size: int) -> TensorType:
    return TensorType((*kind.shape[:dim], size, *kind.shape[dim + 1 :]), kind.dtype)
