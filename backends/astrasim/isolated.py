"""A collective by itself: when each member ends, from when each begins.

In the congestion-unaware backend nothing outside a collective changes its course, since messages share no links and
a rank runs one collective at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stablecast.backends.astrasim.algorithms import begin
from stablecast.backends.astrasim.config import NetworkConfig, SystemConfig
from stablecast.backends.astrasim.engine import Machine, Rank, Stream
from stablecast.backends.astrasim.links import UnawareLinks
from stablecast.backends.astrasim.mirror import Hop, mirror, mirrored, shares_evenly
from stablecast.backends.astrasim.plan import Plan, StuckError
from stablecast.backends.astrasim.skewed import member_ends, without_events

Members = tuple[int, ...]
Ends = tuple[tuple[int, int], ...]
"""(ns of the end, ns at which the event of the end was made) by member."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Distances inside a group.

    `uniform`: every member sees the same. `key`: equal for groups of equal distances. `hop`: of a uniform group.
    """

    uniform: bool
    key: tuple[object, ...]
    hop: Hop | None = None


class Isolated:
    """Collectives by themselves on one network; keeps what it worked out."""

    def __init__(
        self,
        network: NetworkConfig,
        system: SystemConfig,
        aware: bool = False,
        begin_phase: Callable[[Rank, Stream], None] = begin,
    ) -> None:
        self.network, self.system, self.aware, self._begin = network, system, aware, begin_phase
        self._links = UnawareLinks(network)
        self._layouts: dict[tuple[Members, str], Layout] = {}
        self._equal: dict[tuple[object, ...], tuple[int, int]] = {}
        self._skewed: dict[tuple[object, ...], Ends] = {}

    @property
    def has_own_links(self) -> bool:
        """Whether a message from rank to rank meets no other."""
        return not self.aware or self.network.topology == ("FullyConnected",)

    def hops(self, source: int, target: int) -> tuple[int, int]:
        """(dimension, hops) of a message between two ranks."""
        return self._links.hops(source, target)

    def between(self, source: int, target: int, nbytes: int) -> int:
        """ns of a message between two ranks."""
        return self._links.between(source, target, nbytes)

    def layout(self, members: Members, algorithm: str) -> Layout:
        """Distances between the members of a group as `algorithm` uses them."""
        key = (members, algorithm)
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = self._layout(members, algorithm)
        return found

    def _layout(self, members: Members, algorithm: str) -> Layout:
        n, network = len(members), self.network
        if algorithm in ("doubleBinaryTree", "custom"):
            return Layout(False, members)
        if len(network.npus_count) == 1 and network.topology[0] != "Ring":
            hops = (0, 2 if network.topology[0] == "Switch" else 1)
            return Layout(True, (n, hops), lambda _: hops)
        if algorithm == "ring":
            around = tuple(self._links.hops(rank, members[(at + 1) % n]) for at, rank in enumerate(members))
            if len(set(around)) == 1:
                return Layout(True, (n, around[0]), lambda _: around[0])
            return Layout(False, (n, around))
        ahead = [self._links.hops(members[0], members[offset]) for offset in range(1, n)]
        if all(
            self._links.hops(rank, members[partner]) == ahead[offset - 1]
            for at, rank in enumerate(members)
            for offset in range(1, n)
            for partner in (((at + offset) % n,) if algorithm == "direct" else (at ^ offset,) * (at ^ offset < n))
        ):
            return Layout(True, (n, algorithm, tuple(ahead)), lambda offset: ahead[offset - 1])
        return Layout(False, members)

    def uniform(self, plan: Plan, members: Members | None) -> bool:
        """Whether all members that begin together also end together."""
        if members is None:
            return mirrored(plan, self.network, self.aware)
        if self.aware and (self.network.topology[0] == "Ring" or not shares_evenly(plan, self.network)):
            return False
        return self.layout(members, plan.phases[0].impl.name).uniform

    def together(self, plan: Plan, members: Members | None) -> tuple[int, int]:
        """(ns, ns at which the event was made) of a uniform collective that all begin at 0."""
        layout = self.layout(members, plan.phases[0].impl.name) if members else None
        key = (plan, layout.key if layout else None)
        found = self._equal.get(key)
        if found is None:
            hop = layout.hop if layout else None
            found = self._equal[key] = mirror(plan, self.network, self.system, self.aware, hop)
        return found

    def ends(self, plan: Plan, members: Members | None, starts: Sequence[int]) -> Ends:
        """Ends by member for the given starts."""
        if min(starts) == max(starts) and self.uniform(plan, members):
            time, made = self.together(plan, members)
            return ((starts[0] + time, starts[0] + made),) * len(starts)
        first = min(starts)
        relative = tuple(start - first for start in starts)
        layout = self.layout(members, plan.phases[0].impl.name) if members else None
        key = (plan, layout.key if layout else None, relative)
        found = self._skewed.get(key)
        if found is None:
            found = self._skewed[key] = self._ends(plan, members, relative)
        return tuple((first + end, first + made) for end, made in found)

    def _ends(self, plan: Plan, members: Members | None, starts: Sequence[int]) -> Ends:
        if self.aware or not without_events(plan):
            return self.follow(plan, members, starts)
        ranks = members if members is not None else range(self.network.ranks)
        if len(ranks) != plan.dims[0]:
            return self.follow(plan, members, starts)
        return member_ends(plan, ranks, starts, self._links, self.system)

    def follow(self, plan: Plan, members: Members | None, starts: Sequence[int]) -> Ends:
        """Ends by member, from every message. Raises `StuckError` where a member never ends."""
        ranks = members if members is not None else tuple(range(self.network.ranks))
        machine = Machine(self.network, self.system, self.aware, self._begin, ranks)
        ended: dict[int, tuple[int, int]] = {}

        def launch(number: int) -> None:
            rank = machine.ranks[number]
            rank.collective(plan, 0, 0, members, (finish, number))

        def finish(number: int) -> None:
            ended[number] = (machine.queue.now, machine.ranks[number].made)

        for start, number in sorted(zip(starts, ranks, strict=True)):
            if start == 0:
                launch(number)
            else:
                machine.queue.at(start, launch, number)
        machine.queue.run()
        for number in ranks:
            if number not in ended:
                raise StuckError(number)
        return tuple(ended[number] for number in ranks)
