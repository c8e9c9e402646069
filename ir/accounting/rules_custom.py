"""Custom calls that libraries and frameworks make: products, convolutions, attention, selections, annotations."""

import math
from collections.abc import Mapping
from dataclasses import replace

from stablecast.ir.accounting.context import Context, opaque, reads_of, tensor, writes_of
from stablecast.ir.accounting.custom_config import Config, config_of, integers, section
from stablecast.ir.accounting.registry import register_work
from stablecast.ir.accounting.rules_contract import flops_per_multiply_add
from stablecast.ir.accounting.rules_linalg import THREEFRY
from stablecast.ir.accounting.rules_reduce import top_k_work
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.attributes import ConvDims
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op
from stablecast.ir.types import TensorType, TupleType, ValueType

_EPILOGUES = {
    "BIAS": 1,
    "RELU": 1,
    "BIAS_RELU": 2,
    "GELU": 8,
    "BIAS_GELU": 9,
    "GELU_AUX": 8,
    "BIAS_GELU_AUX": 9,
}


@register_work(
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "xla.sdy.FuncResultSharding",
    "xla.sdy.GlobalToLocalShape",
    "xla.sdy.LocalToGlobalShape",
    "xla.sdy.PropagationBarrier",
    "xla.sdy.ShardingGroup",
    "LayoutConstraint",
    "InspectSharding",
    "AssumeGatherIndicesInBound",
    "AllocateBuffer",
    "CreateBuffer",
    "Pin",
    "Unpin",
    "annotate_device_placement",
    "shape_assertion",
    "dce_sink",
    klass=KernelClass.COPY,
    notes="annotation: 0 FLOP, 0 B",
)
def annotation(op: Op, context: Context) -> OpWork:
    return OpWork(reads=(0,) * len(op.operands), writes=(0,) * len(op.results), klass=KernelClass.COPY)


@register_work(
    "MoveToHost",
    "MoveToDevice",
    klass=KernelClass.COPY,
    basis=Basis.FORMULA,
    notes="its operand once, over the host link",
)
def host_copy(op: Op, context: Context) -> OpWork:
    return OpWork(
        reads=reads_of(op), writes=writes_of(op), klass=KernelClass.COPY, basis=Basis.FORMULA, note="over the host link"
    )


@register_work(
    "xla_ffi_python_cpu_callback",
    "xla_ffi_partitioned_python_cpu_callback",
    "xla_ffi_python_gpu_callback",
    "xla_ffi_partitioned_python_gpu_callback",
    "xla_python_cpu_callback",
    "xla_python_gpu_callback",
    basis=Basis.OPAQUE,
    notes="Python on the host: only its bytes are known",
)
def host_callback(op: Op, context: Context) -> OpWork:
    return opaque(op, "runs Python on the host")


def result_of(op: Op) -> TensorType:
    """The first result, the first part of a tuple."""
    kind: ValueType = op.result_type
    while isinstance(kind, TupleType):
        kind = kind.parts[0]
    return kind


@register_work(
    "__cublas$gemm",
    "__cublas$lt$matmul",
    "__cublas$lt$matmul$f8",
    "__cublas$lt$matmul$mx",
    "__triton_gemm",
    "__onednn$matmul",
    klass=KernelClass.MATMUL,
    notes="2 x result x contracted size, from its dimension numbers, else from the sizes of the three matrices",
)
def gemm(op: Op, context: Context) -> OpWork:
    config = config_of(op)
    inner = section(config, "gemm_backend_config") or section(config, "onednn_matmul_config") or config
    out, lhs, rhs = result_of(op), tensor(op.operand_types[0]), tensor(op.operand_types[1])
    contracted = integers(section(inner, "dot_dimension_numbers"), "lhs_contracting_dimensions")
    k = math.prod(lhs.shape[axis] for axis in contracted) if contracted else contracted_size(lhs, rhs, out)
    return OpWork(
        matmul_flops=flops_per_multiply_add(op) * out.elements * k,
        vector_flops=_EPILOGUES.get(str(inner.get("epilogue", "")), 0) * out.elements,
        klass=KernelClass.MATMUL,
    )


def contracted_size(lhs: TensorType, rhs: TensorType, out: TensorType) -> float:
    """k of a batched product from sizes alone: |lhs| |rhs| / |out| = batch k^2, whatever the layouts."""
    batch = math.prod(out.shape[:-2])
    return math.sqrt(lhs.elements * rhs.elements / (out.elements * batch)) if out.elements else 0


@register_work(
    "__cudnn$convForward",
    "__cudnn$convForwardGraph",
    "__cudnn$convBiasActivationForward",
    "__onednn$convolution",
    klass=KernelClass.CONVOLUTION,
    basis=Basis.FORMULA,
    notes="2 x result x kernel / output channels",
)
def conv_forward(op: Op, context: Context) -> OpWork:
    return _conv(op, result_of(op), tensor(op.operand_types[1]))


