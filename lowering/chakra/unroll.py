"""A device program as one flat list of steps: loops unrolled, branches decided, order made explicit."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stablecast.ir.device_program import P2P, Body, Branch, Collective, DeviceProgram, Kernel, Loop, Node
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import FloatArray
from stablecast.ir.types import Count

MAX_STEPS = 2_000_000
"""Steps of one rank above which unrolling is refused."""
_JOIN_ABOVE = 256

Leaf = Kernel | Collective | P2P


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel, collective, send or receive.

    `deps`: earlier steps that must be done. `trips`: how many runs it stands for, more than 1 in a loop that is kept
    compact.
    """

    node: Leaf
    deps: tuple[int, ...]
    trips: int = 1


@dataclass(frozen=True, slots=True)
class Unrolled:
    """`steps` in issue order; `notes`: what was decided on the way."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...]


def unroll(
    program: DeviceProgram,
    costs_s: FloatArray | None = None,
    loops: Mapping[str, int] | None = None,
    max_unroll: int | None = None,
    max_steps: int = MAX_STEPS,
) -> Unrolled:
    """The steps of `program`.

    Trips of a loop run one after the other. `max_unroll`: trips of a loop that are written out; the last of them
    stands for those left. `costs_s`: seconds of each row of the table, by which the dearest body of a branch is found
    (FLOPs and bytes where absent). `loops`: trip counts that the program leaves open. Raises `InputError` for more
    than `max_steps` steps.
    """
    if max_unroll is not None and max_unroll < 1:
        raise InputError(f"--max-unroll {max_unroll} is not a number of trips", "give 1 or more")
    table = program.table
    work = np.array([row.work.flops + row.work.nbytes for row in table.rows])
    made = _Unroller(costs_s if costs_s is not None else work, loops or {}, max_unroll, max_steps)
    made.body(program.body, (), 1)
    return Unrolled(tuple(made.steps), tuple(dict.fromkeys(made.notes)))


class _Unroller:
    def __init__(self, costs: FloatArray, loops: Mapping[str, int], max_unroll: int | None, max_steps: int) -> None:
        self._costs = costs.tolist()
        self._loops = loops
        self._max_unroll = max_unroll
        self._max_steps = max_steps
        self.steps: list[Step] = []
        self.notes: list[str] = []

    def body(self, body: Body, entry: tuple[int, ...], trips: int) -> tuple[int, ...]:
        """Append the steps of `body`, which starts after `entry`; gives the steps that end it."""
        ends: dict[int, tuple[int, ...]] = {}
        waited: set[int] = set()
        for index in _order(body):
            node = body[index]
            before = sorted({*node.deps, *node.after})
            waited.update(before)
            deps = tuple(sorted({end for other in before for end in ends[other]})) if before else entry
            ends[index] = self._node(node, deps or entry, trips)
        open_ends = {end for index, held in ends.items() if index not in waited for end in held}
        return tuple(sorted(open_ends.difference(entry))) or entry

    def _node(self, node: Node, deps: tuple[int, ...], trips: int) -> tuple[int, ...]:
        if isinstance(node, Loop):
            return self._loop(node, deps, trips)
        if isinstance(node, Branch):
            return self.body(self._chosen(node), deps, trips)
        if _is_nothing(node):
            return deps
        if len(self.steps) >= self._max_steps:
            limit = f"{self._max_steps:,}"
            raise InputError(f"a rank has more than {limit} nodes", "keep loops compact: --max-unroll 1")
        self.steps.append(Step(node, deps, trips))
        return (len(self.steps) - 1,)

    def _loop(self, node: Loop, deps: tuple[int, ...], trips: int) -> tuple[int, ...]:
        count = self._count(node.count, node.scope)
        copies = count if self._max_unroll is None else min(count, self._max_unroll)
        for copy in range(copies):
            rest = count - copies + 1 if copy == copies - 1 else 1
            deps = self._joined(self.body(node.body, deps, trips * rest), len(node.body), deps)
        return deps

    def _joined(self, exits: tuple[int, ...], followers: int, entry: tuple[int, ...]) -> tuple[int, ...]:
        """Where many steps would each wait for many, the last of these waits for the others and stands for all.

        What the trip starts after (`entry`) the others wait for already.
        """
        if len(exits) * followers <= _JOIN_ABOVE or len(exits) < 2:
            return exits
        last = exits[-1]
        step = self.steps[last]
        self.steps[last] = replace(step, deps=tuple(sorted({*step.deps, *exits[:-1]}.difference(entry))))
        return (last,)

    def _count(self, count: Count, scope: str) -> int:
        if isinstance(count, int):
            return count
        given = self._loops.get(count.name, count.default)
        if given is None:
            where = f" at {scope}" if scope else ""
            self.notes.append(f"loop {count.name}{where}: trips unknown, taken as {count.low}")
        return count.low if given is None else given

    def _chosen(self, branch: Branch) -> Body:
        if branch.probability is not None:
            weights = [(chance, -index) for index, chance in enumerate(branch.probability)]
            self.notes.append("of a conditional, the most probable body is written")
        else:
            weights = [(self._cost(body), -index) for index, body in enumerate(branch.bodies)]
            self.notes.append("of a conditional, the dearest body is written")
        return branch.bodies[-max(weights)[1]]

    def _cost(self, body: Body) -> float:
        total = 0.0
        for node in body:
            if isinstance(node, Kernel):
                total += self._costs[node.row]
            elif isinstance(node, Loop):
                total += self._cost(node.body) * (node.count if isinstance(node.count, int) else max(1, node.count.low))
            elif isinstance(node, Branch):
                total += max(map(self._cost, node.bodies), default=0.0)
        return total


def _is_nothing(node: Leaf) -> bool:
    """A collective of one rank or a transfer of no bytes, which consumers hang on."""
    if isinstance(node, Collective):
        return node.groups.size < 2 or node.operand_bytes < 1
    return isinstance(node, P2P) and (node.nbytes < 1 or (node.shift == 0 and node.direction in ("send", "recv")))


def _order(body: Body) -> Sequence[int]:
    """Issue order, changed only where a node stands before one that it waits for."""
    if all(dep < index for index, node in enumerate(body) for dep in (*node.deps, *node.after)):
        return range(len(body))
    missing = [len({*node.deps, *node.after}) for node in body]
    followers: list[list[int]] = [[] for _ in body]
    for index, node in enumerate(body):
        for dep in {*node.deps, *node.after}:
            followers[dep].append(index)
    ready = [index for index, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for follower in followers[index]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, follower)
    if len(order) < len(body):
        raise InputError("the device program's order is circular")
    return order
