"""Sets of time intervals as sorted arrays: union, length, overlap."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Intervals = npt.NDArray[np.float64]
"""Shape [n, 2]: start and end, sorted and disjoint."""

NOTHING: Intervals = np.zeros((0, 2))


def union(start: FloatArray, end: FloatArray) -> Intervals:
    """The time that at least one interval covers."""
    if not len(start):
        return NOTHING
    order = np.argsort(start, kind="stable")
    begins, ends = start[order], np.maximum.accumulate(end[order])
    fresh = np.concatenate(([True], begins[1:] > ends[:-1]))
    firsts = np.nonzero(fresh)[0]
    lasts = np.concatenate((firsts[1:] - 1, [len(begins) - 1]))
    return np.stack((begins[firsts], ends[lasts]), axis=1)


def length(intervals: Intervals) -> float:
    """Total length."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def overlap(left: Intervals, right: Intervals) -> float:
    """Length of the time that both cover."""
    if not len(left) or not len(right):
        return 0.0
    both = np.concatenate((left, right))
    return length(left) + length(right) - length(union(both[:, 0], both[:, 1]))


def clip(intervals: Intervals, low: float, high: float) -> Intervals:
    """The part between `low` and `high`."""
    cut = np.clip(intervals, low, high)
    return cut[cut[:, 1] > cut[:, 0]]


def gaps(intervals: Intervals, low: float, high: float) -> Intervals:
    """The time between `low` and `high` that is not covered."""
    inside = clip(intervals, low, high)
    edges = np.concatenate(([low], inside.ravel(), [high])).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]
