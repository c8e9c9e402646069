"""Streams in time where communication slows kernels and other communication, event by event as rates change."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from stablecast.backends.schedule.flat import Flat, Kind
from stablecast.backends.schedule.meeting import Meetings
from stablecast.backends.schedule.play import Played

Shares = Callable[[int, int], tuple[float, float]]
"""(role, communication node) -> shares of the cores and of the memory rate that it takes while it runs."""
Bound = Callable[[int, int], str]
"""(role, kernel node) -> what limits it: `compute`, `memory` or something that communication does not touch."""

Links = Callable[[int, int], tuple[str, ...]]
"""(role, communication node) -> the network dimensions that it uses."""

_LEAST_RATE = 0.1


@dataclass(slots=True)
class _Running:
    """A node under way: seconds of undisturbed work left at `since`, its rate, and which of its end events counts."""

    left: float
    since: float
    rate: float
    version: int = 0


@dataclass(slots=True)
class _Role:
    flat: Flat
    children: list[list[tuple[int, int]]]
    waits: list[int]
    before: list[tuple[int, ...]]
    played: Played
    kernels: dict[int, _Running] = field(default_factory=dict[int, _Running])
    comms: dict[int, _Running] = field(default_factory=dict[int, _Running])
    links: Counter[str] = field(default_factory=Counter[str])
    cores: float = 0.0
    memory: float = 0.0

    def rate(self, bound: str) -> float:
        """Share of its speed that a kernel limited by `bound` keeps."""
        taken = self.cores if bound == "compute" else self.memory if bound == "memory" else 0.0
        return max(1.0 - taken, _LEAST_RATE)


class Contended:
    """Plays all roles together; begin and end as `play` gives them, with kernels stretched."""

    def __init__(self, flats: Sequence[Flat], meet: Meetings, shares: Shares, bound: Bound, links: Links) -> None:
        self._shares, self._bound, self._links = shares, bound, links
        self._roles = [_role(number, flat) for number, flat in enumerate(flats)]
        self._sent: dict[tuple[int, int], tuple[int, int] | None] = {}
        self._events: list[tuple[float, int, int, int, int]] = []
        self._count = 0
        if meet:
            self._link(meet)

    def _link(self, meet: Meetings) -> None:
        for number, role in enumerate(self._roles):
            for index, kind in enumerate(role.flat.kind):
                if kind is not Kind.COMM:
                    continue
                for peer, node in meet.joined(number, index):
                    for before in self._roles[peer].before[node]:
                        self._roles[peer].children[before].append((number, index))
                        role.waits[index] += 1
                sent = meet.send_of(number, index)
                if sent is not None:
                    self._sent[(number, index)] = sent
                    self._roles[sent[0]].children[sent[1]].append((number, index))
                    role.waits[index] += 1

    def run(self) -> list[Played]:
        """Begin and end of every node; nodes that wait for ever keep an end of -1."""
        for number, role in enumerate(self._roles):
            for index, count in enumerate(role.waits):
                if count == 0:
                    self._begin(number, index, 0.0)
        while self._events:
            now, _, number, index, version = heappop(self._events)
            role = self._roles[number]
            running = role.kernels.get(index) or role.comms.get(index)
            if running.version != version if running else role.played.end_s[index] >= 0.0:
                continue
            self._end(number, index, now)
        return [role.played for role in self._roles]

    def _push(self, time: float, number: int, index: int, version: int = 0) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, number, index, version))

    def _begin(self, number: int, index: int, now: float) -> None:
        role = self._roles[number]
        flat = role.flat
        role.played.begin_s[index] = now
        kind = flat.kind[index]
        if kind is Kind.KERNEL:
            rate = role.rate(self._bound(number, index))
            role.kernels[index] = _Running(flat.time_s[index], now, rate)
            self._push(now + flat.time_s[index] / rate, number, index)
        elif kind is Kind.PAUSE:
            trips, second, third = flat.pauses[index]
            self._push(now + trips * (role.played.end_s[third] - role.played.end_s[second]), number, index)
        elif (number, index) in self._sent:
            self._push(now, number, index)
        else:
            self._push(now + flat.time_s[index], number, index)
            if kind is Kind.COMM:
                role.comms[index] = _Running(flat.time_s[index], now, 1.0)
                self._take(number, index, now, 1)

    def _take(self, number: int, index: int, now: float, sign: int) -> None:
        """Communication begins (`sign` 1) or ends (-1): what else runs in the role goes on at another rate."""
        role = self._roles[number]
        if role.flat.stream[index] != 0:
            cores, memory = self._shares(number, index)
            role.cores, role.memory = role.cores + sign * cores, role.memory + sign * memory
            for kernel, running in role.kernels.items():
                self._go_on(number, kernel, running, role.rate(self._bound(number, kernel)), now)
        for link in self._links(number, index):
            role.links[link] += sign
        for comm, running in role.comms.items():
            most = max((role.links[link] for link in self._links(number, comm)), default=1)
            self._go_on(number, comm, running, 1.0 / max(most, 1), now)

    def _go_on(self, number: int, index: int, running: _Running, rate: float, now: float) -> None:
        if rate == running.rate:
            return
        running.left -= (now - running.since) * running.rate
        running.since, running.rate = now, rate
        running.version += 1
        self._push(now + max(running.left, 0.0) / rate, number, index, running.version)

    def _end(self, number: int, index: int, now: float) -> None:
        role = self._roles[number]
        role.played.end_s[index] = now
        kind = role.flat.kind[index]
        if kind is Kind.KERNEL:
            del role.kernels[index]
        elif index in role.comms:
            del role.comms[index]
            self._take(number, index, now, -1)
        for other, child in role.children[index]:
            target = self._roles[other]
            target.waits[child] -= 1
            if target.waits[child] == 0:
                target.played.cause[child], target.played.cause_role[child] = index, number
                self._begin(other, child, now)


def _role(number: int, flat: Flat) -> _Role:
    """Dependencies, order on a stream, and pauses (which hold every stream up) as one kind of edge."""
    size = len(flat)
    children: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    waits = [0] * size
    befores: list[tuple[int, ...]] = []
    last = [-1] * len(flat.streams)
    pause = -1
    for index in range(size):
        before = max(last[flat.stream[index]], pause)
        edges = {*flat.deps[index], before} if before >= 0 else set(flat.deps[index])
        if flat.kind[index] is Kind.PAUSE:
            edges.update(place for place in last if place >= 0)
            pause = index
        for edge in edges:
            children[edge].append((number, index))
        waits[index] = len(edges)
        befores.append(tuple(edges))
        last[flat.stream[index]] = index
    return _Role(flat, children, waits, befores, Played([0.0] * size, [-1.0] * size, [-1] * size, [number] * size))
