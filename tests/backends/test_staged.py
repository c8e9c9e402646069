"""A program with loops over micro-batches under pipeline schedules, against the closed forms."""

from dataclasses import replace

import numpy as np
import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import System
from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.backends.registry import Choice
from stablecast.backends.staged import PipelinePlan, predict_pipeline
from stablecast.ir.attributes import Shift
from stablecast.ir.device_program import Buffers, Collective, DeviceProgram, Kernel, Loop, MicroBatches, Node
from stablecast.ir.errors import InputError
from stablecast.ir.groups import over_axes
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable
from stablecast.ir.program import Mesh
from stablecast.ir.work import SymbolicWork

STAGES, BATCHES = 4, 8
TRIPS = BATCHES + STAGES - 1
MESH = Mesh("mesh", (("stage", STAGES),))
GROUPS = over_axes("mesh", MESH.axes, ["stage"])
SETTINGS = Settings(Choice(), {})
MB = 2**20


def product(size: int) -> KernelRow:
    """A square product in bf16."""
    nbytes = size * size * 2.0
    return KernelRow(
        KernelClass.MATMUL,
        "bf16",
        m=size,
        n=size,
        k=size,
        matmul_flops=2.0 * size**3,
        bytes_read=2 * nbytes,
        bytes_written=nbytes,
    )


TABLE = KernelTable(
    (product(2048), product(3072), KernelRow(elems=1 << 20, bytes_read=4e6, bytes_written=4e6)), np.ones(3)
)


def hand_on(by: int) -> Collective:
    return Collective("collective_permute", GROUPS, MB, MB, shift=Shift("stage", by, False))


def passing(by: int, count: int = BATCHES) -> MicroBatches:
    return MicroBatches("stage", STAGES, by, count=count)


def program(count: int = BATCHES) -> DeviceProgram:
    body: tuple[Node, ...] = (
        Kernel(2, ahead=True, held_bytes=TRIPS * MB),
        Loop((hand_on(1), Kernel(0, deps=(0,))), TRIPS, deps=(0,), micro_batches=passing(1, count)),
        Loop((hand_on(-1), Kernel(1, deps=(0,))), TRIPS, deps=(0, 1), micro_batches=passing(-1, count)),
        Kernel(2, deps=(2,)),
    )
    buffers = Buffers(temp_bytes=100 * MB)
    return DeviceProgram("step", body, TABLE, SymbolicWork(), STAGES, (MESH,), buffers=buffers, stage_axis="stage")


@pytest.fixture(scope="module")
def system() -> System:
    return Catalogue().resolve("h100-sxm:4")


@pytest.fixture(scope="module")
def outside_s(system: System) -> float:
    """Seconds of the kernels that are not in the loops."""
    alone = replace(program(), body=(Kernel(2), Kernel(2)))
    return predict_device_program(alone, system, SETTINGS, "").step_time_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_the_step_is_that_of_the_closed_form(schedule: str, system: System, outside_s: float) -> None:
    made = predict_pipeline(program(), system, SETTINGS, "", PipelinePlan(schedule, 2))
    held = made.pipeline
    f, b, w, send = (held[name] for name in ("forward_s", "backward_s", "weight_s", "send_s"))
    assert w == pytest.approx(b / 2)
    chunks = 2 if schedule == "interleaved" else 1
    bubble = {"interleaved": (f + b) / 2, "zero-bubble": f + b - 2 * w}.get(schedule, f + b) * (STAGES - 1)
    closed = outside_s + BATCHES * (f + b) + bubble
    hops = 2 * (BATCHES + STAGES) * chunks
    assert closed - 1e-9 <= made.step_time_s <= closed + hops * send
    if schedule == "gpipe":
        assert made.step_time_s == pytest.approx(closed + 2 * (STAGES - 1) * send)
    assert made.idle_s == pytest.approx(held["bubble"] * held["step_s"])
    assert made.bubble == pytest.approx(made.idle_s / made.step_time_s)
    assert made.step_time_low_s < made.step_time_s < made.step_time_high_s
    assert len(made.roles) == STAGES
    assert {entry.role for entry in made.timelines[0].slices} == {f"stage {number}" for number in range(STAGES)}


def test_work_is_that_of_micro_batches(system: System) -> None:
    made = predict_pipeline(program(), system, SETTINGS, "", PipelinePlan("gpipe"))
    assert made.work.matmul_flops == BATCHES * (2.0 * 2048**3 + 2.0 * 3072**3)
    assert [kernel.count for kernel in made.kernels if kernel.klass == "matmul"] == [BATCHES, BATCHES]


def test_memory_follows_micro_batches_in_flight(system: System) -> None:
    """GPipe keeps all 8, 1F1B as many as stages follow; the program's loop keeps its 11 trips."""
    every = predict_pipeline(program(), system, SETTINGS, "", PipelinePlan("gpipe"))
    few = predict_pipeline(program(), system, SETTINGS, "", PipelinePlan("1f1b"))
    assert every.pipeline["in_flight"] == [8, 8, 8, 8]
    assert few.pipeline["in_flight"] == [4, 3, 2, 1]
    assert every.peak_memory_bytes == (100 - (TRIPS - 8)) * MB
    assert [role.peak_memory_bytes for role in few.roles] == [(100 - (TRIPS - held)) * MB for held in (4, 3, 2, 1)]


def test_a_slow_stage_decides(system: System, outside_s: float) -> None:
    plain = predict_pipeline(program(), system, SETTINGS, "", PipelinePlan("1f1b"))
    slow = predict_pipeline(program(), system, SETTINGS, "", PipelinePlan("1f1b", speeds={2: 0.5}))
    cost = plain.pipeline["forward_s"] + plain.pipeline["backward_s"]
    assert slow.step_time_s > plain.step_time_s
    assert slow.step_time_s >= outside_s + (2 * BATCHES + 2) * cost
    assert [role.speed for role in slow.roles] == [1.0, 1.0, 0.5, 1.0]
    assert slow.roles[2].idle_s < slow.roles[0].idle_s


def test_what_has_no_pipeline(system: System) -> None:
    bare = replace(program(), body=(Kernel(0),))
    with pytest.raises(InputError, match="has no pipeline"):
        predict_pipeline(bare, system, SETTINGS, "", PipelinePlan("1f1b"))
    with pytest.raises(InputError, match="cannot be told"):
        predict_pipeline(program(count=0), system, SETTINGS, "", PipelinePlan("1f1b"))
    with pytest.raises(InputError, match="unknown pipeline schedule '1f1c'"):
        predict_pipeline(program(), system, SETTINGS, "", PipelinePlan("1f1c"))
