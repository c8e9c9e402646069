"""Calls that launch several kernels, as the libraries' public sources have them: how many, and what class they are of.

PyTorch's scans, sorts, accumulating writes and sums over windows on CUDA (`aten/src/ATen/native/cuda`), CUB's radix
sort, and FBGEMM's operators on sparse features and tables of embeddings (`fbgemm_gpu/src`, `fbgemm_gpu/codegen`).
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


TABLE_BYTES = 32 << 20
"""Rows of a larger table lie farther away than the translations of addresses that a core keeps (a V100's reach)."""

WARP = 32
CAT_BATCH = 128
"""Tensors that PyTorch concatenates in one launch."""

CAT_WAVE = 2
"""Of the blocks that it starts for each, two a core of 512 threads, as many tensors' run at a time."""

FEW_ROWS = 16
"""Rows up to which PyTorch looks one up after the other (`indexSelectSmallIndex`)."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Accesses that the slowest threads of a call's kernels make one after the other, beyond the first of each kernel:
    `near` by, and to `rows` of a large table."""

    near: float = 0
    rows: float = 0


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """How many kernels a call launches, the class of what it does as a whole, None where its body shows it, and what
    its threads wait for."""

    launches: Callable[[Launch], int]
    klass: KernelClass | None = None
    waits: Callable[[Launch], Waits] = lambda _: Waits()


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


def _to_rows(table: tuple[int, ...], count: float, near: float) -> Waits:
    """`count` accesses to rows of an f32 table of this shape, and `near` others."""
    far = 4 * math.prod(table) > TABLE_BYTES
    return Waits(near, count) if far else Waits(near + count)


def _lookup_waits(launch: Launch, table: int, indices: int) -> Waits:
    """A group of threads walks through a bag: where it begins, its indices, and row after row.

    Sizes give the mean length of a bag alone, which the longest exceeds.
    """
    bags, count = max(math.prod(launch.shapes[indices + 1]) - 1, 1), math.prod(launch.shapes[indices])
    length = math.ceil(count / bags)
    return _to_rows(launch.shapes[table], length, 1 + math.ceil(length / WARP))


def _backward_waits(launch: Launch) -> Waits:
    """FBGEMM's backward pass of a look-up.

    Linear indices: after the bags' begins, the indices of a warp's 32 bags, bag after bag. Long segments: after their
    number, lengths. All other segments: after their number, the run and where it begins, whose gradient it is, where
    that table's columns begin, the gradients of all equal indices, where the table lies, the row's state, the row.
    """
    shapes = launch.shapes
    bags, count = max(math.prod(shapes[6]) - 1, 1), math.prod(shapes[5])
    width = max(1, shapes[0][-1] // max(1, shapes[2][0]))
    walked = min(WARP, bags) * math.ceil(math.ceil(count / bags) / WARP)
    equal = max(1.0, count * width / max(math.prod(shapes[1]), 1))
    return _to_rows(shapes[1], 2, walked + 1 + 3 + equal + 1)


def _cat(launch: Launch) -> int:
    return math.ceil(max(len(launch.shapes), 1) / CAT_BATCH)


def _cat_waits(launch: Launch) -> Waits:
    """Each tensor gets blocks for half a device, however small it is; those of two tensors run at a time."""
    full, rest = divmod(len(launch.shapes), CAT_BATCH)
    waves = full * (CAT_BATCH // CAT_WAVE - 1) + max(math.ceil(rest / CAT_WAVE) - 1, 0)
    return Waits(waves)


def _select_waits(launch: Launch) -> Waits:
    if len(launch.shapes) < 2:
        return Waits()
    count = math.prod(launch.shapes[1])
    return _to_rows(launch.shapes[0], count - 1, 0) if 1 < count <= FEW_ROWS else Waits()


_EMBEDDING = "fbgemm.split_embedding"
_ADAGRAD_LOOKUP, _DENSE_LOOKUP = (1, 8), (0, 4)
"""Places of a look-up's table and indices among its operands; offsets come next."""

CALLS: Mapping[str, LibraryCall] = MappingProxyType(
    {
        "aten.cat": LibraryCall(_cat, waits=_cat_waits),
        "aten.cumsum": LibraryCall(_cumsum),
        "aten.sort": LibraryCall(_sort),
        "aten.argsort": LibraryCall(_sort),
        "aten.embedding": LibraryCall(lambda _: 1, waits=_select_waits),
        "aten.index": LibraryCall(lambda _: 1, KernelClass.GATHER, lambda _: Waits(1)),
        "aten.max_pool2d_with_indices_backward": LibraryCall(lambda _: 1, KernelClass.REDUCTION),
        "aten.index_put": LibraryCall(_index_put, waits=lambda _: Waits(2)),
        "fbgemm.permute_2D_sparse_data": LibraryCall(
            lambda _: 1 + SCAN + CUMSUM + 1, KernelClass.GATHER, lambda _: Waits(3)
        ),
        "fbgemm.asynchronous_complete_cumsum": LibraryCall(lambda _: CUMSUM, KernelClass.SORT),
        "fbgemm.bounds_check_indices": LibraryCall(lambda _: 2, KernelClass.GATHER, lambda _: Waits(1)),
        "fbgemm.dense_embedding_codegen_lookup_function": LibraryCall(
            lambda _: 1, KernelClass.GATHER, lambda launch: _lookup_waits(launch, *_DENSE_LOOKUP)
        ),
        f"{_EMBEDDING}_codegen_lookup_adagrad_function": LibraryCall(
            lambda _: 1, KernelClass.GATHER, lambda launch: _lookup_waits(launch, *_ADAGRAD_LOOKUP)
        ),
        f"{_EMBEDDING}_backward_codegen_dense_unweighted_exact_cuda": LibraryCall(
            _dense, KernelClass.SCATTER, _backward_waits
        ),
        f"{_EMBEDDING}_backward_codegen_adagrad_unweighted_exact_cuda": LibraryCall(
            _adagrad, KernelClass.SCATTER, _backward_waits
        ),
    }
)
"""Operator without its overload -> what it launches, and what its threads wait for."""


def library_call(op: str) -> LibraryCall | None:
    """What is known of a call, `aten.cumsum.default` or `aten.cumsum`; None for those that launch one kernel."""
    found = CALLS.get(op)
    return found if found is not None else CALLS.get(op.rpartition(".")[0])
