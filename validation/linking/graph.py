"""The graph of one rank: host operators, device work, and what waits for what."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stablecast.frontends.traces.pytorch_et import EtOp, ExecutionTrace, link
from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import TraceEvents
from stablecast.validation.collectives import MeasuredCollective
from stablecast.validation.host_time import HostTime, blocking_calls, host_time
from stablecast.validation.linking.device import SLACK_S, Linked, Waits, Work, connect, device_work
from stablecast.validation.measured import measure

LEAST_SHARE: Final = 0.8
"""Share of operators that must be found in the Kineto trace; below it the two are of different runs."""

_LEAST_PAUSE_S: Final = 0.5e-6
_BEFORE_SYNC: Final = 64


@dataclass(frozen=True, slots=True)
class Item:
    """One node to be: an operator or a pause of the host, a kernel, or a collective.

    `op`: the node of the execution trace, of device work that of the operator that launched it, None for a pause.
    `deps`: positions of items before this one. `stream`: of the device, or the host's thread.
    """

    name: str
    on_host: bool
    start_s: float
    duration_s: float
    stream: int
    deps: tuple[int, ...]
    op: EtOp | None = None
    collective: MeasuredCollective | None = None
    nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RankGraph:
    """What was linked of one rank.

    `op_share`: of the execution trace's operators, those found in the Kineto trace; `work_share`: of the device work
    launched within their time, that which they launched. `edges`: kind -> number of dependencies. `contradicted`:
    dependencies between streams that the measured times contradict, which are left out. `span_s`: from the first item
    to the end of the last.
    """

    rank: int
    world: int
    items: tuple[Item, ...]
    op_share: float
    work_share: float
    edges: Mapping[str, int]
    contradicted: int

    @property
    def span_s(self) -> float:
        """Measured seconds from the first item to the end of the last."""
        return max(item.start_s + item.duration_s for item in self.items) - min(item.start_s for item in self.items)


def rank_graph(trace: ExecutionTrace, events: TraceEvents) -> RankGraph:
    """Link the two traces of a rank. Raises `InputError` where they are of different runs."""
    found = link(trace, events)
    if found.share < LEAST_SHARE:
        raise InputError(
            f"{trace.source} and {events.source} are of different runs: "
            f"of the host trace's operators {found.share:.0%} are in the Kineto trace",
            "give the two traces that one run wrote",
        )
    ops = {op.id: op for op in trace.ops}
    pairs = sorted((event, number) for number, event in found.event_of.items())
    linked = Linked(
        events,
        measure(events),
        [(ops[number], event) for event, number in pairs],
        ops,
        {event: ops[number] for event, number in pairs},
    )
    work, outside = device_work(linked)
    waits = connect(linked, work)
    items = _Assembly(linked, work, waits).run()
    return RankGraph(
        events.rank,
        _world(events, work),
        tuple(items),
        found.share,
        len(work) / max(len(work) + outside, 1),
        waits.counts,
        waits.contradicted,
    )


def _world(events: TraceEvents, work: Sequence[Work]) -> int:
    said: Any = events.metadata.get("distributedInfo") or {}
    return (
        int(said.get("world_size") or 0) or max((w.collective.group_size for w in work if w.collective), default=1) or 1
    )


class _Assembly:
    """Lays operators and device work out in order, with the dependencies of the host."""

    def __init__(self, linked: Linked, work: Sequence[Work], waits: Waits) -> None:
        self._linked, self._work, self._waits = linked, work, waits
        self._calls = blocking_calls(linked.events).tolist()
        self._items: list[Item] = []
        self._host_at: dict[int, int] = {}
        self._work_at: list[int] = [-1] * len(work)
        self._last_on: dict[int, int] = {}
        self._last_host = -1

    def run(self) -> list[Item]:
        time = self._host_time()
        pending = self._synchronised()
        order = [(self._linked.start_s(event), 0, n) for n, (_, event) in enumerate(self._linked.hosts)]
        order += [(entry.key, 1, n) for n, entry in enumerate(self._work)]
        for _, device, number in sorted(order):
            if device:
                self._device(number)
            else:
                self._host(number, float(time.own_s[number]), float(time.gap_s[number]), pending)
        return self._items

    def _host_time(self) -> HostTime:
        events = [event for _, event in self._linked.hosts]
        start = self._linked.events.start_s[events]
        spans = [(self._linked.start_s(call), self._linked.end_s(call)) for call in self._calls]
        return host_time(start, start + self._linked.events.duration_s[events], spans)

    def _synchronised(self) -> dict[int, list[tuple[float, list[int]]]]:
        """By thread, the end of each blocking call, the last one first, and the device work that it waited for."""
        keys = [entry.key for entry in self._work]
        found: dict[int, list[tuple[float, list[int]]]] = {}
        for call in reversed(self._calls):
            start, end = self._linked.start_s(call), self._linked.end_s(call)
            at = bisect_right(keys, start)
            last: dict[int, int] = {}
            for number in range(at - 1, max(at - _BEFORE_SYNC, 0) - 1, -1):
                last.setdefault(self._work[number].stream, number)
            chosen = [n for n in last.values() if start < self._work[n].end_s <= end + SLACK_S]
            if chosen:
                found.setdefault(self._linked.thread(call), []).append((end, chosen))
        return found

    def _host(self, number: int, own_s: float, gap_s: float, pending: dict[int, list[tuple[float, list[int]]]]) -> None:
        op, event = self._linked.hosts[number]
        thread, start = self._linked.thread(event), self._linked.start_s(event)
        deps = {self._last_on[thread]} if thread in self._last_on else set[int]()
        if deps:
            self._waits.count("thread")
        handed = self._handed_over(thread)
        if handed is not None:
            deps.add(handed)
            self._waits.count("between threads")
        waiting = pending.get(thread, [])
        while waiting and waiting[-1][0] <= start + SLACK_S:
            for earlier in waiting.pop()[1]:
                deps.add(self._work_at[earlier])
                self._waits.count("device to host")
        if gap_s >= _LEAST_PAUSE_S:
            at = self._add(Item("pause", True, start - gap_s, gap_s, thread, tuple(sorted(deps))))
            deps = {at}
        at = self._add(Item(op.name, True, start, own_s, thread, tuple(sorted(deps)), op))
        self._host_at[event] = at
        self._last_on[thread] = at
        self._last_host = at

    def _handed_over(self, thread: int) -> int | None:
        """The last operator of another thread, where the host was there since this thread's last one."""
        at = self._last_host
        return at if at > self._last_on.get(thread, -1) else None

    def _device(self, number: int) -> None:
        entry = self._work[number]
        deps = {self._work_at[earlier] for earlier in entry.deps}
        deps.add(self._host_at[entry.host])
        self._waits.count("host to device")
        self._work_at[number] = self._add(
            Item(
                entry.name,
                False,
                entry.start_s,
                entry.end_s - entry.start_s,
                entry.stream,
                tuple(sorted(deps)),
                entry.op,
                entry.collective,
                entry.nbytes,
            )
        )

    def _add(self, item: Item) -> int:
        self._items.append(item)
        return len(self._items) - 1
