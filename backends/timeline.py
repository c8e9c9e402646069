"""From kernel times to a step: a chain, each node after the one before it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.device import System
from stablecast.backends.estimates import Estimates, FloatArray
from stablecast.ir.device_program import P2P, Body, Branch, Collective, DeviceProgram, Kernel, Loop
from stablecast.ir.types import Count


@dataclass(frozen=True, slots=True)
class KernelRuns:
    """Kernel nodes in issue order: row of the table, scope, source line, and runs in a step."""

    row: int
    scope: str
    source: str
    count: float


@dataclass(frozen=True, slots=True)
class CollectiveRuns:
    """One collective of the program: times of a single run in seconds, and runs in a step."""

    node: Collective | P2P
    count: float
    time_s: float
    low_s: float
    high_s: float
    algorithm: str
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step of one device.

    `time_s`, `low_s`, `high_s`: the step. `compute_s`: kernels. `exposed_s`: communication that nothing hides; in a
    chain all of it. `bound_s`: seconds of the step by what limits them.
    """

    time_s: float
    low_s: float
    high_s: float
    compute_s: float
    exposed_s: float
    kernels: tuple[KernelRuns, ...]
    collectives: tuple[CollectiveRuns, ...]
    bound_s: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(slots=True)
class _Totals:
    time: float = 0.0
    low: float = 0.0
    high: float = 0.0


def chain(program: DeviceProgram, estimates: Estimates, system: System, loops: Mapping[str, int]) -> Timeline:
    """The step in which every node waits for the one before it; of a branch, the dearest body runs.

    `loops`: trip counts that the program leaves open.
    """
    walk = _Walk(estimates, CollectiveModel(system), loops)
    totals = walk.body(program.body, 1.0)
    compute = float(sum(estimates.time_s[kernel.row] * kernel.count for kernel in walk.kernels))
    exposed = sum(run.exposed_s * run.count for run in walk.collectives)
    bound: dict[str, float] = {}
    weights = np.zeros(len(estimates))
    for kernel in walk.kernels:
        weights[kernel.row] += kernel.count
    for name in sorted(set(map(str, estimates.bound))):
        mask: FloatArray = (estimates.bound == name).astype(np.float64)
        bound[name] = float((estimates.time_s * weights * mask).sum())
    if exposed:
        bound["communication"] = exposed
    return Timeline(
        totals.time, totals.low, totals.high, compute, exposed, tuple(walk.kernels), tuple(walk.collectives), bound
    )


class _Walk:
    def __init__(self, estimates: Estimates, model: CollectiveModel, loops: Mapping[str, int]) -> None:
        self._time = estimates.time_s.tolist()
        self._low = estimates.low_s.tolist()
        self._high = estimates.high_s.tolist()
        self._model = model
        self._loops = loops
        self.kernels: list[KernelRuns] = []
        self.collectives: list[CollectiveRuns] = []

    def body(self, body: Body, runs: float) -> _Totals:
        """Times of one run of `body`, which runs `runs` times a step."""
        total = _Totals()
        for node in body:
            if isinstance(node, Kernel):
                row = node.row
                self.kernels.append(KernelRuns(row, node.scope, node.location.source, runs))
                total.time += self._time[row]
                total.low += self._low[row]
                total.high += self._high[row]
            elif isinstance(node, Loop):
                trips = self._trips(node.count)
                inner = self.body(node.body, runs * trips)
                total.time += inner.time * trips
                total.low += inner.low * trips
                total.high += inner.high * trips
            elif isinstance(node, Branch):
                inner = self._branch(node, runs)
                total.time, total.low, total.high = (
                    total.time + inner.time,
                    total.low + inner.low,
                    total.high + inner.high,
                )
            else:
                run = self._collective(node, runs)
                total.time, total.low, total.high = (
                    total.time + run.time_s,
                    total.low + run.low_s,
                    total.high + run.high_s,
                )
        return total

    def _trips(self, count: Count) -> int:
        if isinstance(count, int):
            return count
        return self._loops.get(count.name, count.default if count.default is not None else count.low)

    def _branch(self, node: Branch, runs: float) -> _Totals:
        before = len(self.kernels), len(self.collectives)
        if node.probability is not None:
            total = _Totals()
            for body, chance in zip(node.bodies, node.probability, strict=True):
                inner = self.body(body, runs * chance)
                total.time += inner.time * chance
                total.low += inner.low * chance
                total.high += inner.high * chance
            return total
        times = [self.body(body, 0.0).time for body in node.bodies]
        del self.kernels[before[0] :], self.collectives[before[1] :]
        dearest = max(range(len(times)), key=times.__getitem__)
        return self.body(node.bodies[dearest], runs)

    def _collective(self, node: Collective | P2P, runs: float) -> CollectiveRuns:
        priced = self._model.p2p(node) if isinstance(node, P2P) else self._model.estimate(node)
        run = CollectiveRuns(
            node, runs, priced.time_s, priced.low_s, priced.high_s, priced.algorithm, exposed_s=priced.time_s
        )
        self.collectives.append(run)
        return run
