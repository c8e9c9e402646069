"""Rules about the graph of one rank: ids, dependencies, cycles, and the order in which nodes are issued."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Structure = tuple[int, tuple[int, ...], tuple[int, ...]]
GraphFault = tuple[int | None, str, str]

_SEARCH_BUDGET = 500_000


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """`order`: positions of the nodes as a consumer issues them (ready nodes by ascending id); `parents`: ids that
    some node waits for."""

    order: tuple[int, ...]
    parents: frozenset[int]
    faults: tuple[GraphFault, ...]


def graph_facts(nodes: Sequence[Structure]) -> GraphFacts:
    """Judge the graph of a rank from (id, data_deps, ctrl_deps) of its nodes in file order."""
    faults: list[GraphFault] = []
    position: dict[int, int] = {}
    for index, (node_id, _, _) in enumerate(nodes):
        if node_id in position:
            faults.append((node_id, "duplicate id", f"id {node_id} is given to two nodes: one is lost"))
        else:
            position[node_id] = index
    waits: dict[int, set[int]] = {}
    children: dict[int, list[int]] = {}
    for node_id, index in position.items():
        _, data, ctrl = nodes[index]
        deps = set(data).union(ctrl)
        for absent in sorted(dep for dep in deps if dep not in position):
            faults.append((node_id, "dangling dependency", f"waits for node {absent}, which is not in the file"))
            deps.discard(absent)
        waits[node_id] = deps
        for dep in deps:
            children.setdefault(dep, []).append(node_id)
    order = _issue_order(waits, children)
    if len(order) < len(position):
        faults.append(_cycle(waits, set(waits).difference(order)))
    faults += _control_only(nodes, position, order)
    return GraphFacts(tuple(position[node_id] for node_id in order), frozenset(children), tuple(faults))


def _issue_order(waits: Mapping[int, set[int]], children: Mapping[int, list[int]]) -> list[int]:
    open_count = {node_id: len(deps) for node_id, deps in waits.items()}
    ready = [node_id for node_id, count in open_count.items() if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        node_id = heapq.heappop(ready)
        order.append(node_id)
        for child in children.get(node_id, ()):
            open_count[child] -= 1
            if open_count[child] == 0:
                heapq.heappush(ready, child)
    return order


def _cycle(waits: Mapping[int, set[int]], stuck: set[int]) -> GraphFault:
    node_id = min(stuck)
    walked: dict[int, int] = {}
    while node_id not in walked:
        walked[node_id] = len(walked)
        node_id = min(dep for dep in waits[node_id] if dep in stuck)
    cycle = list(walked)[walked[node_id] :]
    shown = " <- ".join(map(str, [*cycle[:8], "..." if len(cycle) > 8 else cycle[0]]))
    return min(cycle), "dependency cycle", f"{shown}; {len(stuck)} nodes never run"


def _control_only(nodes: Sequence[Structure], position: Mapping[int, int], order: Sequence[int]) -> list[GraphFault]:
    """Control dependencies that data dependencies do not imply, directly or through other nodes."""
    suspects = [(node_id, data, set(ctrl).difference(data)) for node_id, data, ctrl in nodes if ctrl]
    place = {node_id: at for at, node_id in enumerate(order)}
    faults: list[GraphFault] = []
    budget = _SEARCH_BUDGET
    for node_id, data, only in suspects:
        targets = {dep for dep in only if dep in place}
        if not targets or node_id not in place:
            continue
        floor = min(place[dep] for dep in targets)
        seen, todo = set[int](), list(data)
        while todo and targets and budget > 0:
            dep = todo.pop()
            budget -= 1
            if dep in seen or place.get(dep, -1) < floor:
                continue
            seen.add(dep)
            targets.discard(dep)
            todo += nodes[position[dep]][1]
        for dep in sorted(targets):
            message = f"waits for node {dep} in ctrl_deps only, which the older reader ignores"
            faults.append((node_id, "ordering only in ctrl_deps", message))
    return faults
