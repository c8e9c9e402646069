"""A device program laid out flat: nodes on streams, with loops cut down to three trips and a pause for the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, Protocol

from stablecast.backends.astrasim import ReferenceModel
from stablecast.backends.collectives import AUTO, CollectiveEstimate, CollectiveModel
from stablecast.backends.device import System
from stablecast.backends.estimates import Estimates
from stablecast.backends.schedule.settings import ScheduleSettings
from stablecast.ir.device_program import P2P, Body, Branch, Collective, Kernel, Loop, Node
from stablecast.ir.types import Count

StreamKey = tuple[str, tuple[str, ...] | int]
COMPUTE: StreamKey = ("compute", 0)
_TRIPS = 3
MOVES: Final = ("load", "store")
"""Directions of a `P2P` that goes to a memory tier."""
_MOVE_RANGE: Final = (0.95, 1.3)
"""Low and high of a transfer to a memory tier over its stated rate: assumptions."""


class Kind(IntEnum):
    """What a flat node is: a kernel, communication, a place in time, or the trips left out."""

    KERNEL = 0
    COMM = 1
    MARK = 2
    PAUSE = 3


@dataclass(slots=True)
class Flat:
    """Columns by node, in issue order; times in seconds.

    `deps`: nodes that must have ended. `weight`: how often it runs in a step (a fraction in a branch with odds).
    `nodes`: of the program, None for marks. `pauses`: trips left out and the marks at the ends of the second and the
    third trip. `streams`: names by number.
    """

    kind: list[Kind] = field(default_factory=list[Kind])
    time_s: list[float] = field(default_factory=list[float])
    low_s: list[float] = field(default_factory=list[float])
    high_s: list[float] = field(default_factory=list[float])
    stream: list[int] = field(default_factory=list[int])
    deps: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    weight: list[float] = field(default_factory=list[float])
    nodes: list[Kernel | Collective | P2P | None] = field(default_factory=list[Kernel | Collective | P2P | None])
    estimates: list[CollectiveEstimate | None] = field(default_factory=list[CollectiveEstimate | None])
    pauses: dict[int, tuple[int, int, int]] = field(default_factory=dict[int, tuple[int, int, int]])
    streams: list[StreamKey] = field(default_factory=lambda: [COMPUTE])

    def __len__(self) -> int:
        return len(self.kind)


class Costs(Protocol):
    """What prices communication."""

    def estimate(self, collective: Collective) -> CollectiveEstimate: ...

    def p2p(self, p2p: P2P) -> CollectiveEstimate: ...


class Flattener:
    """Lays out one role's program."""

    def __init__(
        self,
        estimates: Estimates,
        system: System,
        loops: Mapping[str, int],
        settings: ScheduleSettings,
        speed: float = 1.0,
        *,
        recorded: bool = False,
    ) -> None:
        self._time = (estimates.time_s / speed).tolist()
        self._low = (estimates.low_s / speed).tolist()
        self._high = (estimates.high_s / speed).tolist()
        reference = settings.collectives == "astra-sim" and system.count > 1
        self._model: Costs = ReferenceModel(system) if reference else CollectiveModel(system)
        named = settings.algorithm != AUTO and not reference
        self._named = CollectiveModel(system, settings.algorithm) if named else None
        self._priced: dict[tuple[object, ...], CollectiveEstimate] = {}
        self._loops, self._settings, self._system = loops, settings, system
        self._numbers: dict[StreamKey, int] = {COMPUTE: 0}
        self._in_order = settings.starts == "in-order" and not recorded
        self._by_program = recorded or settings.comm_streams == "program"
        self._issued = -1
        self.flat = Flat()

    def lay_out(self, body: Body) -> Flat:
        """The flat form of the program's body."""
        self._body(body, -1, 1.0, 1.0)
        return self.flat

    def _body(self, body: Body, entry: int, weight: float, scale: float) -> None:
        """Append `body`, whose nodes without dependencies wait for `entry` (-1: for nothing)."""
        places: list[int] = []
        first = () if entry < 0 else (entry,)
        for node in body:
            deps = tuple(places[index] for index in (*node.deps, *node.after)) or first
            if isinstance(node, Kernel):
                row = node.row
                cost = (self._time[row] * scale, self._low[row] * scale, self._high[row] * scale)
                places.append(self._add(Kind.KERNEL, cost, self._stream(node), deps, weight, node))
            elif isinstance(node, Loop):
                places.append(self._loop(node, deps, weight, scale))
            elif isinstance(node, Branch):
                places.append(self._branch(node, deps, weight, scale))
            else:
                priced = self._price(node)
                cost = (priced.time_s * scale, priced.low_s * scale, priced.high_s * scale)
                stream = self._stream(node)
                if stream and self._in_order and self._issued >= 0 and isinstance(node, Collective):
                    deps = (*deps, self._issued)
                places.append(self._add(Kind.COMM, cost, stream, deps, weight, node, priced))

    def _add(
        self,
        kind: Kind,
        cost: tuple[float, float, float],
        stream: int,
        deps: tuple[int, ...],
        weight: float,
        node: Kernel | Collective | P2P | None = None,
        estimate: CollectiveEstimate | None = None,
    ) -> int:
        flat = self.flat
        flat.kind.append(kind)
        flat.time_s.append(cost[0])
        flat.low_s.append(cost[1])
        flat.high_s.append(cost[2])
        flat.stream.append(stream)
        flat.deps.append(deps)
        flat.weight.append(weight)
        flat.nodes.append(node)
        flat.estimates.append(estimate)
        number = len(flat.kind) - 1
        if stream == 0:
            self._issued = number
        return number

    def _mark(self, deps: tuple[int, ...]) -> int:
        return self._add(Kind.MARK, (0.0, 0.0, 0.0), 0, deps, 0.0)

    def _stream(self, node: Kernel | Collective | P2P) -> int:
        key = self._key(node)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.flat.streams)
            self.flat.streams.append(key)
        return number

    def _key(self, node: Kernel | Collective | P2P) -> StreamKey:
        overlap = self._settings.overlap
        if overlap == "none":
            return COMPUTE
        if isinstance(node, Kernel):
            return ("compute", node.stream)
        if isinstance(node, Collective) and overlap == "program" and not node.asynchronous:
            return COMPUTE
        if self._settings.comm_streams == "one":
            return ("communication", 0)
        if self._by_program:
            return ("communication", node.stream)
        if isinstance(node, P2P):
            return (node.direction, (node.axis,))
        return ("communication", node.groups.axes)

    def _price(self, node: Collective | P2P) -> CollectiveEstimate:
        if isinstance(node, P2P):
            key: tuple[object, ...] = (node.direction in MOVES, node.direction, node.axis, node.shift, node.nbytes)
        else:
            key = (node.kind, node.groups, node.message_bytes)
        found = self._priced.get(key)
        if found is None:
            found = self._message(node) if isinstance(node, P2P) else self._collective(self._received(node))
            self._priced[key] = found
        return found

    def _message(self, node: P2P) -> CollectiveEstimate:
        if node.direction not in MOVES:
            return self._model.p2p(node)
        seconds = self._system.tier(node.axis).seconds(node.nbytes, load=node.direction == "load")
        return CollectiveEstimate(seconds, seconds * _MOVE_RANGE[0], seconds * _MOVE_RANGE[1], node.axis)

    def _collective(self, node: Collective) -> CollectiveEstimate:
        """By the algorithm that was named, where the collective can go by it."""
        if self._named is None or not self._named.can(node):
            return self._model.estimate(node)
        return self._named.estimate(node)

    def _received(self, node: Collective) -> Collective:
        """An all-to-all as large as the busiest receiver sees it."""
        incast = self._settings.incast
        if node.kind != "all_to_all" or incast == 1.0:
            return node
        return replace(
            node, operand_bytes=round(node.operand_bytes * incast), result_bytes=round(node.result_bytes * incast)
        )

    def _tails(self, first: int) -> tuple[int, ...]:
        """The last node of each stream from flat node `first` on."""
        last: dict[int, int] = {}
        for index in range(first, len(self.flat)):
            last[self.flat.stream[index]] = index
        return tuple(sorted(last.values()))

    def trips(self, count: Count) -> int:
        """Trips of a loop."""
        if isinstance(count, int):
            return count
        return self._loops.get(count.name, count.default if count.default is not None else count.low)

    def _loop(self, node: Loop, deps: tuple[int, ...], weight: float, scale: float) -> int:
        trips = self.trips(node.count)
        mark = self._mark(deps)
        barrier = self._settings.loops == "barrier"
        first, ends = len(self.flat), list[int]()
        for trip in range(min(trips, _TRIPS)):
            begun = len(self.flat)
            runs = weight * (trips - _TRIPS + 1) if trip == _TRIPS - 1 else weight
            self._body(node.body, mark, runs, scale)
            mark = self._mark(self._tails(begun) if barrier else (mark,))
            ends.append(mark)
        if trips > _TRIPS:
            tails = self._tails(first)
            mark = self._add(Kind.PAUSE, (0.0, 0.0, 0.0), 0, tails, 0.0)
            self.flat.pauses[mark] = (trips - _TRIPS, ends[-2], ends[-1])
        elif not barrier and trips:
            mark = self._mark(self._tails(first))
        return mark

    def _branch(self, node: Branch, deps: tuple[int, ...], weight: float, scale: float) -> int:
        first = len(self.flat)
        mark = self._mark(deps)
        if node.probability is None:
            costs = [self._chain_cost(body) for body in node.bodies]
            self._body(node.bodies[costs.index(max(costs))], mark, weight, scale)
        else:
            for body, chance in zip(node.bodies, node.probability, strict=True):
                self._body(body, mark, weight * chance, scale * chance)
        return self._mark(self._tails(first))

    def _chain_cost(self, body: Body) -> float:
        return sum(self._node_cost(node) for node in body)

    def _node_cost(self, node: Node) -> float:
        if isinstance(node, Kernel):
            return self._time[node.row]
        if isinstance(node, Loop):
            return self.trips(node.count) * self._chain_cost(node.body)
        if isinstance(node, Branch):
            costs = [self._chain_cost(body) for body in node.bodies]
            if node.probability is None:
                return max(costs, default=0.0)
            return sum(cost * chance for cost, chance in zip(costs, node.probability, strict=True))
        return self._price(node).time_s
