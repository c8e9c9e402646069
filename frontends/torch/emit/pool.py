"""Pooling and resizing."""

import math
from collections.abc import Sequence
from typing import Any

from stablecast.frontends.torch.emit.builder import Val, lowest
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.reduce import wide, window
from stablecast.frontends.torch.emit.registry import emits
from stablecast.frontends.torch.emit.shape import POINTS


def _each(values: Any, rank: int, default: Sequence[int] | None = None) -> list[int]:
    found = [values] if isinstance(values, int) else list(values)
    if not found and default is not None:
        return list(default)
    return found * rank if len(found) == 1 else found


def _high(size: int, out: int, k: int, stride: int, pad: int, dilation: int = 1) -> int:
    """Padding at the end such that `out` windows fit, as `ceil_mode` may ask."""
    return (out - 1) * stride + (k - 1) * dilation + 1 - size - pad


def _patches(
    e: Emitter,
    x: Val,
    k: Sequence[int],
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    out: Sequence[int],
) -> tuple[Val, Val]:
    """Every window's elements in front, [k, ..., out], and their places in the flat input."""
    rank = len(k)
    lead = x.rank - rank
    low = [0] * lead + list(pad)
    high = [0] * lead + [
        max(0, _high(x.shape[lead + i], out[i], k[i], stride[i], pad[i], dilation[i])) for i in range(rank)
    ]
    padded = e.pad(x, e.splat(lowest(x.dtype), (), x.dtype), low, high)
    rows: list[Val] = []
    for number in range(math.prod(k)):
        offset = [number // math.prod(k[i + 1 :]) % k[i] * dilation[i] for i in range(rank)]
        starts = [0] * lead + offset
        limits = list(x.shape[:lead]) + [offset[i] + (out[i] - 1) * stride[i] + 1 for i in range(rank)]
        part = e.slice(padded, starts, limits, [1] * lead + list(stride))
        rows.append(e.reshape(part, (1, *part.shape)))
    return e.concat(rows, 0), _places(e, k, stride, pad, dilation, x.shape[lead:], rows[0].shape, lead)


def _places(
    e: Emitter,
    k: Sequence[int],
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    sizes: Sequence[int],
    shape: tuple[int, ...],
    lead: int,
) -> Val:
    rank = len(k)
    whole = (math.prod(k), *shape[1:])
    number = e.iota(whole, 0)
    place = e.splat(0, whole, "i64")
    for i in range(rank):
        inner = math.prod(k[i + 1 :])
        step = e.binary(
            "remainder", e.binary("divide", number, e.splat(inner, whole, "i64")), e.splat(k[i], whole, "i64")
        )
        line = e.shift(e.add(e.scale(e.iota(whole, 1 + lead + i), stride[i]), e.scale(step, dilation[i])), -pad[i])
        place = e.add(place, e.scale(line, math.prod(sizes[i + 1 :])))
    return place


@emits("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices")
def max_pool(
    e: Emitter,
    x: Val,
    kernel: Sequence[int],
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> list[Val]:
    """Largest element of each window and the first place that it is at in the flat input.

    The places follow from comparing all elements of a window; they are dead in inference, and so is their work.
    """
    rank = 2 if "2d" in e.op else 3
    k = _each(kernel, rank)
    steps, pads, wide_ = _each(stride, rank, k), _each(padding, rank), _each(dilation, rank)
    out = e.out.shape[-rank:]
    lead = x.rank - rank
    high = {lead + i: _high(x.shape[lead + i], out[i], k[i], steps[i], pads[i], wide_[i]) for i in range(rank)}
    best = window(
        e,
        x,
        [1] * lead + k,
        "maximum",
        [1] * lead + steps,
        {lead + i: pads[i] for i in range(rank)},
        high,
        [1] * lead + wide_,
    )
    rows, places = _patches(e, x, k, steps, pads, wide_, out)
    hits = e.compare(rows, e.broadcast_in_dim(best, rows.shape, range(1, rows.rank)), "EQ")
    far = e.splat(math.prod(x.shape[lead:]), places.shape, "i64")
    return [best, e.reduce(e.select(hits, places, far), [0], "minimum")]


@emits("aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward")
def max_pool_backward(
    e: Emitter, grad: Val, x: Val, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, places: Val
) -> Val:
    rank = 2 if "2d" in e.op else 3
    lead = math.prod(x.shape[: x.rank - rank])
    inner = math.prod(x.shape[x.rank - rank :])
    count = math.prod(grad.shape)
    per = count // max(1, lead)
    rows = e.scale(e.iota((lead, per), 0), inner)
    index = e.reshape(e.add(rows, e.reshape(places, (lead, per))), (count, 1))
    zeros = e.splat(0, (lead * inner,), grad.dtype)
    return e.reshape(e.scatter(zeros, index, e.reshape(grad, (count,)), POINTS), x.shape)


@emits("aten.avg_pool2d", "aten.avg_pool3d", "aten.avg_pool1d")
def avg_pool(
    e: Emitter,
    x: Val,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Val:
    rank = int(e.op.partition("avg_pool")[2][0])
    k = _each(kernel, rank)
    steps, pads = _each(stride, rank, k), _each(padding, rank)
    lead = x.rank - rank
    low = {lead + i: pads[i] for i in range(rank)}
    high = {lead + i: _high(x.shape[lead + i], e.out.shape[lead + i], k[i], steps[i], pads[i]) for i in range(rank)}
    sizes, strides = [1] * lead + k, [1] * lead + steps
    sums = window(e, wide(e, x), sizes, "add", strides, low, high)
    if divisor or (count_include_pad and not ceil_mode) or not any(pads):
        return e.scale(sums, 1 / (divisor or math.prod(k)))
    counts = window(e, e.splat(1, x.shape, sums.dtype), sizes, "add", strides, low, high)
    return e.div(sums, counts)


@emits("aten.avg_pool2d_backward")
def avg_pool_backward(
    e: Emitter,
    grad: Val,
    x: Val,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Val:
    k = _each(kernel, 2)
    steps, pads = _each(stride, 2, k), _each(padding, 2)
    lead = x.rank - 2
    if any(pads) and not count_include_pad and not divisor:
        raise NotImplementedError("gradient of average pooling that leaves padding out of the count")
    scaled = e.scale(grad, 1 / (divisor or math.prod(k)))
    low = [0] * lead + [k[i] - 1 - pads[i] for i in range(2)]
    high = [
        0
        if axis < lead
        else x.shape[axis] + k[axis - lead] - 1 - low[axis] - ((grad.shape[axis] - 1) * steps[axis - lead] + 1)
        for axis in range(x.rank)
    ]
    spread = e.pad(scaled, e.splat(0, (), grad.dtype), low, high, [0] * lead + [step - 1 for step in steps])
    return window(e, spread, [1] * lead + k, "add")


@emits("aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d")
def adaptive_avg_pool(e: Emitter, x: Val, sizes: Sequence[int]) -> Val:
    rank = len(sizes)
    lead = x.rank - rank
    if any(x.shape[lead + i] % size for i, size in enumerate(sizes)):
        return _uneven_pool(e, x, sizes)
    split = list(x.shape[:lead])
    for i, size in enumerate(sizes):
        split += [size, x.shape[lead + i] // size]
    axes = [lead + 2 * i + 1 for i in range(rank)]
    sums = e.reduce(wide(e, e.reshape(x, split)), axes, "add")
    return e.scale(sums, 1 / math.prod(split[axis] for axis in axes))


def _uneven_pool(e: Emitter, x: Val, sizes: Sequence[int]) -> Val:
    """Windows of unequal length, as a product with a matrix of weights along each dimension."""
    import numpy as np

    lead = x.rank - len(sizes)
    for i, size in enumerate(sizes):
        length = x.shape[lead + i]
        weights = np.zeros((length, size), dtype=np.float32)
        for place in range(size):
            start, end = place * length // size, -(-(place + 1) * length // size)
            weights[start:end, place] = 1 / (end - start)
        product = e.dot(x, e.data(weights, x.dtype), ((lead + i,), (0,)))
        order = list(range(product.rank - 1))
        order.insert(lead + i, product.rank - 1)
        x = e.transpose(product, order)
    return x


@emits("aten._adaptive_avg_pool2d_backward", "aten._adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(e: Emitter, grad: Val, x: Val) -> Val:
    rank = 3 if "3d" in e.op else 2
    lead = x.rank - rank
    if any(x.shape[lead + i] % grad.shape[lead + i] for i in range(rank)):
        raise NotImplementedError("gradient of adaptive pooling with unequal windows")
    split, dims = list(x.shape[:lead]), list(range(lead))
    count = 1
    for i in range(rank):
        size = grad.shape[lead + i]
        dims.append(len(split))
        split += [size, x.shape[lead + i] // size]
        count *= x.shape[lead + i] // size
    return e.reshape(e.broadcast_in_dim(e.scale(grad, 1 / count), split, dims), x.shape)


@emits("aten.upsample_nearest2d", "aten.upsample_nearest1d", "aten.upsample_nearest3d")
def upsample_nearest(e: Emitter, x: Val, sizes: Sequence[int], *_: Any) -> Val:
    lead = x.rank - len(sizes)
    if any(size % x.shape[lead + i] for i, size in enumerate(sizes)):
        raise NotImplementedError("nearest upsampling by a factor that is not whole")
    split, dims = list(x.shape[:lead]), list(range(lead))
    for i, size in enumerate(sizes):
        dims.append(len(split))
        split += [x.shape[lead + i], size // x.shape[lead + i]]
    return e.reshape(e.broadcast_in_dim(x, split, dims), e.out.shape)


@emits("aten.upsample_nearest2d_backward", "aten.upsample_nearest1d_backward", "aten.upsample_nearest3d_backward")
def upsample_nearest_backward(e: Emitter, grad: Val, sizes: Sequence[int], shape: Sequence[int], *_: Any) -> Val:
    lead = grad.rank - len(sizes)
    if any(size % shape[lead + i] for i, size in enumerate(sizes)):
        raise NotImplementedError("gradient of nearest upsampling by a factor that is not whole")
    split: list[int] = list(shape[:lead])
    for i, size in enumerate(sizes):
        split += [shape[lead + i], size // shape[lead + i]]
    axes = [lead + 2 * i + 1 for i in range(len(sizes))]
    return e.reduce(wide(e, e.reshape(grad, split)), axes, "add")
