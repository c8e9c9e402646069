"""Windows: convolution, reduce_window, select_and_scatter."""

import math
from functools import lru_cache
from typing import NamedTuple

from stablecast.ir.accounting.context import Context, reads_of, tensor, writes_of
from stablecast.ir.accounting.registry import hlo, rule
from stablecast.ir.accounting.rules_contract import flops_per_multiply_add
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.attributes import ConvDims
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op


class Window(NamedTuple):
    """One spatial dimension of a window op: sizes, stride, padding (low) and the two dilations."""

    size: int
    window: int
    outputs: int
    stride: int = 1
    low: int = 0
    lhs_dilation: int = 1
    rhs_dilation: int = 1


@lru_cache(maxsize=4096)
def valid_pairs(w: Window) -> int:
    """How many (output, tap) pairs fall on an element of the input rather than on padding or a dilation zero.

    Output o and tap t look at position o*stride + t*rhs_dilation - low of the dilated input, whose elements lie at the
    multiples of lhs_dilation from 0 to (size-1)*lhs_dilation.
    """
    last = (w.size - 1) * w.lhs_dilation
    return sum(_valid_outputs(w, w.low - tap * w.rhs_dilation, last) for tap in range(w.window)) if w.size else 0


def _valid_outputs(w: Window, offset: int, last: int) -> int:
    """Outputs o in range with 0 <= o*stride - offset <= last and o*stride = offset modulo lhs_dilation."""
    first = max(-(-offset // w.stride), 0)
    final = min((last + offset) // w.stride, w.outputs - 1)
    if final < first:
        return 0
    divisor = math.gcd(w.stride, w.lhs_dilation)
    if offset % divisor:
        return 0
    period = w.lhs_dilation // divisor
    if period == 1:
        return final - first + 1
    start = offset // divisor * pow(w.stride // divisor, -1, period) % period
    first += (start - first) % period
    return (final - first) // period + 1 if final >= first else 0


def conv_windows(op: Op) -> list[Window]:
    """The spatial dimensions of a convolution."""
    dims: ConvDims = op.attrs["dimension_numbers"]
    lhs, rhs, out = (tensor(kind).shape for kind in (*op.operand_types[:2], op.result_type))
    rank = len(dims.input_spatial)
    ones, padding = (1,) * rank, op.attrs.get("padding") or ((0, 0),) * rank
    return [
        Window(lhs[i], rhs[k], out[o], stride, low[0], lhs_dilation, rhs_dilation)
        for i, k, o, stride, low, lhs_dilation, rhs_dilation in zip(
            dims.input_spatial,
            dims.kernel_spatial,
            dims.output_spatial,
            op.attrs.get("window_strides") or ones,
            padding,
            op.attrs.get("lhs_dilation") or ones,
            op.attrs.get("rhs_dilation") or ones,
            strict=True,
        )
    ]


@rule(
    *hlo("convolution"),
    klass=KernelClass.CONVOLUTION,
    notes="2 x result x window x input channels of a group; products with padding and dilation zeros counted apart",
)
def convolution(op: Op, context: Context) -> OpWork:
    """Dense over the window; batch and feature groups need no factor, as result and kernel sizes hold them.

    In a dimension whose input is dilated, edge padding belongs to the dilation: a transposed convolution pads there
    with what its forward never multiplied.
    """
    dims: ConvDims = op.attrs["dimension_numbers"]
    windows = conv_windows(op)
    channels = tensor(op.operand_types[1]).shape[dims.kernel_input_feature]
    outputs = tensor(op.result_type).shape
    others = outputs[dims.output_batch] * outputs[dims.output_feature]
    each = flops_per_multiply_add(op) * others * channels
    dense = each * math.prod(w.outputs * w.window for w in windows)
    useful = each * math.prod(valid_pairs(w) for w in windows)
    undilated = each * math.prod(valid_pairs(w) if w.lhs_dilation > 1 else w.outputs * w.window for w in windows)
    return OpWork(
        matmul_flops=dense,
        padded_flops=dense - useful,
        dilation_flops=dense - undilated,
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.CONVOLUTION,
    )


@rule(
    *hlo("dynamic_conv"),
    klass=KernelClass.CONVOLUTION,
    basis=Basis.FORMULA,
    notes="as convolution; its padding is data, so no position is known to be padding",
)
def dynamic_conv(op: Op, context: Context) -> OpWork:
    dims: ConvDims = op.attrs["dimension_numbers"]
    kernel = tensor(op.operand_types[1]).shape
    taps = math.prod(kernel[axis] for axis in dims.kernel_spatial) * kernel[dims.kernel_input_feature]
    return OpWork(
        matmul_flops=flops_per_multiply_add(op) * op.result_type.elements * taps,
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.CONVOLUTION,
        basis=Basis.FORMULA,
        note="padding is data: counted in",
    )


def _ints(op: Op, name: str, rank: int) -> tuple[int, ...]:
    return tuple(op.attrs.get(name) or (1,) * rank)


def _is_prefix(op: Op) -> list[int]:
    """Dimensions along which a reduce_window is a running reduction: every output folds all that is before (or after)
    it."""
    shape, out = tensor(op.operand_types[0]).shape, tensor(op.result_type).shape
    rank = len(shape)
    padding = op.attrs.get("padding") or ((0, 0),) * rank
    window = _ints(op, "window_dimensions", rank)
    plain = [_ints(op, name, rank) for name in ("window_strides", "base_dilations", "window_dilations")]
    return [
        axis
        for axis in range(rank)
        if window[axis] == shape[axis] == out[axis] > 1
        and tuple(padding[axis]) in ((shape[axis] - 1, 0), (0, shape[axis] - 1))
        and all(values[axis] == 1 for values in plain)
    ]


@rule(
    *hlo("reduce_window"),
    klass=KernelClass.REDUCTION,
    notes="body FLOPs x result x (window - 1); running reductions (cumsum as JAX lowers it) x result",
)
def reduce_window(op: Op, context: Context) -> OpWork:
    """Running reductions are counted as scans, one application per element, as no compiler runs them as windows."""
    body = context.body_cost(op.regions[0])
    result = op.result_type
    taps = math.prod(_ints(op, "window_dimensions", tensor(result).rank))
    prefix = _is_prefix(op)
    for axis in prefix:
        taps //= tensor(result).shape[axis]
    applications = result.elements * (len(prefix) + max(taps - 1, 0))
    return OpWork(
        vector_flops=applications * body.flops,
        transcendentals=applications * body.transcendentals,
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.REDUCTION,
        note="running reduction: one application per element" if prefix else "",
    )


@rule(
    *hlo("select_and_scatter"),
    klass=KernelClass.SCATTER,
    notes="select body x source x (window - 1) + scatter body x source; reads operand and source, writes the result",
)
def select_and_scatter(op: Op, context: Context) -> OpWork:
    source = op.operand_types[1]
    taps = math.prod(_ints(op, "window_dimensions", tensor(source).rank))
    select, combine = context.body_cost(op.regions[0]), context.body_cost(op.regions[1])
    return OpWork(
        vector_flops=source.elements * (select.flops * max(taps - 1, 0) + combine.flops),
        transcendentals=source.elements * (select.transcendentals * max(taps - 1, 0) + combine.transcendentals),
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.SCATTER,
    )