@register_work(
    "__cudnn$convBackwardInput",
    klass=KernelClass.CONVOLUTION,
    basis=Basis.FORMULA,
    notes="as the forward: 2 x output gradient x kernel / output channels",
)
def conv_backward_input(op: Op, context: Context) -> OpWork:
    return _conv(op, tensor(op.operand_types[0]), tensor(op.operand_types[1]))


@register_work(
    "__cudnn$convBackwardFilter",
    klass=KernelClass.CONVOLUTION,
    basis=Basis.FORMULA,
    notes="as the forward: 2 x output gradient x kernel gradient / output channels",
)
def conv_backward_filter(op: Op, context: Context) -> OpWork:
    return _conv(op, tensor(op.operand_types[1]), result_of(op))


def _conv(op: Op, output: TensorType, kernel: TensorType) -> OpWork:
    """Every output element sums the kernel elements of its channel."""
    channels = _output_channels(op, output, kernel)
    flops = flops_per_multiply_add(op) * output.elements * kernel.elements / max(channels or max(kernel.shape), 1)
    work = OpWork(matmul_flops=flops, klass=KernelClass.CONVOLUTION, basis=Basis.FORMULA)
    if channels:
        return work
    return replace(work, basis=Basis.DEFAULT, note="its layout is not said: output channels are guessed")


def _output_channels(op: Op, output: TensorType, kernel: TensorType) -> int:
    """From the dimension numbers where they are kept, else the one channel size that kernel and output share; 0 if
    that is not one."""
    dims = op.attrs.get("dimension_numbers")
    if isinstance(dims, ConvDims):
        return kernel.shape[dims.kernel_output_feature]
    at_edge = {kernel.shape[0], kernel.shape[-1]} & {output.shape[1], output.shape[-1]}
    return at_edge.pop() if len(at_edge) == 1 else 0


_FORWARD_ATTENTION = (
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaScaleBiasSoftmax",
    "__cudnn$fmhaSoftmaxDropout",
    "__cudnn$fmhaScaleBiasSoftmaxDropout",
    "__cudnn$fmhaSoftmaxF8",
)
_BACKWARD_ATTENTION = (
    "__cudnn$fmhaSoftmaxBackward",
    "__cudnn$fmhaScaleBiasSoftmaxBackward",
    "__cudnn$fmhaSoftmaxDropoutBackward",
    "__cudnn$fmhaScaleBiasSoftmaxDropoutBackward",
    "__cudnn$fmhaSoftmaxBackwardF8",
)


@register_work(
    *_FORWARD_ATTENTION,
    klass=KernelClass.ATTENTION,
    notes="2 x scores x (key and value widths); causal half by --causal exact; 1 exp and 5 FLOP a score",
)
def attention_forward(op: Op, context: Context) -> OpWork:
    width = tensor(op.operand_types[0]).shape[-1] + tensor(op.operand_types[2]).shape[-1]
    return _attention(op, context, width, 5)


@register_work(
    *_BACKWARD_ATTENTION,
    klass=KernelClass.ATTENTION,
    notes="2 x scores x (3 key and 2 value widths), the scores recomputed; 1 exp and 8 FLOP a score",
)
def attention_backward(op: Op, context: Context) -> OpWork:
    width = 3 * tensor(op.operand_types[0]).shape[-1] + 2 * tensor(op.operand_types[2]).shape[-1]
    return _attention(op, context, width, 8)


def _attention(op: Op, context: Context, width: int, vector: int) -> OpWork:
    config = section(config_of(op), "cudnn_fmha_backend_config")
    scores = integers(section(config, "intermediate_tensor_shape"), "dimensions")
    if len(scores) != 4:
        return opaque(op, "its configuration does not say the shape of the scores")
    share, note = 1.0, ""
    if str(config.get("mask_type", "")) in ("CAUSAL", "PADDING_CAUSAL") and context.conventions.causal == "exact":
        share = causal_share(scores[2], scores[3], int(config.get("sliding_window_length") or 0))
        note = "only the pairs that the mask lets through"
    pairs = math.prod(scores) * share
    return OpWork(
        matmul_flops=2 * pairs * width,
        vector_flops=vector * pairs,
        transcendentals=pairs,
        klass=KernelClass.ATTENTION,
        note=note,
    )


def causal_share(queries: int, keys: int, window: int = 0) -> float:
    """The share of (query, key) pairs with key <= query, and query - key < window where there is one."""
    pairs = 0
    for query in range(queries):
        seen = min(query + 1, keys)
        pairs += min(seen, window) if window else seen
    return pairs / (queries * keys) if queries and keys else 1.0


