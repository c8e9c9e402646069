"""Normalisations: batch, layer, group, root mean square."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Sequence
from typing import Any

from stablecast.frontends.torch.emit.builder import Val
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.reduce import var_mean_parts, wide
from stablecast.frontends.torch.emit.registry import composite, emits


def _channel(e: Emitter, x: Val, like: Val) -> Val:
    """A per-channel vector over [n, c, ...]."""
    return e.broadcast_in_dim(e.convert(x, like.dtype), like.shape, (1,))


def _affine(e: Emitter, made: Val, weight: Val | None, bias: Val | None) -> Val:
    if weight is not None:
        made = e.mul(made, _channel(e, weight, made))
    return made if bias is None else e.add(made, _channel(e, bias, made))


def _batch_norm(
    e: Emitter,
    x: Val,
    weight: Val | None,
    bias: Val | None,
    mean: Val | None,
    var: Val | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[Val]:
    """Result, mean and inverse deviation of the batch, new running mean and variance."""
    held = wide(e, x)
    axes = [axis for axis in range(x.rank) if axis != 1]
    if training:
        spread, centre = var_mean_parts(e, x, axes)
    else:
        assert mean is not None
        assert var is not None
        spread, centre = e.convert(var, held.dtype), e.convert(mean, held.dtype)
    inverse = e.unary("rsqrt", e.shift(spread, eps))
    made = e.mul(e.sub(held, _channel(e, centre, held)), _channel(e, inverse, held))
    made = e.convert(_affine(e, made, weight, bias), x.dtype)
    if mean is None or var is None:
        return [made, centre, inverse]
    if not training:
        return [made, centre, inverse, mean, var]
    count = math.prod(x.shape[axis] for axis in axes)
    unbiased = e.scale(spread, count / max(1, count - 1))
    return [made, centre, inverse, _running(e, mean, centre, momentum), _running(e, var, unbiased, momentum)]


def _running(e: Emitter, old: Val, new: Val, momentum: float) -> Val:
    return e.add(e.scale(old, 1 - momentum), e.scale(e.convert(new, old.dtype), momentum))


@emits("aten.native_batch_norm", "aten._native_batch_norm_legit", "aten._native_batch_norm_legit_functional")
def native_batch_norm(
    e: Emitter,
    x: Val,
    weight: Val | None,
    bias: Val | None,
    mean: Val | None,
    var: Val | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[Val]:
    found = _batch_norm(e, x, weight, bias, mean, var, training, momentum, eps)
    if not training:
        found[1:3] = [_empty_like(e, 1), _empty_like(e, 2)]
    return found


def _empty_like(e: Emitter, index: int) -> Val:
    spec = e.outs[index]
    assert spec is not None
    return e.splat(0, *spec)


@emits("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    e: Emitter, x: Val, weight: Val | None, bias: Val | None, training: bool, momentum: float, eps: float
) -> list[Val]:
    return _batch_norm(e, x, weight, bias, None, None, True, momentum, eps)


@emits(
    "aten.cudnn_batch_norm",
    "aten._batch_norm_with_update",
    "aten._batch_norm_with_update_functional",
    "aten._batch_norm_no_update",
)
def cudnn_batch_norm(
    e: Emitter, x: Val, weight: Val | None, bias: Val | None, mean: Val | None, var: Val | None, *args: Any
) -> list[Val]:
    training = args[0] if isinstance(args[0], bool) else "no_update" not in e.op
    momentum, eps = args[-2], args[-1]
    found = _batch_norm(e, x, weight, bias, mean, var, training, momentum, eps)
    if not training:
        found[1:3] = [_empty_like(e, 1), _empty_like(e, 2)]
    found.insert(3, _empty_like(e, 3))
    return found


@emits("aten.native_batch_norm_backward")
def native_batch_norm_backward(
    e: Emitter,
    grad: Val,
    x: Val,
    weight: Val | None,
    mean: Val | None,
    var: Val | None,
    save_mean: Val | None,
    save_inverse: Val | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> list[Val | None]:
    g, held = wide(e, grad), wide(e, x)
    axes = [axis for axis in range(x.rank) if axis != 1]
    if train:
        assert save_mean is not None
        assert save_inverse is not None
        centre, inverse = e.convert(save_mean, held.dtype), e.convert(save_inverse, held.dtype)
    else:
        assert mean is not None
        assert var is not None
        centre = e.convert(mean, held.dtype)
        inverse = e.unary("rsqrt", e.shift(e.convert(var, held.dtype), eps))
    normal = e.mul(e.sub(held, _channel(e, centre, held)), _channel(e, inverse, held))
    sum_g = e.reduce(g, axes, "add")
    sum_gx = e.reduce(e.mul(g, normal), axes, "add")
    scale = inverse if weight is None else e.mul(inverse, e.convert(weight, inverse.dtype))
    gx = g
    if train:
        count = 1 / max(1, math.prod(x.shape[axis] for axis in axes))
        pull = e.add(_channel(e, e.scale(sum_g, count), g), e.mul(normal, _channel(e, e.scale(sum_gx, count), g)))
        gx = e.sub(g, pull)
    return [
        e.convert(e.mul(gx, _channel(e, scale, g)), x.dtype) if mask[0] else None,
        sum_gx if mask[1] else None,
        sum_g if mask[2] else None,
    ]


@emits("aten.cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(
    e: Emitter,
    x: Val,
    grad: Val,
    weight: Val,
    mean: Val | None,
    var: Val | None,
    save_mean: Val,
    save_inverse: Val,
    eps: float,
    *_: Any,
) -> list[Val | None]:
    masks = [spec is not None for spec in e.outs]
    return native_batch_norm_backward(e, grad, x, weight, mean, var, save_mean, save_inverse, True, eps, masks)


def _rows(e: Emitter, x: Val, stat: Val, rank: int) -> Val:
    """A statistic of the leading dimensions, spread over the last `rank`."""
    lead = x.rank - rank
    return e.broadcast_in_dim(e.reshape(stat, x.shape[:lead]), x.shape, range(lead))


def _last(e: Emitter, x: Val, like: Val) -> Val:
    return e.broadcast(e.convert(x, like.dtype), like.shape)


@composite("aten.native_layer_norm", attributes=("eps",))
def native_layer_norm(
    e: Emitter, x: Val, shape: Sequence[int], weight: Val | None, bias: Val | None, eps: float
) -> list[Val]:
    lead = x.rank - len(shape)
    axes = list(range(lead, x.rank))
    held = wide(e, x)
    spread, centre = var_mean_parts(e, x, axes)
    inverse = e.unary("rsqrt", e.shift(spread, eps))
    made = e.mul(e.sub(held, _rows(e, held, centre, len(shape))), _rows(e, held, inverse, len(shape)))
    if weight is not None:
        made = e.mul(made, _last(e, weight, made))
    if bias is not None:
        made = e.add(made, _last(e, bias, made))
    stats = (*x.shape[:lead], *(1,) * len(shape))
    return [e.convert(made, x.dtype), e.reshape(centre, stats), e.reshape(inverse, stats)]


@composite("aten.native_layer_norm_backward")
def native_layer_norm_backward(
    e: Emitter,
    grad: Val,
    x: Val,
    shape: Sequence[int],
    mean: Val,
    inverse: Val,
    weight: Val | None,
    bias: Val | None,
    mask: Sequence[bool],
) -> list[Val | None]:
    rank = len(shape)
    axes = list(range(x.rank - rank, x.rank))
    lead = list(range(x.rank - rank))
    g, held = wide(e, grad), wide(e, x)
    spread = _rows(e, held, e.convert(inverse, held.dtype), rank)
    normal = e.mul(e.sub(held, _rows(e, held, e.convert(mean, held.dtype), rank)), spread)
    gw = g if weight is None else e.mul(g, _last(e, weight, g))
    count = 1 / max(1, math.prod(shape))
    first = _rows(e, g, e.scale(e.reduce(gw, axes, "add"), count), rank)
    second = e.mul(normal, _rows(e, g, e.scale(e.reduce(e.mul(gw, normal), axes, "add"), count), rank))
    return [
        e.convert(e.mul(e.sub(e.sub(gw, first), second), spread), x.dtype) if mask[0] else None,
        e.reduce(e.mul(g, normal), lead, "add") if mask[1] else None,
        e.reduce(g, lead, "add") if mask[2] else None,
    ]


@composite("aten._fused_rms_norm", attributes=("eps",))
def fused_rms_norm(e: Emitter, x: Val, shape: Sequence[int], weight: Val | None, eps: float | None) -> list[Val]:
    lead = x.rank - len(shape)
    held = wide(e, x)
    squares = e.reduce(e.mul(held, held), list(range(lead, x.rank)), "add")
    mean = e.scale(squares, 1 / max(1, math.prod(shape)))
    inverse = e.unary("rsqrt", e.shift(mean, 1.1920928955078125e-07 if eps is None else eps))
    made = e.mul(held, _rows(e, held, inverse, len(shape)))
    if weight is not None:
        made = e.mul(made, _last(e, weight, made))
    return [e.convert(made, x.dtype), e.reshape(inverse, (*x.shape[:lead], *(1,) * len(shape)))]


@composite("aten._fused_rms_norm_backward")
def fused_rms_norm_backward(
    e: Emitter, grad: Val, x: Val, shape: Sequence[int], inverse: Val, weight: Val | None, mask: Sequence[bool]
) -> list[Val | None]:
    rank = len(shape)
    axes, lead = list(range(x.rank - rank, x.rank)), list(range(x.rank - rank))
    g, held = wide(e, grad), wide(e, x)
    spread = _rows(e, held, e.convert(inverse, held.dtype), rank)
    normal = e.mul(held, spread)
    gw = g if weight is None else e.mul(g, _last(e, weight, g))
    mean = e.scale(e.reduce(e.mul(gw, normal), axes, "add"), 1 / max(1, math.prod(shape)))
    gx = e.mul(e.sub(gw, e.mul(normal, _rows(e, g, mean, rank))), spread)
    return [
        e.convert(gx, x.dtype) if mask[0] else None,
        e.reduce(e.mul(g, normal), lead, "add") if mask[1] else None,
    ]


@composite("aten.native_group_norm", attributes=("groups", "eps"))
def native_group_norm(
    e: Emitter, x: Val, weight: Val | None, bias: Val | None, n: int, c: int, hw: int, groups: int, eps: float
) -> list[Val]:
    held = wide(e, x)
    rows = e.reshape(held, (n, groups, c // groups * hw))
    spread, centre = var_mean_parts(e, rows, [2])
    inverse = e.unary("rsqrt", e.shift(spread, eps))
    made = e.mul(
        e.sub(rows, e.broadcast_in_dim(centre, rows.shape, (0, 1))), e.broadcast_in_dim(inverse, rows.shape, (0, 1))
    )
    made = _affine(e, e.reshape(made, x.shape), weight, bias)
    return [e.convert(made, x.dtype), centre, inverse]


@composite("aten.native_group_norm_backward", attributes=("groups",))
def native_group_norm_backward(
    e: Emitter,
    grad: Val,
    x: Val,
    mean: Val,
    inverse: Val,
    weight: Val | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    mask: Sequence[bool],
) -> list[Val | None]:
    g, held = wide(e, grad), wide(e, x)
    shape = (n, groups, c // groups * hw)
    spread = lambda stat: e.broadcast_in_dim(e.convert(stat, held.dtype), shape, (0, 1))  # noqa: E731
    normal = e.mul(e.sub(e.reshape(held, shape), spread(mean)), spread(inverse))
    whole = e.reshape(normal, x.shape)
    gw = g if weight is None else e.mul(g, _channel(e, weight, g))
    rows = e.reshape(gw, shape)
    count = 1 / max(1, shape[2])
    first = spread(e.scale(e.reduce(rows, [2], "add"), count))
    second = e.mul(normal, spread(e.scale(e.reduce(e.mul(rows, normal), [2], "add"), count)))
    gx = e.reshape(e.mul(e.sub(e.sub(rows, first), second), spread(inverse)), x.shape)
    axes = [0, *range(2, x.rank)]
    return [
        e.convert(gx, x.dtype) if mask[0] else None,
        e.reduce(e.mul(g, whole), axes, "add") if mask[1] else None,
        e.reduce(g, axes, "add") if mask[2] else None,
    ]
