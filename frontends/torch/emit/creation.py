"""Tensors made from nothing: constants, ranges, empties."""

from typing import Any

from stablecast.frontends.torch.emit.builder import Val
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.registry import emits


@emits("const.data")
def data(e: Emitter, array: Any) -> Val:
    return e.data(array, e.out.dtype)


@emits(
    "aten.zeros",
    "aten.zeros_like",
    "aten.new_zeros",
    "aten.zero",
    "aten.empty",
    "aten.empty_like",
    "aten.new_empty",
    "aten.empty_strided",
    "aten.new_empty_strided",
    "aten.empty_permuted",
)
def zeros(e: Emitter, *_: Any, **__: Any) -> Val:
    return e.splat(0, *e.out)


@emits("aten.ones", "aten.ones_like", "aten.new_ones")
def ones(e: Emitter, *_: Any, **__: Any) -> Val:
    return e.splat(1, *e.out)


@emits("aten.full", "aten.full_like", "aten.new_full", "aten.fill")
def full(e: Emitter, x: Any, value: Any = None, third: Any = None, **__: Any) -> Val:
    chosen = third if e.op.startswith("aten.new_full") else value
    return e.operand(chosen)


@emits("aten.scalar_tensor")
def scalar_tensor(e: Emitter, value: Any, **__: Any) -> Val:
    return e.splat(value, *e.out)


@emits("aten.arange")
def arange(e: Emitter, *args: Any, **kwargs: Any) -> Val:
    numbers = [arg for arg in args if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
    start = numbers[0] if len(numbers) > 1 else kwargs.get("start", 0)
    step = numbers[2] if len(numbers) > 2 else kwargs.get("step", 1)
    return _affine(e, start, step)


def _affine(e: Emitter, start: float, step: float) -> Val:
    shape, dtype = e.out
    line = e.iota(shape, 0, dtype)
    return e.shift(e.scale(line, step), start)


@emits("prims.iota")
def iota(e: Emitter, length: int, start: int = 0, step: int = 1, **__: Any) -> Val:
    return _affine(e, start, step)


@emits("aten.linspace")
def linspace(e: Emitter, start: float, end: float, steps: int, **__: Any) -> Val:
    return _affine(e, start, (end - start) / max(1, steps - 1))


@emits("aten.eye")
def eye(e: Emitter, *_: Any, **__: Any) -> Val:
    shape, dtype = e.out
    return e.convert(e.compare(e.iota(shape, 0), e.iota(shape, 1), "EQ"), dtype)


@emits("aten.tril_indices", "aten.triu_indices")
def triangle_indices(e: Emitter, rows: int, columns: int, offset: int = 0, **__: Any) -> Val:
    import numpy as np

    make = np.tril_indices if e.op.startswith("aten.tril") else np.triu_indices
    return e.data(np.stack(make(rows, offset, columns)).astype(np.int64), e.out.dtype)


@emits("aten.complex")
def complex_(e: Emitter, real: Val, imag: Val) -> Val:
    return e.complex(real, imag)


@emits("aten.polar")
def polar(e: Emitter, length: Val, angle: Val) -> Val:
    return e.complex(e.mul(length, e.unary("cosine", angle)), e.mul(length, e.unary("sine", angle)))


@emits("aten.real")
def real(e: Emitter, x: Val) -> Val:
    return e.real(x)
