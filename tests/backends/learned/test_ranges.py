"""Ranges from rows left out of training."""

import numpy as np
import pytest

from stablecast.backends.learned import fitting


def _calibrated(score: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    low, high = fitting._calibrated(score, np.zeros(len(score), dtype=np.int64), groups, 1)
    return float(low[0]), float(high[0])


def test_alike_groups_keep_their_quantiles() -> None:
    """Scores -1 to 1 in every group: the quantiles of 10 and 90 % are -0.8 and 0.8, less than a thousandth off."""
    score = np.tile(np.linspace(-1.0, 1.0, 1001), 8)
    groups = np.repeat(np.arange(8), 1001)
    low, high = _calibrated(score, groups)
    assert (low, high) == (pytest.approx(-0.8, abs=1e-3), pytest.approx(0.8, abs=1e-3))


def test_unlike_groups_widen_the_range() -> None:
    """Four groups, each constant: what three of them give misses the two at the ends by one step at least."""
    score = np.repeat([-3.0, -1.0, 1.0, 3.0], 100)
    groups = np.repeat(np.arange(4), 100)
    assert np.quantile(score, [0.1, 0.9]).tolist() == [-3.0, 3.0]
    assert _calibrated(score, groups) == (pytest.approx(-5.0), pytest.approx(5.0))
