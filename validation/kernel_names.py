"""What a measured kernel is, by its name: one table, tried from the top, the first pattern that is found decides.

Profilers give nothing but names for most kernels, so names are all there is; every pattern that the project goes by is
in this file and in `docs/validation.md`, nowhere else. A name that no pattern knows is `other`, and reports show it.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final


class MeasuredClass(StrEnum):
    """Classes of measured device work; the first ones carry the names of `KernelClass`."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    GATHER = "gather"
    SCATTER = "scatter"
    SORT = "sort"
    FFT = "fft"
    COPY = "copy"
    COMMUNICATION = "communication"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    SYNC = "sync"
    OTHER = "other"


COMPUTE: Final = frozenset(MeasuredClass) - {MeasuredClass.COMMUNICATION, MeasuredClass.SYNC}
"""Classes whose time is work of the device alone; waiting and communication are not."""

C = MeasuredClass
KERNEL_NAMES: Final[tuple[tuple[MeasuredClass, tuple[str, ...]], ...]] = (
    # collectives: NCCL, RCCL, MSCCL, oneCCL, NVSHMEM; XLA's ops on a TPU
    (C.COMMUNICATION, (r"^(mscclKernel|ncclDevKernel|ncclKernel|rcclGenericKernel|rcclKernel|oneccl|nvshmem)",)),
    (
        C.COMMUNICATION,
        (
            r"ncclKernel",
            r"ncclDevKernel",
        ),
    ),
    (
        C.COMMUNICATION,
        (
            r"cross_device_reduce",
            r"one_shot_all_reduce",
            r"two_shot_all_reduce",
            r"custom_?all_?reduce",
            r"multimem_all",
        ),
    ),
    (
        C.COMMUNICATION,
        (r"^(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|send|recv)\b",),
    ),
    # waits
    (
        C.SYNC,
        (
            r"^(dependency-wait|infeed|outfeed|barrier-cores)",
            r"StreamWait",
            r"Stream Sync",
            r"Event Sync",
            r"Context Sync",
            r"Stream Wait",
        ),
    ),
    # copies within a device's memory, then those between memories
    (C.COPY, (r"[Mm]emcpy[ _]?D(evice)?(to|2)D(evice)?\b", r"MemcpyDeviceToDevice", r"CopyDeviceToDevice")),
    (
        C.MEMCPY,
        (
            r"^\[?(CUDA )?mem(ory)?cpy",
            r"^Memcpy",
            r"hipMemcpy",
        ),
    ),
    (
        C.MEMSET,
        (
            r"^\[?(CUDA )?memset",
            r"^Memset",
            r"FillBuffer",
            r"__amd_rocclr_fill",
        ),
    ),
    (C.MEMCPY, (r"__amd_rocclr_copy",)),
    # attention, before the products inside their names
    (
        C.ATTENTION,
        (
            r"flash",
            r"fmha",
            r"fused_attention",
            r"\bmha_",
            r"attention_kernel",
            r"paged_attention",
            r"splash",
            r"AttentionFwd",
            r"attn_(fwd|bwd)",
        ),
    ),
    # convolutions, with the transforms and layout changes that the library runs for them
    (
        C.CONVOLUTION,
        (
            r"winograd",
            r"implicit_(con|gemm)",
            r"implicit_convolve",
            r"scudnn",
            r"hcudnn",
            r"conv(olve|olution)?(2d|3d)?[_<:]",
            r"Conv2d",
            r"conv_depthwise",
        ),
    ),
    (
        C.CONVOLUTION,
        (
            r"[dw]grad",
            r"fprop",
            r"cudnn_infer",
            r"cudnn::cnn",
            r"cudnn_volta",
            r"cudnn_turing",
            r"cudnn_ampere",
            r"dgrad_engine",
            r"wgrad_alg",
        ),
    ),
    (
        C.CONVOLUTION,
        (
            r"computeOffsetsKernel",
            r"nchwToNhwc",
            r"nhwcToNchw",
            r"nchwAddPadding",
            r"kern_precompute_indices",
            r"Tensor4d",
            r"TransformTensor",
        ),
    ),
    (
        C.CONVOLUTION,
        (
            r"^(miopen|MIOpen|gridwise_conv|igemm_|naive_conv|Sp3Asm|gfx\w+_?conv)",
            r"SubTensorOpWithScalar",
        ),
    ),
    (
        C.CONVOLUTION,
        (
            r"fft2d_[rc]2[rc]_",
            r"cutlass_cudnn",
            r"cask_cudnn",
            r"xmma_(fprop|dgrad|wgrad)",
            r"scalePackedTensor",
            r"im2col",
            r"col2im",
            r"^convolution\b",
        ),
    ),
    # products of matrices and the reductions that finish them
    (
        C.MATMUL,
        (
            r"(?<!fb)gemm",
            r"gemv",
            r"Gemm",
            r"\bdot_kernel",
            r"^Cijk_",
            r"cutlass",
            r"cublas",
            r"nvjet",
            r"xmma",
            r"sgemm",
            r"matmul",
            r"splitK",
            r"split_k",
            r"reduce_1Block",
            r"^dot\b",
            r"^ynn_fusion",
            r"_mm_",
        ),
    ),
    (C.MATMUL, (r"epilogue::impl::globalKernel",)),
    # normalisation and softmax are reductions over rows
    (
        C.REDUCTION,
        (
            r"cudnn::bn_",
            r"batch_norm",
            r"batchnorm",
            r"BatchNorm",
            r"bn_(fw|bw)",
            r"layer_?norm",
            r"LayerNorm",
            r"rms_?norm",
            r"RMSNorm",
            r"GammaBeta",
            r"group_?norm",
            r"welford",
        ),
    ),
    (
        C.REDUCTION,
        (
            r"softmax",
            r"SoftMax",
            r"Softmax",
            r"nll_loss",
            r"cross_entropy",
            r"(max|avg|average|adaptive)_?pool",
            r"pooling",
            r"Pooling",
            r"mse_",
            r"reduce_kernel",
            r"ReduceOp",
            r"reduction",
            r"logsumexp",
            r"cunn_",
            r"norm_kernel",
        ),
    ),
    # order and search
    (
        C.SORT,
        (
            r"RadixSort",
            r"sort",
            r"Sort",
            r"topk",
            r"TopK",
            r"bitonic",
            r"searchsorted",
            r"DeviceScan",
            r"DeviceSelect",
            r"DeviceCompact",
            r"ReduceByKey",
            r"DeviceReduce",
            r"scan_",
        ),
    ),
    # sparse reads and writes
    (
        C.SCATTER,
        (
            r"embedding.*backward",
            r"EmbeddingBackward",
            r"embedding_backward",
            r"index_put",
            r"scatter",
            r"Scatter",
            r"indexing_backward",
            r"indexFunc",
            r"compute_grad_weight",
            r"index_add",
        ),
    ),
    (
        C.GATHER,
        (
            r"embedding",
            r"Embedding",
            r"gather",
            r"Gather",
            r"index_select",
            r"indexSelect",
            r"index_elementwise",
            r"gpu_index",
            r"permute_.*(indices|lengths|data)",
            r"permute_pooled",
        ),
    ),
    (
        C.FFT,
        (
            r"fft",
            r"FFT",
            r"regular_fft",
            r"vector_fft",
        ),
    ),
    # moves within the device memory
    (
        C.COPY,
        (
            r"CatArrayBatchedCopy",
            r"direct_copy",
            r"copy_kernel",
            r"recat_copy",
            r"transpose",
            r"permute",
            r"^copy",
            r"^bitcast",
            r"^slice",
            r"^pad\b",
            r"^concatenate",
            r"unpack",
            r"memcpy32",
        ),
    ),
    (
        C.COPY,
        (
            r"flip_kernel",
            r"roll_cuda",
            r"triu_tril",
            r"UnrolledCopy",
            r"to_dense_representation",
        ),
    ),
    # what works element by element
    (
        C.ELEMENTWISE,
        (
            r"elementwise",
            r"Elementwise",
            r"multi_tensor_apply",
            r"foreach",
            r"dropout",
            r"distribution_",
            r"FillFunctor",
            r"BinaryFunctor",
            r"UnaryFunctor",
        ),
    ),
    (
        C.ELEMENTWISE,
        (
            r"triton_(poi|per|red|tem)",
            r"^(loop|input)_.*fusion",
            r"^fusion",
            r"fused_",
            r"_fusion",
            r"adam",
            r"sgd",
            r"lamb",
            r"tanh",
            r"gelu",
            r"relu",
            r"sigmoid",
            r"silu",
            r"arange",
            r"where_kernel",
        ),
    ),
    (
        C.ELEMENTWISE,
        (
            r"kernel_pointwise",
            r"pointwise",
            r"op_generic_tensor",
            r"op_tensor",
            r"GeneralAddmm",
            r"OpTensor",
            r"Op1dTensor",
            r"Op2dTensor",
            r"Op4dTensor",
        ),
    ),
    (
        C.ELEMENTWISE,
        (
            r"^(add|multiply|subtract|divide|exponential|maximum|minimum|select|compare|convert|broadcast|iota|negate|"
            r"log|power|sqrt|rsqrt|abs|and|or|not|xor|floor|ceil|clamp|sign|remainder|sine|cosine)[._\d]*$",
        ),
    ),
    (C.REDUCTION, (r"reduce",)),
    (
        C.GATHER,
        (
            r"offsets_range",
            r"find_long_segments",
            r"linear_index",
            r"linearize_index",
            r"expand_into_jagged",
            r"jagged",
            r"bounds_check",
            r"lengths_range",
            r"invert_permute",
        ),
    ),
)
"""Classes in the order in which they are tried, each with the patterns that mean it (searched for, case kept)."""

