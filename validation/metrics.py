"""Errors of predictions against measurements; the one place where the project's error figures are defined.

With measured m and predicted p, both seconds: relative error e = (p - m) / m. Errors are fractions, not percent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stablecast.ir.errors import InputError

FloatArray = npt.NDArray[np.float64]
_RESAMPLES: Final = 1000
_SEED: Final = 0
_MAX_PAIRS: Final = 200_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % bootstrap interval of a figure."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """Errors over `count` rows, as fractions.

    `mape`: mean of |e|; `median`, `p90`, `worst`: of |e|; `bias`: mean of e (positive: predicted too long);
    `weighted`: sum |p - m| over sum m; `total`: sum p over sum m, less 1. `rank`: Spearman's correlation of p and m;
    `coverage`: share of measurements within [low, high]; `width`: mean of (high - low) / p. `interval`: of `mape`;
    `rounding`: mean of the label's rounding over m, what no predictor can do better than. None where it has no meaning.
    """

    count: int
    mape: float
    median: float
    p90: float
    worst: float
    bias: float
    weighted: float
    total: float
    rank: float | None = None
    coverage: float | None = None
    width: float | None = None
    interval: Interval | None = None
    rounding: float | None = None

    def to_dict(self) -> dict[str, Any]:
        names = [name for name in self.__slots__ if name != "interval"]
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        found["mape_95"] = [self.interval.low, self.interval.high] if self.interval else None
        return found


def errors(measured: FloatArray, predicted: FloatArray) -> FloatArray:
    """Relative errors. Raises `InputError` where a measurement is not positive or lengths differ."""
    if measured.shape != predicted.shape:
        raise InputError(f"{len(measured)} measurements stand against {len(predicted)} predictions")
    if (measured <= 0).any():
        raise InputError("a measured time is not positive")
    return predicted / measured - 1.0


def error_stats(
    measured: FloatArray,
    predicted: FloatArray,
    low: FloatArray | None = None,
    high: FloatArray | None = None,
    rounding_s: FloatArray | None = None,
    *,
    bootstrap: bool = True,
) -> ErrorStats:
    """All figures of one set of rows, seconds. `rounding_s`: half of the last digit that a label keeps.

    Raises `InputError` for an empty set.
    """
    if not len(measured):
        raise InputError("there are no rows to score")
    signed = errors(measured, predicted)
    size = np.abs(signed)
    ranged = _ranged(measured, predicted, low, high)
    return ErrorStats(
        count=len(measured),
        mape=float(size.mean()),
        median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        worst=float(size.max()),
        bias=float(signed.mean()),
        weighted=float(np.abs(predicted - measured).sum() / measured.sum()),
        total=float(predicted.sum() / measured.sum() - 1.0),
        rank=rank_correlation(measured, predicted),
        coverage=ranged[0],
        width=ranged[1],
        interval=bootstrap_interval(size) if bootstrap and len(size) > 1 else None,
        rounding=float((rounding_s / measured).mean()) if rounding_s is not None else None,
    )


def _ranged(
    measured: FloatArray, predicted: FloatArray, low: FloatArray | None, high: FloatArray | None
) -> tuple[float | None, float | None]:
    """Coverage and mean relative width of the ranges."""
    if low is None or high is None:
        return None, None
    inside = (measured >= low) & (measured <= high)
    return float(inside.mean()), float(((high - low) / predicted).mean())


def _mean(sample: FloatArray) -> float:
    return float(sample.mean())


def bootstrap_interval(values: FloatArray, figure: Callable[[FloatArray], float] | None = None) -> Interval:
    """The 95 % interval of `figure` (the mean if none is given) over resampled rows; the seed is fixed."""
    generator = np.random.default_rng(_SEED)
    resamples = _RESAMPLES if len(values) <= 2000 else 100
    chosen = figure or _mean
    found = [chosen(values[generator.integers(0, len(values), len(values))]) for _ in range(resamples)]
    low, high = np.quantile(found, [0.025, 0.975])
    return Interval(float(low), float(high))


def ranks(values: FloatArray) -> FloatArray:
    """Ranks from 1, equal values sharing their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2.0)[place]


