"""How many kernels a call of a library launches."""

import pytest

from stablecast.ir.kernels import KernelClass
from stablecast.ir.schedule import Launch
from stablecast.lowering.execution.dispatch import launches_of
from stablecast.lowering.execution.library_calls import Waits, library_call, radix_sort_launches

ADAGRAD = "fbgemm.split_embedding_backward_codegen_adagrad_unweighted_exact_cuda.default"


@pytest.mark.parametrize(
    ("count", "bits", "launches"),
    [(2432, 64, 1), (2433, 26, 12), (4736, 8, 6), (1 << 20, 64, 20)],
)
def test_radix_sort(count: int, bits: int, launches: int) -> None:
    """One block up to its tile, then a sweep for every eight bits."""
    assert radix_sort_launches(count, 8, bits) == launches


@pytest.mark.parametrize(
    ("op", "shapes", "path", "launches"),
    [
        ("aten.cumsum.default", ((4096,),), "forward", 2),
        ("aten.cumsum.default", ((16, 4096),), "forward", 1),
        ("aten.sort.default", ((16, 128),), "forward", 3),
        ("aten.sort.default", ((1 << 20,),), "forward", 21),
        ("aten.index_put.default", ((16, 27, 27), (351,), (351,), (16, 351)), "backward/model", 7),
        ("aten.index_put.default", ((16, 27, 27), (351,), (351,), (16, 351)), "forward/model", 1),
        ("fbgemm.permute_2D_sparse_data.default", ((24,), (24, 16), (4736,)), "forward", 7),
        (ADAGRAD, ((128, 48), (640192016,), (3,), (4,), (4,), (4736,), (385,)), "backward", 26),
        (ADAGRAD, ((128, 48), (640192016,), (3,), (4,), (4,), (768,), (385,)), "backward", 14),
    ],
)
def test_launches(op: str, shapes: tuple[tuple[int, ...], ...], path: str, launches: int) -> None:
    assert launches_of(Launch(op, shapes, (), module_path=path)) == launches


LARGE, SMALL = (40_000_000,), (112,)


@pytest.mark.parametrize(
    ("op", "shapes", "waits"),
    [
        # 32 bags of 40 indices: where a bag begins, two accesses to its indices, 40 rows of a large table
        (
            "fbgemm.split_embedding_codegen_lookup_adagrad_function",
            ((0,), LARGE, (0,), (0,), (2,), (2,), (3,), (3,), (1280,), (33,)),
            Waits(3, 40),
        ),
        # a table that fits: rows are near by too
        ("fbgemm.dense_embedding_codegen_lookup_function", (SMALL, (2,), (3,), (3,), (32,), (33,)), Waits(3)),
        # 32 bags walked by one warp, 1 for lengths, 3 + 1 + 1 for a segment, its state and its row
        (
            "fbgemm.split_embedding_backward_codegen_adagrad_unweighted_exact_cuda",
            ((128, 48), LARGE, (3,), (4,), (4,), (4736,), (385,), LARGE),
            Waits(32 * 1 + 1 + 3 + 1 + 1, 2),
        ),
        # 28 indices into 7 rows of 16: 4 equal ones each
        (
            "fbgemm.split_embedding_backward_codegen_dense_unweighted_exact_cuda",
            ((16, 32), SMALL, (2,), (3,), (3,), (28,), (15,)),
            Waits(14 * 1 + 1 + 3 + 4 + 1 + 2),
        ),
        ("aten.cat", ((16, 16),) * 26, Waits(12)),
        ("aten.cat", ((16, 16),) * 130, Waits(63)),
        ("aten.cat", ((16, 16),) * 2, Waits(0)),
        # up to 16 rows one after the other, more at once
        ("aten.embedding", ((128_256, 4096), (10,)), Waits(0, 9)),
        ("aten.embedding", ((128_256, 4096), (2, 16)), Waits()),
        ("aten.mm", ((2, 2), (2, 2)), None),
    ],
)
def test_waits(op: str, shapes: tuple[tuple[int, ...], ...], waits: Waits | None) -> None:
    """Dependent accesses, counted by hand from the libraries' sources."""
    known = library_call(op)
    found = known.waits(Launch(op, shapes, ())) if known else None
    assert found == waits


def test_gradient_of_a_maximum_over_windows_sums_what_they_send() -> None:
    """As StableHLO it scatters; PyTorch's kernel goes over the image and sums what windows send to each place."""
    known = library_call("aten.max_pool2d_with_indices_backward.default")
    assert known is not None
    assert known.klass is KernelClass.REDUCTION
