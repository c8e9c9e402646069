"""Folds and the counting of skewed streams."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.backends.systolic.geometry import (
    DATAFLOWS,
    Dataflow,
    FoldGrid,
    OfmapStream,
    as_dataflow,
    trapezoid,
    trapezoid_array,
    trapezoid_line,
)
from stablecast.ir.errors import InputError


@pytest.mark.parametrize(("dataflow", "lines", "folds"), [("os", 110, 4 * 13), ("ws", 48, 13 * 13), ("is", 68, 13 * 8)])
def test_folds_by_hand(dataflow: Dataflow, lines: int, folds: int) -> None:
    """M 30, N 50, K 100 on 8 x 4: os holds M x N and streams K, ws K x N and M, is K x M and N."""
    grid = FoldGrid.of(dataflow, 8, 4, 30, 50, 100)
    assert (grid.lines, grid.folds, grid.total_lines) == (lines, folds, lines * folds)


@settings(deadline=None)
@given(st.integers(-3, 30), st.integers(1, 9), st.integers(1, 9))
def test_trapezoid_counts_pairs(t: int, height: int, width: int) -> None:
    pairs = [j + c for j in range(height) for c in range(width)]
    assert trapezoid(t, height, width) == sum(pair < t for pair in pairs)
    assert trapezoid_array(np.array([t]), height, width).tolist() == [trapezoid(t, height, width)]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9))
def test_trapezoid_line_is_the_inverse(height: int, width: int) -> None:
    pairs = sorted(j + c for j in range(height) for c in range(width))
    assert [trapezoid_line(count + 1, height, width) for count in range(len(pairs))] == pairs


@settings(deadline=None)
@given(st.sampled_from(DATAFLOWS), st.integers(1, 6), st.integers(1, 6), *(st.integers(1, 14) for _ in range(3)))
def test_output_words_and_lines_agree(dataflow: Dataflow, rows: int, cols: int, m: int, n: int, k: int) -> None:
    stream = OfmapStream(FoldGrid.of(dataflow, rows, cols, m, n, k))
    lines = [stream.line_of(count) for count in range(1, stream.total + 1)]
    assert lines == sorted(lines)
    assert stream.total == (m * n if dataflow == "os" else m * n * -(-k // rows))
    for line in range(-1, stream.grid.total_lines + 2):
        assert stream.count_before(line) == sum(at < line for at in lines)


def test_unknown_dataflow() -> None:
    assert as_dataflow(" WS ") == "ws"
    with pytest.raises(InputError, match="allowed: os, ws, is"):
        as_dataflow("rs")
