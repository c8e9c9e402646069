"""Elementwise ops."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Callable
from typing import Any

from stablecast.frontends.torch.emit.builder import Val, is_float, is_integer
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.registry import emits

_ORDER = (
    "i1",
    "ui8",
    "i8",
    "i16",
    "ui16",
    "i32",
    "ui32",
    "i64",
    "ui64",
    "f8e4m3fn",
    "f8e5m2",
    "f16",
    "bf16",
    "f32",
    "f64",
    "c64",
    "c128",
)


def promoted(x: Any, y: Any) -> str:
    """The element type that two operands are compared in; numbers follow the tensor."""
    if not isinstance(x, Val):
        return promoted(y, x) if isinstance(y, Val) else "f32"
    if not isinstance(y, Val):
        if is_float(x.dtype) or x.dtype.startswith("c"):
            return x.dtype
        return "f32" if isinstance(y, float) else ("i64" if x.dtype == "i1" and not isinstance(y, bool) else x.dtype)
    if x.dtype == y.dtype:
        return x.dtype
    if {x.dtype, y.dtype} == {"f16", "bf16"}:
        return "f32"
    if x.rank and not y.rank and is_float(x.dtype) == is_float(y.dtype):
        return x.dtype
    if y.rank and not x.rank and is_float(x.dtype) == is_float(y.dtype):
        return y.dtype
    return max(x.dtype, y.dtype, key=_ORDER.index)


@emits("aten.add")
def add(e: Emitter, x: Any, y: Any, alpha: Any = 1) -> Val:
    x, y = e.operand(x), e.operand(y)
    if e.out.dtype == "i1":
        return e.binary("or_", x, y)
    return e.add(x, _scaled(e, y, alpha))


@emits("aten.sub", "aten.subtract")
def sub(e: Emitter, x: Any, y: Any, alpha: Any = 1) -> Val:
    return e.sub(e.operand(x), _scaled(e, e.operand(y), alpha))


@emits("aten.rsub")
def rsub(e: Emitter, x: Any, y: Any, alpha: Any = 1) -> Val:
    return e.sub(e.operand(y), _scaled(e, e.operand(x), alpha))


def _scaled(e: Emitter, x: Val, factor: Any) -> Val:
    return e.mul(x, e.operand(factor)) if isinstance(factor, Val) else e.scale(x, factor)


@emits("aten.mul", "aten.multiply")
def mul(e: Emitter, x: Any, y: Any) -> Val:
    if e.out.dtype == "i1":
        return e.binary("and_", e.operand(x), e.operand(y))
    return e.mul(e.operand(x), e.operand(y))


@emits("aten.div", "aten.true_divide", "aten.divide")
def div(e: Emitter, x: Any, y: Any, rounding_mode: str | None = None) -> Val:
    a, b = e.operand(x), e.operand(y)
    if rounding_mode is None:
        return e.div(a, b)
    return _rounded_quotient(e, a, b, rounding_mode)


def _rounded_quotient(e: Emitter, a: Val, b: Val, how: str) -> Val:
    if not is_integer(a.dtype):
        quotient = e.div(a, b)
        return e.unary("floor", quotient) if how == "floor" else _trunc(e, quotient)
    quotient = e.div(a, b)
    if how != "floor" or a.dtype.startswith("ui"):
        return quotient
    zero = e.splat(0, a.shape, a.dtype)
    rest = e.sub(a, e.mul(quotient, b))
    inexact = e.compare(rest, zero, "NE")
    opposite = e.compare(e.compare(rest, zero, "LT"), e.compare(b, zero, "LT"), "NE")
    return e.select(e.binary("and_", inexact, opposite), e.shift(quotient, -1), quotient)


@emits("aten.floor_divide")
def floor_divide(e: Emitter, x: Any, y: Any) -> Val:
    return _rounded_quotient(e, e.operand(x), e.operand(y), "floor")


@emits("aten.fmod")
def fmod(e: Emitter, x: Any, y: Any) -> Val:
    return e.binary("remainder", e.operand(x), e.operand(y))


@emits("aten.remainder")
def remainder(e: Emitter, x: Any, y: Any) -> Val:
    a, b = e.operand(x), e.operand(y)
    rest = e.binary("remainder", a, b)
    zero = e.splat(0, a.shape, a.dtype)
    opposite = e.compare(e.compare(rest, zero, "LT"), e.compare(b, zero, "LT"), "NE")
    wrong = e.binary("and_", e.compare(rest, zero, "NE"), opposite)
    return e.select(wrong, e.add(rest, b), rest)


@emits("aten.pow")
def power(e: Emitter, x: Any, y: Any) -> Val:
    if isinstance(y, (int, float)) and isinstance(x, Val) and is_float(e.out.dtype):
        found = _small_power(e, e.operand(x), y)
        if found is not None:
            return found
    return e.binary("power", e.operand(x), e.operand(y))


def _small_power(e: Emitter, x: Val, y: float) -> Val | None:
    if y == 1:
        return x
    if y == 2:
        return e.mul(x, x)
    if y == 3:
        return e.mul(e.mul(x, x), x)
    if y == 0.5:
        return e.unary("sqrt", x)
    if y == -0.5:
        return e.unary("rsqrt", x)
    if y == -1:
        return e.div(e.splat(1, x.shape, x.dtype), x)
    return e.splat(1, x.shape, x.dtype) if y == 0 else None


def _binary(name: str) -> Callable[..., Val]:
    return lambda e, x, y: e.binary(name, e.operand(x), e.operand(y))


for _name, _hlo in {
    "aten.maximum": "maximum",
    "aten.minimum": "minimum",
    "aten.max.other": "maximum",
    "aten.min.other": "minimum",
    "aten.fmax": "maximum",
    "aten.fmin": "minimum",
    "aten.clamp_min": "maximum",
    "aten.clamp_max": "minimum",
    "aten.atan2": "atan2",
    "aten.bitwise_and": "and_",
    "aten.bitwise_or": "or_",
    "aten.bitwise_xor": "xor",
    "aten.__and__": "and_",
    "aten.__or__": "or_",
    "aten.__xor__": "xor",
    "aten.bitwise_left_shift": "shift_left",
    "aten.bitwise_right_shift": "shift_right_arithmetic",
    "aten.__lshift__": "shift_left",
    "aten.__rshift__": "shift_right_arithmetic",
}.items():
    emits(_name)(_binary(_hlo))


def _logical(name: str) -> Callable[..., Val]:
    return lambda e, x, y: e.binary(name, e.operand(x, "i1"), e.operand(y, "i1"))


for _name, _hlo in {"logical_and": "and_", "logical_or": "or_", "logical_xor": "xor"}.items():
    emits(f"aten.{_name}")(_logical(_hlo))


def _comparison(direction: str) -> Callable[..., Val]:
    def compare(e: Emitter, x: Any, y: Any) -> Val:
        dtype = promoted(x, y)
        return e.compare(e.operand(x, dtype), e.operand(y, dtype), direction)

    return compare


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    emits(f"aten.{_name}")(_comparison(_name.upper()))

_UNARY = {
    "exp": "exponential",
    "log": "log",
    "log1p": "log_plus_one",
    "expm1": "exponential_minus_one",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "sin": "sine",
    "cos": "cosine",
    "tan": "tan",
    "tanh": "tanh",
    "sigmoid": "logistic",
    "neg": "negate",
    "sign": "sign",
    "sgn": "sign",
    "floor": "floor",
    "ceil": "ceil",
    "round": "round_nearest_even",
    "erf": "chlo.erf",
    "erfc": "chlo.erfc",
    "erfinv": "chlo.erf_inv",
    "asin": "chlo.asin",
    "acos": "chlo.acos",
    "atan": "chlo.atan",
    "sinh": "chlo.sinh",
    "cosh": "chlo.cosh",
    "asinh": "chlo.asinh",
    "acosh": "chlo.acosh",
    "atanh": "chlo.atanh",
    "lgamma": "chlo.lgamma",
    "digamma": "chlo.digamma",
}


def _unary(name: str) -> Callable[..., Val]:
    return lambda e, x: e.unary(name, e.operand(x))


for _name, _hlo in _UNARY.items():
    emits(f"aten.{_name}")(_unary(_hlo))


@emits("aten.abs")
def absolute(e: Emitter, x: Val) -> Val:
    if not x.dtype.startswith("c"):
        return e.unary("abs", e.operand(x))
    return e.done(e.hlo.abs(x.value), x.shape, "f32" if x.dtype == "c64" else "f64")


def _trunc(e: Emitter, x: Val) -> Val:
    negative = e.compare(x, e.splat(0, x.shape, x.dtype), "LT")
    return e.select(negative, e.unary("ceil", x), e.unary("floor", x))


@emits("aten.trunc", "aten.fix")
def trunc(e: Emitter, x: Val) -> Val:
    return _trunc(e, x) if is_float(x.dtype) else x


@emits("aten.reciprocal")
def reciprocal(e: Emitter, x: Val) -> Val:
    return e.div(e.operand(1), e.operand(x))


@emits("aten.square")
def square(e: Emitter, x: Val) -> Val:
    x = e.operand(x)
    return e.mul(x, x)


@emits("aten.log2", "aten.log10")
def log_base(e: Emitter, x: Val) -> Val:
    base = 2 if e.op.startswith("aten.log2") else 10
    return e.scale(e.unary("log", e.operand(x)), 1 / math.log(base))


@emits("aten.exp2")
def exp2(e: Emitter, x: Val) -> Val:
    return e.unary("exponential", e.scale(e.operand(x), math.log(2)))


@emits("aten.logical_not")
def logical_not(e: Emitter, x: Val) -> Val:
    return e.unary("not_", e.convert(x, "i1"))


@emits("aten.bitwise_not")
def bitwise_not(e: Emitter, x: Val) -> Val:
    return e.unary("not_", x)


@emits("aten.isnan")
def isnan(e: Emitter, x: Val) -> Val:
    return e.compare(x, x, "NE") if is_float(x.dtype) else e.splat(False, x.shape, "i1")


@emits("aten.isinf")
def isinf(e: Emitter, x: Val) -> Val:
    if not is_float(x.dtype):
        return e.splat(False, x.shape, "i1")
    return e.compare(e.unary("abs", x), e.splat(math.inf, x.shape, x.dtype), "EQ")


@emits("aten.isfinite")
def isfinite(e: Emitter, x: Val) -> Val:
    if not is_float(x.dtype):
        return e.splat(True, x.shape, "i1")
    return e.done(e.hlo.is_finite(x.value), x.shape, "i1")


@emits("aten.where")
def where(e: Emitter, chosen: Val, x: Any, y: Any) -> Val:
    return e.select(e.operand(chosen, "i1"), e.operand(x), e.operand(y))


@emits("aten.masked_fill")
def masked_fill(e: Emitter, x: Val, mask: Val, value: Any) -> Val:
    return e.select(e.operand(mask, "i1"), e.operand(value), e.operand(x))


@emits("aten.clamp", "aten.clip")
def clamp(e: Emitter, x: Val, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Val:
    low, high = (min if low is None else low), (max if high is None else high)
    x = e.operand(x)
    if low is not None:
        x = e.binary("maximum", x, e.operand(low))
    return x if high is None else e.binary("minimum", x, e.operand(high))


@emits("aten.addcmul")
def addcmul(e: Emitter, x: Val, one: Val, two: Val, value: Any = 1) -> Val:
    return e.add(e.operand(x), _scaled(e, e.mul(e.operand(one), e.operand(two)), value))


@emits("aten.addcdiv")
def addcdiv(e: Emitter, x: Val, one: Val, two: Val, value: Any = 1) -> Val:
    return e.add(e.operand(x), _scaled(e, e.div(e.operand(one), e.operand(two)), value))


@emits("aten.lerp")
def lerp(e: Emitter, start: Val, end: Val, weight: Any) -> Val:
    start, end = e.operand(start), e.operand(end)
    return e.add(start, _scaled(e, e.sub(end, start), weight))


@emits("aten.relu")
def relu(e: Emitter, x: Val) -> Val:
    return e.binary("maximum", x, e.splat(0, x.shape, x.dtype))


@emits("aten.threshold_backward")
def threshold_backward(e: Emitter, grad: Val, x: Val, threshold: float) -> Val:
    over = e.compare(x, e.splat(threshold, x.shape, x.dtype), "GT")
    return e.select(over, e.operand(grad), e.operand(0))


@emits("aten.silu")
def silu(e: Emitter, x: Val) -> Val:
    return e.mul(x, e.unary("logistic", x))


@emits("aten.silu_backward")
def silu_backward(e: Emitter, grad: Val, x: Val) -> Val:
    gate = e.unary("logistic", x)
    inner = e.shift(e.mul(x, e.sub(e.splat(1, x.shape, x.dtype), gate)), 1)
    return e.mul(e.mul(grad, gate), inner)


@emits("aten.sigmoid_backward")
def sigmoid_backward(e: Emitter, grad: Val, y: Val) -> Val:
    return e.mul(grad, e.mul(y, e.sub(e.splat(1, y.shape, y.dtype), y)))


@emits("aten.tanh_backward")
def tanh_backward(e: Emitter, grad: Val, y: Val) -> Val:
    return e.mul(grad, e.sub(e.splat(1, y.shape, y.dtype), e.mul(y, y)))


_GELU = (math.sqrt(2 / math.pi), 0.044715)


def _gelu_inner(e: Emitter, x: Val) -> Val:
    factor, cubic = _GELU
    cube = e.mul(e.mul(x, x), x)
    return e.unary("tanh", e.scale(e.add(x, e.scale(cube, cubic)), factor))


def _normal_cdf(e: Emitter, x: Val) -> Val:
    return e.scale(e.shift(e.unary("chlo.erf", e.scale(x, math.sqrt(0.5))), 1), 0.5)


@emits("aten.gelu")
def gelu(e: Emitter, x: Val, approximate: str = "none") -> Val:
    if approximate == "tanh":
        return e.mul(e.scale(x, 0.5), e.shift(_gelu_inner(e, x), 1))
    return e.mul(x, _normal_cdf(e, x))


@emits("aten.gelu_backward")
def gelu_backward(e: Emitter, grad: Val, x: Val, approximate: str = "none") -> Val:
    if approximate != "tanh":
        density = e.scale(e.unary("exponential", e.scale(e.mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
        return e.mul(grad, e.add(_normal_cdf(e, x), e.mul(x, density)))
    factor, cubic = _GELU
    inner = _gelu_inner(e, x)
    slope = e.scale(e.shift(e.scale(e.mul(x, x), 3 * cubic), 1), factor)
    curve = e.mul(e.sub(e.splat(1, x.shape, x.dtype), e.mul(inner, inner)), slope)
    left = e.scale(e.shift(inner, 1), 0.5)
    return e.mul(grad, e.add(left, e.mul(e.scale(x, 0.5), curve)))


@emits("aten.softplus")
def softplus(e: Emitter, x: Val, beta: float = 1, threshold: float = 20) -> Val:
    scaled = e.scale(x, beta)
    soft = e.scale(e.unary("log_plus_one", e.unary("exponential", scaled)), 1 / beta)
    return e.select(e.compare(scaled, e.splat(threshold, x.shape, x.dtype), "GT"), x, soft)


@emits("aten.leaky_relu")
def leaky_relu(e: Emitter, x: Val, slope: float = 0.01) -> Val:
    return e.select(e.compare(x, e.splat(0, x.shape, x.dtype), "GT"), x, e.scale(x, slope))


@emits("aten.hardtanh", "aten.relu6")
def hardtanh(e: Emitter, x: Val, low: float = -1, high: float = 1) -> Val:
    if e.op.startswith("aten.relu6"):
        low, high = 0, 6
    return e.binary("minimum", e.binary("maximum", x, e.operand(low)), e.operand(high))


@emits("aten.nan_to_num")
def nan_to_num(
    e: Emitter, x: Val, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Val:
    import numpy as np

    limit = (
        3.3895313892515355e38
        if x.dtype == "bf16"
        else float(np.finfo({"f16": "f2", "f64": "f8"}.get(x.dtype, "f4")).max)
    )
    made = e.select(e.compare(x, x, "NE"), e.operand(0.0 if nan is None else nan), x)
    high, low = e.operand(limit if posinf is None else posinf), e.operand(-limit if neginf is None else neginf)
    made = e.select(e.compare(x, e.operand(math.inf), "EQ"), high, made)
    return e.select(e.compare(x, e.operand(-math.inf), "EQ"), low, made)


@emits("aten._to_copy", "prims.convert_element_type", "aten.copy", "aten.to")
def to_copy(e: Emitter, x: Any, y: Any = None, *_: Any, **__: Any) -> Val:
    source = y if isinstance(y, Val) else x
    return e.operand(source)


@emits(
    "aten.clone",
    "aten.contiguous",
    "aten.lift_fresh_copy",
    "aten.detach_copy",
    "aten.alias_copy",
    "aten._conj_physical",
)
def clone(e: Emitter, x: Val, *_: Any, **__: Any) -> Val:
    return x


@emits("aten.amp_unscale")
def amp_unscale(e: Emitter, grad: Val, flag: Val, factor: Val) -> list[Val]:
    finite = e.done(e.hlo.is_finite(grad.value), grad.shape, "i1")
    every = e.reduce(finite, list(range(grad.rank)), "and")
    broken = e.convert(e.unary("not_", every), flag.dtype)
    scaled = e.mul(grad, e.operand(factor, grad.dtype, grad.shape))
    return [scaled, e.reshape(e.binary("maximum", e.reshape(flag, ()), broken), flag.shape)]
