"""Streams and events of a recorded run on kernels."""

from stablecast.ir.device_program import Collective, Kernel
from stablecast.ir.groups import all_devices
from stablecast.ir.schedule import Schedule
from stablecast.lowering.recorded import as_recorded

GATHER = Collective("all_gather", all_devices(8), 1, 8)


def test_streams_and_events() -> None:
    """A gather on stream 2 after a copy on stream 1; the main stream waits for it by a call that launches nothing."""
    nodes = [Kernel(0), Kernel(1), GATHER, Kernel(2), Kernel(3, deps=(2,))]
    launches = [0, 2, 3, 5, 6]
    schedule = Schedule({2: 1, 3: 2}, {2: (0,), 3: (2,), 4: (3,)})
    made = as_recorded(nodes, launches, schedule)
    assert [node.stream for node in made] == [0, 1, 2, 0, 0]
    assert [node.after for node in made] == [(), (0,), (1,), (2,), ()]
    assert isinstance(made[2], Collective)
    assert made[2].asynchronous


def test_an_event_behind_a_call_without_a_kernel() -> None:
    """What waits for a view waits for the last kernel before it on its stream; data dependencies are not said twice."""
    nodes = [Kernel(0), Kernel(1), GATHER]
    made = as_recorded(
        [nodes[0], nodes[1], Collective("all_gather", all_devices(8), 1, 8, deps=(1,))],
        [0, 1, 9],
        Schedule({9: 3}, {9: (1, 4)}),
    )
    assert made[2].after == ()
    made = as_recorded(nodes, [0, 1, 9], Schedule({9: 3}, {9: (4,)}))
    assert made[2].after == (1,)


def test_nothing_recorded_on_the_main_stream() -> None:
    nodes = [Kernel(0), GATHER, Kernel(1)]
    made = as_recorded(nodes, [-1, 0, 1], Schedule())
    assert isinstance(made[1], Collective)
    assert not made[1].asynchronous
    assert [node.after for node in made] == [(), (), ()]
