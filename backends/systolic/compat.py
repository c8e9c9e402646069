"""SCALE-Sim v3's reports of a layer, equal in every column (compatibility mode "scalesim-3.0").

SCALE-Sim builds every demand and steps every cycle; here cycles and SRAM counts are closed forms, DRAM traffic and
stalls are stepped from one event (buffer wipe, prefetch, drain) to the next. Its quirks are kept; `docs/systolic.md`
lists them beside what the corrected mode does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stablecast.backends.systolic.calc_reads import CalcBuffer, DramStream
from stablecast.backends.systolic.config import SystolicConfig
from stablecast.backends.systolic.geometry import FoldGrid, OfmapStream
from stablecast.backends.systolic.layers import Layer
from stablecast.backends.systolic.layout import BankedOperand, Layout, filter_words, ifmap_words
from stablecast.backends.systolic.ofmap_buffer import OfmapBuffer
from stablecast.backends.systolic.operands import MatrixRows, Window, filter_order, ifmap_order
from stablecast.backends.systolic.plans import ReadPlan, SharedPlan, StationaryPlan, StreamedPlan
from stablecast.backends.systolic.records import LayerReport, SparseStorage, SramStream
from stablecast.backends.systolic.sparsity import SparseLayer, sparse_layer
from stablecast.backends.systolic.timing import run_clock
from stablecast.ir.errors import InputError


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """All that a run of one layer needs: folds, both read operands, SRAM words, efficiencies (0 to 1)."""

    grid: FoldGrid
    ifmap: ReadPlan
    filter: ReadPlan
    sram_words: tuple[float, int, int]
    mapping_eff: float
    storage: SparseStorage | None = None


def plan_layer(layer: Layer, config: SystolicConfig, layout: Layout | None = None) -> LayerPlan:
    """Plan of `layer`: dense, or sparse where the configuration says so; `layout` where it asks for custom layouts."""
    if config.sparsity.enabled:
        return _sparse_plan(layer, config, sparse_layer(layer, config))
    grid = FoldGrid.of(config.dataflow, config.rows, config.cols, layer.m, layer.n, layer.k)
    ifmap, filters = _ifmap_plan(layer, grid), _filter_plan(grid)
    if layout is not None and config.mode == "USER":
        if config.ifmap.custom_layout:
            ifmap = _laid_out_ifmap(layer, config, grid, layout)
        if config.filter.custom_layout:
            filters = _laid_out_filter(layer, config, grid, layout)
    return LayerPlan(grid, ifmap, filters, sram_words(grid), mapping_efficiency(grid))


def _laid_out_ifmap(layer: Layer, config: SystolicConfig, grid: FoldGrid, layout: Layout) -> SharedPlan:
    if config.ifmap_offset:
        raise InputError(f"IfmapOffset {config.ifmap_offset} with IfmapCustomLayout", "allowed: 0, as in SCALE-Sim")
    words = ifmap_words(layer, layout, config.ifmap)
    order = replace(ifmap_order(Window.of(layer), grid), prefetch=MatrixRows(words[None, :]))
    banked = BankedOperand.of(words, order.size, config.ifmap, 1024 * config.ifmap_kb)
    return SharedPlan(grid, order, banked=banked)


def _laid_out_filter(layer: Layer, config: SystolicConfig, grid: FoldGrid, layout: Layout) -> SharedPlan:
    words = filter_words(layer, layout, config.filter)
    order = replace(filter_order(layer, grid), prefetch=MatrixRows(words[None, :]))
    banked = BankedOperand.of(words, order.size, config.filter, 1024 * config.filter_kb, config.filter_offset)
    return SharedPlan(grid, order, banked=banked)


def evaluate_layer(layer: Layer, config: SystolicConfig, layout: Layout | None = None) -> LayerReport:
    """SCALE-Sim's reports of `layer`; batch, padding, dilation and groups are not part of its model."""
    plan = plan_layer(layer, config, layout)
    grid, user = plan.grid, config.mode == "USER"
    stream = OfmapStream(grid)
    ifmap_span, filter_span = plan.ifmap.span(), plan.filter.span()
    watch = {*ifmap_span, *filter_span, stream.first_line, stream.last_line}
    ofmap = OfmapBuffer(stream, 1024 * config.ofmap_kb, config.bandwidth if user else config.cols)
    if user:
        ifmap_clock = plan.ifmap.clock(1024 * config.ifmap_kb, config.ifmap.bandwidth)
        filter_clock = plan.filter.clock(1024 * config.filter_kb, config.filter.bandwidth)
        clocked = run_clock(grid.total_lines - 1, ofmap, ifmap_clock, filter_clock, watch)
        dram_ifmap, dram_filter = ifmap_clock.dram(), filter_clock.dram()
    else:
        clocked = run_clock(grid.total_lines - 1, ofmap, None, None, watch)
        dram_ifmap = plan.ifmap.calc(CalcBuffer.of(1024 * config.ifmap_kb))
        dram_filter = plan.filter.calc(CalcBuffer.of(1024 * config.filter_kb))
    dram_ofmap = DramStream(ofmap.first_drain or 0, ofmap.last_drain, ofmap.writes)
    ifmap_words, filter_words, ofmap_words = plan.sram_words
    return LayerReport(
        name=layer.name,
        overall_cycles=dram_ofmap.stop - min(dram_ifmap.start, dram_filter.start),
        total_cycles=clocked.total,
        stall_cycles=clocked.stalls,
        overall_util=layer.m * layer.n * layer.k * 100 / (clocked.total * config.rows * config.cols),
        mapping_eff=plan.mapping_eff * 100,
        compute_util=compute_utilisation(grid) * 100,
        sram_ifmap=_sram(clocked.ifmap_at, ifmap_span, ifmap_words),
        sram_filter=_sram(clocked.filter_at, filter_span, filter_words),
        sram_ofmap=_sram(clocked.ofmap_at, (stream.first_line, stream.last_line), ofmap_words),
        dram_ifmap=dram_ifmap,
        dram_filter=dram_filter,
        dram_ofmap=dram_ofmap,
        sparse=plan.storage,
    )