HLO_CATEGORIES: Final[Mapping[str, MeasuredClass]] = {
    "convolution fusion": C.MATMUL,
    "convolution": C.MATMUL,
    "dot": C.MATMUL,
    "custom-call": C.OTHER,
    "loop fusion": C.ELEMENTWISE,
    "input fusion": C.REDUCTION,
    "output fusion": C.ELEMENTWISE,
    "custom fusion": C.ELEMENTWISE,
    "non-fusion elementwise": C.ELEMENTWISE,
    "reduce": C.REDUCTION,
    "reduce-window": C.REDUCTION,
    "select-and-scatter": C.SCATTER,
    "scatter": C.SCATTER,
    "gather": C.GATHER,
    "dynamic-slice": C.GATHER,
    "dynamic-update-slice": C.SCATTER,
    "sort": C.SORT,
    "fft": C.FFT,
    "rng-bit-generator": C.ELEMENTWISE,
    "data formatting": C.COPY,
    "copy": C.COPY,
    "copy-start": C.COPY,
    "copy-done": C.COPY,
    "async-start": C.COPY,
    "async-done": C.COPY,
    "broadcast": C.ELEMENTWISE,
    "pad": C.COPY,
    "all-reduce": C.COMMUNICATION,
    "all-gather": C.COMMUNICATION,
    "reduce-scatter": C.COMMUNICATION,
    "all-to-all": C.COMMUNICATION,
    "collective-permute": C.COMMUNICATION,
    "all-reduce fusion": C.COMMUNICATION,
    "all-gather fusion": C.COMMUNICATION,
    "send": C.COMMUNICATION,
    "recv": C.COMMUNICATION,
    "send-done": C.COMMUNICATION,
    "recv-done": C.COMMUNICATION,
    "infeed": C.SYNC,
    "outfeed": C.SYNC,
}
"""XLA's `hlo_category` of an op of a TPU; XLA writes products of matrices as convolutions there."""

