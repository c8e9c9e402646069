"""The order in which kernels are issued: program order, but what frees memory comes first where the compiler does so.

XLA's list scheduler issues a kernel as soon as it gives back at least as much memory as it takes; products that only
the optimiser waits for run where their operands die, not where the program puts them. Its latency-hiding scheduler,
which takes over where there are collectives, puts these products off to the end.
"""

import heapq
from collections.abc import Mapping, Set

from stablecast.lowering.categories import Category
from stablecast.lowering.graph import EXTERNAL, Graph
from stablecast.lowering.group import Group


def issue_order(
    graph: Graph,
    groups: Mapping[int, Group],
    followers: Mapping[int, Set[int]],
    place: Mapping[int, int],
    *,
    reorders: bool = True,
    hides: bool = False,
) -> tuple[list[int], list[int]]:
    """The kernels `groups` in issue order by their key, and those that wait for each other.

    `followers`: kernels that read results of each. `place`: of each in the program. `reorders`: what frees memory is
    issued before its place. `hides`: of a block with collectives, last products are issued last.
    """
    late = last_products(graph, groups, followers, place) if hides and _communicates(graph) else frozenset[int]()
    return _Issue(graph, groups, followers, place, late, reorders=reorders).run()


def last_products(
    graph: Graph, groups: Mapping[int, Group], followers: Mapping[int, Set[int]], place: Mapping[int, int]
) -> Set[int]:
    """The products that no other product waits for: in a train step those that make the gradients of weights."""
    products = {
        key
        for key, group in groups.items()
        if group.hero >= 0 and graph.categories[group.hero] in (Category.MATMUL, Category.CONV)
    }
    leads: set[int] = set()
    for key in sorted(groups, key=place.__getitem__, reverse=True):
        if any(follower in leads or follower in products for follower in followers[key]):
            leads.add(key)
    return products - leads


def _communicates(graph: Graph) -> bool:
    return any(live and kind is Category.COLLECTIVE for live, kind in zip(graph.live, graph.categories, strict=True))


class _Issue:
    def __init__(
        self,
        graph: Graph,
        groups: Mapping[int, Group],
        followers: Mapping[int, Set[int]],
        place: Mapping[int, int],
        late: Set[int],
        *,
        reorders: bool,
    ) -> None:
        self._reorders = reorders
        self._late = late
        self._graph = graph
        self._groups = groups
        self._followers = followers
        self._place = place
        self._readers: dict[int, set[int]] = {}
        for key, group in groups.items():
            for value in group.reads:
                if graph.producer[value] != EXTERNAL:
                    self._readers.setdefault(value, set()).add(key)
        self._returned = set(graph.returns)
        self._missing = dict.fromkeys(groups, 0)
        for others in followers.values():
            for other in others:
                self._missing[other] += 1
        self._ready: list[tuple[int, int, int]] = []
        self._rank: dict[int, int] = {}

    def run(self) -> tuple[list[int], list[int]]:
        for key, count in self._missing.items():
            if not count:
                self._offer(key)
        order: list[int] = []
        issued: set[int] = set()
        while self._ready:
            rank, _, key = heapq.heappop(self._ready)
            if key in issued or rank != self._rank[key]:
                continue
            issued.add(key)
            order.append(key)
            self._issue(key)
        return order, [key for key in self._groups if key not in issued]

    def _issue(self, key: int) -> None:
        for value in self._groups[key].reads:
            readers = self._readers.get(value)
            if readers is not None:
                readers.discard(key)
                if len(readers) == 1:
                    last = next(iter(readers))
                    if last in self._rank:
                        self._offer(last)
        for follower in self._followers[key]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._offer(follower)

    def _offer(self, key: int) -> None:
        """Put a ready kernel into the queue; again where it has come to free more."""
        rank = 2 if key in self._late else int(self._reorders and self._takes(key) > self._frees(key))
        if self._rank.get(key) != rank:
            self._rank[key] = rank
            heapq.heappush(self._ready, (rank, self._place[key], key))

    def _frees(self, key: int) -> int:
        types = self._graph.types
        return sum(
            types[value].nbytes
            for value in self._groups[key].reads
            if value not in self._returned and self._readers.get(value) == {key}
        )

    def _takes(self, key: int) -> int:
        graph = self._graph
        return sum(
            graph.types[value].nbytes
            for root in self._groups[key].roots
            for value in graph.outputs[root]
            if value in self._readers and value not in self._returned
        )
