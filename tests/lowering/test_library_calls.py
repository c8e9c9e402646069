"""How many kernels a call of a library launches."""

import pytest

from stablecast.ir.schedule import Launch
from stablecast.lowering.execution.dispatch import launches_of
from stablecast.lowering.execution.library_calls import radix_sort_launches

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