def rank_correlation(measured: FloatArray, predicted: FloatArray) -> float | None:
    """Spearman's rank correlation; None for fewer than three rows or where one side is constant."""
    if len(measured) < 3:
        return None
    a, b = ranks(measured), ranks(predicted)
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


@lru_cache(maxsize=256)
def pairs(size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Every pair of `size` rows, a fixed sample of them where there are too many."""
    if size * (size - 1) // 2 <= _MAX_PAIRS:
        first, second = np.triu_indices(size, 1)
        return first.astype(np.int64), second.astype(np.int64)
    generator = np.random.default_rng(_SEED)
    first = generator.integers(0, size, _MAX_PAIRS)
    second = (first + generator.integers(1, size, _MAX_PAIRS)) % size
    return first, second


def pairwise_order(measured: FloatArray, predicted: FloatArray, tie: float = 0.0) -> float | None:
    """Share of pairs whose faster member is predicted to be the faster one; pairs closer than `tie` are left out."""
    if len(measured) < 2:
        return None
    first, second = pairs(len(measured))
    apart = np.abs(np.log(measured[first] / measured[second])) > np.log1p(tie)
    if not apart.any():
        return None
    same = np.sign(measured[first] - measured[second]) == np.sign(predicted[first] - predicted[second])
    return float(same[apart].mean())


def ratio_error(measured: FloatArray, predicted: FloatArray) -> float | None:
    """Median over pairs of |predicted ratio / measured ratio - 1|: how well differences are predicted.

    The larger of the two measurements is always on top, so that the figure does not depend on the order of rows.
    """
    if len(measured) < 2:
        return None
    first, second = pairs(len(measured))
    swap = measured[first] < measured[second]
    top, below = np.where(swap, second, first), np.where(swap, first, second)
    found = (predicted[top] / predicted[below]) / (measured[top] / measured[below]) - 1.0
    return float(np.median(np.abs(found)))


def grouped_ratio_error(groups: Sequence[Any], measured: FloatArray, predicted: FloatArray) -> float | None:
    """The median over groups of `ratio_error` within each: one system at several sizes."""
    return _grouped(_members(groups), measured, predicted, ratio_error)


def across(
    items: Sequence[Any], systems: Sequence[Any], measured: FloatArray, predicted: FloatArray, tie: float = 0.05
) -> tuple[float | None, float | None]:
    """The same item on several systems: median ratio error, and the share of system pairs put in the right order.

    Several rows of one item on one system count as their geometric mean; systems that are measured within `tie` of each
    other have no order. None where no item is on two systems.
    """
    cells: dict[tuple[Any, Any], list[int]] = {}
    for index, cell in enumerate(zip(items, systems, strict=True)):
        cells.setdefault(cell, []).append(index)
    by_item: dict[Any, list[int]] = {}
    for place, (item, _) in enumerate(cells):
        by_item.setdefault(item, []).append(place)
    shared = {item: places for item, places in by_item.items() if len(places) > 1}
    if not shared:
        return None, None
    logs = [(np.log(measured[rows]).mean(), np.log(predicted[rows]).mean()) for rows in cells.values()]
    values = np.exp(np.array(logs))
    members = [np.array(places) for places in shared.values()]
    ratios = [ratio_error(values[place, 0], values[place, 1]) for place in members]
    orders = [pairwise_order(values[place, 0], values[place, 1], tie) for place in members]
    known = [order for order in orders if order is not None]
    return float(np.median([ratio for ratio in ratios if ratio is not None])), float(np.mean(known)) if known else None


def _members(groups: Sequence[Any]) -> list[npt.NDArray[np.int64]]:
    members: dict[Any, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return [np.array(index) for index in members.values() if len(index) > 1]


def _grouped(
    members: Sequence[npt.NDArray[np.int64]],
    measured: FloatArray,
    predicted: FloatArray,
    figure: Callable[[FloatArray, FloatArray], float | None],
) -> float | None:
    found = [figure(measured[index], predicted[index]) for index in members]
    known = [value for value in found if value is not None]
    return float(np.median(known)) if known else None
