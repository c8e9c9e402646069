"""Symmetric collectives by one rank that stands for all: what it sends to the rank ahead it receives from behind.

Exact where every rank begins at the same time and sees the same distances, so that all do the same at every moment.
"""

from collections.abc import Callable
from typing import Any

from stablecast.backends.astrasim.algorithms import begin
from stablecast.backends.astrasim.config import NetworkConfig, SystemConfig
from stablecast.backends.astrasim.engine import EventQueue, Machine, Messages, Rank, SharedMessages, Stream
from stablecast.backends.astrasim.links import UnawareLinks, ring_hops
from stablecast.backends.astrasim.plan import Plan, StuckError

Hop = Callable[[int], tuple[int, int]]
"""(network dimension, hops) of the message to the member `ahead` places further."""


class _MirrorPaths:
    """Message times by logical dimension and offset; `hop` for a group."""

    def __init__(self, network: NetworkConfig, hop: Hop | None) -> None:
        self._network, self._links, self._hop = network, UnawareLinks(network), hop
        self._flat = network.ranks

    def between(self, source: int, target: int, nbytes: int) -> int:
        if self._hop is not None:
            dim, hops = self._hop(target)
        else:
            dim = source
            hops = ring_hops(self._network.topology[dim], self._network.npus_count[dim], 0, target)
        return self._links.time(dim, hops, nbytes)


class _MirrorRoutes(_MirrorPaths):
    """Shared links of one rank: its own to the switch and back, or one to each offset."""

    def route(self, source: int, target: int) -> tuple[int, ...]:
        return (0, 1) if self._network.topology[0] == "Switch" else (target,)

    def busy(self, nbytes: int) -> int:
        return int(nbytes / self._network.bytes_per_ns[0])

    def delivery(self, nbytes: int) -> int:
        return int(self._network.latency[0] + nbytes / self._network.bytes_per_ns[0])


class _MirrorRank(Rank):
    """Rank 0 of every dimension; messages are named by dimension and offset."""

    def send(self, stream: Stream, target: int, nbytes: int) -> None:
        dim = stream.phase.dim if stream.phase else 0
        self.machine.messages.send(stream.tag, dim, target, nbytes, None)

    def receive(self, stream: Stream, source: int, nbytes: int, action: Callable[[Any], None]) -> None:
        phase = stream.phase
        assert phase is not None
        ahead = source if phase.impl.name == "halvingDoubling" else (phase.size - source) % phase.size
        self.machine.messages.receive(stream.tag, phase.dim, ahead, nbytes, (action, stream))

    def members(self, stream: Stream) -> tuple[int, ...]:
        phase = stream.phase
        assert phase is not None
        return self.machine.line((phase.size,), 0, 0)


class _MirrorMachine(Machine):
    def __init__(self, network: NetworkConfig, system: SystemConfig, aware: bool, hop: Hop | None) -> None:
        super().__init__(network, system, False, begin, ())
        self.queue = EventQueue()
        self.messages = (
            SharedMessages(self.queue, _MirrorRoutes(network, hop))
            if aware
            else Messages(self.queue, _MirrorPaths(network, hop))
        )


def mirror(plan: Plan, network: NetworkConfig, system: SystemConfig, aware: bool, hop: Hop | None) -> tuple[int, int]:
    """(ns until every rank has finished, ns at which the event of that was made)."""
    machine = _MirrorMachine(network, system, aware, hop)
    rank = _MirrorRank(machine, 0)
    ended: list[tuple[int, int]] = []
    rank.collective(plan, 0, 0, None, (lambda _: ended.append((machine.queue.now, rank.made)), None))
    machine.queue.run()
    if not ended:
        raise StuckError(0)
    return ended[0]


def mirrored(plan: Plan, network: NetworkConfig, aware: bool) -> bool:
    """Whether all ranks do the same in a collective over all of them that they begin together."""
    names = {phase.impl.name for phase in plan.phases}
    if names & {"doubleBinaryTree", "custom"}:
        return False
    if plan.dims != network.npus_count[: len(plan.dims)]:
        return False
    return not aware or shares_evenly(plan, network)


def shares_evenly(plan: Plan, network: NetworkConfig) -> bool:
    """Whether, on links that messages share, one rank's own links show what happens on all (congestion-aware).

    On a Ring only where every message takes one hop; on a Switch only where no two messages reach it on the same ns.
    """
    topology = network.topology[0]
    if topology == "FullyConnected" or {phase.impl.name for phase in plan.phases} == {"ring"}:
        return True
    least = min(phase.nbytes // (1 if phase.kind == "all_gather" else phase.size) for phase in plan.phases)
    return topology == "Switch" and int(least / network.bytes_per_ns[0]) > 0
