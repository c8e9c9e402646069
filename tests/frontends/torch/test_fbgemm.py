"""FBGEMM's operators: what they compute, and a capture of a step that calls them."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stablecast.frontends.torch import capture_torch, fbgemm  # noqa: E402
from stablecast.ir.reader import read  # noqa: E402

WIDTH, TABLES, BAGS = 2, 2, 3
INDICES = torch.tensor([0, 1, 1, 2, 0, 3, 3, 3])
OFFSETS = torch.tensor([0, 2, 3, 4, 4, 5, 8])
BEGINS = torch.tensor([0, 3 * WIDTH])
"""Two tables of three and four rows; bags of the first: (0 1) (1) (2), of the second: () (0) (3 3 3)."""


def _rows() -> Any:
    return torch.arange(14, dtype=torch.float32)


def test_segments_are_permuted_with_their_values() -> None:
    lengths = torch.tensor([[1, 2], [0, 3]])
    moved, values, weights = fbgemm.permute_2d(torch.tensor([1, 0]), lengths, torch.arange(6))
    assert moved.tolist() == [[0, 3], [1, 2]]
    assert values.tolist() == [3, 4, 5, 0, 1, 2]
    assert weights is None


def test_complete_sums() -> None:
    assert fbgemm.complete_cumsum(torch.tensor([2, 0, 1])).tolist() == [0, 2, 2, 3]


def test_indices_outside_their_table_become_zero() -> None:
    indices = torch.tensor([2, 3, -1, 3])
    written, offsets, warning = fbgemm.bounded(
        torch.tensor([3, 4]), indices, torch.tensor([0, 2, 9]), 1, torch.tensor([0])
    )
    assert written.tolist() == [2, 0, 0, 3]
    assert offsets.tolist() == [0, 2, 4]
    assert warning.tolist() == [2]


def test_rows_are_summed_by_bag_and_table() -> None:
    rows = _rows().view(-1, WIDTH)
    sums = fbgemm.pooled(_rows(), BEGINS, TABLES * WIDTH, INDICES, OFFSETS)
    assert sums.shape == (BAGS, TABLES * WIDTH)
    assert torch.equal(sums[0], torch.cat([rows[0] + rows[1], torch.zeros(2)]))
    assert torch.equal(sums[2], torch.cat([rows[2], 3 * rows[3 + 3]]))


def test_equal_rows_are_updated_once() -> None:
    """Exact Adagrad: gradients of equal rows are summed before they are squared."""
    gradient = torch.arange(BAGS * TABLES * WIDTH, dtype=torch.float32).view(BAGS, TABLES * WIDTH)
    rows = _rows().requires_grad_()
    fbgemm.pooled(rows, BEGINS, TABLES * WIDTH, INDICES, OFFSETS).backward(gradient)
    known = (BEGINS, None, WIDTH, None, 3, INDICES, OFFSETS, 0)
    assert torch.equal(fbgemm.dense_gradient(gradient, _rows(), *known), rows.grad)
    updated, squares = fbgemm.adagrad(gradient, _rows(), *known, torch.ones(14), 0.1, 0.5)
    wanted = 1 + rows.grad**2
    assert torch.allclose(squares, wanted)
    assert torch.allclose(updated, _rows() - 0.5 * rows.grad / (wanted.sqrt() + 0.1))


def test_a_step_is_captured_call_by_call() -> None:
    """The look-up and its update are one launch each, have a form, and give the table back."""
    ops = fbgemm.operators()

    def build() -> tuple[Any, ...]:
        held = torch.nn.Module()
        held.anchor = torch.nn.Parameter(torch.empty(0))
        for name, count, kind in (
            ("rows", 14, torch.float32), ("squares", 14, torch.float32), ("none", 0, torch.float32),
            ("begins", TABLES, torch.int64), ("dims", TABLES + 1, torch.int32),
        ):  # fmt: skip
            held.register_buffer(name, torch.empty(count, dtype=kind))
        return (held,)

    def step(held: Any, indices: Any, offsets: Any) -> Any:
        sums = ops.split_embedding_codegen_lookup_adagrad_function(
            held.anchor, held.rows, held.none, held.none, held.dims, held.begins, held.dims, TABLES * WIDTH, WIDTH,
            held.begins, 3, indices, offsets, 0, None, None, held.dims, False, 1.0, False, held.squares,
            held.none, held.dims, held.begins, 0.1, 0.5,
        )  # fmt: skip
        sums.sum().backward()
        return sums.detach()

    workload = capture_torch(build, step, lambda: (INDICES, OFFSETS))
    assert not workload.metadata["unlowered"]
    assert workload.launches is not None
    names = [launch.op for launch in workload.launches.launches if launch.op.startswith("fbgemm.")]
    assert names == [
        "fbgemm.split_embedding_codegen_lookup_adagrad_function.default",
        "fbgemm.split_embedding_backward_codegen_adagrad_unweighted_exact_cuda.default",
    ]
    program = read(workload.modules[0].data, "step")
    assert sum(arg.aliases_output is not None for arg in workload.args) == 2
    assert program.main.body.ops
