"""The corrected model: SCALE-Sim's array with its quirks put right, in closed form over whole tables.

Every correction is named in `CORRECTIONS` and explained in docs/systolic.md. Memory is modelled fold by fold with
double buffering: while a fold computes, the words of the next are fetched, so a fold takes the longest of its compute
lines and its operands' transfers; the first fetch and the last write-back stand at the ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stablecast.backends.systolic.cycles import (
    Dataflows,
    FloatArray,
    FoldArrays,
    Ints,
    fold_arrays,
    from_one,
    mapping_efficiencies,
)
from stablecast.backends.systolic.geometry import IntArray
from stablecast.ir.errors import InputError

CORRECTIONS: dict[str, str] = {
    "full-last-cycle": "total cycles are folds x lines; SCALE-Sim reports the index of the last cycle, one less",
    "os-drain": "an output-stationary fold also takes the R cycles that move its results out of the array",
    "os-writes": "output-stationary results are written once: M x N words, without R + C more per fold",
    "stall-once": "a late transfer stalls by its lateness; SCALE-Sim adds it twice and may go negative",
    "capacity-reuse": "an operand is fetched again only if it does not fit its SRAM; no wipes, no ring, no padding",
    "fill-and-drain": "total cycles hold the first fetch and the last write-back when a bandwidth is given",
    "partial-sums": "ws and is partial sums stay in the output SRAM if a column's fit, else they go out and come back",
    "one-bandwidth": "Bandwidth is that of all three operands (or a list of ifmap, filter, ofmap); SCALE-Sim takes it "
    "for the output only and the reads' from the [layout] keys",
    "whole-windows": "a convolution has floor((H + 2P - D(F - 1) - 1) / S) + 1 windows; none reaches past the input",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """SRAM capacities in words and DRAM bandwidths in words per cycle; infinite bandwidth means no stalls.

    `latency` cycles pass between asking DRAM for a fold's words and the first of them.
    """

    ifmap_words: int
    filter_words: int
    ofmap_words: int
    ifmap_bandwidth: float = np.inf
    filter_bandwidth: float = np.inf
    ofmap_bandwidth: float = np.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if min(self.ifmap_words, self.filter_words, self.ofmap_words) < 0:
            raise InputError(
                f"SRAM sizes {self.ifmap_words}, {self.filter_words}, {self.ofmap_words}", "allowed: from 0"
            )
        if not min(self.ifmap_bandwidth, self.filter_bandwidth, self.ofmap_bandwidth) > 0:
            rates = f"{self.ifmap_bandwidth}, {self.filter_bandwidth}, {self.ofmap_bandwidth}"
            raise InputError(f"bandwidths {rates}", "allowed: above 0, infinite for no limit")
        if not self.latency >= 0:
            raise InputError(f"DRAM latency {self.latency}", "allowed: cycles from 0")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Arrays over products. Cycles: compute, stalls, first fetch and last write-back add up to `total_cycles`.

    Words to and from DRAM and SRAM per product table row; `mapping_eff`, `compute_util` and `overall_util` from 0 to 1.
    """

    compute_cycles: IntArray
    stall_cycles: FloatArray
    fill_cycles: FloatArray
    drain_cycles: FloatArray
    total_cycles: FloatArray
    ifmap_reads: FloatArray
    filter_reads: FloatArray
    ofmap_writes: FloatArray
    ofmap_reads: FloatArray
    sram_ifmap_reads: IntArray
    sram_filter_reads: IntArray
    sram_ofmap_writes: IntArray
    sram_ofmap_reads: IntArray
    mapping_eff: FloatArray
    compute_util: FloatArray
    overall_util: FloatArray


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Words one product moves: `row` enters at array rows (per pass), `col` at columns, by fold."""

    row_pass: FloatArray
    row_passes: IntArray
    col_pass: FloatArray
    col_passes: IntArray
    out_writes: FloatArray
    out_reads: FloatArray
    row_bandwidth: FloatArray
    col_bandwidth: FloatArray
    latency: float


def estimate(
    m: Ints,
    n: Ints,
    k: Ints,
    *,
    batch: Ints = 1,
    array_rows: Ints,
    array_cols: Ints,
    dataflow: Dataflows = "ws",
    memory: Memory,
    ifmap_distinct: Ints | None = None,
    ifmap_band: Ints | None = None,
) -> Estimate:
    """Corrected cycles and traffic of `batch` products of M x K by K x N each; every size may be an array.

    `ifmap_distinct`: different input words behind the M x K matrix (a convolution's windows share words), default
    M * K; `ifmap_band`: words of the input rows that the windows of one fold touch. Where the band fits, os and is
    fetch each word once a pass; else a pass fetches every window anew, which bounds the real traffic from above.
    """
    folds = fold_arrays(m, n, k, array_rows, array_cols, dataflow)
    times = from_one("batch", batch)
    macs = np.asarray(m, np.int64) * np.asarray(n, np.int64) * np.asarray(k, np.int64)
    whole = np.asarray(m, np.int64) * np.asarray(k, np.int64)
    distinct = whole if ifmap_distinct is None else np.asarray(ifmap_distinct, np.int64)
    band = distinct if ifmap_band is None else np.asarray(ifmap_band, np.int64)
    traffic = _traffic(folds, memory, distinct, band)
    lines = folds.t + 2 * folds.rows + folds.cols - 2
    count = folds.row_folds * folds.col_folds
    busy = _busy_cycles(folds, traffic, lines, memory.ofmap_bandwidth)
    fill = _fill_cycles(folds, traffic)
    last = np.where(folds.is_os, _last(folds.sr, folds.rows), folds.t) * _last(folds.sc, folds.cols)
    drain = np.ceil(last / memory.ofmap_bandwidth)
    compute = times * count * lines
    total = times * busy + fill + drain
    row, col = traffic.row_pass * traffic.row_passes * times, traffic.col_pass * traffic.col_passes * times
    row_is_ifmap = folds.is_os | folds.is_ws
    sram_row, sram_col, sram_out = _sram(folds)
    mapping = mapping_efficiencies(folds)
    return Estimate(
        compute_cycles=compute,
        stall_cycles=times * busy - compute,
        fill_cycles=fill,
        drain_cycles=drain,
        total_cycles=total,
        ifmap_reads=np.where(row_is_ifmap, row, col),
        filter_reads=np.where(row_is_ifmap, col, row),
        ofmap_writes=traffic.out_writes * times,
        ofmap_reads=traffic.out_reads * times,
        sram_ifmap_reads=times * np.where(row_is_ifmap, sram_row, sram_col),
        sram_filter_reads=times * np.where(row_is_ifmap, sram_col, sram_row),
        sram_ofmap_writes=times * sram_out,
        sram_ofmap_reads=times * np.where(folds.is_os, 0, sram_out - folds.t * folds.sc),
        mapping_eff=mapping,
        compute_util=mapping * folds.t / lines,
        overall_util=times * macs / (total * folds.rows * folds.cols),
    )


def _last(size: IntArray, tile: IntArray) -> IntArray:
    """Width of the last fold."""
    return size - (-(-size // tile) - 1) * tile


def _sram(folds: FoldArrays) -> tuple[IntArray, IntArray, IntArray]:
    """Words read for the row operand and the column operand, and results written, between SRAM and array."""
    row = folds.t * folds.sr * folds.col_folds
    col = np.where(folds.is_os, folds.t * folds.sc * folds.row_folds, folds.sr * folds.sc)
    out = np.where(folds.is_os, folds.sr * folds.sc, folds.t * folds.sc * folds.row_folds)
    return row, col, out


def _traffic(folds: FoldArrays, memory: Memory, distinct: IntArray, band: IntArray) -> _Traffic:
    row_is_ifmap = folds.is_os | folds.is_ws
    row_room = np.where(row_is_ifmap, memory.ifmap_words, memory.filter_words)
    col_room = np.where(row_is_ifmap, memory.filter_words, memory.ifmap_words)
    row_words, col_words = folds.t * folds.sr, np.where(folds.is_os, folds.t, folds.sr) * folds.sc
    row_distinct = np.where(row_is_ifmap, distinct, row_words)
    col_distinct = np.where(row_is_ifmap, col_words, distinct)
    row_fits = row_distinct <= row_room
    slides = ~folds.is_ws & (band <= memory.ifmap_words)
    row_slides, col_slides = slides & row_is_ifmap, slides & ~row_is_ifmap
    # an os filter block is used by all row folds of its column; ws and is load each stationary word once
    block_fits = folds.t * np.minimum(folds.cols, folds.sc) <= col_room
    one = np.ones_like(folds.row_folds)
    out_words = np.where(folds.is_os, folds.sr, folds.t) * folds.sc
    spills = ~folds.is_os & (folds.t * np.minimum(folds.cols, folds.sc) > memory.ofmap_words)
    return _Traffic(
        row_pass=np.where(
            row_fits | row_slides, row_distinct, np.minimum(row_words, folds.row_folds * row_distinct)
        ).astype(np.float64),
        row_passes=np.where(row_fits, one, folds.col_folds),
        col_pass=np.where((col_distinct <= col_room) | col_slides, col_distinct, col_words).astype(np.float64),
        col_passes=np.where(folds.is_os & ~block_fits, folds.row_folds, one),
        out_writes=(out_words * np.where(spills, folds.row_folds, one)).astype(np.float64),
        out_reads=(out_words * np.where(spills, folds.row_folds - 1, 0)).astype(np.float64),
        row_bandwidth=np.where(row_is_ifmap, memory.ifmap_bandwidth, memory.filter_bandwidth),
        col_bandwidth=np.where(row_is_ifmap, memory.filter_bandwidth, memory.ifmap_bandwidth),
        latency=memory.latency,
    )


def _busy_cycles(folds: FoldArrays, traffic: _Traffic, lines: IntArray, out_bandwidth: float) -> FloatArray:
    """Cycles of all folds of one product, each as long as the longest of its compute and its transfers."""
    last_col = _last(folds.sc, folds.cols)
    width = np.minimum(folds.cols, folds.sc)
    every = traffic.row_passes == folds.col_folds
    first = _column(folds, traffic, lines, width, np.ones_like(every), out_bandwidth)
    inner = _column(folds, traffic, lines, width, every, out_bandwidth)
    final = _column(folds, traffic, lines, last_col, every, out_bandwidth)
    several = folds.col_folds > 1
    return np.where(several, first + (folds.col_folds - 2) * inner + final, first)


def _column(
    folds: FoldArrays,
    traffic: _Traffic,
    lines: IntArray,
    width: IntArray,
    fetches_rows: npt.NDArray[np.bool_],
    out_bandwidth: float,
) -> FloatArray:
    """Cycles of one column fold, `width` columns wide."""
    share = width / folds.sc
    col_words, passes = traffic.col_pass * share, traffic.col_passes

    def fold(height: IntArray, opens: bool) -> FloatArray:
        row = np.where(fetches_rows, traffic.latency + traffic.row_pass * height / folds.sr / traffic.row_bandwidth, 0)
        words = np.where(folds.is_os, col_words, col_words * height / folds.sr)
        fetches_cols = ~folds.is_os | opens | (passes > 1)
        col = np.where(fetches_cols, traffic.latency + words / traffic.col_bandwidth, 0)
        return np.maximum(lines, np.ceil(np.maximum(row, col)))

    height = np.minimum(folds.rows, folds.sr)
    last = _last(folds.sr, folds.rows)
    several = folds.row_folds > 1
    cycles = fold(height, True) + np.where(several, (folds.row_folds - 2) * fold(height, False) + fold(last, False), 0)
    out = np.ceil((traffic.out_writes + traffic.out_reads) * share / out_bandwidth)
    return np.maximum(cycles, out)


def _fill_cycles(folds: FoldArrays, traffic: _Traffic) -> FloatArray:
    """Cycles to fetch the operands of the first fold."""
    height, width = np.minimum(folds.rows, folds.sr), np.minimum(folds.cols, folds.sc)
    row = traffic.row_pass * height / folds.sr / traffic.row_bandwidth
    down = np.where(folds.is_os, 1.0, height / folds.sr)
    col = traffic.col_pass * down * width / folds.sc / traffic.col_bandwidth
    return np.ceil(traffic.latency + np.maximum(row, col))
