"""Whether a pass kept what every node waits for, on loops cut down to a few trips.

The nodes of the program are numbered; a pass carries the numbers along (`origin`): `dataclasses.replace` keeps them, a
node made of several has those of all, and the parts of a split node have that of the whole. The k-th run of a number
is the same before and after, so that a loop may be turned, peeled or unrolled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stablecast.ir.device_program import P2P, Body, Branch, Collective, DeviceProgram, Kernel, Loop, Node
from stablecast.lowering.passes.body import free_nodes

TRIPS = 4
"""Trips that loops are cut down to."""
Change = Callable[[DeviceProgram], DeviceProgram]


def illegal(change: Change, program: DeviceProgram) -> str:
    """What `change` does to `program` that it may not, in one sentence; empty where nothing.

    It may not lose a node, run one more or less often, let one begin before what it waited for has ended, change the
    FLOPs of the step, or refer to nodes that are not there or come later.
    """
    short = replace(program, body=_numbered(_cut(program.body), _Counter()))
    changed = change(short)
    fault = _malformed(changed.body, "")
    if fault:
        return fault
    before, after = _Needs(), _Order()
    before.walk(short.body)
    after.walk(changed.body, ())
    for number, places in before.runs.items():
        got = len(after.runs.get(number, ()))
        if got == 0 or got % len(places):
            return f"{before.labels[number]} runs {got} times, not {len(places)}"
    flops = _flops(short), _flops(changed)
    if abs(flops[0] - flops[1]) > 1e-6 * max(flops):
        return f"the step has {flops[1]:g} matrix FLOPs, not {flops[0]:g}"
    return _broken(before, after)


def _broken(before: "_Needs", after: "_Order") -> str:
    def parts(run: tuple[int, int]) -> Sequence[int]:
        places = after.runs[run[0]]
        each = len(places) // len(before.runs[run[0]])
        return places[run[1] * each : (run[1] + 1) * each]

    for place, needed in enumerate(before.needs):
        ends = parts(before.run_of[place])
        for other in needed:
            first = before.run_of[other]
            if not all(part in ends or after.precedes(part, ends) for part in parts(first)):
                return f"{before.labels[before.run_of[place][0]]} no longer waits for {before.labels[first[0]]}"
    return ""


def _cut(body: Body) -> Body:
    """Loops of at most `TRIPS` trips; of branches the first body."""
    nodes: list[Node] = []
    for node in body:
        if isinstance(node, Loop):
            trips = min(node.count, TRIPS) if isinstance(node.count, int) else TRIPS
            nodes.append(replace(node, body=_cut(node.body), count=trips))
        elif isinstance(node, Branch):
            nodes.append(replace(node, bodies=tuple(map(_cut, node.bodies))))
        else:
            nodes.append(node)
    return tuple(nodes)


@dataclass(slots=True)
class _Counter:
    next: int = 0

    def take(self) -> tuple[int, ...]:
        self.next += 1
        return (self.next - 1,)


def _numbered(body: Body, counter: _Counter) -> Body:
    nodes: list[Node] = []
    for node in body:
        if isinstance(node, Loop):
            nodes.append(replace(node, body=_numbered(node.body, counter), origin=()))
        elif isinstance(node, Branch):
            nodes.append(replace(node, bodies=tuple(_numbered(one, counter) for one in node.bodies), origin=()))
        else:
            nodes.append(replace(node, origin=counter.take()))
    return tuple(nodes)


def _malformed(body: Body, where: str) -> str:
    for index, node in enumerate(body):
        for dep in (*node.deps, *node.after):
            if not 0 <= dep < index:
                return f"node {index}{where} waits for node {dep}, which does not come before it"
        inner = (node.body,) if isinstance(node, Loop) else node.bodies if isinstance(node, Branch) else ()
        for part in inner:
            fault = _malformed(part, f" in the body of node {index}{where}")
            if fault:
                return fault
    return ""


def _flops(program: DeviceProgram) -> float:
    def of(body: Body) -> float:
        total = 0.0
        for node in body:
            if isinstance(node, Kernel):
                total += program.table.rows[node.row].matmul_flops
            elif isinstance(node, Loop):
                total += of(node.body) * (node.count if isinstance(node.count, int) else TRIPS)
            elif isinstance(node, Branch):
                total += sum(map(of, node.bodies))
        return total

    return of(program.body)


class _Needs:
    """Every run of every node, and the runs whose results it needs.

    In a loop's trip, what runs ahead needs what is outside the loop; the rest needs what the trip before made: all that
    is without a reader there.
    """

    def __init__(self) -> None:
        self.needs: list[tuple[int, ...]] = []
        self.run_of: list[tuple[int, int]] = []
        self.runs: dict[int, list[int]] = {}
        self.labels: dict[int, str] = {}

    def walk(self, body: Body, entry: tuple[int, ...] = (), outside: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Add one run of `body`; gives the runs that what follows needs. `entry`, `outside`: what it needs itself."""
        free = free_nodes(body)
        means: list[tuple[int, ...]] = []
        read = {dep for node in body for dep in node.deps}
        for index, node in enumerate(body):
            deps = (*node.deps, *node.after)
            found = [place for dep in deps for place in means[dep]]
            if free[index]:
                found += outside if not deps else ()
            elif all(free[dep] for dep in deps):
                found += entry
            means.append(self._node(node, tuple(dict.fromkeys(found))))
        return tuple(place for index, places in enumerate(means) if index not in read for place in places)

    def _node(self, node: Node, needed: tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(node, Loop):
            carried = needed
            for _ in range(node.count if isinstance(node.count, int) else TRIPS):
                carried = self.walk(node.body, carried, needed) or carried
            return carried
        if isinstance(node, Branch):
            return tuple(place for one in node.bodies for place in self.walk(one, needed, needed)) or needed
        number = node.origin[0]
        place = len(self.needs)
        runs = self.runs.setdefault(number, [])
        self.needs.append(needed)
        self.run_of.append((number, len(runs)))
        self.labels[number] = _label(node, number)
        runs.append(place)
        return (place,)


class _Order:
    """Every run of every node and of the ends of trips, and those that it waits for."""

    def __init__(self) -> None:
        self.edges: list[tuple[int, ...]] = []
        self.runs: dict[int, list[int]] = {}
        self._known: tuple[int, set[int]] = (-1, set())

    def walk(self, body: Body, entry: tuple[int, ...]) -> list[int]:
        """Add one run of `body`, whose nodes without dependencies wait for `entry`; gives the place of each node."""
        places: list[int] = []
        for node in body:
            edges = tuple(places[dep] for dep in (*node.deps, *node.after)) or entry
            if isinstance(node, Loop):
                mark = self._add(edges)
                for _ in range(node.count if isinstance(node.count, int) else TRIPS):
                    mark = self._add((mark, *self.walk(node.body, (mark,))))
            elif isinstance(node, Branch):
                first = self._add(edges)
                mark = self._add((first, *(place for one in node.bodies for place in self.walk(one, (first,)))))
            else:
                mark = self._add(edges)
                for number in node.origin:
                    self.runs.setdefault(number, []).append(mark)
            places.append(mark)
        return places

    def _add(self, edges: tuple[int, ...]) -> int:
        self.edges.append(edges)
        return len(self.edges) - 1

    def precedes(self, first: int, ends: Sequence[int]) -> bool:
        """Whether some end waits, however indirectly, for `first`."""
        return any(first in self.edges[end] for end in ends) or any(first in self._before(end) for end in ends)

    def _before(self, end: int) -> set[int]:
        if self._known[0] != end:
            found: set[int] = set()
            waiting = list(self.edges[end])
            while waiting:
                place = waiting.pop()
                if place not in found:
                    found.add(place)
                    waiting += self.edges[place]
            self._known = (end, found)
        return self._known[1]


def _label(node: Kernel | Collective | P2P, number: int) -> str:
    kind = node.kind if isinstance(node, Collective) else type(node).__name__.lower()
    return f"{kind} {number}" + (f" ({node.scope})" if node.scope else "")
