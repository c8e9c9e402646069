"""Kernels of many nodes that would wait for themselves."""

from collections.abc import Iterable

from stablecast.lowering.graph import Graph
from stablecast.lowering.group import Group


def waits_for_itself(graph: Graph, made: Group, others: Iterable[Group]) -> bool:
    """Whether `made` reads what some other kernel makes of its results.

    `others`: the kernels made so far; each starts when all that it reads is there. Nodes in none are kernels of their
    own.
    """
    return _Search(graph, made, others).run()


class _Search:
    def __init__(self, graph: Graph, made: Group, others: Iterable[Group]) -> None:
        self._graph = graph
        self._made = made
        self._last, near = _reach_of(made, others)
        self._readers: dict[int, list[Group]] = {}
        for group in near:
            for node in group.members:
                self._readers.setdefault(node, []).append(group)

    def run(self) -> bool:
        """Every node after the roots; a copied one is made once inside the kernel and may be made once more outside."""
        made, own = self._made, set(self._made.roots)
        stack = [(node, True) for node in made.roots]
        seen: set[int] = set()
        while stack:
            node, inside = stack.pop()
            inside = inside or node in made.members
            for reader in self._graph.consumers_of(node):
                if reader in made.members and not inside:
                    return True
                if reader in own or reader in seen or reader > self._last:
                    continue
                seen.add(reader)
                stack.append((reader, False))
                stack += [(root, False) for group in self._readers.get(reader, ()) for root in group.roots]
        return False


def _reach_of(made: Group, others: Iterable[Group]) -> tuple[int, list[Group]]:
    """The last node that may lead back into `made`, and the kernels that lie across it or within.

    Results of a node come after it, but those of a kernel may come before its last node.
    """
    first, last = min(made.roots), max(made.roots)
    spans = sorted(((min(group.roots), max(group.roots), group) for group in others if group.roots), key=_start)
    near: list[Group] = []
    for start, end, group in spans:
        if start > last:
            break
        if end >= first:
            near.append(group)
            last = max(last, end)
    return last, near


def _start(span: tuple[int, int, Group]) -> int:
    return span[0]
