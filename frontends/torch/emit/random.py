"""Random numbers, from a state that the step takes and gives back."""

import math
from typing import Any

from stablecast.frontends.torch.emit.builder import Val, is_float
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.reduce import sorted_along
from stablecast.frontends.torch.emit.registry import emits

_MANTISSA = 1 / (1 << 24)


def uniform01(e: Emitter, shape: tuple[int, ...]) -> Val:
    """Uniform in [0, 1), f32: 24 random bits over 2^24."""
    bits = e.random_bits(shape)
    top = e.binary("shift_right_logical", bits, e.splat(8, shape, "ui32"))
    return e.scale(e.convert(top, "f32"), _MANTISSA)


def normal01(e: Emitter, shape: tuple[int, ...]) -> Val:
    """Standard normal: sqrt(2) erfinv(u) of a uniform in (-1, 1)."""
    half = e.splat(_MANTISSA / 2, shape, "f32")
    centred = e.shift(e.scale(e.add(uniform01(e, shape), half), 2), -1)
    return e.scale(e.unary("chlo.erf_inv", centred), math.sqrt(2))


def _made(e: Emitter, x: Val) -> Val:
    return e.convert(x, e.out.dtype)


@emits("aten.rand", "aten.rand_like", "prims.uniform")
def rand(e: Emitter, *_: Any, **__: Any) -> Val:
    return _made(e, uniform01(e, e.out.shape))


@emits("aten.randn", "aten.randn_like")
def randn(e: Emitter, *_: Any, **__: Any) -> Val:
    return _made(e, normal01(e, e.out.shape))


@emits("aten.uniform")
def uniform(e: Emitter, x: Any, low: float = 0, high: float = 1, **__: Any) -> Val:
    return _made(e, e.shift(e.scale(uniform01(e, e.out.shape), high - low), low))


@emits("aten.normal")
def normal(e: Emitter, x: Any = None, mean: float = 0, std: float = 1, **__: Any) -> Val:
    return _made(e, e.shift(e.scale(normal01(e, e.out.shape), std), mean))


@emits("aten.exponential")
def exponential(e: Emitter, x: Any, rate: float = 1, **__: Any) -> Val:
    safe = e.sub(e.splat(1, e.out.shape, "f32"), uniform01(e, e.out.shape))
    return _made(e, e.scale(e.unary("log", safe), -1 / rate))


@emits("aten.bernoulli")
def bernoulli(e: Emitter, x: Val | None = None, p: Any = None, **__: Any) -> Val:
    chance = x if p is None else p
    draw = uniform01(e, e.out.shape)
    return _made(e, e.compare(draw, e.operand(chance, "f32"), "LT"))


@emits("aten.native_dropout")
def native_dropout(e: Emitter, x: Val, p: float, train: bool | None = True) -> list[Val]:
    if not train or p == 0:
        return [x, e.splat(True, x.shape, "i1")]
    kept = e.compare(uniform01(e, x.shape), e.splat(1 - p, x.shape, "f32"), "LT")
    scaled = e.scale(x, 1 / (1 - p)) if p < 1 else e.splat(0, x.shape, x.dtype)
    return [e.select(kept, scaled, e.splat(0, x.shape, x.dtype)), kept]


@emits("aten.native_dropout_backward")
def native_dropout_backward(e: Emitter, grad: Val, kept: Val, scale: float) -> Val:
    return e.select(kept, e.scale(grad, scale), e.splat(0, grad.shape, grad.dtype))


@emits("aten.randint", "aten.randint_like", "aten.random")
def randint(e: Emitter, *args: Any, **__: Any) -> Val:
    numbers = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
    low, high = (numbers[0], numbers[1]) if len(numbers) > 1 else (0, numbers[0] if numbers else 1 << 24)
    span = e.scale(uniform01(e, e.out.shape), high - low)
    whole = span if is_float(e.out.dtype) else e.unary("floor", span)
    return e.shift(_made(e, whole), low)


@emits("aten.randperm")
def randperm(e: Emitter, *_: Any, **__: Any) -> Val:
    return _made(e, sorted_along(e, uniform01(e, e.out.shape), 0, False)[1])
