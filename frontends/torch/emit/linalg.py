"""Products of matrices."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from typing import Any

from stablecast.frontends.torch.emit.builder import Val
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.registry import composite, emits


def matmul2(e: Emitter, x: Val, y: Val) -> Val:
    """[m, k] x [k, n]."""
    return e.dot(x, y, ((1,), (0,)), dtype=e.out.dtype)


def batched(e: Emitter, x: Val, y: Val, dtype: str | None = None) -> Val:
    """[..., m, k] x [..., k, n] with equal leading dimensions."""
    lead = list(range(x.rank - 2))
    return e.dot(x, y, ((x.rank - 1,), (y.rank - 2,)), (lead, lead), dtype)


@emits("aten.mm")
def mm(e: Emitter, x: Val, y: Val, *_: Any) -> Val:
    return matmul2(e, x, y)


@emits("aten.bmm")
def bmm(e: Emitter, x: Val, y: Val, *_: Any) -> Val:
    return batched(e, x, y, e.out.dtype)


@emits("aten.matmul")
def matmul(e: Emitter, x: Val, y: Val) -> Val:
    if x.rank == 1 and y.rank == 1:
        return e.dot(x, y, ((0,), (0,)))
    if y.rank <= 2:
        return e.reshape(e.dot(x, y, ((x.rank - 1,), (max(0, y.rank - 2),))), e.out.shape)
    lead = e.out.shape[:-2]
    x = e.broadcast(x, (*lead, *x.shape[-2:]))
    return batched(e, x, e.broadcast(y, (*lead, *y.shape[-2:])))


@emits("aten.dot", "aten.vdot")
def dot(e: Emitter, x: Val, y: Val) -> Val:
    return e.dot(x, y, ((0,), (0,)))


@emits("aten.mv")
def mv(e: Emitter, x: Val, y: Val) -> Val:
    return e.dot(x, y, ((1,), (0,)))


@emits("aten.addmm")
def addmm(e: Emitter, bias: Val, x: Val, y: Val, *_: Any, beta: float = 1, alpha: float = 1, **__: Any) -> Val:
    return _plus(e, bias, matmul2(e, x, y), beta, alpha)


@emits("aten.addmv")
def addmv(e: Emitter, bias: Val, x: Val, y: Val, *, beta: float = 1, alpha: float = 1) -> Val:
    return _plus(e, bias, mv(e, x, y), beta, alpha)


@emits("aten.baddbmm")
def baddbmm(e: Emitter, bias: Val, x: Val, y: Val, *_: Any, beta: float = 1, alpha: float = 1, **__: Any) -> Val:
    return _plus(e, bias, batched(e, x, y, e.out.dtype), beta, alpha)


@emits("aten.addbmm")
def addbmm(e: Emitter, bias: Val, x: Val, y: Val, *, beta: float = 1, alpha: float = 1) -> Val:
    return _plus(e, bias, e.dot(x, y, ((0, 2), (0, 1)), dtype=e.out.dtype), beta, alpha)


def _plus(e: Emitter, bias: Val, product: Val, beta: float, alpha: float) -> Val:
    product = e.scale(product, alpha)
    if beta == 0:
        return product
    return e.add(product, e.scale(e.operand(bias), beta))


@emits("aten.outer", "aten.ger")
def outer(e: Emitter, x: Val, y: Val) -> Val:
    left = e.broadcast_in_dim(x, e.out.shape, (0,))
    return e.mul(left, e.broadcast_in_dim(y, e.out.shape, (1,)))


@composite("aten._grouped_mm")
def grouped_mm(
    e: Emitter, x: Val, y: Val, offs: Val | None = None, bias: Val | None = None, out_dtype: str | None = None
) -> Val:
    """Rows by the matrix of their group: `chlo.ragged_dot`, whose group sizes follow from the offsets."""
    if offs is None:
        return batched(e, x, y, e.out.dtype)
    if x.rank != 2 or y.rank != 3:
        return _grouped_columns(e, x, y, offs)
    count = offs.shape[0]
    before = e.pad(e.slice_dim(offs, 0, 0, count - 1), e.splat(0, (), offs.dtype), [1], [0])
    return _ragged(e, x, y, e.sub(offs, before))


def _ragged(e: Emitter, x: Val, y: Val, sizes: Val) -> Val:
    numbers = e.ir.Attribute.parse(
        "#chlo.ragged_dot<lhs_batching_dimensions = [], rhs_batching_dimensions = [], lhs_contracting_dimensions = [1],"
        " rhs_contracting_dimensions = [1], lhs_ragged_dimensions = [0], rhs_group_dimensions = [0]>"
    )
    shape = (x.shape[0], y.shape[2])
    made = e.chlo.ragged_dot(e.type(shape, e.out.dtype), x.value, y.value, sizes.value, numbers)
    return e.done(made, shape, e.out.dtype)


def _grouped_columns(e: Emitter, x: Val, y: Val, offs: Val) -> Val:
    """[m, k] x [k, n] whose k is cut into groups: one product a group, over rows masked to it."""
    groups = offs.shape[0]
    inner = x.shape[-1]
    if x.rank != 2 or y.rank != 2:
        raise NotImplementedError(f"grouped product of ranks {x.rank} and {y.rank}")
    line = e.iota((groups, inner), 1, offs.dtype)
    ends = e.broadcast_in_dim(offs, (groups, inner), (0,))
    starts = e.pad(e.slice_dim(offs, 0, 0, groups - 1), e.splat(0, (), offs.dtype), [1], [0])
    inside = e.binary(
        "and_", e.compare(line, ends, "LT"), e.compare(line, e.broadcast_in_dim(starts, (groups, inner), (0,)), "GE")
    )
    mask = e.broadcast_in_dim(e.convert(inside, x.dtype), (groups, *x.shape), (0, 2))
    rows = e.mul(e.broadcast_in_dim(x, (groups, *x.shape), (1, 2)), mask)
    return e.dot(rows, y, ((2,), (0,)), dtype=e.out.dtype)


@composite("aten._scaled_mm")
def scaled_mm(
    e: Emitter,
    x: Val,
    y: Val,
    scale_x: Val,
    scale_y: Val,
    bias: Val | None = None,
    result_scale: Val | None = None,
    *_: Any,
    **__: Any,
) -> Val:
    """A product of 8-bit factors with their scales, per tensor or per row."""
    product = e.dot(x, y, ((1,), (0,)), dtype="f32")
    scales = e.mul(_scale_of(e, scale_x, product.shape), _scale_of(e, scale_y, product.shape))
    product = e.mul(product, scales)
    if bias is not None:
        product = e.add(product, e.operand(bias, "f32", product.shape))
    return e.convert(product, e.out.dtype)


def _scale_of(e: Emitter, scale: Val, shape: tuple[int, ...]) -> Val:
    if math.prod(scale.shape) == 1:
        return e.broadcast(e.convert(e.reshape(scale, ()), "f32"), shape)
    return e.operand(scale, "f32", shape)