COLLECTIVE_NAMES: Final[tuple[tuple[str, str], ...]] = (
    (r"all_?-?reduce", "all_reduce"),
    (r"reduce_?-?scatter", "reduce_scatter"),
    (r"all_?-?gather", "all_gather"),
    (r"all_?-?to_?-?all|alltoall", "all_to_all"),
    (r"broadcast", "collective_broadcast"),
    (r"collective-permute|permute|send_?recv|sendrecv|\bsend\b|\brecv\b", "collective_permute"),
    (r"barrier", "barrier"),
    (r"gather", "gather"),
    (r"scatter", "scatter"),
    (r"reduce", "reduce"),
)
"""Kinds of collectives, by the profiler's name of the collective or the kernel's; case does not matter."""

LAUNCHING_OPS: Final[tuple[tuple[str, MeasuredClass], ...]] = (
    (r"convolution|conv_transpose|thnn_conv|ConvolutionBackward|^aten::conv", C.CONVOLUTION),
    (r"scaled_dot_product|_flash_attention|_efficient_attention|_cudnn_attention", C.ATTENTION),
    (r"^aten::(mm|addmm|bmm|baddbmm|_addmm_activation|linear|matmul|dot|mv|addmv|einsum|_scaled_mm)$", C.MATMUL),
)
"""Operators of PyTorch whose kernels are of their class, whatever library routine does the arithmetic."""

