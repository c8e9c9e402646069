"""All-gathers of parameters ahead of the units that read them, as FSDP and collective pipelining do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stablecast.ir.device_program import Body, Collective, DeviceProgram, Loop, Node
from stablecast.ir.errors import InputError
from stablecast.ir.scopes import parse_scope
from stablecast.lowering.passes.body import ancestors, each_body, free_nodes, readers, reordered, with_body
from stablecast.lowering.passes.overlap import no_value


class FsdpPrefetch:
    """All-gathers of parameters run N units ahead (=N, 1 unless given): a layer, or a trip of a loop over layers."""

    def __init__(self, value: str = "") -> None:
        if value and not (value.isascii() and value.isdigit()):
            raise InputError(f"pass 'fsdp-prefetch' takes a number of units, not '{value}'", "write fsdp-prefetch=2")
        self._ahead: int | None = int(value or 1)

    def __call__(self, program: DeviceProgram) -> DeviceProgram:
        def change(body: Body) -> Body:
            if self._ahead is None or self._ahead > 0:
                body = _turned(body, self._ahead or 1)
            return _prefetched(body, self._ahead)

        return with_body(program, each_body(program.body, change))


class AllGatherReorder(FsdpPrefetch):
    """All-gathers of parameters as early as their operands allow; in loops one trip ahead."""

    def __init__(self, value: str = "") -> None:
        no_value("all-gather-reorder", value)
        self._ahead = None


@dataclass(frozen=True, slots=True)
class _Unit:
    """Gathers that one layer reads: their nodes with what they wait for, and the first node that reads any."""

    nodes: tuple[int, ...]
    first_reader: int


def _gathers(body: Body) -> list[int]:
    """All-gathers that need parameters and counters only."""
    free = free_nodes(body)
    return [
        index
        for index, node in enumerate(body)
        if isinstance(node, Collective) and node.kind == "all_gather" and free[index]
    ]


def _units(body: Body) -> list[_Unit]:
    """Units in the order in which they are read. Gathers are one unit where their readers' scopes name one layer."""
    reads = readers(body)
    keyed: dict[object, list[tuple[int, int]]] = {}
    for gather in _gathers(body):
        if reads[gather]:
            first = _first_use(body, reads, gather)
            layer = _layer(body[first].scope)
            keyed.setdefault(layer or gather, []).append((gather, first))
    found: list[_Unit] = []
    for pairs in keyed.values():
        nodes = sorted({node for gather, _ in pairs for node in ancestors(body, gather)})
        found.append(_Unit(tuple(nodes), min(first for _, first in pairs)))
    return sorted(found, key=lambda unit: unit.first_reader)


def _first_use(body: Body, reads: Sequence[Sequence[int]], gather: int) -> int:
    """The first node past the gather that does more than hand its result on."""
    index = gather
    free = free_nodes(body)
    while reads[index] and free[reads[index][0]]:
        index = reads[index][0]
    return reads[index][0] if reads[index] else index


def _layer(scope: str) -> str:
    """The part of a scope that names one layer: up to its first number, with the direction.

    What runs again is part of the backward pass, for which parameters are gathered again.
    """
    parsed = parse_scope(scope)
    parts = parsed.label.split("/")
    for depth, part in enumerate(parts):
        if any(letter.isdigit() for letter in part):
            return "/".join(parts[: depth + 1]) + (" (backward)" if parsed.backward or parsed.recomputed else "")
    return ""


def _prefetched(body: Body, ahead: int | None) -> Body:
    """Each unit's gathers in front of the first reader of the unit `ahead` before it; of all units where None.

    Gathers may come later than they were, what they wait for may not.
    """
    units = _units(body)
    if not units:
        return body
    reads, gathers = readers(body), set(_gathers(body))
    moved: dict[int, int] = {}
    for number, unit in enumerate(units):
        place = 0 if ahead is None else units[max(number - ahead, 0)].first_reader
        for node in unit.nodes:
            latest = reads[node][0] if node in gathers else node
            moved[node] = min(moved.get(node, place), place, latest)
    keys = [(moved.get(index, index), 0 if index in moved else 1, index) for index in range(len(body))]
    marked = [_asynchronous(node) if index in gathers else node for index, node in enumerate(body)]
    return reordered(marked, sorted(range(len(body)), key=keys.__getitem__))


def _turned(body: Body, ahead: int) -> Body:
    """Loops of `body` that gather parameters, turned so that each trip gathers what the one `ahead` later reads."""
    nodes: list[Node] = []
    place: dict[int, int] = {}
    for index, node in enumerate(body):
        shifted = _moved(node, place)
        nodes += _peeled(shifted, ahead, len(nodes)) if isinstance(shifted, Loop) else [shifted]
        place[index] = len(nodes) - 1
    return tuple(nodes)


def _peeled(loop: Loop, ahead: int, base: int) -> list[Node]:
    """Gathers of the first trips, the loop with those of later ones, and the last trips without."""
    gathers = _gathers(loop.body)
    if not gathers or not isinstance(loop.count, int) or loop.count <= ahead or loop.micro_batches is not None:
        return [loop]
    early = sorted({node for gather in gathers for node in ancestors(loop.body, gather)})
    late = _without(loop.body, early, gathers)
    nodes: list[Node] = []
    for _ in range(ahead):
        start = base + len(nodes)
        place = {old: start + new for new, old in enumerate(early)}
        for old in early:
            node = _asynchronous(_moved(loop.body[old], place))
            nodes.append(node if node.deps else replace(node, deps=loop.deps))
    before = tuple(range(base, base + len(nodes)))
    turned = replace(
        loop,
        body=_in_front(loop.body, early, late),
        count=loop.count - ahead,
        deps=tuple(sorted({*loop.deps, *before})),
    )
    nodes.append(turned)
    rest = replace(loop, body=late, count=ahead, deps=(base + len(nodes) - 1,), after=())
    return [*nodes, rest]


def _asynchronous(node: Node) -> Node:
    return replace(node, asynchronous=True) if isinstance(node, Collective) else node


def _without(body: Body, early: Sequence[int], gathers: Sequence[int]) -> Body:
    """The trip that finds its parameters gathered. What else reads the operands of a gather keeps them."""
    reads = readers(body)
    gone = set(gathers)
    for index in reversed(early):
        if index not in gone and reads[index] and gone.issuperset(reads[index]):
            gone.add(index)
    kept = [index for index in range(len(body)) if index not in gone]
    place = {old: new for new, old in enumerate(kept)}
    again = set(early)
    return tuple(_moved(replace(body[old], origin=()) if old in again else body[old], place) for old in kept)


def _in_front(body: Body, early: Sequence[int], late: Body) -> Body:
    """A trip that starts the gathers of a later one before its own work."""
    place = {old: new for new, old in enumerate(early)}
    first = [_asynchronous(_moved(body[old], place)) for old in early]
    behind = {index: index + len(first) for index in range(len(late))}
    return (*first, *(_moved(node, behind) for node in late))


def _moved(node: Node, place: Mapping[int, int]) -> Node:
    """`node` where nodes have the numbers `place`; what has none is not waited for."""
    deps = tuple(sorted({place[dep] for dep in node.deps if dep in place}))
    return replace(node, deps=deps, after=tuple(sorted({place[dep] for dep in node.after if dep in place})))
