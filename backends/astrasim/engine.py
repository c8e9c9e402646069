"""The event-driven machine: a queue of events, messages between ranks, and the queues of chunks of each rank.

This is the reference that follows every message; equal times are served in the order in which events were made,
and the timers of one rank that fall on the same ns are served together, as in ASTRA-sim.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from stablecast.backends.astrasim.config import NetworkConfig, SystemConfig
from stablecast.backends.astrasim.links import AwareLinks, Paths, Routes, UnawareLinks
from stablecast.backends.astrasim.plan import LOCAL_DELAY_NS, Phase, Plan, reduction_ns

Event = tuple[Callable[[Any], None], Any]
Tag = tuple[int, int]
Key = tuple[Any, int, int, int]


class EventQueue:
    """Events by time in whole ns; of equal time, the earlier made first."""

    def __init__(self) -> None:
        self.now = 0
        self._times: list[int] = []
        self._lists: dict[int, list[Event]] = {}

    def at(self, time: int, action: Callable[[Any], None], argument: Any) -> None:
        """Call `action(argument)` at `time`."""
        events = self._lists.get(time)
        if events is None:
            self._lists[time] = [(action, argument)]
            heapq.heappush(self._times, time)
        else:
            events.append((action, argument))

    def run(self) -> None:
        """Serve events until there are none."""
        while self._times:
            time = heapq.heappop(self._times)
            self.now = time
            events = self._lists[time]
            for action, argument in events:
                action(argument)
            del self._lists[time]


class _Meeting:
    """A message of which one end is known, or both."""

    __slots__ = ("arrived", "receiver", "sender")

    def __init__(self) -> None:
        self.sender: Event | None = None
        self.receiver: Event | None = None
        self.arrived = False


class Messages:
    """Sends and receives matched by tag, source, target and size, in order; messages do not share links."""

    def __init__(self, queue: EventQueue, paths: Paths) -> None:
        self.queue = queue
        self._paths = paths
        self._sent: dict[Key, int] = {}
        self._received: dict[Key, int] = {}
        self._meetings: dict[tuple[Key, int], _Meeting] = {}

    def _meet(self, counts: dict[Key, int], key: Key) -> tuple[tuple[Key, int], _Meeting]:
        number = counts.get(key, 0)
        counts[key] = number + 1
        place = (key, number)
        meeting = self._meetings.get(place)
        if meeting is None:
            meeting = self._meetings[place] = _Meeting()
        return place, meeting

    def send(self, tag: Any, source: int, target: int, nbytes: int, done: Event | None) -> None:
        """Put a message on the way; `done` is called when it has arrived."""
        place, meeting = self._meet(self._sent, (tag, source, target, nbytes))
        meeting.sender = done
        self.launch(place)

    def launch(self, place: tuple[Key, int]) -> None:
        """Let a message travel."""
        _, source, target, nbytes = place[0]
        self.queue.at(self.queue.now + self._paths.between(source, target, nbytes), self.arrive, place)

    def receive(self, tag: Any, source: int, target: int, nbytes: int, done: Event) -> None:
        """`done` is called when the message is there, at once (by an event) where it already is."""
        place, meeting = self._meet(self._received, (tag, source, target, nbytes))
        if meeting.arrived:
            del self._meetings[place]
            self.queue.at(self.queue.now, *done)
        else:
            meeting.receiver = done

    def arrive(self, place: Any) -> None:
        """A message is at its target."""
        meeting = self._meetings[place]
        receiver = meeting.receiver
        if receiver is None:
            meeting.arrived = True
        else:
            del self._meetings[place]
        if meeting.sender is not None:
            action, argument = meeting.sender
            action(argument)
        if receiver is not None:
            action, argument = receiver
            action(argument)


class SharedMessages(Messages):
    """Messages that pass FIFO links one after the other."""

    def __init__(self, queue: EventQueue, routes: Routes) -> None:
        super().__init__(queue, routes)
        self._routes = routes
        self._free: dict[int, int] = {}

    def launch(self, place: tuple[Key, int]) -> None:
        self._hop((place, self._routes.route(place[0][1], place[0][2]), 0))

    def _hop(self, argument: Any) -> None:
        place, route, index = argument
        if index == len(route):
            self.arrive(place)
            return
        link, nbytes = route[index], place[0][3]
        start = max(self.queue.now, self._free.get(link, 0))
        self._free[link] = start + self._routes.busy(nbytes)
        self.queue.at(start + self._routes.delivery(nbytes), self._hop, (place, route, index + 1))


class Stream:
    """One chunk of a collective on one rank."""

    __slots__ = ("data", "left", "number", "phase", "tag")

    def __init__(self, data: "DataSet", tag: Tag, number: int, phases: tuple[Phase, ...]) -> None:
        self.data, self.tag, self.number = data, tag, number
        self.left = deque(phases)
        self.phase: Phase | None = None


class DataSet:
    """The streams of one collective on one rank; `done` is called when all have finished."""

    __slots__ = ("done", "members", "plan", "remaining")

    def __init__(self, plan: Plan, members: tuple[int, ...] | None, done: Event) -> None:
        self.plan, self.members, self.done = plan, members, done
        self.remaining = plan.streams


class Rank:
    """One rank: its timers, and a first-in-first-out queue of streams a dimension.

    `made`: when it last set a timer.
    """

    def __init__(self, machine: "Machine", number: int) -> None:
        self.machine, self.number = machine, number
        self._timers: dict[int, list[Event]] = {}
        self._queues: dict[int, list[Stream]] = {}
        self._running: dict[int, int] = {}
        self.made = 0

    def after(self, delay: int, action: Callable[[Any], None], argument: Any) -> None:
        """Call `action(argument)` in `delay` ns."""
        queue = self.machine.queue
        self.made = queue.now
        time = queue.now + delay
        timers = self._timers.get(time)
        if timers is None:
            self._timers[time] = [(action, argument)]
            queue.at(time, self._ring, time)
        else:
            timers.append((action, argument))

    def _ring(self, time: int) -> None:
        for action, argument in self._timers[time]:
            action(argument)
        del self._timers[time]

    def send(self, stream: Stream, target: int, nbytes: int) -> None:
        self.machine.messages.send(stream.tag, self.number, target, nbytes, None)

    def receive(self, stream: Stream, source: int, nbytes: int, action: Callable[[Any], None]) -> None:
        self.machine.messages.receive(stream.tag, source, self.number, nbytes, (action, stream))

    def collective(self, plan: Plan, tag: int, first: int, members: tuple[int, ...] | None, done: Event) -> None:
        """Begin a collective; its streams have the tags (`tag`, `first`), (`tag`, `first` + 1), ..."""
        data = DataSet(plan, members, done)
        for number in range(first, first + plan.streams):
            self.advance(Stream(data, (tag, number), number - first, plan.phases))

    def advance(self, stream: Stream) -> None:
        """Move a stream from the phase it has finished into the queue of its next."""
        before, moves = stream.phase, bool(stream.left)
        if not moves:
            stream.data.remaining -= 1
            if stream.data.remaining == 0:
                action, argument = stream.data.done
                action(argument)
        if before is not None:
            self._queues[before.dim].remove(stream)
        if moves:
            phase = stream.phase = stream.left.popleft()
            self._queues.setdefault(phase.dim, []).append(stream)
        if before is not None:
            self._running[before.dim] -= 1
            self._start(before.dim)
        if moves and stream.phase is not None:
            self._start(stream.phase.dim)

    def _start(self, dim: int) -> None:
        streams = self._queues[dim]
        running = self._running.get(dim, 0)
        while running < self.machine.concurrent and running < len(streams):
            stream = streams[running]
            self._running[dim] = running + 1
            self.machine.begin(self, stream)
            running = self._running[dim]

    def members(self, stream: Stream) -> tuple[int, ...]:
        """The ranks that a stream's phase runs over, in ring order."""
        data, phase = stream.data, stream.phase
        return data.members or self.machine.line(data.plan.dims, self.number, phase.dim if phase else 0)

    def delay(self, stream: Stream) -> int:
        """Endpoint delay of a stream's messages."""
        return LOCAL_DELAY_NS if stream.data.plan.local else self.machine.system.endpoint_delay_ns


