"""ATen calls as kernels: how many launches one makes, and its row where only its shapes are known."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from stablecast.ir.dtypes import dtype
from stablecast.ir.kernels import KernelClass, KernelRow
from stablecast.ir.schedule import Launch, LaunchTable
from stablecast.lowering.execution.library_calls import library_call

CHUNK = 65536
"""Elements of a tensor that one block of `multi_tensor_apply` takes."""
MAX_BLOCKS = 320
MAX_TENSORS: Mapping[int, int] = MappingProxyType({1: 110, 2: 64, 3: 48, 4: 36, 5: 30})
"""Tensors of one list in one launch of `multi_tensor_apply`, by the number of lists."""

LISTS: Mapping[str, int] = MappingProxyType(
    {
        "aten._foreach_add_.Scalar": 1,
        "aten._foreach_add_.List": 2,
        "aten._foreach_add.Scalar": 2,
        "aten._foreach_add.List": 3,
        "aten._foreach_sub_.Scalar": 1,
        "aten._foreach_sub_.List": 2,
        "aten._foreach_mul_.Scalar": 1,
        "aten._foreach_mul_.List": 2,
        "aten._foreach_mul_.Tensor": 1,
        "aten._foreach_mul.Scalar": 2,
        "aten._foreach_mul.List": 3,
        "aten._foreach_div_.Scalar": 1,
        "aten._foreach_div_.ScalarList": 1,
        "aten._foreach_div_.List": 2,
        "aten._foreach_div_.Tensor": 1,
        "aten._foreach_lerp_.Scalar": 2,
        "aten._foreach_lerp_.List": 3,
        "aten._foreach_addcmul_.Scalar": 3,
        "aten._foreach_addcmul_.ScalarList": 3,
        "aten._foreach_addcdiv_.Scalar": 3,
        "aten._foreach_addcdiv_.ScalarList": 3,
        "aten._foreach_sqrt.default": 2,
        "aten._foreach_sqrt_.default": 1,
        "aten._foreach_zero_.default": 1,
        "aten._foreach_neg.default": 2,
        "aten._foreach_copy_.default": 2,
        "aten._foreach_norm.Scalar": 1,
        "aten._foreach_maximum_.List": 2,
        "aten._fused_sgd_.default": 2,
        "aten._fused_adam_.default": 4,
        "aten._fused_adamw_.default": 4,
    }
)
"""Call -> tensor lists that its kernel walks through together, results of its own included."""


def afresh(launches: LaunchTable | None) -> frozenset[int]:
    """Calls that write new memory. ATen calls in place end in an underscore; `out` overloads are given theirs."""
    found = launches.launches if launches else ()
    names = [launch.op.split(".")[1:] for launch in found]
    return frozenset(n for n, name in enumerate(names) if name and not (name[0].endswith("_") or "out" in name[1:]))


def launches_of(launch: Launch) -> int:
    """Launches of a call: those of its library, those of `multi_tensor_apply` for lists of tensors, else one."""
    known = library_call(launch.op)
    if known is not None:
        return known.launches(launch)
    lists = LISTS.get(launch.op)
    if lists is None or not launch.shapes:
        return 1
    given = lists - (1 if launch.result_shapes and lists > 1 and len(launch.result_shapes) > 1 else 0)
    count = max(1, len(launch.shapes) // max(1, given))
    return multi_tensor_launches([math.prod(shape) for shape in launch.shapes[:count]], lists)


def multi_tensor_launches(sizes: Sequence[int], lists: int) -> int:
    """Launches of `multi_tensor_apply` over tensors of these many elements, `lists` lists at a time.

    A launch is full at `MAX_TENSORS[lists]` tensors or at `MAX_BLOCKS` chunks; a tensor cut by the latter goes on in
    the next one.
    """
    most = MAX_TENSORS[lists]
    launches = tensors = blocks = 0
    for size in sizes:
        chunks = -(-size // CHUNK)
        if not chunks:
            continue
        tensors += 1
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if (tensors == most and last) or blocks == MAX_BLOCKS:
                launches += 1
                blocks = 0
                tensors = 0 if last else 1
    return max(1, launches + (1 if blocks else 0))


def bare_row(launch: Launch) -> KernelRow:
    """The row of a call by its shapes: every operand read, every result written (the first operand, of calls in place).

    A call in place that has one operand only fills it.
    """
    reads = _bytes(launch.shapes, launch.dtypes)
    writes = _bytes(launch.result_shapes, launch.result_dtypes)
    if not launch.result_shapes and launch.shapes:
        writes = _bytes(launch.shapes[:1], launch.dtypes[:1])
        reads = _bytes(launch.shapes[1:], launch.dtypes[1:])
    elems = max((math.prod(shape) for shape in (*launch.result_shapes, *launch.shapes)), default=0)
    name = next(iter((*launch.result_dtypes, *launch.dtypes)), "")
    return KernelRow(
        klass=KernelClass.COPY,
        in_dtype=launch.dtypes[0] if launch.dtypes else "",
        out_dtype=name,
        elems=elems,
        inputs=len(launch.shapes),
        bytes_read=reads,
        bytes_written=writes,
        launches=launches_of(launch),
        label=launch.op,
    )


def _bytes(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> float:
    return float(sum(dtype(name).nbytes(math.prod(shape)) for shape, name in zip(shapes, dtypes, strict=False)))
