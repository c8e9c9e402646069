"""SCALE-Sim v3's trace files of a layer: what each port asks for in each cycle, and what crosses to DRAM.

Every line is written out, so this is slow and large by nature; reports do not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stablecast.backends.systolic.compat import LayerPlan, plan_layer
from stablecast.backends.systolic.config import SystolicConfig
from stablecast.backends.systolic.geometry import FoldGrid, OfmapStream
from stablecast.backends.systolic.layers import Layer
from stablecast.backends.systolic.layout import Layout
from stablecast.backends.systolic.ofmap_buffer import OfmapBuffer
from stablecast.backends.systolic.operands import (
    AddressRows,
    OperandOrder,
    SkewedRows,
    Window,
    filter_order,
    ifmap_order,
    ofmap_block,
)
from stablecast.backends.systolic.plans import SharedPlan
from stablecast.backends.systolic.reports import write_atomically
from stablecast.backends.systolic.ring import ReadClock
from stablecast.backends.systolic.sparsity import sparse_layer
from stablecast.backends.systolic.timing import run_clock

Rows = npt.NDArray[np.int64]
_CALC_WORDS_PER_CYCLE = 10


def write_traces(layer: Layer, config: SystolicConfig, folder: Path, layout: Layout | None = None) -> tuple[Path, ...]:
    """Write the SRAM and DRAM traces of `layer` to `folder`; returns the six files.

    A row is a cycle and the address at each port, -1 for an idle one. Equal to SCALE-Sim's files for the same layer.
    """
    plan = plan_layer(layer, config, layout)
    grid, user = plan.grid, config.mode == "USER"
    ifmap, filters = _orders(layer, config, plan)
    bandwidth = config.bandwidth if user else config.cols
    ofmap = OfmapBuffer(OfmapStream(grid), 1024 * config.ofmap_kb, bandwidth, keep_log=True)
    clocks = (
        plan.ifmap.clock(1024 * config.ifmap_kb, config.ifmap.bandwidth) if user else None,
        plan.filter.clock(1024 * config.filter_kb, config.filter.bandwidth) if user else None,
    )
    clocked = run_clock(grid.total_lines - 1, ofmap, *clocks, range(grid.total_lines))

    def dram(order: OperandOrder, clock: ReadClock | None, kb: int, offset: int) -> Iterator[Rows]:
        if clock is not None:
            return _user_rows(order.prefetch, clock, 1024 * kb, offset)
        return iter(_CalcTrace(1024 * kb).rows(_demand_lines(order, grid), offset))

    results = (ofmap_block(layer, grid, fold) for fold in range(grid.folds))
    files: dict[str, tuple[Iterator[Rows], str]] = {
        "IFMAP_SRAM": (_sram_rows(_fold_lines(ifmap, grid), grid, clocked.ifmap_at, config.ifmap_offset), "%i"),
        "IFMAP_DRAM": (dram(ifmap, clocks[0], config.ifmap_kb, config.ifmap_offset), "%.1f"),
        "FILTER_SRAM": (_sram_rows(_fold_lines(filters, grid), grid, clocked.filter_at, config.filter_offset), "%i"),
        "FILTER_DRAM": (dram(filters, clocks[1], config.filter_kb, config.filter_offset), "%.1f"),
        "OFMAP_SRAM": (_sram_rows(results, grid, clocked.ofmap_at, config.ofmap_offset), "%i"),
        "OFMAP_DRAM": (_ofmap_rows(layer, grid, ofmap, bandwidth, config.ofmap_offset), "%.1f"),
    }
    paths: list[Path] = []
    for name, (rows, form) in files.items():
        path = folder / f"{name}_TRACE.csv"
        write_atomically(path, _saver(rows, form))
        paths.append(path)
    return tuple(paths)


def _saver(chunks: Iterator[Rows], form: str) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        with path.open("w", encoding="utf-8") as handle:
            for chunk in chunks:
                np.savetxt(handle, chunk, fmt=form, delimiter=",")

    return save


def _orders(layer: Layer, config: SystolicConfig, plan: LayerPlan) -> tuple[OperandOrder, OperandOrder]:
    if config.sparsity.enabled:
        sparse = sparse_layer(layer, config)
        return sparse.ifmap_order(layer), sparse.filter_order(layer)
    ifmap = plan.ifmap.order if isinstance(plan.ifmap, SharedPlan) else ifmap_order(Window.of(layer), plan.grid)
    filters = plan.filter.order if isinstance(plan.filter, SharedPlan) else filter_order(layer, plan.grid)
    return ifmap, filters


def _fold_lines(order: OperandOrder, grid: FoldGrid) -> Iterator[tuple[int, AddressRows]]:
    for fold in range(grid.folds):
        block = order.block_of(fold, grid.row_folds)
        yield order.offset[block], order.demand[block]


def _placed(addresses: npt.NDArray[np.integer], offset: int) -> Rows:
    wide = addresses.astype(np.int64)
    return np.where(wide >= 0, wide + offset, -1)


def _sram_rows(
    folds: Iterator[tuple[int, AddressRows]], grid: FoldGrid, served: dict[int, int], offset: int
) -> Iterator[Rows]:
    for fold, (start, source) in enumerate(folds):
        rows = np.full((grid.lines, source.width + 1), -1, np.int64)
        rows[:, 0] = [served[line] for line in range(fold * grid.lines, (fold + 1) * grid.lines)]
        rows[start : start + source.rows, 1:] = _placed(source.chunk(0, source.rows), offset)
        yield rows


def _demand_lines(order: OperandOrder, grid: FoldGrid) -> Iterator[tuple[int, Rows]]:
    """(Line, addresses) of every line that demands something."""
    for fold, (start, source) in enumerate(_fold_lines(order, grid)):
        for at, line in enumerate(source.chunk(0, source.rows).astype(np.int64)):
            words = line[line >= 0]
            if len(words):
                yield fold * grid.lines + start + at, words


def _in_order(prefetch: AddressRows) -> npt.NDArray[np.int32]:
    """The prefetch order with its blanks; ports outside a skewed stack are not part of it."""
    cells = prefetch.chunk(0, prefetch.rows)
    if not isinstance(prefetch, SkewedRows):
        return cells.reshape(-1)
    down = np.arange(prefetch.rows)[:, None] - np.arange(prefetch.width)[None, :]
    return cells[(down >= 0) & (down < len(prefetch.blocks) * prefetch.block_rows)]


def _user_rows(prefetch: AddressRows, clock: ReadClock, total: int, offset: int) -> Iterator[Rows]:
    """Prefetches under USER bandwidth. SCALE-Sim always fetches the same rows again after the first fill, and blanks
    out parts of its own fetch list on the way; both are kept."""
    ring, active = clock.ring, -(-total // 2)
    width = ring.bandwidth
    flat = _placed(_in_order(prefetch), offset)
    fetch = np.full((-(-len(flat) // width), width), -1, np.int64)
    fetch.reshape(-1)[: len(flat)] = flat
    first = ring.first_rows
    skip = 0
    if first * width > active:
        skip = active % width
        fetch[first - 1, skip:] = -1
    yield np.column_stack((np.arange(-first, 0), fetch[:first]))
    start = (first if first * width > active else first + 1) % len(fetch)
    count = ring.prefetch_rows
    last = -1
    for _ in range(clock.shifts):
        rows = fetch[start : start + count]
        if start + count > len(fetch):
            rows = np.concatenate((fetch[start:], fetch[: min(start + count - len(fetch), start)]))
        rows[0, :skip] = -1
        if count * width > active:
            rows[-1, active % width :] = -1
        padded = np.full((count, width), -1, np.int64)
        padded[: len(rows)] = rows
        yield np.column_stack((np.arange(last + 2, last + 2 + count), padded))
        last += count + 1
        start = (count if count * width > active else count + 1) % len(fetch)


def _ofmap_rows(layer: Layer, grid: FoldGrid, ofmap: OfmapBuffer, width: int, offset: int) -> Iterator[Rows]:
    """Drained rows, in blocks of one drain each."""
    words = _result_words(layer, grid, offset)
    row = 0
    for cycle, count in ofmap.log or ():
        block = np.full((count, width + 1), -1, np.int64)
        block[:, 0] = np.arange(cycle, cycle + count)
        for at in range(count):
            filled = ofmap.partial.get(row, width)
            block[at, 1 : filled + 1] = np.fromiter(words, np.int64, filled)
            row += 1
        yield block


def _result_words(layer: Layer, grid: FoldGrid, offset: int) -> Iterator[int]:
    for fold in range(grid.folds):
        _, source = ofmap_block(layer, grid, fold)
        flat = source.chunk(0, source.rows).reshape(-1)
        yield from (flat[flat >= 0].astype(np.int64) + offset).tolist()


class _CalcTrace:
    """Prefetches with estimated bandwidth: sets of a hundredth of the buffer, half the sets at a time.

    The order of words within a set is Python's own for sets of whole numbers, as in SCALE-Sim.
    """

    def __init__(self, total: int) -> None:
        self._per_set = total // 100
        self._held: set[int] = set()
        self._sets: list[set[int]] = []
        self._current: set[int] = set()
        self._blocks: list[tuple[int, list[int], int, int]] = []
        self._start, self._end = -2, -1
        self._first = -1

    def rows(self, lines: Iterator[tuple[int, Rows]], offset: int) -> list[Rows]:
        """Trace rows of all prefetches, padded to the widest."""
        for line, words in lines:
            if self._first < 0:
                self._first = line
            for word in (words + offset).tolist():
                self._take(line, word)
        self._finish()
        blocks = [self._block(*block) for block in self._blocks]
        width = max(block.shape[1] for block in blocks)
        # SCALE-Sim fills the columns of narrower blocks with ones
        return [np.pad(block, ((0, 0), (0, width - block.shape[1])), constant_values=1) for block in blocks]

    def _take(self, line: int, word: int) -> None:
        if word in self._held:
            return
        self._held.add(word)
        self._current.add(word)
        if len(self._current) < self._per_set:
            return
        self._sets.append(self._current)
        self._current = set()
        if len(self._sets) < 50:
            return
        if self._blocks:
            self._prefetch(self._end - self._start + 1)
        else:
            self._end = self._first - 2
            self._start = self._end + 1 - self._fill_cycles(50)
            self._prefetch(self._end - self._start + 1, _CALC_WORDS_PER_CYCLE)
        self._held = set()
        self._start, self._end = self._end + 1, line

    def _fill_cycles(self, sets: int) -> int:
        return -(-sets * self._per_set // _CALC_WORDS_PER_CYCLE)

    def _prefetch(self, cycles: int, bandwidth: int | None = None) -> None:
        count = len(self._sets) * self._per_set
        words = [word for held in self._sets for word in held]
        self._blocks.append((self._start, words, cycles, -(-count // cycles) if bandwidth is None else bandwidth))
        self._sets = []

    def _finish(self) -> None:
        if self._current:
            self._sets.append(self._current)
        if not self._blocks:
            self._end = -2
            cycles = self._fill_cycles(len(self._sets))
            self._start = self._end + 1 - cycles
            self._prefetch(cycles, _CALC_WORDS_PER_CYCLE)
        else:
            self._prefetch(self._end - self._start + 1)

    @staticmethod
    def _block(start: int, words: list[int], cycles: int, bandwidth: int) -> Rows:
        """Rows of one prefetch; a word is there one cycle after it was asked for."""
        flat = np.full(cycles * bandwidth, -1, np.int64)
        flat[: len(words)] = words
        return np.column_stack((np.arange(start + 1, start + 1 + cycles), flat.reshape(cycles, bandwidth)))
