"""Nodes that stand for many runs, put back into loops."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stablecast.ir.device_program import P2P, Body, Collective, Kernel, Loop, Node


@dataclass(frozen=True, slots=True)
class Item:
    """A node, the positions of the items that it waits for, and the runs that it stands for."""

    node: Kernel | Collective | P2P
    deps: tuple[int, ...]
    trips: int = 1


def gather_loops(items: Sequence[Item]) -> Body:
    """The body of `items`; neighbours that stand for equally many runs (more than one) become a loop."""
    runs = _runs(items)
    home = {at: index for index, run in enumerate(runs) for at in run}
    chained = _chains(items)
    ends = [_ends(items, run) for run in runs]
    body: list[Node] = []
    for index, run in enumerate(runs):
        first = items[run[0]]
        inside = set(run)
        if first.trips == 1:
            deps = {home[dep] for dep in first.deps if not _only_order(items, dep, run[0], chained, ends[home[dep]])}
            body.append(replace(first.node, deps=tuple(sorted(deps))))
            continue
        roots = [at for at in run if inside.isdisjoint(items[at].deps)]
        common = set(items[roots[0]].deps).intersection(*(items[at].deps for at in roots))
        place = {at: number for number, at in enumerate(run)}
        nodes = tuple(
            replace(items[at].node, deps=tuple(sorted(place[dep] for dep in items[at].deps if dep in inside)))
            for at in run
        )
        body.append(Loop(nodes, first.trips, deps=tuple(sorted({home[dep] for dep in common} - {index}))))
    return tuple(body)


def _runs(items: Sequence[Item]) -> list[list[int]]:
    runs: list[list[int]] = []
    for at, item in enumerate(items):
        if runs and item.trips > 1 and items[runs[-1][0]].trips == item.trips:
            runs[-1].append(at)
        else:
            runs.append([at])
    return runs


def _chains(items: Sequence[Item]) -> dict[int, int]:
    """Of each collective, the one before it in its groups."""
    last: dict[object, int] = {}
    found: dict[int, int] = {}
    for at, item in enumerate(items):
        if isinstance(item.node, Collective):
            if item.node.groups in last:
                found[at] = last[item.node.groups]
            last[item.node.groups] = at
    return found


def _ends(items: Sequence[Item], run: Sequence[int]) -> set[int]:
    waited = {dep for at in run for dep in items[at].deps}
    return {at for at in run if at not in waited}


def _only_order(items: Sequence[Item], dep: int, at: int, chained: dict[int, int], ends: set[int]) -> bool:
    """Whether a dependency on a node in a loop only keeps the collectives of a group in order."""
    return items[dep].trips > 1 and chained.get(at) == dep and not ends <= set(items[at].deps)
