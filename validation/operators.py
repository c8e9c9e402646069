"""What PyTorch's operators do, by name: for traces in which no kernel says it."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from stablecast.validation.kernel_names import MeasuredClass, classify_launched

C = MeasuredClass
_SILENT_NAMES: Final = """
alias as_strided broadcast_tensors chunk contiguous detach detach_ empty empty_like empty_strided expand expand_as
flatten is_same_size item lift_fresh narrow new_empty new_empty_strided numpy_T permute pin_memory _pin_memory
record_stream reshape _reshape_alias resize_ resolve_conj resolve_neg result_type select set_ size slice split
split_with_sizes squeeze squeeze_ stride swapaxes t to to_dense transpose type_as unbind unflatten unfold unsafe_split
unsafe_view _unsafe_view unsqueeze unsqueeze_ view view_as _local_scalar_dense is_pinned
_has_compatible_shallow_copy_type
"""
_SILENT: Final = frozenset(_SILENT_NAMES.split())
"""ATen operators that launch nothing themselves."""

_CLASSES: Final[Sequence[tuple[re.Pattern[str], MeasuredClass]]] = tuple(
    (re.compile(pattern), klass)
    for pattern, klass in (
        (r"^(copy_?|clone|cat|stack|_to_copy|constant_pad_nd|repeat|roll|flip)$", C.COPY),
        (r"^(zero_?|fill_?|zeros|ones|full)$", C.MEMSET),
        (r"embedding_dense_backward|index_put|index_add|scatter|masked_scatter", C.SCATTER),
        (r"^(embedding|index_select|index|gather|take|masked_select|_embedding_bag.*)$", C.GATHER),
        (r"^(sort|topk|argsort|unique.*|msort|multinomial|kthvalue|median)$", C.SORT),
        (r"fft", C.FFT),
        (
            r"softmax|norm|pool|^(sum|mean|max|min|amax|amin|argmax|argmin|prod|var|std|var_mean|std_mean|any|all|"
            r"cumsum|nll_loss.*|cross_entropy.*|mse_loss.*|binary_cross_entropy.*|logsumexp|count_nonzero|bincount)$",
            C.REDUCTION,
        ),
    )
)


_SAME: Final[Mapping[str, str]] = {
    "cudnn_convolution": "convolution",
    "miopen_convolution": "convolution",
    "cudnn_batch_norm": "native_batch_norm",
    "miopen_batch_norm": "native_batch_norm",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "miopen_batch_norm_backward": "native_batch_norm_backward",
    "_native_batch_norm_legit": "native_batch_norm",
    "clamp_min": "relu",
    "_index_put_impl": "index_put",
    "zero": "fill",
}
"""Operators that launch the kernels of others, without `aten::` and the sign of working in place."""


_BACKWARD: Final = "fbgemm::split_embedding_backward_codegen_{}_unweighted_exact_cuda"
_OWNERS: Final = re.compile(r"^fbgemm::|^aten::_index_put_impl_$|^torch::autograd::CppNode<SplitLookupFunction_")
_OWN_CLASSES: Final[Sequence[tuple[re.Pattern[str], MeasuredClass]]] = (
    (re.compile(r"_cumsum$"), C.SORT),
    (re.compile(r"_backward_|index_put"), C.SCATTER),
    (re.compile(r""), C.GATHER),
)
_NODE: Final = re.compile(r"torch::autograd::CppNode<SplitLookupFunction_(\w+)_Op>")
"""FBGEMM's backward passes, as autograd names those that are no operators."""


def owns_launches(name: str) -> bool:
    """Whether all that is launched inside the operator `name` belongs to it: a capture has it as one call."""
    return _OWNERS.search(name) is not None


def class_of_owner(name: str) -> MeasuredClass | None:
    """The class of all that an operator launches that owns it, None for other operators."""
    plain = plain_operator(name)
    return next(klass for pattern, klass in _OWN_CLASSES if pattern.search(plain)) if owns_launches(name) else None


def plain_operator(name: str) -> str:
    """The operator whose kernel `name` launches: `aten::convolution` for cuDNN's, `aten::add` for `aten::add_`."""
    node = _NODE.match(name)
    if node is not None:
        return _BACKWARD.format(node[1].lower())
    namespace, mark, rest = name.partition("::")
    if not mark or namespace != "aten":
        return name
    bare = rest.rstrip("_") or rest
    return f"aten::{_SAME.get(bare, bare)}"


def launches_nothing(name: str) -> bool:
    """Whether the operator only makes views or memory, or calls others."""
    return name.removeprefix("aten::") in _SILENT


def class_of_operator(name: str) -> MeasuredClass:
    """The class of the kernel that the operator `name` launches."""
    known = classify_launched(name, name)
    if known in (C.MATMUL, C.CONVOLUTION, C.ATTENTION):
        return known
    plain = name.removeprefix("aten::")
    return next((klass for pattern, klass in _CLASSES if pattern.search(plain)), C.ELEMENTWISE)