TF32_NAMES: Final = re.compile(r"tf32|s1688|s16816gemm_f32|xmma_gemm_f32f32_tf32")
"""Kernels of f32 products and convolutions that multiply as TF32."""

WEIGHT_GRADIENT: Final = re.compile(r"wgrad|Wgrad|bwd_weight|bwd_filter|BackwardWeight|BwdWeight|WrW|wrw")
"""Kernels of the gradient of a convolution to its weights."""

_WRAPPED: Final = "wrapped_"
"""What XLA puts before the name of an op that is a fusion of its own."""
_COMPILED: Final = tuple((re.compile("|".join(patterns)), klass) for klass, patterns in KERNEL_NAMES)
_OPS: Final = tuple((re.compile(pattern), klass) for pattern, klass in LAUNCHING_OPS)
_KINDS: Final = tuple((re.compile(pattern, re.IGNORECASE), kind) for pattern, kind in COLLECTIVE_NAMES)


@lru_cache(maxsize=65536)
def classify(name: str, hlo_category: str = "") -> MeasuredClass:
    """The class of the kernel `name`; XLA's own category comes first where the profile has it."""
    known = HLO_CATEGORIES.get(hlo_category)
    if known is not None and known is not MeasuredClass.OTHER:
        return known
    plain = name.removeprefix(_WRAPPED)
    for pattern, klass in _COMPILED:
        if pattern.search(plain):
            return klass
    return MeasuredClass.OTHER


@lru_cache(maxsize=65536)
def classify_launched(name: str, op: str) -> MeasuredClass:
    """The class of the kernel `name` that the operator `op` launched: a product inside a convolution belongs to it."""
    own = classify(name)
    if own in (MeasuredClass.MATMUL, MeasuredClass.CONVOLUTION, MeasuredClass.ATTENTION, MeasuredClass.OTHER):
        for pattern, klass in _OPS:
            if pattern.search(op):
                return klass
    return own


@lru_cache(maxsize=4096)
def collective_kind(name: str) -> str:
    """The kind of a collective: `all_reduce`, `all_gather`, ...; empty where the name does not say.

    NCCL runs an all-to-all as sends and receives, `ncclKernel_SendRecv`: its kind is `collective_permute` unless what
    launched it says otherwise.
    """
    for pattern, kind in _KINDS:
        if pattern.search(name):
            return kind
    return ""