def sram_words(grid: FoldGrid) -> tuple[int, int, int]:
    """Words between SRAM and array, as SCALE-Sim counts them: ifmap reads, filter reads, ofmap writes.

    Output-stationary writes carry R + C words too many per fold, as in SCALE-Sim.
    """
    sr, sc, t = grid.sr, grid.sc, grid.t
    wide, tall = t * sr * grid.col_folds, t * sc * grid.row_folds
    if grid.dataflow == "os":
        return wide, tall, sr * sc + grid.folds * (grid.rows + grid.cols)
    if grid.dataflow == "ws":
        return wide, sr * sc, tall
    return sr * sc, wide, tall


def mapping_efficiency(grid: FoldGrid) -> float:
    """Share of the array that holds an element, averaged over folds; 0 to 1."""
    return grid.sr * grid.sc / (grid.folds * grid.rows * grid.cols)


def compute_utilisation(grid: FoldGrid) -> float:
    """Multiply-adds per processing element and cycle, averaged over folds; ws and is use SCALE-Sim's T+2R+2C-3."""
    cycles = grid.lines if grid.dataflow == "os" else grid.t + 2 * grid.rows + 2 * grid.cols - 3
    return mapping_efficiency(grid) * grid.t / cycles


def _sram(at: dict[int, int], span: tuple[int, int], words: float) -> SramStream:
    return SramStream(at[span[0]], at[span[1]], words)


def _ifmap_plan(layer: Layer, grid: FoldGrid) -> ReadPlan:
    if layer.shared_words:
        return SharedPlan(grid, ifmap_order(Window.of(layer), grid), layer)
    return StationaryPlan(grid) if grid.dataflow == "is" else StreamedPlan.rowwise(grid)


def _filter_plan(grid: FoldGrid) -> ReadPlan:
    if grid.dataflow == "ws":
        return StationaryPlan(grid)
    return StreamedPlan.rowwise(grid) if grid.dataflow == "is" else StreamedPlan.columnwise(grid)


def _sparse_plan(layer: Layer, config: SystolicConfig, sparse: SparseLayer) -> LayerPlan:
    grid = sparse.grid
    ifmap_words, filter_words, ofmap_words = sram_words(grid)
    if sparse.row_wise:
        return LayerPlan(
            grid,
            SharedPlan(grid, sparse.ifmap_order(layer)),
            SharedPlan(grid, sparse.filter_order(layer)),
            (sparse.row_wise_reads, filter_words, ofmap_words),
            sparse.mapping_eff,
            sparse.storage,
        )
    reads: float = ifmap_words * (layer.sparse_m / layer.sparse_n) if grid.dataflow == "ws" else ifmap_words
    ifmap: ReadPlan
    if layer.shared_words:
        ifmap = SharedPlan(grid, sparse.ifmap_order(layer))
    else:
        ifmap = StationaryPlan(grid) if grid.dataflow == "is" else StreamedPlan.rowwise(grid)
    return LayerPlan(
        grid, ifmap, _filter_plan(grid), (reads, filter_words, ofmap_words), mapping_efficiency(grid), sparse.storage
    )