class Machine:
    """The ranks of a network (only `ranks` where given) with their messages."""

    def __init__(
        self,
        network: NetworkConfig,
        system: SystemConfig,
        aware: bool,
        begin: Callable[[Rank, Stream], None],
        ranks: Iterable[int] | None = None,
    ) -> None:
        self.network, self.system, self.begin = network, system, begin
        self.queue = EventQueue()
        self.messages = (
            SharedMessages(self.queue, AwareLinks(network)) if aware else Messages(self.queue, UnawareLinks(network))
        )
        self.concurrent = system.active_chunks
        self.ranks = {number: Rank(self, number) for number in (range(network.ranks) if ranks is None else ranks)}
        self._lines: dict[tuple[tuple[int, ...], int, int], tuple[int, ...]] = {}
        self._reductions: dict[int, int] = {}

    def line(self, dims: tuple[int, ...], rank: int, dim: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` in dimension `dim` of `dims` only, by their place in it."""
        stride = math.prod(dims[:dim])
        base = rank - rank // stride % dims[dim] * stride
        key = (dims, base, dim)
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = tuple(base + place * stride for place in range(dims[dim]))
        return found

    def reduction(self, nbytes: int) -> int:
        """ns to fold a received message in."""
        found = self._reductions.get(nbytes)
        if found is None:
            found = self._reductions[nbytes] = reduction_ns(nbytes, self.system)
        return found
