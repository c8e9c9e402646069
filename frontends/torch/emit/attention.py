"""Scaled dot-product attention, every variant that torch dispatches to: composites with the plain form inside."""

import math
from typing import Any

from stablecast.frontends.torch.emit.builder import Val
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.registry import composite

_BATCH = ((0, 1), (0, 1))


def _repeat_heads(e: Emitter, x: Val, heads: int) -> Val:
    """Each key or value head stands for a group of query heads."""
    b, h, s, d = x.shape
    if h == heads:
        return x
    wide = e.broadcast_in_dim(x, (b, h, heads // h, s, d), (0, 1, 3, 4))
    return e.reshape(wide, (b, heads, s, d))


def _sum_heads(e: Emitter, x: Val, heads: int) -> Val:
    b, h, s, d = x.shape
    return x if h == heads else e.reduce(e.reshape(x, (b, heads, h // heads, s, d)), [2], "add")


def _scores(e: Emitter, q: Val, k: Val, bias: Val | None, causal: bool, scale: float | None) -> tuple[Val, float]:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    wide = "f64" if q.dtype == "f64" else "f32"
    scores = e.scale(e.dot(q, k, ((3,), (3,)), _BATCH, wide), factor)
    if causal:
        rows, columns = e.iota(scores.shape, 2, "i32"), e.iota(scores.shape, 3, "i32")
        scores = e.select(e.compare(columns, rows, "LE"), scores, e.splat(-math.inf, scores.shape, wide))
    if bias is None:
        return scores, factor
    if bias.dtype == "i1":
        kept = e.broadcast(bias, scores.shape)
        return e.select(kept, scores, e.splat(-math.inf, scores.shape, wide)), factor
    return e.add(scores, e.broadcast(e.convert(bias, wide), scores.shape)), factor


def _rows(e: Emitter, x: Val, like: Val) -> Val:
    return e.broadcast_in_dim(x, like.shape, (0, 1, 2))


def _forward(
    e: Emitter, q: Val, k: Val, v: Val, bias: Val | None, causal: bool, scale: float | None
) -> tuple[Val, Val]:
    k, v = _repeat_heads(e, k, q.shape[1]), _repeat_heads(e, v, q.shape[1])
    scores, _ = _scores(e, q, k, bias, causal, scale)
    top = e.reduce(scores, [3], "maximum")
    alive = e.compare(top, e.splat(-math.inf, top.shape, top.dtype), "NE")
    top = e.select(alive, top, e.splat(0, top.shape, top.dtype))
    weights = e.unary("exponential", e.sub(scores, _rows(e, top, scores)))
    total = e.reduce(weights, [3], "add")
    weights = e.convert(e.div(weights, _rows(e, total, weights)), q.dtype)
    return e.dot(weights, v, ((3,), (2,)), _BATCH, q.dtype), e.add(top, e.unary("log", total))


def _backward(
    e: Emitter,
    grad: Val,
    q: Val,
    k: Val,
    v: Val,
    out: Val,
    lse: Val,
    bias: Val | None,
    causal: bool,
    scale: float | None,
) -> list[Val]:
    heads, groups = q.shape[1], k.shape[1]
    k, v = _repeat_heads(e, k, heads), _repeat_heads(e, v, heads)
    scores, factor = _scores(e, q, k, bias, causal, scale)
    lse = e.reshape(
        e.slice_dim(e.reshape(lse, (*lse.shape[:2], math.prod(lse.shape[2:]))), 2, 0, q.shape[2]), q.shape[:3]
    )
    weights = e.unary("exponential", e.sub(scores, _rows(e, e.convert(lse, scores.dtype), scores)))
    into = e.dot(grad, v, ((3,), (3,)), _BATCH, scores.dtype)
    delta = e.reduce(e.mul(e.convert(grad, scores.dtype), e.convert(out, scores.dtype)), [3], "add")
    inner = e.mul(weights, e.sub(into, _rows(e, delta, into)))
    small = e.convert(e.scale(inner, factor), q.dtype)
    gq = e.dot(small, k, ((3,), (2,)), _BATCH, q.dtype)
    gk = e.dot(small, q, ((2,), (2,)), _BATCH, q.dtype)
    gv = e.dot(e.convert(weights, q.dtype), grad, ((2,), (2,)), _BATCH, q.dtype)
    return [gq, _sum_heads(e, gk, groups), _sum_heads(e, gv, groups), inner]


def _statistics(e: Emitter, lse: Val, index: int = 1) -> Val:
    """The log-sum-exp in the shape that the kernel keeps it in, which may be padded or empty."""
    spec = e.outs[index]
    if spec is None or math.prod(spec.shape) == 0:
        return e.splat(0, *(spec or e.out))
    flat = e.convert(lse, spec.dtype)
    if spec.shape[2:3] > flat.shape[2:3]:
        flat = e.pad(flat, e.splat(0, (), spec.dtype), [0, 0, 0], [0, 0, spec.shape[2] - flat.shape[2]])
    return e.reshape(flat, spec.shape)


def _others(e: Emitter, first: int) -> list[Val | None]:
    """Random state, lengths and debug masks: zeros, where torch has a tensor."""
    return [None if spec is None else e.splat(0, *spec) for spec in e.outs[first:]]


@composite("aten._scaled_dot_product_flash_attention", attributes=("dropout_p", "is_causal", "scale"))
def flash(
    e: Emitter,
    q: Val,
    k: Val,
    v: Val,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    scale: float | None = None,
) -> list[Val | None]:
    out, lse = _forward(e, q, k, v, None, is_causal, scale)
    return [out, _statistics(e, lse), *_others(e, 2)]


@composite("aten._scaled_dot_product_flash_attention_backward", attributes=("dropout_p", "is_causal", "scale"))
def flash_backward(
    e: Emitter,
    grad: Val,
    q: Val,
    k: Val,
    v: Val,
    out: Val,
    lse: Val,
    cum_q: Any,
    cum_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    scale: float | None = None,
) -> list[Val]:
    return _backward(e, grad, q, k, v, out, lse, None, is_causal, scale)[:3]


@composite("aten._scaled_dot_product_flash_attention_for_cpu", attributes=("dropout_p", "is_causal", "scale"))
def flash_cpu(
    e: Emitter,
    q: Val,
    k: Val,
    v: Val,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Val | None = None,
    scale: float | None = None,
) -> list[Val | None]:
    out, lse = _forward(e, q, k, v, attn_mask, is_causal, scale)
    return [out, _statistics(e, lse)]


@composite("aten._scaled_dot_product_flash_attention_for_cpu_backward", attributes=("dropout_p", "is_causal", "scale"))
def flash_cpu_backward(
    e: Emitter,
    grad: Val,
    q: Val,
    k: Val,
    v: Val,
    out: Val,
    lse: Val,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Val | None = None,
    scale: float | None = None,
) -> list[Val]:
    return _backward(e, grad, q, k, v, out, lse, attn_mask, is_causal, scale)[:3]


@composite("aten._scaled_dot_product_efficient_attention", attributes=("dropout_p", "is_causal", "scale"))
def efficient(
    e: Emitter,
    q: Val,
    k: Val,
    v: Val,
    bias: Val | None,
    compute_lse: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> list[Val | None]:
    out, lse = _forward(e, q, k, v, bias, is_causal, scale)
    return [out, _statistics(e, lse), *_others(e, 2)]


@composite("aten._scaled_dot_product_efficient_attention_backward", attributes=("dropout_p", "is_causal", "scale"))
def efficient_backward(
    e: Emitter,
    grad: Val,
    q: Val,
    k: Val,
    v: Val,
    bias: Val | None,
    out: Val,
    lse: Val,
    seed: Any,
    offset: Any,
    dropout_p: float,
    mask: Any,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> list[Val | None]:
    gq, gk, gv, inner = _backward(e, grad, q, k, v, out, lse, bias, is_causal, scale)
    found: list[Val | None] = [gq, gk, gv]
    spec = e.outs[3] if len(e.outs) > 3 else None
    if spec is not None:
        lead = len(inner.shape) - len(spec.shape)
        folded = [axis for axis in range(4) if axis < lead or (spec.shape[axis - lead] == 1 and inner.shape[axis] != 1)]
        found.append(e.reshape(e.reduce(inner, folded, "add"), spec.shape))
    return found


@composite("aten._scaled_dot_product_cudnn_attention", attributes=("dropout_p", "is_causal", "scale"))
def cudnn(
    e: Emitter,
    q: Val,
    k: Val,
    v: Val,
    bias: Val | None,
    compute_lse: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    scale: float | None = None,
) -> list[Val | None]:
    out, lse = _forward(e, q, k, v, bias, is_causal, scale)
    return [out, _statistics(e, lse), *_others(e, 2)]


@composite("aten._scaled_dot_product_cudnn_attention_backward", attributes=("dropout_p", "is_causal", "scale"))
def cudnn_backward(
    e: Emitter,
    grad: Val,
    q: Val,
    k: Val,
    v: Val,
    out: Val,
    lse: Val,
    seed: Any,
    offset: Any,
    bias: Val | None,
    cum_q: Any,
    cum_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> list[Val]:
    return _backward(e, grad, q, k, v, out, lse, bias, is_causal, scale)[:3]
