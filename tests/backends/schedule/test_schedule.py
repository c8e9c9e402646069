"""Streams side by side: every time worked out by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stablecast.backends.astrasim import ReferenceModel
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.device import System
from stablecast.backends.estimates import Estimates
from stablecast.backends.schedule import (
    Contention,
    RoleInput,
    ScheduleSettings,
    Slice,
    Timeline,
    schedule,
    schedule_roles,
)
from stablecast.backends.schedule.perfetto import perfetto_bytes
from stablecast.ir.device_program import P2P, Branch, Collective, DeviceProgram, Kernel, Loop, Node
from stablecast.ir.errors import InputError
from stablecast.ir.groups import over_axes
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.ir.types import Location, Symbol
from stablecast.ir.work import SymbolicWork

MS = 1e-3
GROUPS = over_axes("mesh", [("data", 8)], ["data"])
ROWS = 12


@pytest.fixture(scope="module")
def system() -> System:
    return Catalogue().resolve("h100-sxm:8")


@pytest.fixture(scope="module")
def comm_s(system: System) -> float:
    """Seconds of one of the all-reduces below."""
    return CollectiveModel(system).estimate(reduce_all()).time_s


def costs(bound: str = "compute") -> Estimates:
    """Row r takes r ms."""
    times = np.arange(ROWS) * MS
    return Estimates(times, times * 0.5, times * 2.0, np.full(ROWS, "analytical"), np.full(ROWS, bound))


def kernel(millis: int, *deps: int, scope: str = "", after: tuple[int, ...] = (), stream: int = 0) -> Kernel:
    return Kernel(millis, deps=deps, scope=scope, after=after, stream=stream, location=Location(scope, "m.py", 3))


def reduce_all(*deps: int, asynchronous: bool = True, stream: int = 1, scope: str = "") -> Collective:
    return Collective(
        "all_reduce", GROUPS, 1 << 30, 1 << 30, deps=deps, asynchronous=asynchronous, stream=stream, scope=scope
    )


def program(*body: Node, name: str = "step") -> DeviceProgram:
    table = KernelTable(tuple(KernelRow(elems=number) for number in range(ROWS)), np.ones(ROWS))
    return DeviceProgram(name, tuple(body), table, SymbolicWork())


def test_a_hidden_collective(system: System, comm_s: float) -> None:
    """A kernel of 10 ms beside an all-reduce of less: only what reads the result waits, and nothing is exposed."""
    assert 2 * MS < comm_s < 9 * MS
    step = schedule(program(kernel(1), reduce_all(0), kernel(10, 0), kernel(2, 1, 2)), costs(), system)
    assert step.time_s == pytest.approx(13 * MS)
    assert (step.low_s, step.high_s) == pytest.approx((6.5 * MS, 26 * MS))
    assert step.compute_s == pytest.approx(13 * MS)
    assert step.exposed_s == pytest.approx(0.0, abs=1e-12)
    assert step.idle_s == 0.0
    assert isinstance(step, Timeline)


def test_an_exposed_collective(system: System, comm_s: float) -> None:
    step = schedule(program(kernel(1), reduce_all(0), kernel(2, 0), kernel(1, 1, 2)), costs(), system)
    assert step.time_s == pytest.approx(2 * MS + comm_s)
    assert step.exposed_s == pytest.approx(comm_s - 2 * MS)
    assert step.exposed_by_axis_s == pytest.approx({"data": comm_s - 2 * MS})
    assert step.bound_s["communication"] == pytest.approx(step.exposed_s)
    assert [run.exposed_s for run in step.collectives] == pytest.approx([comm_s - 2 * MS])
    assert sum(step.bound_s.values()) == pytest.approx(step.time_s)


def test_a_synchronous_collective_holds_the_kernels_up(system: System, comm_s: float) -> None:
    body = (kernel(1), reduce_all(0, asynchronous=False), kernel(2, 0))
    step = schedule(program(*body), costs(), system)
    assert step.time_s == pytest.approx(3 * MS + comm_s)
    assert step.exposed_s == pytest.approx(comm_s)
    free = schedule(program(*body), costs(), system, settings=ScheduleSettings(overlap="all"))
    assert free.time_s == pytest.approx(1 * MS + comm_s)


def test_no_overlap_is_a_chain(system: System, comm_s: float) -> None:
    body = (kernel(1), reduce_all(0), Loop((kernel(2), reduce_all(0)), 7), kernel(3))
    step = schedule(program(*body), costs(), system, settings=ScheduleSettings(overlap="none"))
    assert step.time_s == pytest.approx(18 * MS + 8 * comm_s)
    assert step.compute_s == pytest.approx(18 * MS)
    assert step.exposed_s == pytest.approx(8 * comm_s)
    assert [run.count for run in step.kernels] == [1, 7, 1]
    assert [run.count for run in step.collectives] == [1, 7]
    assert sum(step.critical_s.values()) == pytest.approx(step.time_s)


def test_asynchronous_collectives_start_in_the_order_of_issue(system: System, comm_s: float) -> None:
    """What is issued after a kernel starts after it, unless streams are told to start on their own."""
    body = (kernel(3), reduce_all(), kernel(1, 1))
    assert schedule(program(*body), costs(), system).time_s == pytest.approx(4 * MS + comm_s)
    free = schedule(program(*body), costs(), system, settings=ScheduleSettings(starts="free"))
    assert free.time_s == pytest.approx(max(3 * MS, comm_s) + 1 * MS)


def test_streams_keep_their_order(system: System, comm_s: float) -> None:
    """Two collectives of one axis follow each other; on streams of their own they run at once."""
    body = (reduce_all(stream=1), reduce_all(stream=2), kernel(1, 0, 1))
    assert schedule(program(*body), costs(), system).time_s == pytest.approx(1 * MS + 2 * comm_s)
    apart = schedule(program(*body), costs(), system, settings=ScheduleSettings(comm_streams="program"))
    assert apart.time_s == pytest.approx(1 * MS + comm_s)
    assert apart.exposed_s == pytest.approx(comm_s)
    copies = schedule(program(kernel(3), kernel(5, stream=2), kernel(1, 1)), costs(), system)
    assert copies.time_s == pytest.approx(6 * MS)


def test_an_event_without_data(system: System) -> None:
    ordered = schedule(program(kernel(4, stream=2), kernel(3, after=(0,))), costs(), system)
    assert ordered.time_s == pytest.approx(7 * MS)


@pytest.mark.parametrize("trips", [0, 1, 2, 3, 4, 96])
def test_loops_in_steady_state(trips: int, system: System, comm_s: float) -> None:
    """A trip of a barrier loop ends when its collective has; counts and sums are those of all trips."""
    body = (kernel(1), Loop((kernel(1), reduce_all(0), kernel(2, 0)), trips, deps=(0,)), kernel(3, 1))
    step = schedule(program(*body), costs(), system)
    assert step.time_s == pytest.approx(4 * MS + trips * (1 * MS + comm_s))
    assert step.compute_s == pytest.approx(4 * MS + trips * 3 * MS)
    assert step.exposed_s == pytest.approx(trips * (comm_s - 2 * MS))
    assert sum(run.count for run in step.kernels) == pytest.approx(2 + 2 * trips)
    assert sum(step.critical_s.values()) == pytest.approx(step.time_s)


def test_collectives_carried_from_trip_to_trip(system: System, comm_s: float) -> None:
    """What nothing in the trip reads goes on beside the next: only the last one is seen."""
    body = (Loop((kernel(5), reduce_all(0)), 50), kernel(1, 0))
    step = schedule(program(*body), costs(), system, settings=ScheduleSettings(loops="carry"))
    assert step.time_s == pytest.approx(51 * 5 * MS - 4 * MS + comm_s)
    assert schedule(program(*body), costs(), system).time_s == pytest.approx(50 * (5 * MS + comm_s) + 1 * MS)


def test_open_trip_counts_and_branches(system: System) -> None:
    trips = Symbol("n", default=4)
    body = (
        Loop((kernel(2),), trips),
        Branch(((kernel(1),), (kernel(6),))),
        Branch(((kernel(2),), (kernel(4),)), (0.5, 0.5)),
    )
    assert schedule(program(*body), costs(), system).time_s == pytest.approx((8 + 6 + 3) * MS)
    step = schedule(program(*body), costs(), system, {"n": 10})
    assert step.time_s == pytest.approx((20 + 6 + 3) * MS)
    assert step.compute_s == pytest.approx(step.time_s)


def test_contention(system: System, comm_s: float) -> None:
    """While it runs, a collective takes a share s of a kernel of 10 ms, which ends s x comm later."""
    body = (reduce_all(), kernel(10))
    taken = ScheduleSettings(contention=Contention(cores_share=0.25, memory_passes=0.0))
    slowed = schedule(program(*body), costs("compute"), system, settings=taken)
    assert slowed.time_s == pytest.approx(10 * MS + 0.25 * comm_s)
    assert schedule(program(*body), costs("memory"), system, settings=taken).time_s == pytest.approx(10 * MS)
    memory = Contention(cores_share=0.0, memory_passes=3.0)
    share = memory.of_memory("all_reduce", 1 << 30, comm_s, system.device)
    assert share == pytest.approx(3 * (1 << 30) / comm_s / system.device.hbm_bytes_per_s.value)
    slowed = schedule(program(*body), costs("memory"), system, settings=ScheduleSettings(contention=memory))
    assert slowed.time_s == pytest.approx(10 * MS + share * comm_s)
    assert any("assumption" in text for text in slowed.assumptions)
    assert memory.of_memory("all_gather", 1 << 30, comm_s, system.device) == pytest.approx(share * 2 / 3)
    assert memory.of_memory("load", 1 << 30, comm_s, system.device) == pytest.approx(share / 3)


def test_collectives_share_links(system: System, comm_s: float) -> None:
    """Two at once take twice as long; one of two that begins t later ends when both messages are through."""
    apart = ScheduleSettings(comm_streams="program", contention=Contention(0.0, 0.0))
    body = (reduce_all(stream=1), reduce_all(stream=2), kernel(1, 0, 1))
    assert schedule(program(*body), costs(), system, settings=apart).time_s == pytest.approx(1 * MS + 2 * comm_s)
    late = (reduce_all(stream=1), kernel(1), reduce_all(1, stream=2), kernel(1, 0), kernel(1, 2))
    step = schedule(program(*late), costs(), system, settings=apart)
    first = 1 * MS + 2 * (comm_s - 1 * MS)
    assert [one.end_s for one in step.slices if one.name == "all_reduce"] == pytest.approx([first, 2 * comm_s])
    assert step.time_s == pytest.approx(max(2 * comm_s, first + 1 * MS) + 1 * MS)
    free = ScheduleSettings(comm_streams="program", contention=Contention(0.0, 0.0, share_links=False))
    assert schedule(program(*body), costs(), system, settings=free).time_s == pytest.approx(1 * MS + comm_s)


def test_the_busiest_receiver_of_an_all_to_all(system: System) -> None:
    """Twice the mean takes as long as twice the message; other collectives do not care."""
    exchange = Collective("all_to_all", GROUPS, 1 << 28, 1 << 28)
    uneven = ScheduleSettings(incast=2.0)
    doubled = replace(exchange, operand_bytes=1 << 29, result_bytes=1 << 29)
    even = schedule(program(doubled), costs(), system).time_s
    assert schedule(program(exchange), costs(), system, settings=uneven).time_s == pytest.approx(even)
    assert schedule(program(exchange), costs(), system).time_s < even
    reduce = program(reduce_all())
    assert schedule(reduce, costs(), system, settings=uneven).time_s == schedule(reduce, costs(), system).time_s


def test_contention_that_nothing_meets_changes_nothing(system: System) -> None:
    body = (kernel(1), reduce_all(0), kernel(2, 1), Loop((kernel(3), reduce_all(0), kernel(1, 1)), 9, deps=(2,)))
    plain = schedule(program(*body), costs(), system)
    slowed = schedule(program(*body), costs(), system, settings=ScheduleSettings(contention=Contention()))
    assert slowed.time_s == pytest.approx(plain.time_s)
    assert slowed.exposed_s == pytest.approx(plain.exposed_s)
    assert slowed.critical_s == pytest.approx(plain.critical_s)


def test_the_critical_path_by_scope(system: System, comm_s: float) -> None:
    body = (
        kernel(1, scope="jit(f)/a/dot"),
        reduce_all(0, scope="jit(f)/sync/psum"),
        kernel(2, 0, scope="jit(f)/b/dot"),
        kernel(3, 1, 2, scope="jit(f)/c/dot"),
    )
    step = schedule(program(*body), costs(), system)
    assert step.critical_s == pytest.approx({"a": 1 * MS, "sync": comm_s, "c": 3 * MS})


def stage(*body: Node, at: int, speed: float = 1.0) -> RoleInput:
    return RoleInput(f"stage{at}", program(*body), costs(), {"stage": at}, speed)


def transfer(direction: str, shift: int, *deps: int, tag: int = 0) -> P2P:
    return P2P(direction, "stage", shift, tag, 1 << 20, deps=deps)


def test_roles_wait_for_each_other(system: System) -> None:
    first = stage(kernel(4), transfer("send", 1, 0), kernel(1, 0), at=0)
    second = stage(transfer("recv", -1), kernel(2, 0), at=1)
    send_s = CollectiveModel(system).p2p(transfer("send", 1)).time_s
    steps = schedule_roles([first, second], system)
    end = 4 * MS + send_s + 2 * MS
    assert steps["stage0"].time_s == steps["stage1"].time_s == pytest.approx(end)
    assert steps["stage0"].compute_s == pytest.approx(5 * MS)
    assert steps["stage0"].idle_s == pytest.approx(end - 5 * MS)
    assert steps["stage1"].critical_s == pytest.approx(
        {"stage0: m.py:3": 4 * MS, "stage0: send": send_s, "stage1: m.py:3": 2 * MS}
    )
    slow = schedule_roles([replace(first, speed=0.5), second], system)
    assert slow["stage1"].time_s == pytest.approx(end + 4 * MS)
    contended = schedule_roles([first, second], system, settings=ScheduleSettings(contention=Contention(0.0, 0.0)))
    assert contended["stage1"].time_s == pytest.approx(end)


@pytest.mark.parametrize("contention", [None, Contention(0.0, 0.0)])
def test_a_straggler_holds_the_others_up(contention: Contention | None, system: System, comm_s: float) -> None:
    """All members begin a collective together; what the fast ones wait for is idle, not communication."""
    body = (kernel(4, scope="a"), reduce_all(0, asynchronous=False), kernel(1, 1, scope="b"))
    roles = [RoleInput("others", program(*body), costs()), RoleInput("slow", program(*body), costs(), speed=0.5)]
    steps = schedule_roles(roles, system, settings=ScheduleSettings(contention=contention))
    assert steps["others"].time_s == pytest.approx(8 * MS + comm_s + 2 * MS)
    assert steps["others"].exposed_s == pytest.approx(comm_s)
    assert steps["others"].idle_s == pytest.approx(5 * MS)
    assert steps["slow"].idle_s == pytest.approx(0.0, abs=1e-12)
    assert steps["slow"].critical_s == pytest.approx({"slow: a": 8 * MS, "slow: all_reduce": comm_s, "slow: b": 2 * MS})
    apart = [replace(role, coords={"stage": at}) for at, role in enumerate(roles)]
    alone = schedule_roles(apart, system, settings=ScheduleSettings(contention=contention))
    assert alone["others"].idle_s == pytest.approx(5 * MS)
    ranks = [replace(role, ranks=(at,)) for at, role in enumerate(roles)]
    assert schedule_roles(ranks, system)["others"].idle_s == pytest.approx(5 * MS)


def test_a_straggler_behind_a_loop(system: System, comm_s: float) -> None:
    body = (Loop((kernel(2), reduce_all(0, asynchronous=False)), 10),)
    roles = [RoleInput("others", program(*body), costs()), RoleInput("slow", program(*body), costs(), speed=0.5)]
    assert schedule_roles(roles, system)["others"].time_s == pytest.approx(10 * (4 * MS + comm_s))


def test_roles_that_never_meet(system: System) -> None:
    with pytest.raises(InputError, match="role stage1: receive 0 of tag 5 along stage has no send"):
        schedule_roles([stage(kernel(1), at=0), stage(transfer("recv", -1, tag=5), at=1)], system)
    crossed = [
        stage(transfer("recv", 1, tag=1), transfer("send", 1, 0), at=0),
        stage(transfer("recv", -1), transfer("send", -1, 0, tag=1), at=1),
    ]
    with pytest.raises(InputError, match="waits for a role that waits for it"):
        schedule_roles(crossed, system)
    with pytest.raises(InputError, match="same name"):
        schedule_roles([stage(kernel(1), at=0), stage(kernel(1), at=0)], system)


def test_slices_and_perfetto(system: System, tmp_path: Path) -> None:
    pytest.importorskip("perfetto", reason="the perfetto package is not installed")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    body = (kernel(1, scope="jit(f)/a/dot"), reduce_all(0), Loop((kernel(2),), 5))
    step = schedule(program(*body), costs(), system)
    assert [(one.stream, one.name, one.runs) for one in step.slices][:2] == [
        ("compute", "elementwise", 1.0),
        ("communication data", "all_reduce", 1.0),
    ]
    assert step.slices[-1].runs == 3
    step.to_perfetto(tmp_path / "x.pftrace")
    trace = Trace()
    trace.ParseFromString((tmp_path / "x.pftrace").read_bytes())
    names = [packet.track_descriptor.name for packet in trace.packet if packet.track_descriptor.parent_uuid]
    assert names == ["compute", "communication data"]
    begins = [packet for packet in trace.packet if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN]
    ends = [packet for packet in trace.packet if packet.track_event.type == TrackEvent.TYPE_SLICE_END]
    assert len(begins) == len(ends) == 5
    first = {note.name: note for note in begins[0].track_event.debug_annotations}
    assert first["scope"].string_value == "jit(f)/a/dot"
    assert first["source"].string_value == "m.py:3"
    assert [path.name for path in tmp_path.iterdir()] == ["x.pftrace"]


def test_perfetto_of_nothing_and_into_nowhere(tmp_path: Path, system: System) -> None:
    pytest.importorskip("perfetto", reason="the perfetto package is not installed")
    assert perfetto_bytes([])
    assert perfetto_bytes([Slice("r", "s", "n", 0.0, 1.0, "")])
    with pytest.raises(InputError, match="No such file"):
        schedule(program(kernel(1)), costs(), system).to_perfetto(tmp_path / "absent" / "x")


def test_collectives_of_the_reference(system: System) -> None:
    reference = ReferenceModel(system).estimate(reduce_all()).time_s
    settings = ScheduleSettings(collectives="astra-sim")
    step = schedule(program(kernel(1), reduce_all(0), kernel(1, 1)), costs(), system, settings=settings)
    assert step.time_s == pytest.approx(2 * MS + reference)
    assert any("ASTRA-sim" in text for text in step.assumptions)


def test_an_algorithm_by_name(system: System) -> None:
    """Those that can go by it do; a permutation goes as ever."""
    permute = Collective("collective_permute", GROUPS, 1 << 28, 1 << 28)
    tree = ScheduleSettings(algorithm="double-binary-tree")
    step = schedule(program(reduce_all(asynchronous=False), permute), costs(), system, settings=tree)
    assert {run.node.kind: run.algorithm for run in step.collectives if isinstance(run.node, Collective)} == {
        "all_reduce": "double-binary-tree",
        "collective_permute": "direct",
    }
    named = CollectiveModel(system, "double-binary-tree").estimate(reduce_all()).time_s
    plain = CollectiveModel(system).estimate(permute).time_s
    assert step.time_s == pytest.approx(named + plain)
    with pytest.raises(InputError, match="unknown algorithm 'treee'"):
        schedule(program(reduce_all()), costs(), system, settings=ScheduleSettings(algorithm="treee"))


def test_an_empty_program(system: System) -> None:
    step = schedule(program(), costs(), system)
    assert (step.time_s, step.exposed_s, step.idle_s, step.kernels) == (0.0, 0.0, 0.0, ())
