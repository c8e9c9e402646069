"""Losses: negative log likelihood and mean squares, with their gradients."""

import math

from stablecast.frontends.torch.emit.builder import Val
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.index import gather
from stablecast.frontends.torch.emit.registry import emits

_NONE, _MEAN = 0, 1


def _rows(e: Emitter, x: Val, target: Val, ignore: int) -> tuple[Val, Val, int]:
    """Which rows count, a target that is safe to index with, and the class dimension."""
    axis = 0 if x.rank == 1 else 1
    valid = e.compare(target, e.splat(ignore, target.shape, target.dtype), "NE")
    safe = e.select(valid, target, e.splat(0, target.shape, target.dtype))
    return valid, safe, axis


def _weights(e: Emitter, x: Val, valid: Val, safe: Val, weight: Val | None) -> Val:
    from stablecast.frontends.torch.emit.index import take_rows

    ones = e.convert(valid, x.dtype)
    return ones if weight is None else e.mul(ones, e.convert(take_rows(e, weight, safe), x.dtype))


def _column(e: Emitter, safe: Val, x: Val, axis: int) -> Val:
    shape = [1 if place == axis else size for place, size in enumerate(x.shape)]
    return e.reshape(safe, shape)


@emits("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss_forward(e: Emitter, x: Val, target: Val, weight: Val | None, reduction: int, ignore: int) -> list[Val]:
    valid, safe, axis = _rows(e, x, target, ignore)
    outs = e.outs
    index = _column(e, safe, x, axis)
    e.outs = (type(e.out)(index.shape, x.dtype),)
    picked = e.reshape(gather(e, x, axis, index), target.shape)
    e.outs = outs
    held = e.convert(picked, "f32") if x.dtype in ("bf16", "f16") else picked
    weights = _weights(e, held, valid, safe, weight)
    losses = e.neg(e.mul(held, weights))
    every = list(range(losses.rank))
    sum_weights = e.reduce(weights, every, "add")
    if reduction == _NONE:
        return [losses, e.splat(0, (), sum_weights.dtype)]
    total = e.reduce(losses, every, "add")
    return [e.div(total, sum_weights) if reduction == _MEAN else total, sum_weights]


@emits("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(
    e: Emitter, grad: Val, x: Val, target: Val, weight: Val | None, reduction: int, ignore: int, total: Val
) -> Val:
    valid, safe, axis = _rows(e, x, target, ignore)
    weights = _weights(e, x, valid, safe, weight)
    scale = e.neg(weights)
    if reduction == _MEAN:
        scale = e.div(scale, e.broadcast(e.convert(total, x.dtype), weights.shape))
    scale = e.mul(scale, e.broadcast(e.convert(grad, x.dtype), weights.shape))
    kept = [place for place in range(x.rank) if place != axis]
    hits = e.compare(e.iota(x.shape, axis, safe.dtype), e.broadcast_in_dim(safe, x.shape, kept), "EQ")
    return e.select(hits, e.broadcast_in_dim(scale, x.shape, kept), e.splat(0, x.shape, x.dtype))


@emits("aten.mse_loss")
def mse_loss(e: Emitter, x: Val, y: Val, reduction: int = _MEAN) -> Val:
    shape = x.shape if x.rank >= y.rank else y.shape
    gap = e.sub(e.operand(x, shape=shape), e.operand(y, shape=shape))
    squares = e.mul(gap, gap)
    if reduction == _NONE:
        return squares
    total = e.reduce(squares, list(range(len(shape))), "add")
    return e.scale(total, 1 / max(1, math.prod(shape))) if reduction == _MEAN else total


@emits("aten.mse_loss_backward")
def mse_loss_backward(e: Emitter, grad: Val, x: Val, y: Val, reduction: int) -> Val:
    gap = e.sub(e.operand(x), e.operand(y))
    factor = 2 / max(1, math.prod(e.out.shape)) if reduction == _MEAN else 2
    return e.mul(e.operand(grad), e.scale(gap, factor))
