"""Nodes that stand for many runs, put back into loops."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stablecast.ir.device_program import P2P, Body, Collective, Kernel, Loop, Node


@dataclass(frozen=True, slots=True)
class Item:
    """A node, the positions of the items that it waits for, and the runs that it stands for."""

    node: Kernel | Collective | P2P
    deps: tuple[int, ...]
    trips: int = 1


def gather_loops(items: Sequence[Item]) -> Body:
    """The body of `items`; neighbours that stand for equally many runs (more than one) become a loop.

    Where nested loops were, their dependencies may not fit that; then every such node becomes a loop of its own.
    """
    chained = _chains(items)
    body = _gathered(items, _runs(items), chained)
    expected = [_with(item.deps, chained.get(at)) for at, item in enumerate(items)]
    if [_with(deps, chained.get(at)) for at, deps in enumerate(_flat(body))] == expected:
        return body
    return _gathered(items, [[at] for at in range(len(items))], chained)


def _with(deps: Iterable[int], chained: int | None) -> set[int]:
    return set(deps) if chained is None else {*deps, chained}


def _flat(body: Body) -> list[set[int]]:
    """Of each node, in order and one trip of every loop, the nodes that it waits for."""
    flat: list[set[int]] = []
    ends: list[set[int]] = []
    for node in body:
        entry = {end for dep in node.deps for end in ends[dep]}
        first = len(flat)
        if not isinstance(node, Loop):
            flat.append(entry)
            ends.append({first})
            continue
        flat += [{first + dep for dep in inner.deps} or entry for inner in node.body]
        waited = {dep for deps in flat[first:] for dep in deps}
        ends.append(set(range(first, len(flat))) - waited)
    return flat


def _gathered(items: Sequence[Item], runs: Sequence[Sequence[int]], chained: Mapping[int, int]) -> Body:
    home = {at: index for index, run in enumerate(runs) for at in run}
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
    """Of each collective, the one before it in its groups, which emission has it wait for; not of permutations."""
    last: dict[object, int] = {}
    found: dict[int, int] = {}
    for at, item in enumerate(items):
        if isinstance(item.node, Collective) and item.node.kind != "collective_permute":
            if item.node.groups in last:
                found[at] = last[item.node.groups]
            last[item.node.groups] = at
    return found


def _ends(items: Sequence[Item], run: Sequence[int]) -> set[int]:
    waited = {dep for at in run for dep in items[at].deps}
    return {at for at in run if at not in waited}


def _only_order(items: Sequence[Item], dep: int, at: int, chained: Mapping[int, int], ends: set[int]) -> bool:
    """Whether a dependency on a node in a loop only keeps the collectives of a group in order."""
    return items[dep].trips > 1 and chained.get(at) == dep and not ends <= set(items[at].deps)
