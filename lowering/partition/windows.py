"""Windowed ops on a sharded dimension: convolutions, pooling, and cumulative sums written as windows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stablecast.ir.attributes import ConvDims
from stablecast.ir.program import Op
from stablecast.ir.types import ValueType
from stablecast.lowering.partition.halo import Exchange, Halo, final, halo
from stablecast.lowering.partition.site import Site

SCATTER_NOTE = "the gradient of an overlapping pooling on a sharded dimension: its halo is modelled on that of a window"


@dataclass(frozen=True, slots=True)
class Window:
    """One dimension of a window: sizes in elements, dilations and padding as in StableHLO."""

    size: int
    stride: int = 1
    low: int = 0
    high: int = 0
    base: int = 1
    dilation: int = 1

    @property
    def span(self) -> int:
        """Elements of the (dilated) input that the window covers."""
        return (self.size - 1) * self.dilation + 1

    def around(self, parts: int, size: int, results: int) -> Halo:
        """The halo where shards of `size` give shards of `results`."""
        return halo(
            parts,
            size,
            lambda k: -(-(k * results * self.stride - self.low) // self.base),
            lambda k: ((k * results + results - 1) * self.stride - self.low + self.span - 1) // self.base + 1,
        )

    def around_split(self, parts: int, size: int, share: int, results: int) -> Halo:
        """The halo where the window itself is split into parts of `share` and every result is needed everywhere."""
        return halo(
            parts,
            size,
            lambda k: k * share * self.dilation - self.low,
            lambda k: (results - 1) * self.stride + ((k + 1) * share - 1) * self.dilation - self.low + 1,
        )


def convolution(site: Site) -> list[Op] | None:
    """Halo exchange on each sharded spatial dimension; None where none is sharded."""
    dims: ConvDims = site.op.attrs["dimension_numbers"]
    attrs = site.op.attrs
    count = len(dims.input_spatial)
    padding: list[tuple[int, int]] = list(attrs.get("padding") or [(0, 0)] * count)
    exchange = Exchange.of(site, 0)
    for place, dim in enumerate(dims.input_spatial):
        axes = site.axes(0, dim)
        parts = site.parts(0, dim)
        if parts == 1:
            continue
        kernel_dim, result_dim = dims.kernel_spatial[place], dims.output_spatial[place]
        window = Window(
            site.operand_type(1).shape[kernel_dim],
            _item(attrs, "window_strides", place),
            *padding[place],
            _item(attrs, "lhs_dilation", place),
            _item(attrs, "rhs_dilation", place),
        )
        size, results = site.local_shape(0)[dim], site.result_shape[result_dim]
        share = site.local_shape(1)[kernel_dim]
        if site.parts(1, kernel_dim) > 1:
            around = window.around_split(parts, size, share, results)
            span = (share - 1) * window.dilation + 1
        elif site.result_parts(result_dim) > 1:
            around = window.around(parts, size, results)
            span = window.span
        else:
            continue
        if max(around.left, around.right) > size:
            exchange.gather(dim, axes, site.shardings[0].mesh)
        else:
            exchange.widen(dim, axes, site.shardings[0].mesh, around)
        padding[place] = _padding(window, span, exchange.kind.shape[dim], results)
    if not exchange.ops:
        return None
    types: list[ValueType] = [exchange.kind, *site.local[1:]]
    operands = [exchange.value, *site.operands[1:]]
    return [*exchange.ops, final(site, operands, types, {**attrs, "padding": tuple(padding)})]


def _padding(window: Window, span: int, size: int, results: int) -> tuple[int, int]:
    """Padding under which an input of `size` gives `results`."""
    dilated = (size - 1) * window.base + 1
    return 0, (results - 1) * window.stride + span - dilated


def _item(attrs: Mapping[str, Any], name: str, place: int) -> int:
    values = attrs.get(name)
    return int(values[place]) if values else 1


def reduce_window(site: Site) -> list[Op] | None:
    """Halo exchange, or a gather where the window reaches beyond the next shard (cumulative sums)."""
    return _windowed(site, len(site.op.operands) // 2)


def _windowed(site: Site, inputs: int) -> list[Op] | None:
    attrs = site.op.attrs
    rank = site.operand_type(0).rank
    sharded = [dim for dim in range(rank) if site.parts(0, dim) > 1 and attrs["window_dimensions"][dim] > 1]
    if not sharded:
        return None
    padding: list[tuple[int, int]] = list(attrs.get("padding") or [(0, 0)] * rank)
    exchanges = [Exchange.of(site, operand) for operand in range(inputs)]
    for dim in sharded:
        window = Window(
            attrs["window_dimensions"][dim],
            _item(attrs, "window_strides", dim),
            *padding[dim],
            _item(attrs, "base_dilations", dim),
            _item(attrs, "window_dilations", dim),
        )
        size, results = site.local_shape(0)[dim], site.result_shape[dim]
        around = window.around(site.parts(0, dim), size, results)
        for exchange in exchanges:
            if max(around.left, around.right) > size:
                exchange.gather(dim, site.axes(0, dim), site.shardings[0].mesh)
            else:
                exchange.widen(dim, site.axes(0, dim), site.shardings[0].mesh, around)
        padding[dim] = _padding(window, window.span, exchanges[0].kind.shape[dim], results)
    operands = [*(exchange.value for exchange in exchanges), *site.operands[inputs:]]
    types: list[ValueType] = [*(exchange.kind for exchange in exchanges), *site.local[inputs:]]
    made = [op for exchange in exchanges for op in exchange.ops]
    return [*made, final(site, operands, types, {**attrs, "padding": tuple(padding)})] if made else None


def select_and_scatter(site: Site) -> list[Op] | None:
    """Overlapping windows on a sharded dimension: both inputs and the result's edge cross the cut."""
    attrs = site.op.attrs
    rank = site.operand_type(0).rank
    exchanges = [Exchange.of(site, operand) for operand in (0, 1)]
    for dim in range(rank):
        size, stride = attrs["window_dimensions"][dim], _item(attrs, "window_strides", dim)
        if site.parts(0, dim) == 1 or size <= stride:
            continue
        site.note(SCATTER_NOTE)
        for exchange, rows in zip(exchanges, (size - stride, 1), strict=True):
            around = Halo(rows, rows)
            if rows <= exchange.kind.shape[dim]:
                exchange.widen(dim, site.axes(0, dim), site.shardings[0].mesh, around)
    made = [op for exchange in exchanges for op in exchange.ops]
    operands = [*(exchange.value for exchange in exchanges), site.operands[2]]
    types: list[ValueType] = [*(exchange.kind for exchange in exchanges), site.local[2]]
    return [*made, final(site, operands, types)] if made else None
