"""Multi-output fusion: kernels of the same extent that share a tensor become one."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from stablecast.ir.errors import InputError
from stablecast.ir.scopes import parse_scope
from stablecast.lowering.categories import Category
from stablecast.lowering.graph import EXTERNAL, Graph
from stablecast.lowering.group import Group
from stablecast.lowering.issue_order import issue_order

_LOOPS = (Category.LOOP, Category.GENERATOR)
_PRODUCTS = (Category.MATMUL, Category.CONV)
MAX_VISITED = 128
"""Kernels looked at to prove that two may merge; where that is not enough they stay apart."""


@dataclass(frozen=True, slots=True)
class MergeRules:
    """Which kernels may become one.

    `min_bytes`: a shared tensor smaller than that is no reason. `max_members`, `max_siblings`: limits of a kernel.
    `reductions`: whether a reduction joins the kernel that reads it: one over the same rows, or over its results.
    `reorders`: whether what frees memory is issued before its place in the program.
    """

    min_bytes: int = 1
    max_members: int = 512
    max_siblings: int = 32
    reductions: bool = False
    reorders: bool = True


XLA_MERGES = MergeRules()
INDUCTOR_MERGES = MergeRules(max_members=64, reductions=True, reorders=False)
"""`max_fusion_size` of TorchInductor is 64. It orders kernels within a graph, and a step is many: the forward and the
backward pass of each compiled module; autograd and the optimiser run them in the program's order."""


