"""Convolutions that are matrix products, as TPU compilers write these.

A dimension of a product stands as the batch or features of a convolution, or as a spatial one with a window that
makes it so. Which positions of input and window meet in an output decides what it is.
"""

from collections.abc import Mapping
from typing import Any

from stablecast.ir.attributes import ConvDims, DotDims
from stablecast.ir.types import TensorType

_CONTRACTED, _LEFT, _RIGHT, _BATCH = range(4)


def as_product(made: Mapping[str, Any], operands: tuple[TensorType, TensorType], result: TensorType) -> DotDims | None:
    """The dimension numbers of the product that a convolution with attributes `made` is, None where it is none."""
    if made["feature_group_count"] != 1 or made["batch_group_count"] != 1:
        return None
    dims: ConvDims = made["dimension_numbers"]
    lhs_batch: list[int] = []
    rhs_batch: list[int] = []
    lhs_contracted, rhs_contracted = [dims.input_feature], [dims.kernel_input_feature]
    for axis, (left, right, out) in enumerate(
        zip(dims.input_spatial, dims.kernel_spatial, dims.output_spatial, strict=True)
    ):
        sizes = (operands[0].shape[left], operands[1].shape[right], result.shape[out])
        kind = _role(sizes, {name: made[name][axis] for name in _WINDOW})
        if kind is None:
            return None
        if kind == _CONTRACTED:
            lhs_contracted.append(left)
            rhs_contracted.append(right)
        elif kind == _BATCH:
            lhs_batch.append(left)
            rhs_batch.append(right)
    return DotDims(tuple(lhs_batch), tuple(rhs_batch), tuple(lhs_contracted), tuple(rhs_contracted))


_WINDOW = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "window_reversal")


def _role(sizes: tuple[int, int, int], window: Mapping[str, Any]) -> int | None:
    """What a spatial dimension of `sizes` (input, window, output) does; None where a window slides along it."""
    size, taps, outputs = sizes
    stride, pads, dilation = window["window_strides"], tuple(window["padding"]), window["lhs_dilation"]
    plain = stride == dilation == 1
    if taps == 1 and plain and pads == (0, 0) and outputs == size:
        return _LEFT
    if window["rhs_dilation"] != 1:
        return None
    if outputs == 1 and taps == size and pads == (0, 0) and dilation == 1 and not window["window_reversal"]:
        return _CONTRACTED
    if size == 1 and outputs == taps and stride == 1 and pads == (taps - 1, taps - 1):
        return _RIGHT
    if not size == taps == outputs:
        return None
    if window["window_reversal"]:
        apart = pads == (size - 1, size - 1) and (stride, dilation) == (size, size - 1)
    else:
        apart = pads == (0, 0) and (stride, dilation) == (size - 1, size)
    return _BATCH if apart else None
