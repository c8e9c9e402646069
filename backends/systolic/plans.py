"""How one read operand is demanded and prefetched, and what follows: span, DRAM traffic, ring events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stablecast.backends.systolic.calc_reads import (
    CalcBuffer,
    DramStream,
    calc_os_filter,
    calc_shared,
    calc_stationary,
    calc_streamed,
)
from stablecast.backends.systolic.geometry import FoldGrid
from stablecast.backends.systolic.layers import Layer
from stablecast.backends.systolic.layout import BankedOperand, layout_events
from stablecast.backends.systolic.operands import AddressRows, OperandOrder
from stablecast.backends.systolic.ring import (
    EventChunk,
    ReadClock,
    Ring,
    StreamedBlocks,
    stationary_events,
    streamed_events,
)
from stablecast.backends.systolic.shared_ring import shared_events

_CHUNK_WORDS = 1 << 20


class ReadPlan(Protocol):
    """One read operand of one layer on one array."""

    def span(self) -> tuple[int, int]:
        """First and last line that demands a word."""
        ...

    def calc(self, buffer: CalcBuffer) -> DramStream:
        """DRAM traffic with estimated bandwidth."""
        ...

    def clock(self, total: int, bandwidth: int) -> ReadClock:
        """Stall clock of a buffer of `total` words fed at `bandwidth` words per cycle."""
        ...


@dataclass(frozen=True, slots=True)
class StreamedPlan:
    """Skewed operand whose words are all different. `per_column`: os filter, whose block follows the column fold."""

    grid: FoldGrid
    blocks: StreamedBlocks
    offset: int
    per_column: bool = False

    @classmethod
    def rowwise(cls, grid: FoldGrid) -> StreamedPlan:
        """The operand that enters at the array's rows: os and ws ifmap, is filter."""
        blocks = StreamedBlocks(grid.t, grid.rows, grid.row_folds, grid.fold_rows(grid.row_folds - 1))
        return cls(grid, blocks, 0 if grid.dataflow == "os" else grid.rows)

    @classmethod
    def columnwise(cls, grid: FoldGrid) -> StreamedPlan:
        """The operand that enters at the array's columns: os filter."""
        blocks = StreamedBlocks(grid.t, grid.cols, grid.col_folds, grid.fold_cols(grid.col_folds - 1))
        return cls(grid, blocks, 0, per_column=True)

    def span(self) -> tuple[int, int]:
        """First and last line that demands a word."""
        grid = self.grid
        return self.offset, (grid.folds - 1) * grid.lines + self.offset + grid.t + self.blocks.last_width - 2

    def calc(self, buffer: CalcBuffer) -> DramStream:
        """DRAM traffic with estimated bandwidth."""
        return calc_os_filter(self.grid, buffer) if self.per_column else calc_streamed(self.grid, buffer)

    def clock(self, total: int, bandwidth: int) -> ReadClock:
        """Stall clock."""
        blocks = self.blocks
        ring = Ring.of(total, bandwidth, blocks.valid, blocks.t * blocks.width * blocks.blocks)
        return ReadClock(ring, streamed_events(self.grid, blocks, ring, self.offset, self.per_column))


