"""Geometry of a systolic run: operand matrices, folds over the array and the lines of a fold.

A *fold* is one loading of the array; a *line* is one cycle of a fold. All formulas are those of SCALE-Sim v3's
demand matrices: with S_r x S_c elements mapped to R x C processing elements and T streamed steps,

=========  =====  =====  =====  =================
dataflow   S_r    S_c    T      lines of a fold
=========  =====  =====  =====  =================
os         M      N      K      T + R + C - 2
ws         K      N      M      T + 2R + C - 2
is         K      M      N      T + 2R + C - 2
=========  =====  =====  =====  =================
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

from stablecast.ir.errors import InputError

Dataflow = Literal["os", "ws", "is"]
IntArray = npt.NDArray[np.int64]
DATAFLOWS: tuple[Dataflow, ...] = ("os", "ws", "is")


def as_dataflow(text: str) -> Dataflow:
    """The dataflow named by `text` (case does not matter); InputError for any other name."""
    name = text.strip().lower()
    for dataflow in DATAFLOWS:
        if name == dataflow:
            return dataflow
    raise InputError(f"unknown dataflow {text!r}", "allowed: os, ws, is")


@dataclass(frozen=True, slots=True)
class FoldGrid:
    """Folds of one matrix product over one array: `row_folds` x `col_folds`, column fold outermost."""

    dataflow: Dataflow
    rows: int
    cols: int
    sr: int
    sc: int
    t: int
    row_folds: int
    col_folds: int
    lines: int

    @classmethod
    def of(cls, dataflow: Dataflow, rows: int, cols: int, m: int, n: int, k: int) -> FoldGrid:
        """Grid of an M x K by K x N product on a `rows` x `cols` array."""
        sr, sc, t = {"os": (m, n, k), "ws": (k, n, m), "is": (k, m, n)}[dataflow]
        lines = t + rows + cols - 2 + (0 if dataflow == "os" else rows)
        return cls(dataflow, rows, cols, sr, sc, t, -(-sr // rows), -(-sc // cols), lines)

    @property
    def folds(self) -> int:
        """Number of folds."""
        return self.row_folds * self.col_folds

    @property
    def total_lines(self) -> int:
        """Lines of the whole run, in cycles without stalls."""
        return self.row_folds * self.col_folds * self.lines

    def fold_rows(self, row_fold: int) -> int:
        """Array rows in use in row fold `row_fold`."""
        return min(self.rows, self.sr - row_fold * self.rows)

    def fold_cols(self, col_fold: int) -> int:
        """Array columns in use in column fold `col_fold`."""
        return min(self.cols, self.sc - col_fold * self.cols)


def trapezoid(t: int, height: int, width: int) -> int:
    """Number of pairs (j, c), 0 <= j < height, 0 <= c < width, with j + c < t."""
    if t <= 0:
        return 0
    count = t * (t + 1)
    u = t - height
    if u > 0:
        count -= u * (u + 1)
    u = t - width
    if u > 0:
        count -= u * (u + 1)
    u = t - height - width
    if u > 0:
        count += u * (u + 1)
    return count >> 1


def trapezoid_array(t: IntArray, height: int, width: int) -> IntArray:
    """`trapezoid` for an array of `t`."""

    def triangle(x: IntArray) -> IntArray:
        clipped = np.maximum(x, 0)
        return clipped * (clipped + 1) // 2

    return triangle(t) - triangle(t - height) - triangle(t - width) + triangle(t - height - width)


def trapezoid_line(count: int, height: int, width: int) -> int:
    """Diagonal j + c that holds the `count`-th pair (1-based) when pairs are taken diagonal by diagonal."""
    short, long = (height, width) if height < width else (width, height)
    head = short * (short + 1) >> 1
    if count <= head:
        root = (isqrt(8 * count + 1) - 1) >> 1
        return root - 1 if root * (root + 1) >> 1 == count else root
    middle = head + (long - short) * short
    if count <= middle:
        return short - 1 - (head - count) // short
    rest = height * width - count
    return height + width - 2 - ((isqrt(8 * rest + 1) - 1) >> 1)


class OfmapStream:
    """When each output word leaves the array: a skewed block per fold, counted without building it.

    `total` words leave in all; ws and is write every partial sum once per row fold. The fold looked at last is kept,
    since questions come mostly in order.
    """

    __slots__ = (
        "_block",
        "_column",
        "_end",
        "_first",
        "_fold_line",
        "_head",
        "_height",
        "_middle",
        "_short",
        "_start",
        "_width",
        "grid",
        "total",
    )

    def __init__(self, grid: FoldGrid) -> None:
        os = grid.dataflow == "os"
        self.grid = grid
        self._column = grid.sr if os else grid.t * grid.row_folds
        self._block = grid.rows if os else grid.t
        self.total = self._column * grid.sc
        self._enter(0)

    def _enter(self, fold: int) -> None:
        """Look at `fold`: words before it and with it, line of its first word, and the shape of its block."""
        grid = self.grid
        col_fold, row_fold = divmod(fold, grid.row_folds)
        width = grid.fold_cols(col_fold)
        os = grid.dataflow == "os"
        height = grid.fold_rows(row_fold) if os else grid.t
        self._fold_line = fold * grid.lines
        self._start = self._fold_line + (grid.t - 1 + grid.rows - height if os else 2 * grid.rows - 1)
        self._first = self._column * grid.cols * col_fold + self._block * width * row_fold
        self._end = self._first + height * width
        self._height, self._width = height, width
        self._short = min(height, width)
        self._head = self._short * (self._short + 1) >> 1
        self._middle = self._head + abs(height - width) * self._short

    def line_of(self, count: int) -> int:
        """Line of the `count`-th output word (1-based); past the last word, the line behind the run."""
        if not self._first < count <= self._end:
            if count > self.total:
                return self.grid.total_lines
            columns = self._column * self.grid.cols
            col_fold = (count - 1) // columns
            width = self.grid.fold_cols(col_fold)
            self._enter(col_fold * self.grid.row_folds + (count - 1 - col_fold * columns) // (self._block * width))
        rest = count - self._first
        if self._head < rest <= self._middle:
            return self._start + self._short - 1 - (self._head - rest) // self._short
        return self._start + trapezoid_line(rest, self._height, self._width)

    def count_before(self, line: int) -> int:
        """Output words that left the array in lines before `line`."""
        if not 0 <= line - self._fold_line < self.grid.lines:
            fold = line // self.grid.lines
            if fold >= self.grid.folds:
                return self.total
            if fold < 0:
                return 0
            self._enter(fold)
        t = line - self._start
        if t <= 0:
            return self._first
        if self._short <= t <= max(self._height, self._width):
            return self._first + self._head + (t - self._short) * self._short
        return self._first + trapezoid(t, self._height, self._width)

    @property
    def first_line(self) -> int:
        """First line that writes an output word."""
        return self.line_of(1)

    @property
    def last_line(self) -> int:
        """Last line that writes an output word."""
        return self.line_of(self.total)
