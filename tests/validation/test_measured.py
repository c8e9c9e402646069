"""The model of a measured run, on real traces: steps, parts, classes, collectives, ranks."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from stablecast.frontends.traces import read_trace
from stablecast.ir.errors import InputError
from stablecast.validation.collectives import annotated_collectives, collectives
from stablecast.validation.measured import MeasuredRun, measure
from stablecast.validation.ranks import align
from stablecast.validation.steps import repetition


@cache
def _run(path: Path) -> MeasuredRun:
    return measure(read_trace(path))


def test_a100_of_8_ranks(traces: Path) -> None:
    """README: 6 steps of 75-81 ms, 8,568 kernels, 60 NCCL."""
    run = _run(traces / "hta" / "a100_8ranks_rank3_kineto.json.gz")
    assert (len(run.steps), run.step_basis) == (6, "annotation")
    assert run.step_times_s.min() == pytest.approx(75.473e-3)
    assert run.step_times_s.max() == pytest.approx(81.12e-3)
    assert run.mean_step_s == pytest.approx(77.491e-3, rel=1e-3)
    found = collectives(run)
    assert len(found) == 60
    assert all(entry.group_size == 8 for entry in found)
    assert (found[0].kind, found[0].nbytes) == ("all_to_all", 8 * 1024 * 8816 * 4)
    assert (run.step >= 0).all()
    parts = run.mean_parts()
    assert parts.busy_s + parts.idle_s == pytest.approx(parts.window_s)
    assert parts.compute_s + parts.exposed_s == pytest.approx(parts.busy_s)
    assert 0 < parts.exposed_s < parts.communication_s


def test_a100_of_2_ranks(traces: Path) -> None:
    """README: 3 steps of 220 ms, 21 NCCL kernels with message size and group in args."""
    run = _run(traces / "hta" / "a100_2ranks_nccl_rank0_kineto.json.gz")
    assert len(run.steps) == 3
    assert run.mean_step_s == pytest.approx(0.2224, rel=0.01)
    found = collectives(run)
    assert len(found) == 21
    assert {entry.ranks for entry in found} == {(0, 1)}
    assert sum(entry.kind == "all_reduce" for entry in found) == annotated_collectives(run.events)["all_reduce"] == 15
    assert found[2].nbytes == 2049000 * 4


def test_dlrm_ranks_align(traces: Path) -> None:
    """README: step 12.5-20 ms, 8 NCCL kernels."""
    runs = [_run(traces / "param" / f"v100x8_dlrm_rank{rank}_kineto.json.gz") for rank in range(8)]
    steps = [run.mean_step_s for run in runs]
    assert (min(steps), max(steps)) == (pytest.approx(12.509e-3), pytest.approx(19.901e-3))
    aligned = align(runs)
    assert (aligned.matched, aligned.step_s) == (8, pytest.approx(19.901e-3))
    assert aligned.spread_s < 20e-6
    assert aligned.wait_s.min() >= 0


def test_tpu_modules_are_steps(traces: Path) -> None:
    run = _run(traces / "tpu_v4_jax" / "matmul_1024x1024x1024.xplane.pb")
    assert len(run.steps) == 10
    assert run.step_basis.startswith("runs of module jit_validation_matrix_multiply")
    assert run.class_times()["matmul"] == pytest.approx(43.8e-6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "steps"), [("rtx2080ti_linear_kineto.json.gz", 40), ("rtx2080ti_resnet_kineto.json.gz", 30)]
)
def test_steps_from_marks(traces: Path, name: str, steps: int) -> None:
    run = _run(traces / "param" / name)
    assert len(run.steps) == steps
    assert run.step_basis.startswith("from one ")


def test_nothing_repeats(traces: Path) -> None:
    run = _run(traces / "hta" / "a100_alexnet_kineto.json.gz")
    assert (len(run.steps), run.step_basis) == (1, "the whole trace, as nothing repeats")
    assert "sync" not in run.class_times(), "waiting is no work"


def test_almost_all_time_has_a_class(traces: Path) -> None:
    for path in sorted([*traces.glob("hta/*kineto*"), traces / "param" / "v100x8_dlrm_rank0_kineto.json.gz"]):
        run = _run(path)
        other = sum(kernel.time_s for kernel in run.by_name if kernel.klass == "other")
        assert other < 0.01 * float(run.duration_s.sum())


def test_kernels_of_convolutions_belong_to_them(traces: Path) -> None:
    """A product that cuDNN runs inside a convolution counts as convolution, by the operator that launched it."""
    run = _run(traces / "param" / "rtx2080ti_resnet_kineto.json.gz")
    times = run.class_times()
    assert times["convolution"] > 5 * times["matmul"]


def test_wrong_requests(traces: Path) -> None:
    events = read_trace(traces / "hta" / "mi250_minitoy_kineto.json.gz")
    with pytest.raises(InputError, match="no device 9"):
        measure(events, device=9)
    with pytest.raises(InputError, match="no annotation"):
        measure(events, step="epoch")
    with pytest.raises(InputError, match="not how long it took"):
        measure(read_trace(traces / "hta" / "a100_simple_add_small_et.json.gz"))


def test_a_profile_without_any_work(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "epoch", "ts": 0, "dur": 5, "pid": 1, "tid": 1}]}'
    )
    with pytest.raises(InputError, match="no work of a device"):
        measure(read_trace(path))


@pytest.mark.parametrize(
    ("names", "period"),
    [([1, 2, 3] * 5, 3), ([9, *[1, 2] * 6], 2), ([1, 2, 3, 4, 5], 0), ([7] * 9, 1), ([1, 1, 2] * 4, 3)],
)
def test_repetition(names: list[int], period: int) -> None:
    assert repetition(np.array(names)) == period