@dataclass(frozen=True, slots=True)
class StationaryPlan:
    """Stationary operand whose words are all different: ws filter, is ifmap of a matrix product."""

    grid: FoldGrid

    def span(self) -> tuple[int, int]:
        """First and last line that demands a word."""
        grid = self.grid
        return grid.rows - grid.fold_rows(0), (grid.folds - 1) * grid.lines + grid.rows - 1

    def calc(self, buffer: CalcBuffer) -> DramStream:
        """DRAM traffic with estimated bandwidth."""
        return calc_stationary(self.grid, buffer)

    def clock(self, total: int, bandwidth: int) -> ReadClock:
        """Stall clock."""
        grid = self.grid
        ring = Ring.of(total, bandwidth, grid.sr * grid.sc, grid.sr * grid.cols * grid.col_folds)
        return ReadClock(ring, stationary_events(grid, ring))


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """Operand given by its addresses: words that come up more than once, or blanks.

    `layer` allows closed counts for a dense convolution input; without it the addresses are counted. `banked` lays
    the operand out in SRAM lines and banks.
    """

    grid: FoldGrid
    order: OperandOrder
    layer: Layer | None = None
    banked: BankedOperand | None = None

    def span(self) -> tuple[int, int]:
        """First and last line that demands a word."""
        return self._first_line(), self._last_line()

    def _first_line(self) -> int:
        for fold in range(self.grid.folds):
            for first, lines in _valid_lines(self._demand(fold), forward=True):
                if len(lines):
                    return self._base(fold) + first + int(lines[0])
        return 0

    def _last_line(self) -> int:
        for fold in range(self.grid.folds - 1, -1, -1):
            for first, lines in _valid_lines(self._demand(fold), forward=False):
                if len(lines):
                    return self._base(fold) + first + int(lines[-1])
        return 0

    def _demand(self, fold: int) -> AddressRows:
        return self.order.demand[self.order.block_of(fold, self.grid.row_folds)]

    def _base(self, fold: int) -> int:
        return fold * self.grid.lines + self.order.offset[self.order.block_of(fold, self.grid.row_folds)]

    def calc(self, buffer: CalcBuffer) -> DramStream:
        """DRAM traffic with estimated bandwidth."""
        touched = touched_words(self.layer) if self.layer is not None else _distinct(self.order)
        if touched < buffer.capacity:
            return buffer.never_full(touched)
        return calc_shared(self.grid, self.order, buffer, self._first_line())

    def clock(self, total: int, bandwidth: int) -> ReadClock:
        """Stall clock."""
        if self.banked is not None:
            return ReadClock(self.banked.ring, layout_events(self.grid, self.order, self.banked))
        prefetch = self.order.prefetch
        valid = valid_words(self.layer) if self.layer is not None else _valid(prefetch)
        ring = Ring.of(total, bandwidth, valid, self.order.prefetch_words)
        return ReadClock(ring, self._events(ring))

    def _events(self, ring: Ring) -> Iterator[EventChunk]:
        return shared_events(self.grid, self.order, ring)


def _chunks(source: AddressRows, rows: int) -> Iterator[tuple[int, int]]:
    for first in range(0, source.rows, rows):
        yield first, min(first + rows, source.rows)


def _valid_lines(source: AddressRows, *, forward: bool) -> Iterator[tuple[int, np.ndarray]]:
    rows = max(1, min(_CHUNK_WORDS // source.width, 2 * source.width))
    bounds = _chunks(source, rows) if forward else reversed(list(_chunks(source, rows)))
    for first, stop in bounds:
        yield first, np.flatnonzero((source.chunk(first, stop) >= 0).any(axis=1))


def _valid(source: AddressRows) -> int:
    rows = max(1, _CHUNK_WORDS // source.width)
    return sum(int((source.chunk(first, stop) >= 0).sum()) for first, stop in _chunks(source, rows))


def _distinct(order: OperandOrder) -> int:
    seen = np.zeros(order.size + 1, np.bool_)
    for source in order.demand:
        rows = max(1, _CHUNK_WORDS // source.width)
        for first, stop in _chunks(source, rows):
            seen[source.chunk(first, stop)] = True
    return int(seen[:-1].sum())


def touched_words(layer: Layer) -> int:
    """Different input words that some window of `layer` holds."""
    rows = _touched(layer.out_h, layer.stride_h, layer.filter_h, layer.ifmap_h)
    return rows * _touched(layer.out_w, layer.stride_w, layer.filter_w, layer.ifmap_w) * layer.channels


def _touched(windows: int, stride: int, size: int, limit: int) -> int:
    if size >= stride:
        return min(limit, (windows - 1) * stride + size)
    return _inside(windows, stride, size, limit)


def valid_words(layer: Layer) -> int:
    """Words of the im2col matrix of `layer` that lie inside its input."""
    rows = _inside(layer.out_h, layer.stride_h, layer.filter_h, layer.ifmap_h)
    return rows * _inside(layer.out_w, layer.stride_w, layer.filter_w, layer.ifmap_w) * layer.channels


def _inside(windows: int, stride: int, size: int, limit: int) -> int:
    return sum(max(0, min(size, limit - at * stride)) for at in range(windows))
