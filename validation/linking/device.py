"""The device's side of a rank: work in the order of its launch, and the waits within and between streams."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from stablecast.frontends.traces.pytorch_et import EtOp
from stablecast.ir.trace_events import TraceEvents
from stablecast.validation.collectives import MeasuredCollective, collectives
from stablecast.validation.linking.tensors import read_storages, sequence_of, waited_for, written_storages
from stablecast.validation.measured import MeasuredRun

SLACK_S: Final = 1.5e-6
"""Kineto writes whole microseconds."""

_AROUND: Final = 3
"""Operators around a collective that may name its tensors and its number."""


@dataclass(frozen=True, slots=True)
class Linked:
    """A rank's two traces, linked. `hosts`: operators and their events in order of start; `of_event`: the reverse."""

    events: TraceEvents
    run: MeasuredRun
    hosts: Sequence[tuple[EtOp, int]]
    ops: Mapping[int, EtOp]
    of_event: Mapping[int, EtOp]

    def start_s(self, event: int) -> float:
        return float(self.events.start_s[event])

    def end_s(self, event: int) -> float:
        return float(self.events.start_s[event] + self.events.duration_s[event])

    def thread(self, event: int) -> int:
        return int(self.events.stream[event])

    def launching(self, host: int) -> int:
        """The event of the innermost linked operator around host event `host`, -1 without one."""
        return next((index for index in self.run.launches.above(host) if index in self.of_event), -1)


@dataclass(slots=True)
class Work:
    """Device work: launched at `key` on `thread` by the operator of event `host`; `deps`: earlier work by number."""

    name: str
    key: float
    start_s: float
    end_s: float
    stream: int
    thread: int
    host: int
    op: EtOp
    collective: MeasuredCollective | None
    nbytes: float
    deps: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class Waits:
    """Dependencies among device work by kind, and those between streams that the measured times contradict."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    contradicted: int = 0

    def count(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1


def device_work(linked: Linked) -> tuple[list[Work], int]:
    """Work that linked operators launched, in order of launch, and how much within their time they did not."""
    run, events = linked.run, linked.events
    talk = {entry.position: entry for entry in collectives(run)}
    first = min((linked.start_s(event) for _, event in linked.hosts), default=0.0)
    last = max((linked.end_s(event) for _, event in linked.hosts), default=0.0)
    found: list[Work] = []
    outside = 0
    for position, event in enumerate(run.work.tolist()):
        launch = int(run.launches.launch[event])
        host = linked.launching(launch)
        key = linked.start_s(launch if launch >= 0 else event)
        if host < 0:
            outside += first <= key <= last
            continue
        found.append(
            Work(
                run.name(position),
                key,
                linked.start_s(event),
                linked.end_s(event),
                linked.thread(event),
                linked.thread(launch),
                host,
                linked.of_event[host],
                talk.get(position),
                float(events.nbytes[event]),
            )
        )
    found.sort(key=lambda entry: (entry.key, entry.start_s))
    return found, outside


def connect(linked: Linked, work: Sequence[Work]) -> Waits:
    """Fill in `deps`: the order within each stream, and the waits between streams.

    Between streams, a collective follows what its thread launched before it; what a thread launches after it has waited
    for a collective follows that; and whoever reads a tensor follows its last writer. Each is kept only where the
    measured times allow it, and only where it does not follow from others.
    """
    return _Connecting(linked, work).run()


class _Connecting:
    def __init__(self, linked: Linked, work: Sequence[Work]) -> None:
        self._linked, self._work = linked, work
        self._seen: dict[int, dict[int, int]] = {}
        self._waits = Waits()
        self._awaited = self._awaited_before()

    def run(self) -> Waits:
        last_on: dict[int, int] = {}
        current: dict[int, int] = {}
        writers: dict[int, int] = {}
        for number, entry in enumerate(self._work):
            if entry.stream in last_on:
                entry.deps.add(last_on[entry.stream])
                self._waits.count("stream")
            around = self._around(entry)
            for kind, earlier in self._candidates(number, around, current, writers):
                self._wait(kind, earlier, entry)
            last_on[entry.stream] = number
            self._seen.setdefault(entry.stream, {})[entry.stream] = number
            if entry.collective is None:
                current[entry.thread] = number
            writers.update(dict.fromkeys(written_storages(around), number))
        return self._waits

    def _around(self, entry: Work) -> list[EtOp]:
        """The operator of the work and, of a collective, those around it."""
        found: list[EtOp] = []
        op: EtOp | None = entry.op
        while op is not None and len(found) < (_AROUND if entry.collective else 1):
            found.append(op)
            op = self._linked.ops.get(op.parent)
        return found

    def _candidates(
        self, number: int, around: Sequence[EtOp], current: Mapping[int, int], writers: Mapping[int, int]
    ) -> Iterator[tuple[str, int]]:
        entry = self._work[number]
        if entry.collective is not None and entry.thread in current:
            yield "launch of a collective", current[entry.thread]
        for earlier in self._awaited.get(number, ()):
            yield "wait for a collective", earlier
        for storage in sorted(read_storages(around)):
            if storage in writers:
                yield "tensor", writers[storage]

    def _wait(self, kind: str, earlier: int, entry: Work) -> None:
        before = self._work[earlier]
        seen = self._seen.setdefault(entry.stream, {})
        if before.stream == entry.stream or seen.get(before.stream, -1) >= earlier:
            return
        if before.end_s > entry.start_s + SLACK_S:
            self._waits.contradicted += 1
            return
        entry.deps.add(earlier)
        self._waits.count(f"between streams, {kind}")
        seen[before.stream] = earlier

    def _awaited_before(self) -> dict[int, list[int]]:
        """By work, the collectives that its thread waited for just before launching it."""
        sent: dict[int, int] = {}
        for number, entry in enumerate(self._work):
            if entry.collective is not None:
                numbers = (sequence_of(op) for op in self._around(entry))
                sent.update({sequence: number for sequence in numbers if sequence is not None})
        plain = sorted((entry.thread, entry.key, n) for n, entry in enumerate(self._work) if entry.collective is None)
        found: dict[int, list[int]] = {}
        for op, event in self._linked.hosts:
            sequence = waited_for(op)
            if sequence not in sent:
                continue
            thread = self._linked.thread(event)
            at = bisect_left(plain, (thread, self._linked.start_s(event), -1))
            if at < len(plain) and plain[at][0] == thread:
                found.setdefault(plain[at][2], []).append(sent[sequence])
        return found
