"""Calls that launch several kernels, as the libraries' public sources have them: how many, and what class they are of.

PyTorch's scans, sorts and accumulating writes on CUDA (`aten/src/ATen/native/cuda`), CUB's radix sort, and FBGEMM's
operators on sparse features and tables of embeddings (`fbgemm_gpu/src`, `fbgemm_gpu/codegen`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stablecast.ir.kernels import KernelClass
from stablecast.ir.schedule import Launch

SCAN = 2
"""CUB's scan, run-length encoding and selection: a kernel that prepares the tiles, and one over them."""

CUMSUM = 1 + SCAN
"""FBGEMM's complete sums: the leading zero is a fill."""

SINGLE_TILE_BYTES = 256 * 19 * 4
"""CUB sorts this many bytes of keys in one kernel of one block: 256 threads of 19 keys of 4 bytes."""

DIGIT_BITS = 8
SMALL_SORT = 4096
"""Elements of a slice that PyTorch sorts in place by one block."""

LONG_SEGMENT = 1024
"""Equal indices from which FBGEMM shares a row among blocks, through a buffer that it clears."""


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """How many kernels a call launches, and the class of what it does as a whole, None where its body shows it."""

    launches: Callable[[Launch], int]
    klass: KernelClass | None = None


def radix_sort_launches(count: int, key_bytes: int, bits: int) -> int:
    """Launches of CUB's sort of `count` keys by their low `bits`.

    One block does it where all fit in its tile; else a histogram of all digits, their sums, and a sweep for each digit
    of eight bits, with two buffers cleared before and one before each sweep.
    """
    if count * key_bytes <= SINGLE_TILE_BYTES:
        return 1
    return 4 + 2 * math.ceil(bits / DIGIT_BITS)


def _bits(values: int) -> int:
    return max(1, (max(values, 1) - 1).bit_length())


def _cumsum(launch: Launch) -> int:
    """One slice is scanned by CUB, several by a kernel of PyTorch's own."""
    return SCAN if launch.shapes and sum(size > 1 for size in launch.shapes[0]) <= 1 else 1


def _sort(launch: Launch) -> int:
    """Values are copied, places counted, and both sorted: slices in place, one long slice by digits."""
    shape = launch.shapes[0] if launch.shapes else ()
    if math.prod(shape) > SMALL_SORT and sum(size > 1 for size in shape) == 1:
        return 1 + radix_sort_launches(math.prod(shape), 8, 64)
    return 3


def _index_put(launch: Launch) -> int:
    """As the gradient of an indexing, which adds: linear places of k indices, their sort, and the sums of equal ones.

    Places take k - 1 products and sums, values are made contiguous, places divided, and numbered.
    """
    if not launch.module_path.startswith("backward") or len(launch.shapes) < 2:
        return 1
    table, *indices = launch.shapes[:-1]
    count = max((math.prod(shape) for shape in indices), default=1)
    return 2 * max(len(indices) - 1, 0) + 3 + radix_sort_launches(count, 8, _bits(math.prod(table))) + 1


def _adagrad(launch: Launch) -> int:
    """FBGEMM's backward pass of a look-up that updates its rows.

    Operands: gradient, weights, three of the tables, indices. Linear indices; their sort by as many bits as rows need;
    two cleared buffers and the run-length encoding into them; complete sums of the lengths; two cleared counters; the
    search for long segments, their kernel and that of all others; a cleared buffer where segments may be shared.
    """
    shapes = launch.shapes
    width = max(1, shapes[0][-1] // max(1, shapes[2][0]))
    count, bits = math.prod(shapes[5]), _bits(shapes[1][0] // width)
    shared = 1 if count >= LONG_SEGMENT else 0
    return 1 + radix_sort_launches(count, 8, bits) + 2 + SCAN + CUMSUM + 2 + 3 + shared


def _dense(launch: Launch) -> int:
    """As `_adagrad`, into a cleared gradient in place of an update."""
    return 1 + _adagrad(launch)


_EMBEDDING = "fbgemm.split_embedding"
CALLS: Mapping[str, LibraryCall] = MappingProxyType(
    {
        "aten.cumsum": LibraryCall(_cumsum),
        "aten.sort": LibraryCall(_sort),
        "aten.argsort": LibraryCall(_sort),
        "aten.index_put": LibraryCall(_index_put),
        "fbgemm.permute_2D_sparse_data": LibraryCall(lambda _: 1 + SCAN + CUMSUM + 1, KernelClass.GATHER),
        "fbgemm.asynchronous_complete_cumsum": LibraryCall(lambda _: CUMSUM, KernelClass.SORT),
        "fbgemm.bounds_check_indices": LibraryCall(lambda _: 2, KernelClass.GATHER),
        "fbgemm.dense_embedding_codegen_lookup_function": LibraryCall(lambda _: 1, KernelClass.GATHER),
        f"{_EMBEDDING}_codegen_lookup_adagrad_function": LibraryCall(lambda _: 1, KernelClass.GATHER),
        f"{_EMBEDDING}_backward_codegen_dense_unweighted_exact_cuda": LibraryCall(_dense, KernelClass.SCATTER),
        f"{_EMBEDDING}_backward_codegen_adagrad_unweighted_exact_cuda": LibraryCall(_adagrad, KernelClass.SCATTER),
    }
)
"""Operator without its overload -> what it launches."""


def library_call(op: str) -> LibraryCall | None:
    """What is known of a call, `aten.cumsum.default` or `aten.cumsum`; None for those that launch one kernel."""
    found = CALLS.get(op)
    return found if found is not None else CALLS.get(op.rpartition(".")[0])
