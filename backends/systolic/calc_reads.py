"""SCALE-Sim v3's read buffers with estimated bandwidth (CALC): distinct words until full, then emptied completely."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stablecast.backends.systolic.geometry import FoldGrid, trapezoid_line
from stablecast.backends.systolic.operands import AddressArray, OperandOrder

_FIRST_FILL_WORDS_PER_CYCLE = 10
_CHUNK_WORDS = 1 << 20


@dataclass(frozen=True, slots=True)
class DramStream:
    """First and last cycle and number of words of one operand's traffic to DRAM."""

    start: int
    stop: int
    words: int


@dataclass(frozen=True, slots=True)
class CalcBuffer:
    """Half of the buffer, 50 sets of `per_set` words, is `capacity`; reaching it empties everything."""

    per_set: int
    capacity: int

    @classmethod
    def of(cls, total: int) -> CalcBuffer:
        """Buffer of `total` words."""
        return cls(total // 100, 50 * (total // 100))

    def never_full(self, distinct: int) -> DramStream:
        """Traffic when fewer than `capacity` distinct words are touched."""
        words = -(-distinct // self.per_set) * self.per_set
        cycles = -(-words // _FIRST_FILL_WORDS_PER_CYCLE)
        return DramStream(-cycles, -1, distinct)

    def wiped(self, first_line: int, last_wipe: int, words: int) -> DramStream:
        """Traffic when the buffer was emptied, the last time in line `last_wipe`."""
        cycles = -(-self.capacity // _FIRST_FILL_WORDS_PER_CYCLE)
        return DramStream(first_line - cycles, last_wipe + 1, words)


def streamed_line(grid: FoldGrid, block_width: int, span: int, offset: int, index: int) -> int:
    """Line of the `index`-th word (1-based) of passes over a skewed T x `span` operand in blocks of `block_width`."""
    one = grid.t * span
    passes = (index - 1) // one
    rest = index - passes * one
    block = (rest - 1) // (grid.t * block_width)
    rest -= block * grid.t * block_width
    width = min(block_width, span - block * block_width)
    return (passes * grid.row_folds + block) * grid.lines + offset + trapezoid_line(rest, grid.t, width)


def stationary_line(grid: FoldGrid, index: int) -> int:
    """Line of the `index`-th word (1-based) of the stationary operand, loaded bottom row first."""
    column = (index - 1) // (grid.sr * grid.cols)
    rest = index - 1 - column * grid.sr * grid.cols
    width = grid.fold_cols(column)
    row_fold = rest // (grid.rows * width)
    rest -= row_fold * grid.rows * width
    line = grid.rows - grid.fold_rows(row_fold) + rest // width
    return (column * grid.row_folds + row_fold) * grid.lines + line


def calc_streamed(grid: FoldGrid, buffer: CalcBuffer) -> DramStream:
    """Row-wide streamed operand (os, ws: ifmap; is: filter) whose words are all different: one pass per column fold."""
    one = grid.t * grid.sr
    if one < buffer.capacity:
        return buffer.never_full(one)
    offset = 0 if grid.dataflow == "os" else grid.rows
    words = one * grid.col_folds
    last = words // buffer.capacity * buffer.capacity
    return buffer.wiped(offset, streamed_line(grid, grid.rows, grid.sr, offset, last), words)


def calc_stationary(grid: FoldGrid, buffer: CalcBuffer) -> DramStream:
    """Stationary operand (ws: filter, is: ifmap) whose words are all different."""
    words = grid.sr * grid.sc
    if words < buffer.capacity:
        return buffer.never_full(words)
    last = words // buffer.capacity * buffer.capacity
    return buffer.wiped(grid.rows - grid.fold_rows(0), stationary_line(grid, last), words)


def calc_os_filter(grid: FoldGrid, buffer: CalcBuffer) -> DramStream:
    """os filter: each column fold's block is visited once per row fold before the next one follows."""
    fill = 0
    words = 0
    wipe: tuple[int, int, int] | None = None
    for column in range(grid.col_folds):
        block = grid.t * grid.fold_cols(column)
        for visit in range(grid.row_folds):
            fresh = fill + block - buffer.capacity
            if fresh < 0:
                words += block
                fill += block
                break
            # the buffer is emptied within this visit: only what came after the last time is kept
            kept = fresh % buffer.capacity
            words += block
            fill = kept
            wipe = (column, visit, block - kept)
            if block < buffer.capacity:
                if visit + 1 < grid.row_folds:
                    words += block - kept
                    fill = block
                break
    if wipe is None:
        return buffer.never_full(words)
    column, visit, index = wipe
    line = trapezoid_line(index, grid.t, grid.fold_cols(column))
    return buffer.wiped(0, (column * grid.row_folds + visit) * grid.lines + line, words)


def calc_shared(grid: FoldGrid, order: OperandOrder, buffer: CalcBuffer, first_line: int) -> DramStream:
    """Operand with repeated words or blanks that does not fit; its first word is demanded in `first_line`."""
    counter = _EpochCounter(order.size, buffer.capacity)
    repeat = grid.col_folds if order.block_by == "row" else 1
    cache: dict[int, AddressArray] = {}
    cached = 0
    for index in range(len(order.demand) * repeat):
        block = index % len(order.demand)
        fold = index
        base = fold * grid.lines + order.offset[block]
        source = order.demand[block]
        known = cache.get(block)
        if known is not None:
            counter.take(known, base, source.width, block in order.distinct)
            continue
        rows = max(1, _CHUNK_WORDS // source.width)
        for first in range(0, source.rows, rows):
            flat = source.chunk(first, min(first + rows, source.rows)).reshape(-1)
            counter.take(flat, base + first, source.width, block in order.distinct)
            if repeat > 1 and rows >= source.rows and cached + len(flat) < 16 * _CHUNK_WORDS:
                cache[block] = flat
                cached += len(flat)
    return buffer.wiped(first_line, counter.last_wipe, counter.words)


class _EpochCounter:
    """Counts distinct words since the buffer was last emptied."""

    def __init__(self, size: int, capacity: int) -> None:
        self._capacity = capacity
        self._stamp = np.full(size + 1, -1, np.int32)
        self._first = np.zeros(size + 1, np.int32)
        self._epoch = 0
        self._stamp[-1] = 0
        self._fill = 0
        self._wipes = 0
        self._step = int(min(max(2 * capacity, 2048), _CHUNK_WORDS))
        self._index = np.arange(self._step, dtype=np.int32)
        self.last_wipe = -1

    @property
    def words(self) -> int:
        """Words fetched so far."""
        return self._wipes * self._capacity + self._fill

    def take(self, flat: AddressArray, base: int, width: int, distinct: bool) -> None:
        """Demand `flat`, lines of `width` addresses (-1: none) from line `base` on; `distinct`: no word comes twice."""
        at, size = 0, len(flat)
        while at < size:
            part = flat[at : at + self._step]
            fresh = np.flatnonzero(self._stamp[part] != self._epoch)
            if not len(fresh):
                at += len(part)
                continue
            words = part[fresh]
            new = fresh if distinct else fresh[self._first_times(words)]
            room = self._capacity - self._fill
            if len(new) < room:
                self._stamp[words] = self._epoch
                self._fill += len(new)
                at += len(part)
                continue
            at += int(new[room - 1])
            self.last_wipe = base + at // width
            at += 1
            self._wipes += 1
            self._epoch += 1
            self._stamp[-1] = self._epoch
            self._fill = 0

    def _first_times(self, words: AddressArray) -> npt.NDArray[np.intp]:
        """Where each word comes up first; of several writes to one place numpy keeps the last."""
        index = self._index[: len(words)]
        self._first[words[::-1]] = index[::-1]
        return np.flatnonzero(self._first[words] == index)
