"""Reductions, scans, sorts and softmax."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from typing import Any

from stablecast.frontends.torch.emit.builder import Val, axes_of, axis_of, highest, is_float, lowest
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.registry import emits

_WIDE = {"bf16": "f32", "f16": "f32"}


def wide(e: Emitter, x: Val) -> Val:
    """`x` in the type that sums are made in."""
    return e.convert(x, _WIDE.get(x.dtype, x.dtype))


def total(e: Emitter, x: Val, dims: list[int], how: str = "add") -> Val:
    """A sum in a wide type, shaped as the result."""
    return e.reshape(e.reduce(wide(e, x), dims, how), e.out.shape)


@emits("aten.sum")
def sum_(e: Emitter, x: Val, dims: Any = None, keepdim: bool = False, **__: Any) -> Val:
    held = x if is_float(x.dtype) or x.dtype.startswith("c") else e.convert(x, e.out.dtype)
    return total(e, held, axes_of(dims, x.rank))


@emits("aten.mean")
def mean(e: Emitter, x: Val, dims: Any = None, keepdim: bool = False, **__: Any) -> Val:
    axes = axes_of(dims, x.rank)
    held = wide(e, x if is_float(x.dtype) else e.convert(x, e.out.dtype))
    return e.scale(total(e, held, axes), 1 / max(1, math.prod(x.shape[axis] for axis in axes)))


@emits("aten.prod")
def prod(e: Emitter, x: Val, dim: Any = None, keepdim: bool = False, **__: Any) -> Val:
    return total(e, e.convert(x, e.out.dtype), axes_of(dim, x.rank), "multiply")


@emits("aten.amax", "aten.max.default")
def amax(e: Emitter, x: Val, dims: Any = None, keepdim: bool = False) -> Val:
    return e.reshape(e.reduce(x, axes_of(dims, x.rank), "or" if x.dtype == "i1" else "maximum"), e.out.shape)


@emits("aten.amin", "aten.min.default")
def amin(e: Emitter, x: Val, dims: Any = None, keepdim: bool = False) -> Val:
    return e.reshape(e.reduce(x, axes_of(dims, x.rank), "and" if x.dtype == "i1" else "minimum"), e.out.shape)


@emits("aten.any", "aten.all")
def logical(e: Emitter, x: Val, dims: Any = None, keepdim: bool = False) -> Val:
    how = "or" if e.op.startswith("aten.any") else "and"
    return e.reshape(e.reduce(e.convert(x, "i1"), axes_of(dims, x.rank), how), e.out.shape)


@emits("aten.var", "aten.std")
def variance(e: Emitter, x: Val, dims: Any = None, correction: Any = 1, keepdim: bool = False, **__: Any) -> Val:
    if isinstance(dims, bool):
        correction, dims = int(dims), None
    found, _ = var_mean_parts(e, x, axes_of(dims, x.rank), float(correction if correction is not None else 1))
    found = e.unary("sqrt", found) if e.op.startswith("aten.std") else found
    return e.reshape(found, e.out.shape)


@emits("aten.var_mean")
def var_mean(e: Emitter, x: Val, dims: Any = None, correction: Any = 1, keepdim: bool = False, **__: Any) -> list[Val]:
    found, centre = var_mean_parts(e, x, axes_of(dims, x.rank), float(correction if correction is not None else 1))
    return [e.reshape(found, e.out.shape), e.reshape(centre, e.out.shape)]


def var_mean_parts(e: Emitter, x: Val, axes: list[int], correction: float = 0) -> tuple[Val, Val]:
    """Variance and mean over `axes`, without those dimensions, in a wide type."""
    x = wide(e, x)
    count = math.prod(x.shape[axis] for axis in axes)
    centre = e.scale(e.reduce(x, axes, "add"), 1 / max(1, count))
    kept = [axis for axis in range(x.rank) if axis not in axes]
    shifted = e.sub(x, e.broadcast_in_dim(centre, x.shape, kept))
    squares = e.reduce(e.mul(shifted, shifted), axes, "add")
    return e.scale(squares, 1 / max(1e-30, count - correction)), centre


@emits("aten.linalg_vector_norm", "aten.norm")
def vector_norm(e: Emitter, x: Val, order: Any = 2, dims: Any = None, keepdim: bool = False, *_: Any, **__: Any) -> Val:
    axes = axes_of(dims, x.rank)
    held = e.unary("abs", wide(e, e.convert(x, e.out.dtype) if x.dtype != e.out.dtype and not is_float(x.dtype) else x))
    order = 2.0 if order is None else float(order)
    if order == math.inf:
        return e.reshape(e.reduce(held, axes, "maximum", 0), e.out.shape)
    if order == 2:
        return e.unary("sqrt", total(e, e.mul(held, held), axes))
    if order == 1:
        return total(e, held, axes)
    powers = total(e, e.binary("power", held, e.splat(order, held.shape, held.dtype)), axes)
    return e.binary("power", powers, e.splat(1 / order, powers.shape, powers.dtype))


@emits("aten._softmax", "aten._safe_softmax", "aten.softmax")
def softmax(e: Emitter, x: Val, dim: int, *_: Any, **__: Any) -> Val:
    exps, sums, axis = _exponentials(e, wide(e, e.convert(x, e.out.dtype) if not is_float(x.dtype) else x), dim)
    kept = [place for place in range(x.rank) if place != axis]
    made = e.div(exps, e.broadcast_in_dim(sums, exps.shape, kept))
    if "_safe" not in e.op:
        return made
    alive = e.reduce(e.compare(x, e.splat(-math.inf, x.shape, x.dtype), "NE"), [axis], "or")
    return e.select(e.broadcast_in_dim(alive, made.shape, kept), made, e.splat(0, made.shape, made.dtype))


def _shifted(e: Emitter, x: Val, dim: int) -> tuple[Val, int, list[int]]:
    axis = axis_of(dim, x.rank)
    kept = [place for place in range(x.rank) if place != axis]
    if not x.rank:
        return e.sub(x, x), 0, []
    return e.sub(x, e.broadcast_in_dim(e.reduce(x, [axis], "maximum"), x.shape, kept)), axis, kept


def _exponentials(e: Emitter, x: Val, dim: int) -> tuple[Val, Val, int]:
    shifted, axis, _ = _shifted(e, x, dim)
    exps = e.unary("exponential", shifted)
    return exps, e.reduce(exps, [axis] if x.rank else [], "add"), axis


@emits("aten._log_softmax", "aten.log_softmax")
def log_softmax(e: Emitter, x: Val, dim: int, *_: Any, **__: Any) -> Val:
    shifted, axis, kept = _shifted(e, wide(e, x), dim)
    sums = e.reduce(e.unary("exponential", shifted), [axis] if x.rank else [], "add")
    return e.sub(shifted, e.broadcast_in_dim(e.unary("log", sums), shifted.shape, kept))


@emits("aten._softmax_backward_data")
def softmax_backward(e: Emitter, grad: Val, y: Val, dim: int, *_: Any) -> Val:
    grad, y = wide(e, grad), wide(e, y)
    axis = axis_of(dim, y.rank)
    kept = [place for place in range(y.rank) if place != axis]
    product = e.mul(grad, y)
    sums = e.broadcast_in_dim(e.reduce(product, [axis], "add"), y.shape, kept)
    return e.sub(product, e.mul(y, sums))


@emits("aten._log_softmax_backward_data")
def log_softmax_backward(e: Emitter, grad: Val, y: Val, dim: int, *_: Any) -> Val:
    grad, y = wide(e, grad), wide(e, y)
    axis = axis_of(dim, y.rank)
    kept = [place for place in range(y.rank) if place != axis]
    sums = e.broadcast_in_dim(e.reduce(grad, [axis], "add"), y.shape, kept)
    return e.sub(grad, e.mul(e.unary("exponential", y), sums))


@emits("aten.logsumexp")
def logsumexp(e: Emitter, x: Val, dims: Any, keepdim: bool = False) -> Val:
    axes = axes_of(dims, x.rank)
    kept = [axis for axis in range(x.rank) if axis not in axes]
    x = wide(e, x)
    top = e.reduce(x, axes, "maximum")
    sums = e.reduce(e.unary("exponential", e.sub(x, e.broadcast_in_dim(top, x.shape, kept))), axes, "add")
    return e.reshape(e.add(e.unary("log", sums), top), e.out.shape)


@emits("aten.argmax", "aten.argmin")
def arg_extreme(e: Emitter, x: Val, dim: int | None = None, keepdim: bool = False) -> Val:
    if dim is None:
        x = e.reshape(x, (math.prod(x.shape),))
    _, index = extreme(e, x, axis_of(dim or 0, x.rank), e.op.startswith("aten.argmax"))
    return e.reshape(index, e.out.shape)


@emits("aten.max.dim", "aten.min.dim")
def extreme_dim(e: Emitter, x: Val, dim: int, keepdim: bool = False) -> list[Val]:
    values, index = extreme(e, x, axis_of(dim, x.rank), e.op.startswith("aten.max"))
    return [e.reshape(values, e.out.shape), e.reshape(index, e.out.shape)]


def extreme(e: Emitter, x: Val, axis: int, largest: bool) -> tuple[Val, Val]:
    """Extreme values along `axis` and the first place that each is at."""
    values = e.reduce(x, [axis], "maximum" if largest else "minimum")
    kept = [place for place in range(x.rank) if place != axis]
    hits = e.compare(x, e.broadcast_in_dim(values, x.shape, kept), "EQ")
    places = e.select(hits, e.iota(x.shape, axis), e.splat(x.shape[axis], x.shape, "i64"))
    return values, e.reduce(places, [axis], "minimum")


@emits("aten.sort")
def sort(e: Emitter, x: Val, *args: Any, stable: bool = False, dim: int = -1, descending: bool = False) -> list[Val]:
    plain = [arg for arg in args if arg is not None]
    if plain and not isinstance(plain[0], bool):
        dim = plain[0]
    if plain and isinstance(plain[-1], bool):
        descending = plain[-1]
    values, index = sorted_along(e, x, axis_of(dim, x.rank), descending)
    return [values, index]


@emits("aten.argsort")
def argsort(e: Emitter, x: Val, dim: int = -1, descending: bool = False, **__: Any) -> Val:
    return sorted_along(e, x, axis_of(dim, x.rank), descending)[1]


def sorted_along(e: Emitter, x: Val, axis: int, descending: bool) -> tuple[Val, Val]:
    """Values in order along `axis`, with the places that they came from."""
    places = e.iota(x.shape, axis)
    op = e.hlo.SortOp(
        [e.type(x.shape, x.dtype), e.type(x.shape, "i64")], [x.value, places.value], dimension=axis, is_stable=True
    )
    direction = "GT" if descending else "LT"
    e.body(op, (x.dtype, x.dtype, "i64", "i64"), lambda a, b, i, j: [e.compare(a, b, direction)])
    first = e.done(op.results[0], x.shape, x.dtype)
    return first, Val(op.results[1], x.shape, "i64")


@emits("aten.topk")
def topk(e: Emitter, x: Val, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Val]:
    axis = axis_of(dim, x.rank)
    values, index = sorted_along(e, x, axis, largest)
    return [e.slice_dim(values, axis, 0, k), e.slice_dim(index, axis, 0, k)]


@emits("aten.cumsum", "aten.cumprod")
def cumulative(e: Emitter, x: Val, dim: int, **__: Any) -> Val:
    """A window over everything before, as XLA makes scans out of."""
    x = e.operand(x)
    if not x.rank:
        return x
    axis = axis_of(dim, x.rank)
    size = x.shape[axis]
    how = "add" if e.op.startswith("aten.cumsum") else "multiply"
    return window(e, x, [size if a == axis else 1 for a in range(x.rank)], how, low={axis: size - 1})


def window(
    e: Emitter,
    x: Val,
    sizes: list[int],
    how: str,
    strides: list[int] | None = None,
    low: dict[int, int] | None = None,
    high: dict[int, int] | None = None,
    dilations: list[int] | None = None,
) -> Val:
    """`reduce_window` over all dimensions."""
    import numpy as np

    rank = x.rank
    steps, wide_ = strides or [1] * rank, dilations or [1] * rank
    pads = [[(low or {}).get(axis, 0), (high or {}).get(axis, 0)] for axis in range(rank)]
    shape = [
        (x.shape[axis] + sum(pads[axis]) - (sizes[axis] - 1) * wide_[axis] - 1) // steps[axis] + 1
        for axis in range(rank)
    ]
    start = {"add": 0, "multiply": 1}.get(how, lowest(x.dtype) if how == "maximum" else highest(x.dtype))
    initial = e.splat(start, (), x.dtype)
    op = e.hlo.ReduceWindowOp(
        [e.type(shape, x.dtype)],
        [x.value],
        [initial.value],
        e.ints(sizes),
        window_strides=e.ints(steps),
        window_dilations=e.ints(wide_),
        padding=e.ir.DenseIntElementsAttr.get(np.array(pads, dtype=np.int64)),
    )
    e.body(op, (x.dtype, x.dtype), lambda a, b: [e.binary(how, a, b)])
    return e.done(op.results[0], shape, x.dtype)


@emits("aten.count_nonzero")
def count_nonzero(e: Emitter, x: Val, dims: Any = None) -> Val:
    ones = e.convert(e.convert(x, "i1"), e.out.dtype)
    return e.reshape(e.reduce(ones, axes_of(dims, x.rank), "add"), e.out.shape)


@emits("aten.histc")
def histc(e: Emitter, x: Val, bins: int = 100, low: float = 0, high: float = 0) -> Val:
    """Counts of elements in equal bins between `low` and `high`; the last bin holds its upper end."""
    if low == high:
        raise NotImplementedError("a histogram whose range follows from the data")
    flat = e.convert(e.reshape(x, (math.prod(x.shape),)), "f32")
    place = e.unary("floor", e.scale(e.shift(flat, -low), bins / (high - low)))
    place = e.binary("minimum", place, e.splat(bins - 1, place.shape, "f32"))
    inside = e.binary(
        "and_",
        e.compare(flat, e.splat(low, flat.shape, "f32"), "GE"),
        e.compare(flat, e.splat(high, flat.shape, "f32"), "LE"),
    )
    shape = (flat.shape[0], bins)
    hits = e.compare(e.broadcast_in_dim(e.convert(place, "i32"), shape, (0,)), e.iota(shape, 1, "i32"), "EQ")
    counted = e.binary("and_", hits, e.broadcast_in_dim(inside, shape, (0,)))
    return e.reduce(e.convert(counted, e.out.dtype), [0], "add")
