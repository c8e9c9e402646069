"""Streams and events of a recorded PyTorch run, on the kernels that its calls became.

An event makes everything later on its stream wait for everything before it on the stream that recorded it. Calls that
launch nothing hand what they wait for on to the next one on their stream.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from stablecast.ir.device_program import P2P, Branch, Collective, Kernel, Loop
from stablecast.ir.schedule import Schedule

_Node = TypeVar("_Node", bound=Kernel | Collective | P2P | Loop | Branch)


def as_recorded(nodes: Sequence[_Node], launches: Sequence[int], schedule: Schedule) -> list[_Node]:
    """`nodes` with streams and events. `launches`: number of the call behind each node, -1 for none."""
    node_of = {launch: index for index, launch in enumerate(launches) if launch >= 0}
    ends = _last_nodes(node_of, schedule)
    waits = _waits(node_of, schedule)
    found: list[_Node] = []
    for index, (node, launch) in enumerate(zip(nodes, launches, strict=True)):
        events = {ends[event] for event in waits.get(launch, ()) if ends.get(event, index) < index}
        after = tuple(sorted({*node.after, *events} - set(node.deps)))
        found.append(_on_stream(replace(node, after=after), schedule.stream_of.get(launch, 0)))
    return found


def _on_stream(node: _Node, stream: int) -> _Node:
    if isinstance(node, Collective):
        return replace(node, stream=stream, asynchronous=stream != 0)
    return replace(node, stream=stream) if isinstance(node, Kernel | P2P) else node


def _last_nodes(node_of: dict[int, int], schedule: Schedule) -> dict[int, int]:
    """For each call that an event recorded: the last node at or before it on its stream."""
    asked = sorted({event for befores in schedule.after.values() for event in befores})
    order = sorted(node_of)
    last: dict[int, int] = {}
    found: dict[int, int] = {}
    at = 0
    for event in asked:
        while at < len(order) and order[at] <= event:
            last[schedule.stream_of.get(order[at], 0)] = node_of[order[at]]
            at += 1
        stream = schedule.stream_of.get(event, 0)
        if stream in last:
            found[event] = last[stream]
    return found


def _waits(node_of: dict[int, int], schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """What each call with a node waits for: its own events, and those of calls before it that launch nothing."""
    pending: dict[int, list[int]] = {}
    found: dict[int, tuple[int, ...]] = {}
    for launch in sorted({*node_of, *schedule.after}):
        stream = schedule.stream_of.get(launch, 0)
        pending.setdefault(stream, []).extend(schedule.after.get(launch, ()))
        if launch in node_of:
            found[launch] = tuple(dict.fromkeys(pending.pop(stream)))
    return found
