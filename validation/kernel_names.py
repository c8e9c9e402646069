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
KERNEL_NAMES: Final[tuple[tuple[str, MeasuredClass], ...]] = (
    # collectives: NCCL, RCCL, MSCCL, oneCCL, NVSHMEM; XLA's ops on a TPU
    (r"^(mscclKernel|ncclDevKernel|ncclKernel|rcclGenericKernel|rcclKernel|oneccl|nvshmem)", C.COMMUNICATION),
    (r"ncclKernel|ncclDevKernel", C.COMMUNICATION),
    (r"cross_device_reduce|one_shot_all_reduce|two_shot_all_reduce|custom_?all_?reduce|multimem_all", C.COMMUNICATION),
    (r"^(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|send|recv)\b", C.COMMUNICATION),
    # waits
    (r"^(dependency-wait|infeed|outfeed|barrier-cores)|StreamWait|Stream Sync|Event Sync|Context Sync|Stream Wait", C.SYNC),
    # copies between memories, as profilers spell them and as XLA and CUDA kernels do them
    (r"^\[?(CUDA )?mem(ory)?cpy|^Memcpy|MemcpyDeviceToDevice|CopyDeviceToDevice|hipMemcpy", C.MEMCPY),
    (r"^\[?(CUDA )?memset|^Memset|FillBuffer|__amd_rocclr_fill", C.MEMSET),
    (r"__amd_rocclr_copy", C.MEMCPY),
    # attention, before the products inside their names
    (r"flash|fmha|fused_attention|\bmha_|attention_kernel|paged_attention|splash|AttentionFwd|attn_(fwd|bwd)", C.ATTENTION),
    # convolutions, with the transforms and layout changes that the library runs for them
    (r"winograd|implicit_(con|gemm)|implicit_convolve|scudnn|hcudnn|conv(olve|olution)?(2d|3d)?[_<:]|Conv2d|conv_depthwise", C.CONVOLUTION),
    (r"[dw]grad|fprop|cudnn_infer|cudnn::cnn|cudnn_volta|cudnn_turing|cudnn_ampere|dgrad_engine|wgrad_alg", C.CONVOLUTION),
    (r"computeOffsetsKernel|nchwToNhwc|nhwcToNchw|nchwAddPadding|kern_precompute_indices|Tensor4d|TransformTensor", C.CONVOLUTION),
    (r"^(miopen|MIOpen|gridwise_conv|igemm_|naive_conv|Sp3Asm|gfx\w+_?conv)|SubTensorOpWithScalar", C.CONVOLUTION),
    (r"fft2d_[rc]2[rc]_|cutlass_cudnn|cask_cudnn|xmma_(fprop|dgrad|wgrad)|scalePackedTensor|im2col|col2im|^convolution\b", C.CONVOLUTION),
    # products of matrices and the reductions that finish them
    (r"gemm|gemv|Gemm|\bdot_kernel|^Cijk_|cutlass|cublas|nvjet|xmma|sgemm|matmul|splitK|split_k|reduce_1Block|^dot\b|_mm_", C.MATMUL),
    (r"epilogue::impl::globalKernel", C.MATMUL),
    # normalisation and softmax are reductions over rows
    (r"cudnn::bn_|batch_norm|batchnorm|BatchNorm|bn_(fw|bw)|layer_?norm|LayerNorm|rms_?norm|RMSNorm|GammaBeta|group_?norm|welford", C.REDUCTION),
    (r"softmax|SoftMax|Softmax|nll_loss|cross_entropy|pool|Pool|mse_|reduce_kernel|ReduceOp|reduction|logsumexp|cunn_|norm_kernel", C.REDUCTION),
    # order and search
    (r"RadixSort|sort|Sort|topk|TopK|bitonic|searchsorted|DeviceScan|DeviceSelect|DeviceCompact|ReduceByKey|DeviceReduce|scan_", C.SORT),
    # sparse reads and writes
    (r"embedding.*backward|EmbeddingBackward|embedding_backward|index_put|scatter|Scatter|indexing_backward|indexFunc|compute_grad_weight|index_add", C.SCATTER),
    (r"embedding|Embedding|gather|Gather|index_select|indexSelect|index_elementwise|gpu_index|permute_.*(indices|lengths|data)|permute_pooled", C.GATHER),
    (r"fft|FFT|regular_fft|vector_fft", C.FFT),
    # moves within the device memory
    (r"CatArrayBatchedCopy|direct_copy|copy_kernel|recat_copy|transpose|permute|^copy|^bitcast|^slice|^pad\b|^concatenate|unpack|memcpy32", C.COPY),
    (r"flip_kernel|roll_cuda|triu_tril|UnrolledCopy|to_dense_representation", C.COPY),
    # what works element by element
    (r"elementwise|Elementwise|multi_tensor_apply|foreach|dropout|distribution_|FillFunctor|BinaryFunctor|UnaryFunctor", C.ELEMENTWISE),
    (r"triton_(poi|per|red|tem)|^(loop|input)_.*fusion|^fusion|fused_|_fusion|adam|sgd|lamb|tanh|gelu|relu|sigmoid|silu|arange|where_kernel", C.ELEMENTWISE),
    (r"kernel_pointwise|pointwise|op_generic_tensor|op_tensor|GeneralAddmm|OpTensor|Op1dTensor|Op2dTensor|Op4dTensor", C.ELEMENTWISE),
    (r"^(add|multiply|subtract|divide|exponential|maximum|minimum|select|compare|convert|broadcast|iota)[._\d]*$", C.ELEMENTWISE),
    (r"reduce", C.REDUCTION),
    (r"offsets_range|find_long_segments|linear_index|linearize_index|expand_into_jagged|jagged|bounds_check|lengths_range|invert_permute", C.GATHER),
)  # fmt: skip
"""Patterns (searched for, case kept) and the class they mean."""

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

_COMPILED: Final = tuple((re.compile(pattern), klass) for pattern, klass in KERNEL_NAMES)
_OPS: Final = tuple((re.compile(pattern), klass) for pattern, klass in LAUNCHING_OPS)
_KINDS: Final = tuple((re.compile(pattern, re.IGNORECASE), kind) for pattern, kind in COLLECTIVE_NAMES)


@lru_cache(maxsize=65536)
def classify(name: str, hlo_category: str = "") -> MeasuredClass:
    """The class of the kernel `name`; XLA's own category comes first where the profile has it."""
    known = HLO_CATEGORIES.get(hlo_category)
    if known is not None and known is not MeasuredClass.OTHER:
        return known
    for pattern, klass in _COMPILED:
        if pattern.search(name):
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
