"""Error figures against values worked out by hand, and properties of intervals and ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.ir.errors import InputError
from stablecast.validation.intervals import clip, gaps, length, overlap, union
from stablecast.validation.metrics import across, error_stats, pairwise_order, rank_correlation, ratio_error

MEASURED = np.array([1.0, 2.0, 4.0])
PREDICTED = np.array([1.1, 1.8, 4.0])


def test_figures_by_hand() -> None:
    stats = error_stats(MEASURED, PREDICTED, PREDICTED * 0.9, PREDICTED * 1.05, np.array([0.005, 0.005, 0.0]))
    assert stats.mape == pytest.approx(0.2 / 3)
    assert stats.median == pytest.approx(0.1)
    assert stats.bias == pytest.approx(0.0)
    assert stats.weighted == pytest.approx(0.3 / 7)
    assert stats.total == pytest.approx(6.9 / 7 - 1)
    assert stats.rank == pytest.approx(1.0)
    assert stats.coverage == pytest.approx(2 / 3)
    assert stats.width == pytest.approx(0.15)
    assert stats.rounding == pytest.approx((0.005 + 0.0025) / 3)
    assert stats.interval is not None
    assert stats.interval.low <= stats.mape <= stats.interval.high


def test_ratio_and_order() -> None:
    assert ratio_error(np.array([1.0, 2.0]), np.array([1.0, 3.0])) == pytest.approx(0.5)
    assert ratio_error(np.array([2.0, 1.0]), np.array([3.0, 1.0])) == pytest.approx(0.5), (
        "order of rows does not matter"
    )
    assert pairwise_order(MEASURED, PREDICTED[::-1].copy()) == pytest.approx(0.0)
    assert rank_correlation(MEASURED, np.ones(3)) is None


def test_across_devices() -> None:
    items, systems = ["a", "a", "b"], ["x", "y", "x"]
    ratio, order = across(items, systems, np.array([1.0, 2.0, 5.0]), np.array([1.0, 1.5, 9.0]))
    assert (ratio, order) == (pytest.approx(0.25), 1.0)
    assert across(["a", "a"], ["x", "x"], MEASURED[:2], PREDICTED[:2]) == (None, None)


def test_wrong_input() -> None:
    with pytest.raises(InputError, match="no rows"):
        error_stats(np.zeros(0), np.zeros(0))
    with pytest.raises(InputError, match="not positive"):
        error_stats(np.zeros(1), np.ones(1))


_SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def _covered(spans: list[tuple[int, int]]) -> set[int]:
    return {second for start, size in spans for second in range(start, start + size)}


@settings(deadline=None)
@given(_SPANS, _SPANS, st.integers(0, 40), st.integers(0, 40))
def test_intervals_equal_sets_of_seconds(
    left: list[tuple[int, int]], right: list[tuple[int, int]], low: int, size: int
) -> None:
    sets = [
        union(np.array([a for a, _ in spans], float), np.array([a + b for a, b in spans], float))
        for spans in (left, right)
    ]
    ours, theirs = _covered(left), _covered(right)
    assert length(sets[0]) == len(ours)
    assert overlap(sets[0], sets[1]) == len(ours & theirs)
    window = set(range(low, low + size))
    assert length(clip(sets[0], low, low + size)) == len(ours & window)
    assert length(gaps(sets[0], low, low + size)) == len(window - ours)
