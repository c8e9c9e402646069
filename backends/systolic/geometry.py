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


@dataclass(frozen=True, slots=True)
class OfmapStream:
    """When each output word leaves the array: a skewed block per fold, counted without building it."""

    grid: FoldGrid
    total: int

    @classmethod
    def of(cls, grid: FoldGrid) -> OfmapStream:
        """Output stream of `grid`; ws and is write every partial sum once per row fold."""
        height = grid.sr if grid.dataflow == "os" else grid.t * grid.row_folds
        return cls(grid, height * grid.sc)

    def block(self, row_fold: int, col_fold: int) -> tuple[int, int, int]:
        """(first line within the fold, height, width) of one fold's output block."""
        grid = self.grid
        width = grid.fold_cols(col_fold)
        if grid.dataflow == "os":
            height = grid.fold_rows(row_fold)
            return grid.t - 1 + grid.rows - height, height, width
        return 2 * grid.rows - 1, grid.t, width

    def line_of(self, count: int) -> int:
        """Line of the `count`-th output word (1-based)."""
        grid = self.grid
        os = grid.dataflow == "os"
        column = (grid.sr if os else grid.t * grid.row_folds) * grid.cols
        col_fold = (count - 1) // column
        rest = count - col_fold * column
        width = min(grid.cols, grid.sc - col_fold * grid.cols)
        block = (grid.rows if os else grid.t) * width
        row_fold = (rest - 1) // block
        rest -= row_fold * block
        start, height, width = self.block(row_fold, col_fold)
        return (col_fold * grid.row_folds + row_fold) * grid.lines + start + trapezoid_line(rest, height, width)

    def count_before(self, line: int) -> int:
        """Output words that left the array in lines before `line`."""
        grid = self.grid
        fold, offset = divmod(line, grid.lines)
        if fold >= grid.folds:
            return self.total
        if fold < 0:
            return 0
        col_fold, row_fold = divmod(fold, grid.row_folds)
        os = grid.dataflow == "os"
        start, height, width = self.block(row_fold, col_fold)
        before = (grid.sr if os else grid.t * grid.row_folds) * grid.cols * col_fold
        before += (grid.rows if os else grid.t) * width * row_fold
        return before + trapezoid(offset - start, height, width)

    @property
    def first_line(self) -> int:
        """First line that writes an output word."""
        return self.line_of(1)

    @property
    def last_line(self) -> int:
        """Last line that writes an output word."""
        return self.line_of(self.total)
