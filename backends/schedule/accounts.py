"""What a played timeline adds up to: kernels, collectives, exposed communication, idle time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stablecast.backends.estimates import Estimates, FloatArray
from stablecast.backends.schedule.flat import Flat, Kind
from stablecast.backends.schedule.play import Played
from stablecast.backends.schedule.timeline import CollectiveRuns, KernelRuns
from stablecast.ir.device_program import P2P, Collective, Kernel

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Accounts:
    """Sums of one role's step; fields as in `Timeline`."""

    compute_s: float
    exposed_s: float
    idle_s: float
    kernels: tuple[KernelRuns, ...]
    collectives: tuple[CollectiveRuns, ...]
    bound_s: dict[str, float]
    exposed_by_axis_s: dict[str, float]


class Covered:
    """How much of [0, t] is covered by intervals; overlapping ones count once."""

    def __init__(self, begin: FloatArray, end: FloatArray) -> None:
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
        reached = np.maximum.accumulate(np.concatenate([np.zeros(1), end]))
        self.own = np.maximum(end - np.maximum(begin, reached[:-1]), 0.0)
        starts = np.maximum(begin, reached[:-1])
        keep = self.own > 0.0
        points = np.stack([starts[keep], end[keep]], axis=1).reshape(-1)
        steps = np.stack([np.zeros(int(keep.sum())), self.own[keep]], axis=1).reshape(-1)
        self._at = np.concatenate([np.zeros(1), points])
        self._sum = np.concatenate([np.zeros(1), np.cumsum(steps)])
        self.order = order
        self.first = starts

    def until(self, time: FloatArray) -> FloatArray:
        """Covered seconds before each time."""
        return np.interp(time, self._at, self._sum)


def account(flat: Flat, played: Played, estimates: Estimates, speed: float, step_s: float) -> Accounts:
    """Add up one role. Of communication that overlaps itself, a moment counts for the one that began first."""
    kinds = np.array(flat.kind, dtype=np.int64)
    begin, end = np.array(played.begin_s), np.array(played.end_s)
    kernels = np.nonzero(kinds == Kind.KERNEL)[0]
    comms = np.nonzero(kinds == Kind.COMM)[0]
    weight = np.array(flat.weight)
    exposed = _exposed(begin, end, kernels, comms)
    compute_s, bound_s = _compute(flat, kernels, estimates, speed)
    exposed_s = float((exposed * weight[comms]).sum())
    busy = Covered(begin[kernels], end[kernels])
    running = float((busy.own * weight[kernels][busy.order]).sum())
    if exposed_s > 0.0:
        bound_s["communication"] = exposed_s
    idle_s = max(step_s - running - exposed_s, 0.0)
    idle_s = 0.0 if idle_s < 1e-12 * step_s else idle_s
    if idle_s > 0.0:
        bound_s["idle"] = idle_s
    return Accounts(
        compute_s,
        exposed_s,
        idle_s,
        _kernel_runs(flat, kernels),
        _collective_runs(flat, comms, exposed),
        bound_s,
        _by_axis(flat, comms, exposed),
    )


def _exposed(begin: FloatArray, end: FloatArray, kernels: IntArray, comms: IntArray) -> FloatArray:
    """Seconds of each communication node in which no kernel runs and no earlier communication does."""
    found = np.zeros(len(comms))
    if not len(comms):
        return found
    busy = Covered(begin[kernels], end[kernels])
    taken = Covered(begin[comms], end[comms])
    first = taken.first
    last = first + taken.own
    found[taken.order] = np.maximum(taken.own - (busy.until(last) - busy.until(first)), 0.0)
    return found


def _compute(flat: Flat, kernels: IntArray, estimates: Estimates, speed: float) -> tuple[float, dict[str, float]]:
    runs = np.zeros(len(estimates))
    for index in _places(kernels):
        node = flat.nodes[index]
        assert isinstance(node, Kernel)
        runs[node.row] += flat.weight[index]
    spent = estimates.time_s * runs / speed
    names = sorted(set(map(str, estimates.bound)))
    return float(spent.sum()), {name: float(spent[estimates.bound == name].sum()) for name in names}


def _kernel_runs(flat: Flat, kernels: IntArray) -> tuple[KernelRuns, ...]:
    counts: dict[int, float] = {}
    nodes: dict[int, Kernel] = {}
    for index in _places(kernels):
        node = flat.nodes[index]
        assert isinstance(node, Kernel)
        counts[id(node)] = counts.get(id(node), 0.0) + flat.weight[index]
        nodes[id(node)] = node
    return tuple(KernelRuns(node.row, node.scope, node.location.source, counts[key]) for key, node in nodes.items())


def _collective_runs(flat: Flat, comms: IntArray, exposed: FloatArray) -> tuple[CollectiveRuns, ...]:
    counts: dict[int, float] = {}
    sums: dict[int, float] = {}
    places: dict[int, int] = {}
    for place, index in enumerate(_places(comms)):
        key = id(flat.nodes[index])
        counts[key] = counts.get(key, 0.0) + flat.weight[index]
        sums[key] = sums.get(key, 0.0) + float(exposed[place]) * flat.weight[index]
        places.setdefault(key, index)
    return tuple(_runs(flat, index, counts[key], sums[key]) for key, index in places.items())


def _runs(flat: Flat, index: int, count: float, exposed_s: float) -> CollectiveRuns:
    node, priced = flat.nodes[index], flat.estimates[index]
    assert isinstance(node, Collective | P2P)
    assert priced is not None
    each = exposed_s / count if count else 0.0
    return CollectiveRuns(node, count, priced.time_s, priced.low_s, priced.high_s, priced.algorithm, each)


def _by_axis(flat: Flat, comms: IntArray, exposed: FloatArray) -> dict[str, float]:
    found: dict[str, float] = {}
    for place, index in enumerate(_places(comms)):
        node = flat.nodes[index]
        assert isinstance(node, Collective | P2P)
        axes = node.axis if isinstance(node, P2P) else ",".join(node.groups.axes) or "all"
        found[axes] = found.get(axes, 0.0) + float(exposed[place]) * flat.weight[index]
    return found


def _places(indices: IntArray) -> list[int]:
    return [int(index) for index in indices]
