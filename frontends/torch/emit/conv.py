"""Convolutions and their gradients."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from typing import Any

import numpy as np

from stablecast.frontends.torch.emit.builder import Val
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.registry import emits


def convolve(
    e: Emitter,
    x: Val,
    w: Val,
    dims: tuple[str, str, str],
    strides: Sequence[int],
    pads: Sequence[tuple[int, int]],
    lhs: Sequence[int],
    rhs: Sequence[int],
    groups: int = 1,
    batch_groups: int = 1,
) -> Val:
    """`stablehlo.convolution`; `dims` name the first two dimensions of operand, kernel and result: `bf`, `oi`, `bf`."""
    rank = x.rank - 2
    numbers = e.ir.Attribute.parse(_numbers(dims, rank))
    size = lambda shape, letter, order: shape[order.index(letter)]  # noqa: E731
    spatial = [
        ((x.shape[2 + i] - 1) * lhs[i] + 1 + sum(pads[i]) - ((w.shape[2 + i] - 1) * rhs[i] + 1)) // strides[i] + 1
        for i in range(rank)
    ]
    lead = {"b": size(x.shape, "b", dims[0]) // batch_groups, "f": size(w.shape, "o", dims[1])}
    shape = [lead[dims[2][0]], lead[dims[2][1]], *spatial]
    op = e.hlo.ConvolutionOp(
        e.type(shape, x.dtype),
        x.value,
        w.value,
        numbers,
        feature_group_count=e.ir.IntegerAttr.get(e.ir.IntegerType.get_signless(64), groups),
        batch_group_count=e.ir.IntegerAttr.get(e.ir.IntegerType.get_signless(64), batch_groups),
        window_strides=e.ints(strides),
        padding=e.ir.DenseIntElementsAttr.get(np.array(pads, dtype=np.int64).reshape(rank, 2)),
        lhs_dilation=e.ints(lhs),
        rhs_dilation=e.ints(rhs),
        precision_config=e.precision(x.dtype, convolution=True),
    )
    return e.done(op.result, shape, x.dtype)


def _numbers(dims: tuple[str, str, str], rank: int) -> str:
    spatial = ", ".join(str(i) for i in range(rank))
    texts = [", ".join([*order, *([spatial] if rank else [])]) for order in dims]
    return f"#stablehlo.conv<[{texts[0]}]x[{texts[1]}]->[{texts[2]}]>"


def _grouped_kernel(e: Emitter, w: Val, groups: int) -> Val:
    """[i, o/g, ...] of a transposed convolution as [o, i/g, ...]."""
    if groups == 1:
        return e.transpose(w, [1, 0, *range(2, w.rank)])
    split = e.reshape(w, (groups, w.shape[0] // groups, *w.shape[1:]))
    swapped = e.transpose(split, [0, 2, 1, *range(3, split.rank)])
    return e.reshape(swapped, (groups * w.shape[1], w.shape[0] // groups, *w.shape[2:]))


def _input_like(
    e: Emitter,
    grad: Val,
    w: Val,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Val:
    """The transposed convolution: gradient of the input, whose spatial sizes are `size`."""
    rank = grad.rank - 2
    kernel = e.reverse(_grouped_kernel(e, w, groups), range(2, w.rank))
    pads: list[tuple[int, int]] = []
    for i in range(rank):
        span = (w.shape[2 + i] - 1) * dilation[i]
        low = span - padding[i]
        full = (grad.shape[2 + i] - 1) * stride[i] + 1
        pads.append((low, size[i] - full - low + span))
    return convolve(e, grad, kernel, ("bf", "oi", "bf"), [1] * rank, pads, stride, dilation, groups)


@emits("aten.convolution", "aten._convolution", "aten.cudnn_convolution")
def convolution(
    e: Emitter,
    x: Val,
    w: Val,
    bias: Val | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: Any,
) -> Val:
    rank = x.rank - 2
    stride, padding, dilation = _each(stride, rank), _each(padding, rank), _each(dilation, rank)
    if transposed:
        made = _input_like(e, x, w, e.out.shape[2:], stride, padding, dilation, groups)
    else:
        pads = [(pad, pad) for pad in padding]
        made = convolve(e, x, w, ("bf", "oi", "bf"), stride, pads, [1] * rank, dilation, groups)
    if bias is None:
        return made
    return e.add(made, e.broadcast_in_dim(e.convert(bias, made.dtype), made.shape, (1,)))


def _each(values: Sequence[int], rank: int) -> list[int]:
    return list(values) * rank if len(values) == 1 else list(values)


def _weight_gradient(
    e: Emitter,
    x: Val,
    grad: Val,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Val:
    """Input correlated with the gradient: batch is contracted, features become batch; gives [o, i/g, ...]."""
    rank = x.rank - 2
    pads: list[tuple[int, int]] = []
    for i in range(rank):
        reach = (grad.shape[2 + i] - 1) * stride[i] + (window[i] - 1) * dilation[i] + 1
        pads.append((padding[i], reach - x.shape[2 + i] - padding[i]))
    made = convolve(e, x, grad, ("fb", "io", "fb"), dilation, pads, [1] * rank, stride, batch_groups=groups)
    return e.transpose(made, [0, 1, *range(2, made.rank)])


@emits("aten.convolution_backward")
def convolution_backward(
    e: Emitter,
    grad: Val,
    x: Val,
    w: Val,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> list[Val | None]:
    rank = x.rank - 2
    stride, padding, dilation = _each(stride, rank), _each(padding, rank), _each(dilation, rank)
    window = w.shape[2:]
    found: list[Val | None] = [None, None, None]
    if transposed:
        if mask[0]:
            pads = [(pad, pad) for pad in padding]
            found[0] = convolve(e, grad, w, ("bf", "oi", "bf"), stride, pads, [1] * rank, dilation, groups)
        if mask[1]:
            found[1] = _weight_gradient(e, grad, x, window, stride, padding, dilation, groups)
    else:
        if mask[0]:
            found[0] = _input_like(e, grad, w, x.shape[2:], stride, padding, dilation, groups)
        if mask[1]:
            found[1] = _weight_gradient(e, x, grad, window, stride, padding, dilation, groups)
    if mask[2]:
        found[2] = e.reduce(grad, [0, *range(2, grad.rank)], "add")
    return found
