"""Pipelines against their closed forms."""

import itertools

import pytest

from stablecast.backends.schedule import PIPELINE_SCHEDULES, StageCost, pipeline
from stablecast.ir.errors import InputError

SIZES = [(2, 2), (2, 6), (4, 4), (4, 8), (8, 32)]


@pytest.mark.parametrize(("stages", "batches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fill_and_drain(name: str, stages: int, batches: int) -> None:
    """(m + p - 1) (f + b); GPipe holds every micro-batch, 1F1B as many as there are stages from here on."""
    found = pipeline([StageCost(1.0, 2.0)] * stages, batches, name)
    assert found.step_s == pytest.approx((batches + stages - 1) * 3.0)
    assert found.bubble_share == pytest.approx((stages - 1) / (batches + stages - 1))
    held = [batches] * stages if name == "gpipe" else [min(stages - at, batches) for at in range(stages)]
    assert list(found.in_flight) == held


@pytest.mark.parametrize(("stages", "batches"), [*SIZES, (3, 7), (4, 22), (8, 8)])
def test_1f1b_waits_for_transfers_that_gpipe_hides(stages: int, batches: int) -> None:
    """GPipe shows 2 (p - 1) transfers, 1F1B 2 (p - 1) more for every p micro-batches, as it holds no more than p.

    In all 2 (p - 1 + (m - 2) - floor((m - 2) / p)), as long as a transfer is short beside a pass.
    """
    costs, send, steady = [StageCost(1.0, 2.0)] * stages, 0.01, batches - 2
    free = (batches + stages - 1) * 3.0
    gpipe, alternating = (pipeline(costs, batches, name, send_s=send) for name in ("gpipe", "1f1b"))
    assert gpipe.step_s == pytest.approx(free + 2 * (stages - 1) * send)
    assert alternating.step_s == pytest.approx(free + 2 * (stages - 1 + steady - steady // stages) * send)
    assert alternating.bubble_share >= gpipe.bubble_share - 1e-12


@pytest.mark.parametrize(("stages", "batches"), SIZES)
@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble(stages: int, batches: int, chunks: int) -> None:
    found = pipeline([StageCost(1.0, 2.0)] * stages, batches, "interleaved", chunks=chunks)
    assert found.step_s == pytest.approx(batches * 3.0 + (stages - 1) * 3.0 / chunks)


@pytest.mark.parametrize(("stages", "batches"), SIZES)
def test_zero_bubble(stages: int, batches: int) -> None:
    """ZB-H1 with equal passes: m (f + b) + (p - 1) (f + b - 2 w), at the memory of 1F1B's first stage."""
    found = pipeline([StageCost(1.0, 2.0, 1.0)] * stages, batches, "zero-bubble")
    assert found.step_s == pytest.approx(batches * 3.0 + (stages - 1))
    assert max(found.in_flight) <= stages


def test_transfers_and_stragglers() -> None:
    """One micro-batch: forward through both stages and back, two transfers; a stage at half speed takes twice as long."""
    assert pipeline([StageCost(1.0, 2.0)] * 2, 1, send_s=0.25).step_s == pytest.approx(6.5)
    slow = pipeline([StageCost(1.0, 2.0), StageCost(1.0, 2.0, speed=0.5)], 1)
    assert slow.step_s == pytest.approx(9.0)
    assert slow.bubble_s == pytest.approx((6.0, 3.0))


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_every_task_once_and_after_what_it_needs(name: str) -> None:
    chunks = 2 if name == "interleaved" else 1
    found = pipeline([StageCost(1.0, 2.0, 0.5)] * 4, 8, name, chunks=chunks, send_s=0.1)
    for stage in found.tasks:
        assert len({task for task, _, _ in stage}) == len(stage) == 8 * chunks * (3 if name == "zero-bubble" else 2)
        assert all(end <= begin for (_, _, end), (_, begin, _) in itertools.pairwise(stage))
        assert sum(end - begin for _, begin, end in stage) == pytest.approx(24.0)
    assert len(found.slices) == sum(map(len, found.tasks))


def test_refusals() -> None:
    stages = [StageCost(1.0, 2.0)] * 4
    with pytest.raises(InputError, match="unknown pipeline schedule 'gpip'; did you mean gpipe"):
        pipeline(stages, 8, "gpip")
    with pytest.raises(InputError, match="multiple of the stages"):
        pipeline(stages, 6, "interleaved", chunks=2)
    with pytest.raises(InputError, match="one chunk a stage"):
        pipeline(stages, 8, "1f1b", chunks=2)
    with pytest.raises(InputError, match="needs stages"):
        pipeline([], 8)
