"""Embedding bags, Fourier transforms and other ops of their own."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from typing import Any

from stablecast.frontends.torch.emit.builder import Val
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.index import put_rows, take_rows
from stablecast.frontends.torch.emit.registry import emits

_SUM, _MEAN = 0, 1


def _bags(e: Emitter, index: Val, offsets: Val, include_last: bool) -> tuple[Val, int]:
    """The bag of every index: how many offsets are at or before its place."""
    count = offsets.shape[0] - int(include_last)
    starts = e.slice_dim(offsets, 0, 0, count)
    shape = (index.shape[0], count)
    places = e.iota(shape, 0, starts.dtype)
    before = e.compare(e.broadcast_in_dim(starts, shape, (1,)), places, "LE")
    return e.shift(e.reduce(e.convert(before, "i64"), [1], "add"), -1), count


@emits("aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(
    e: Emitter,
    weight: Val,
    index: Val,
    offsets: Val,
    scale_grad: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    weights: Val | None = None,
    include_last: bool = False,
    padding: int = -1,
) -> list[Val | None]:
    if mode not in (_SUM, _MEAN):
        raise NotImplementedError("embedding bags that take a maximum")
    bags, count = _bags(e, index, offsets, include_last)
    rows = take_rows(e, weight, index)
    if weights is not None:
        rows = e.mul(rows, e.broadcast_in_dim(weights, rows.shape, (0,)))
    sums = put_rows(e, e.splat(0, (count, weight.shape[1]), rows.dtype), bags, rows, 0, "add")
    sizes = put_rows(e, e.splat(0, (count,), "i64"), bags, e.splat(1, index.shape, "i64"), 0, "add")
    if mode == _MEAN:
        safe = e.convert(e.binary("maximum", sizes, e.splat(1, (count,), "i64")), sums.dtype)
        sums = e.div(sums, e.broadcast_in_dim(safe, sums.shape, (0,)))
    others: list[Val | None] = []
    for spec, value in zip(e.outs[1:], (bags, sizes, None), strict=False):
        fits = value is not None and spec is not None and value.shape == spec.shape
        others.append(
            e.convert(value, spec.dtype) if fits and value is not None and spec is not None else _zeros(e, spec)
        )
    return [sums, *others]


def _zeros(e: Emitter, spec: Any) -> Val | None:
    return None if spec is None else e.splat(0, *spec)


@emits("aten._embedding_bag_backward")
def embedding_bag_backward(
    e: Emitter,
    grad: Val,
    index: Val,
    offsets: Val,
    offset2bag: Val,
    bag_size: Val,
    maximum: Val,
    rows: int,
    scale_grad: bool,
    mode: int,
    sparse: bool,
    weights: Val | None,
    padding: int = -1,
) -> Val:
    bags, _ = _bags(e, index, offsets, grad.shape[0] < offsets.shape[0])
    return _bag_gradient(e, grad, index, bags, rows, mode, weights)


@emits("aten._embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    e: Emitter,
    grad: Val,
    index: Val,
    offset2bag: Val,
    bag_size: Val,
    maximum: Val,
    rows: int,
    scale_grad: bool,
    mode: int,
    weights: Val | None,
    padding: int = -1,
) -> Val:
    return _bag_gradient(e, grad, index, offset2bag, rows, mode, weights)


def _bag_gradient(e: Emitter, grad: Val, index: Val, bags: Val, rows: int, mode: int, weights: Val | None) -> Val:
    """Each row's gradient: its bag's, over the bag's size for a mean."""
    if mode not in (_SUM, _MEAN):
        raise NotImplementedError("embedding bags that take a maximum")
    if mode == _MEAN:
        sizes = put_rows(e, e.splat(0, grad.shape[:1], bags.dtype), bags, e.splat(1, bags.shape, bags.dtype), 0, "add")
        safe = e.convert(e.binary("maximum", sizes, e.splat(1, sizes.shape, sizes.dtype)), grad.dtype)
        grad = e.div(grad, e.broadcast_in_dim(safe, grad.shape, (0,)))
    updates = take_rows(e, grad, bags)
    if weights is not None:
        updates = e.mul(updates, e.broadcast_in_dim(weights, updates.shape, (0,)))
    return put_rows(e, e.splat(0, (rows, grad.shape[1]), grad.dtype), index, updates, 0, "add")


@emits("aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r")
def fft(e: Emitter, x: Val, dims: Any, normalization: int, last: Any) -> Val:
    """Transforms over the last dimensions; torch's normalisation is a factor."""
    axes = [dim % x.rank for dim in dims]
    if axes != list(range(x.rank - len(axes), x.rank)) or len(axes) > 3:
        raise NotImplementedError("a Fourier transform over other than the last dimensions")
    kind = "RFFT" if "r2c" in e.op else "IRFFT" if "c2r" in e.op else "FFT" if last else "IFFT"
    lengths = [(e.out.shape if kind == "IRFFT" else x.shape)[axis] for axis in axes]
    made = e.hlo.fft(x.value, e.hlo.FftTypeAttr.get(kind), e.ints(lengths))
    value = e.done(made, e.out.shape, e.out.dtype)
    count = math.prod(lengths)
    factor = (1.0, 1 / math.sqrt(count), 1 / count)[normalization]
    return e.scale(value, factor * count) if kind in ("IFFT", "IRFFT") else e.scale(value, factor)