@register_work(
    "TopK",
    "__gpu$TopK",
    "mhlo.topk",
    "dynamic_top_k",
    "stablehlo.dynamic_top_k",
    klass=KernelClass.SORT,
    basis=Basis.FORMULA,
    notes="elements x (ceil(log2 k) + 1) comparisons",
)
def top_k(op: Op, context: Context) -> OpWork:
    return top_k_work(op)


@register_work(
    "ApproxTopK",
    "PartialReduce",
    "ApproxTopKWithFallback",
    klass=KernelClass.SORT,
    basis=Basis.FORMULA,
    notes="1 comparison per element, then a sort of what is kept",
)
def approximate_top_k(op: Op, context: Context) -> OpWork:
    kept = op.result_type.elements
    flops = op.operand_types[0].elements + kept * max(kept.bit_length(), 1)
    return OpWork(vector_flops=flops, klass=KernelClass.SORT, basis=Basis.FORMULA)


@register_work(
    "cu_threefry2x32_ffi",
    "hip_threefry2x32_ffi",
    "cu_threefry2x32",
    "hip_threefry2x32",
    basis=Basis.FORMULA,
    klass=KernelClass.ELEMENTWISE,
    notes=f"{THREEFRY} FLOP per 32-bit word",
)
def threefry(op: Op, context: Context) -> OpWork:
    words = sum(kind.elements for kind in op.result_types)
    return OpWork(vector_flops=words * THREEFRY, klass=KernelClass.ELEMENTWISE, basis=Basis.FORMULA)


@register_work(
    "__cudnn$norm",
    "__onednn$layernorm",
    klass=KernelClass.REDUCTION,
    basis=Basis.FORMULA,
    notes="8 FLOP per element (mean 1, variance 3, normalise 4)",
)
def layer_norm(op: Op, context: Context) -> OpWork:
    return OpWork(vector_flops=8 * op.operand_types[0].elements, klass=KernelClass.REDUCTION, basis=Basis.FORMULA)


@register_work(
    "__onednn$softmax",
    klass=KernelClass.REDUCTION,
    basis=Basis.FORMULA,
    notes="4 FLOP (maximum, subtract, sum, divide) and 1 exp per element",
)
def softmax(op: Op, context: Context) -> OpWork:
    elements = op.operand_types[0].elements
    return OpWork(vector_flops=4 * elements, transcendentals=elements, klass=KernelClass.REDUCTION, basis=Basis.FORMULA)


@register_work(
    *(f"mhlo.{name}" for name in ("acos", "acosh", "asin", "asinh", "atanh", "cosh", "erf", "erf_inv", "sinh", "tan")),
    klass=KernelClass.ELEMENTWISE,
    notes="1 transcendental per element, as the op it stands for",
)
def named_function(op: Op, context: Context) -> OpWork:
    return OpWork(transcendentals=op.result_type.elements, klass=KernelClass.ELEMENTWISE)


@register_work(
    "tpu_custom_call",
    "mosaic_gpu",
    "mosaic_gpu_v2",
    "triton_kernel_call",
    "triton_kernel_call_ffi",
    "__gpu$xla.gpu.triton",
    basis=Basis.FORMULA,
    notes="Pallas, Mosaic and Triton kernels: the cost estimate that their author gave, else opaque",
)
def kernel(op: Op, context: Context) -> OpWork:
    config = config_of(op)
    estimate = section(config, "custom_call_config", "cost_estimate") or section(config, "cost_estimate")
    if not estimate:
        return opaque(op, "a kernel without a cost estimate")
    return estimated(op, estimate)


def estimated(op: Op, estimate: Config) -> OpWork:
    """Work by a kernel's own estimate (`flops`, `transcendentals`, `bytes_accessed`).

    Its FLOPs count as those of a matrix unit: an estimate does not say. Its bytes are shared out as the boundary's.
    """
    reads, writes = reads_of(op), writes_of(op)
    boundary = sum(reads) + sum(writes)
    scale = _amount(estimate, "bytes_accessed") / boundary if boundary and "bytes_accessed" in estimate else 1.0
    return OpWork(
        matmul_flops=_amount(estimate, "flops"),
        transcendentals=_amount(estimate, "transcendentals"),
        reads=tuple(part * scale for part in reads),
        writes=tuple(part * scale for part in writes),
        klass=KernelClass.CUSTOM,
        basis=Basis.FORMULA,
        note="by the kernel's own cost estimate, its FLOPs taken as matrix products",
    )


def _amount(estimate: Mapping[str, object], name: str) -> float:
    value = estimate.get(name, 0)
    return float(value) if isinstance(value, (int, float, str)) and value not in ("", None) else 0.0