class Merger:
    """Merges kernels; `into_consumers` and `siblings` do it, `ordered` gives what came of it.

    `fences`: nodes, ascending, that end one graph of the compiler and begin the next; nothing merges across them.
    """

    def __init__(
        self, graph: Graph, groups: dict[int, Group], rules: MergeRules = XLA_MERGES, fences: Sequence[int] = ()
    ) -> None:
        self._graph = graph
        self._rules = rules
        self._fences = fences
        self._single = groups
        self._again = {root for root in groups if parse_scope(graph.scopes[root]).recomputed}
        self._groups = dict(groups)
        self._parent = {root: root for root in groups}
        self._parts: dict[int, list[int]] = {}
        self._direct: dict[int, set[int]] = {root: set() for root in groups}
        home = {node: root for root, group in groups.items() for node in group.roots}
        for root, group in groups.items():
            for value in group.reads:
                producer = home.get(graph.producer[value], EXTERNAL)
                if producer not in (EXTERNAL, root):
                    self._direct[producer].add(root)
        self._followers = {root: set(direct) for root, direct in self._direct.items()}

    def _find(self, root: int) -> int:
        parent = self._parent
        while parent[root] != root:
            parent[root] = parent[parent[root]]
            root = parent[root]
        return root

    def into_consumers(self) -> None:
        """Elementwise kernels into their first consumer of the same extent."""
        for root in sorted(self._groups, reverse=True):
            group = self._groups[root]
            if not group.fusible or (self._graph.categories[root] not in _LOOPS and not self._rules.reductions):
                continue
            followers = sorted({self._find(follower) for follower in self._followers[root]}, key=self._position)
            if not followers or self._bytes(root) < self._rules.min_bytes:
                continue
            first = followers[0]
            if self._alike(first, root, joins=True) and not self._path(root, first, direct=False):
                self._merge(first, root)

    def siblings(self) -> None:
        """Kernels of the same extent that read the same tensor, which is as large or larger."""
        types = self._graph.types
        readers: dict[int, list[int]] = {}
        for root in sorted(self._groups):
            for value in self._groups[root].reads:
                if types[value].nbytes >= self._rules.min_bytes:
                    readers.setdefault(value, []).append(root)
        for value in sorted(readers):
            elements = types[value].elements
            by_extent: dict[int, list[int]] = {}
            for root in dict.fromkeys(self._find(root) for root in readers[value]):
                group = self._groups[root]
                if group.fusible and 1 < group.extent <= elements:
                    by_extent.setdefault(group.extent, []).append(root)
            for alike in by_extent.values():
                for index, root in enumerate(alike[1 : self._rules.max_siblings], 1):
                    self._join_one_of(alike[:index], root)

    def into_products(self) -> None:
        """Products with the first kernel that walks over their result: they compute what follows as they write it."""
        graph = self._graph
        for root in sorted(self._groups):
            group = self._groups[root]
            if group.hero != root or graph.categories[root] not in _PRODUCTS or len(graph.outputs[root]) != 1:
                continue
            size = graph.types[graph.outputs[root][0]].elements
            for follower in sorted({self._find(follower) for follower in self._followers[root]}, key=self._position):
                other = self._groups[follower]
                fits = (
                    other.fusible
                    and other.extent == size
                    and bisect(self._fences, follower) == bisect(self._fences, root)
                )
                if fits and not self._path(root, follower, direct=False):
                    self._merge(follower, root)
                    self._take_lead(follower, root)
                    break

    def _take_lead(self, kernel: int, product: int) -> None:
        """Make `product`, which merged into `kernel`, what decides its class."""
        group = self._groups[kernel]
        group.hero, group.fusible = product, False
        group.reads.difference_update(*(self._graph.outputs[node] for node in group.members))

    def _join_one_of(self, earlier: list[int], root: int) -> None:
        root = self._find(root)
        for other in dict.fromkeys(map(self._find, reversed(earlier))):
            if other == root:
                return
            if (other in self._again) != (root in self._again):
                continue
            if self._alike(other, root) and not self._path(other, root) and not self._path(root, other):
                self._merge(other, root)
                return

    def _position(self, root: int) -> int:
        return max(self._groups[root].roots)

    def _bytes(self, root: int) -> int:
        return sum(self._graph.types[value].nbytes for value in self._graph.outputs[root])

    def _alike(self, left: int, right: int, *, joins: bool = False) -> bool:
        """Whether two kernels walk over the same elements. `joins`: `right` makes what `left` reads."""
        one, two = self._groups[left], self._groups[right]
        if not (one.fusible and two.fusible) or left == right or one.block or two.block:
            return False
        if len(one.members) + len(two.members) > self._rules.max_members:
            return False
        if bisect(self._fences, left) != bisect(self._fences, right):
            return False
        if joins and self._rules.reductions and two.rows and not one.rows and one.extent == two.rows:
            return True
        if one.rows and two.rows and (one.rows, one.columns) != (two.rows, two.columns):
            return False
        return one.extent == two.extent

    def _path(self, start: int, end: int, *, direct: bool = True) -> bool:
        """Whether `end` needs `start`; `direct=False` asks for a way through some other kernel only."""
        limit = self._position(end)
        stack = [follower for follower in map(self._find, self._followers[start]) if direct or follower != end]
        seen = {start}
        while stack:
            current = stack.pop()
            if current == end:
                return True
            if current in seen or min(self._groups[current].roots) > limit:
                continue
            seen.add(current)
            if len(seen) > MAX_VISITED:
                return True
            stack.extend(map(self._find, self._followers[current]))
        return False

    def _merge(self, into: int, root: int) -> None:
        self._parent[root] = into
        self._parts.setdefault(into, [into]).extend(self._parts.pop(root, [root]))
        kept, gone = self._groups[into], self._groups[root]
        self._groups[into] = Group(
            kept.roots + gone.roots,
            kept.members | gone.members,
            kept.reads | gone.reads,
            extent=max(kept.extent, gone.extent),
            rows=max(kept.rows, gone.rows),
            columns=kept.columns or gone.columns,
        )
        self._followers[into] = {self._find(other) for other in self._followers[into] | self._followers[root]} - {into}

    def ordered(self, *, hides: bool = False) -> list[Group]:
        """Merged kernels by the place of their last root, each after all that it reads; `hides` as in `issue_order`.

        The search for paths is bounded, so a merge may rarely close a cycle; such kernels fall apart again.
        """
        while True:
            order, stuck = self._sorted(hides)
            if not stuck:
                return order
            if not any(root in self._parts for root in stuck):
                raise InputError(f"kernels of nodes {stuck[:8]} wait for each other", "try --exec unfused")
            for root in stuck:
                for part in self._parts.pop(root, []):
                    self._parent[part] = part
                    self._groups[part] = self._single[part]

    def _sorted(self, hides: bool) -> tuple[list[Group], list[int]]:
        roots = [root for root in self._groups if self._parent[root] == root]
        followers = {
            root: {self._find(f) for part in self._parts.get(root, [root]) for f in self._direct[part]} - {root}
            for root in roots
        }
        groups = {root: self._groups[root] for root in roots}
        place = {root: self._position(root) for root in roots}
        order, stuck = issue_order(self._graph, groups, followers, place, reorders=self._rules.reorders, hides=hides)
        return [groups[root] for root in order], stuck
