"""What PyTorch's operators do, by name: for traces in which no kernel says it."""

import re
from collections.abc import Sequence
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
        (r"^(copy_|clone|cat|stack|_to_copy|constant_pad_nd|repeat|roll|flip)$", C.COPY),
        (r"^(zero_|fill_|zeros|ones|full)$", C.MEMSET),
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
