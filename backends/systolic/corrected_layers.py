"""Reports of whole layers under the corrected model."""

from __future__ import annotations

from dataclasses import replace

from stablecast.backends.systolic.calc_reads import DramStream
from stablecast.backends.systolic.config import SystolicConfig
from stablecast.backends.systolic.corrected import Estimate, Memory, estimate
from stablecast.backends.systolic.layers import Layer
from stablecast.backends.systolic.records import LayerReport, SparseStorage, SramStream
from stablecast.backends.systolic.sparsity import sparse_layer
from stablecast.ir.errors import InputError


def product_of(layer: Layer) -> tuple[int, int, int, int]:
    """(m, n, k, how many) of the products a layer is: images stack in m, groups are products of their own."""
    if layer.kind == "gemm":
        return layer.ifmap_h, layer.filters, layer.ifmap_w, layer.batch
    m = layer.batch * layer.whole_out_h * layer.whole_out_w
    return m, layer.filters // layer.groups, layer.k // layer.groups, layer.groups


def memory_of(config: SystolicConfig) -> Memory:
    """SRAMs, bandwidths and latency of a configuration; CALC has no bandwidth limit and no latency."""
    words = (1024 * config.ifmap_kb, 1024 * config.filter_kb, 1024 * config.ofmap_kb)
    if config.mode == "CALC":
        return Memory(*words)
    return Memory(*words, *config.operand_bandwidths, latency=config.dram_latency)


def evaluate_corrected(layer: Layer, config: SystolicConfig) -> LayerReport:
    """Corrected report of `layer`. All traffic is spread over the whole run: streams span cycle 0 to the last."""
    _check(layer)
    m, n, k, times = product_of(layer)
    storage: SparseStorage | None = None
    dense_k, mapping = k, None
    if config.sparsity.enabled:
        sparse = sparse_layer(replace(layer, channels=layer.channels // layer.groups, filters=n, batch=1), config)
        k = sparse.grid.t if config.dataflow == "os" else sparse.grid.sr
        storage = sparse.storage
        mapping = sparse.mapping_eff if sparse.row_wise else None
    memory = memory_of(config)
    result = estimate(
        m,
        n,
        k,
        batch=times,
        array_rows=config.rows,
        array_cols=config.cols,
        dataflow=config.dataflow,
        memory=memory,
        ifmap_distinct=min(m * k, _distinct(layer)),
        ifmap_band=_band(layer, config.rows if config.dataflow == "os" else config.cols),
    )
    report = _report(layer, result, m * n * dense_k * times, config.rows * config.cols)
    if storage is None:
        return report
    return replace(report, sparse=storage, mapping_eff=report.mapping_eff if mapping is None else mapping * 100)


def _report(layer: Layer, result: Estimate, macs: int, elements: int) -> LayerReport:
    total = int(result.total_cycles)
    fill, drain = int(result.fill_cycles), int(result.drain_cycles)

    def sram(words: float) -> SramStream:
        return SramStream(fill, total - drain - 1, int(words))

    def dram(words: float) -> DramStream:
        return DramStream(0, total - 1, int(words))

    return LayerReport(
        name=layer.name,
        overall_cycles=total,
        total_cycles=total,
        stall_cycles=int(result.stall_cycles),
        overall_util=100 * macs / (total * elements),
        mapping_eff=100 * float(result.mapping_eff),
        compute_util=100 * float(result.compute_util),
        sram_ifmap=sram(int(result.sram_ifmap_reads)),
        sram_filter=sram(int(result.sram_filter_reads)),
        sram_ofmap=sram(int(result.sram_ofmap_writes) + int(result.sram_ofmap_reads)),
        dram_ifmap=dram(float(result.ifmap_reads)),
        dram_filter=dram(float(result.filter_reads)),
        dram_ofmap=dram(float(result.ofmap_writes) + float(result.ofmap_reads)),
    )


def _check(layer: Layer) -> None:
    name = layer.where or layer.name
    if layer.kind == "conv" and min(layer.whole_out_h, layer.whole_out_w) < 1:
        raise InputError(f"{name}: filter is larger than its padded input", "allowed: filters up to the input's size")
    if layer.groups < 1 or layer.channels % layer.groups or layer.filters % layer.groups:
        allowed = f"allowed: divisors of {layer.channels} channels and {layer.filters} filters"
        raise InputError(f"{name}: groups = {layer.groups}", allowed)


def _distinct(layer: Layer) -> int:
    """Different input words one product touches."""
    if layer.kind == "gemm":
        return layer.ifmap_h * layer.ifmap_w
    rows = _reach(layer.whole_out_h, layer.stride_h, layer.filter_h, layer.dilation_h, layer.ifmap_h)
    cols = _reach(layer.whole_out_w, layer.stride_w, layer.filter_w, layer.dilation_w, layer.ifmap_w)
    return layer.batch * rows * cols * (layer.channels // layer.groups)


def _reach(windows: int, stride: int, size: int, dilation: int, limit: int) -> int:
    """Rows (or columns) that some window touches, at most: gaps between windows are left out, those of dilation not."""
    span = (size - 1) * dilation + 1
    return min(limit, (windows - 1) * min(stride, span) + span)


def _band(layer: Layer, pixels: int) -> int:
    """Words of the input rows that `pixels` windows in a row touch."""
    if layer.kind == "gemm":
        return min(pixels, layer.ifmap_h) * layer.ifmap_w
    out_rows = min(layer.whole_out_h, -(-pixels // layer.whole_out_w) + 1)
    rows = _reach(out_rows, layer.stride_h, layer.filter_h, layer.dilation_h, layer.ifmap_h)
    return rows * layer.ifmap_w * (layer.channels // layer.groups)
