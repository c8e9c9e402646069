"""Passes that start collectives beside kernels: as issued, and as a latency-hiding scheduler orders them."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stablecast.ir.device_program import P2P, Body, Branch, Collective, DeviceProgram, Kernel, Loop, Node
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelRow
from stablecast.lowering.passes.body import asynchronous, each_body, reordered, with_body

MATRIX_FLOPS_PER_S: Final = 4e14
MEMORY_BYTES_PER_S: Final = 2e12
LINK_BYTES_PER_S: Final = 1e11
START_S: Final = 1e-5
"""Nominal rates by which `latency-hiding` weighs kernels against collectives, as compilers' schedulers do with fixed
latencies; the device's own come later, in the timeline. Assumptions."""
_OPEN_TRIPS: Final = 8


class Async:
    """Collectives run beside kernels from where they are issued."""

    def __init__(self, value: str = "") -> None:
        no_value("async", value)

    def __call__(self, program: DeviceProgram) -> DeviceProgram:
        return with_body(program, each_body(program.body, asynchronous))


class Pin:
    """Order of issue as dependencies, for consumers that know no streams (ASTRA-sim): use it last."""

    def __init__(self, value: str = "") -> None:
        no_value("pin", value)

    def __call__(self, program: DeviceProgram) -> DeviceProgram:
        return with_body(program, each_body(program.body, _pinned))


def _pinned(body: Body) -> Body:
    """Kernels, and collectives that hold them up, one after the other; others start behind what was issued before."""
    nodes: list[Node] = []
    last = -1
    for index, node in enumerate(body):
        beside = isinstance(node, P2P) or (isinstance(node, Collective) and node.asynchronous)
        held = last >= 0 and last not in node.deps and not isinstance(node, P2P)
        nodes.append(replace(node, after=tuple(sorted({*node.after, last}))) if held else node)
        last = last if beside else index
    return tuple(nodes)


class LatencyHiding:
    """Collectives start early and kernels that need them come late, as XLA's latency-hiding scheduler orders them."""

    def __init__(self, value: str = "") -> None:
        no_value("latency-hiding", value)

    def __call__(self, program: DeviceProgram) -> DeviceProgram:
        rows = program.table.rows

        def change(body: Body) -> Body:
            if not any(isinstance(node, Collective | P2P) for node in body):
                return body
            body = asynchronous(body)
            return reordered(body, _Backwards(body, rows).order())

        return with_body(program, each_body(program.body, change))


def no_value(name: str, value: str) -> None:
    """Raise `InputError` where a pass that takes no value was given one."""
    if value:
        raise InputError(f"pass '{name}' takes no value, not '{value}'")


def nominal_s(node: Node, rows: Sequence[KernelRow]) -> float:
    """Seconds at the nominal rates."""
    if isinstance(node, Kernel):
        row = rows[node.row]
        return max(row.matmul_flops / MATRIX_FLOPS_PER_S, (row.bytes_read + row.bytes_written) / MEMORY_BYTES_PER_S)
    if isinstance(node, Collective):
        twice = 2.0 if node.kind == "all_reduce" else 1.0
        return START_S + twice * node.message_bytes / LINK_BYTES_PER_S
    if isinstance(node, P2P):
        return START_S + node.nbytes / LINK_BYTES_PER_S
    if isinstance(node, Loop):
        trips = node.count if isinstance(node.count, int) else _OPEN_TRIPS
        return trips * sum(nominal_s(inner, rows) for inner in node.body)
    assert isinstance(node, Branch)
    return max((sum(nominal_s(inner, rows) for inner in body) for body in node.bodies), default=0.0)


@dataclass(slots=True)
class _Backwards:
    """List scheduling from the end of a body: the last kernel first, a collective once its time has been filled.

    So a collective starts no earlier than it must to be hidden, which keeps memory low. Where nothing else can run, the
    collective is taken whose operands come last in the order of issue.
    """

    body: Body
    rows: Sequence[KernelRow]

    def order(self) -> list[int]:
        """Nodes in their new order."""
        body = self.body
        left = [0] * len(body)
        for node in body:
            for dep in {*node.deps, *node.after}:
                left[dep] += 1
        pending = _Pending([max((*node.deps, *node.after), default=-1) for node in body])
        kernels: list[int] = []
        found: list[int] = []
        fresh = [index for index, count in enumerate(left) if count == 0]
        while fresh or kernels or pending.comms:
            for index in fresh:
                if isinstance(body[index], Collective):
                    pending.add(index, nominal_s(body[index], self.rows))
                else:
                    heapq.heappush(kernels, -index)
            fresh = []
            if pending.due or not kernels:
                chosen = pending.take()
            else:
                chosen = -heapq.heappop(kernels)
                pending.now += nominal_s(body[chosen], self.rows)
            found.append(chosen)
            for dep in {*body[chosen].deps, *body[chosen].after}:
                left[dep] -= 1
                if left[dep] == 0:
                    fresh.append(dep)
        return found[::-1]


@dataclass(slots=True)
class _Pending:
    """Collectives that are needed after `now` (counted from the end), one after the other on the link.

    `latest`: of each node, the last one in the order of issue that it waits for.
    """

    latest: Sequence[int]
    comms: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    now: float = 0.0
    link: float = 0.0
    next: float = math.inf

    @property
    def due(self) -> bool:
        """Whether the time of one has been filled with kernels."""
        return self.next <= self.now

    def add(self, index: int, takes_s: float) -> None:
        self.comms[index] = (self.now, takes_s)
        self.next = min(self.next, max(self.now, self.link) + takes_s)

    def take(self) -> int:
        """The one that starts now: of those that are due, or of all where none is, the one whose operands come last."""
        due = [index for index in self.comms if self._end(index) <= self.now]
        chosen = max(due or self.comms, key=lambda index: (self.latest[index], index))
        self.link = self._end(chosen)
        self.now = max(self.now, self.link)
        del self.comms[chosen]
        self.next = min(map(self._end, self.comms), default=math.inf)
        return chosen

    def _end(self, index: int) -> float:
        asked, takes = self.comms[index]
        return max(asked, self.link) + takes
