"""SCALE-Sim v3's two kinds of filter sparsity: N:M per layer, and row-wise with a random N per filter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

import numpy as np
import numpy.typing as npt

from stablecast.backends.systolic.config import SystolicConfig
from stablecast.backends.systolic.geometry import FoldGrid
from stablecast.backends.systolic.layers import Layer
from stablecast.backends.systolic.operands import (
    AddressArray,
    MatrixRows,
    OperandOrder,
    SkewedRows,
    Window,
    filter_order,
    ifmap_order,
)
from stablecast.backends.systolic.records import SparseStorage
from stablecast.ir.errors import InputError

_BITS_PER_WORD = 32


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """A layer whose filter is stored without its zeros: `grid` counts the compressed rows as K.

    `kept` are the words of a window that are read (N:M); `counts` the non-zeros per block of each filter (row-wise).
    """

    grid: FoldGrid
    row_wise: bool
    block: int
    kept: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    storage: SparseStorage
    mapping_eff: float

    @property
    def row_wise_reads(self) -> int:
        """Row-wise ifmap reads from SRAM, idle ports included, as SCALE-Sim counts them."""
        half = self.block // 2
        width = -(-2 * self.grid.rows // self.block) * half * self.block
        return self.grid.folds * (self.grid.t + self.grid.rows - 1) * width

    def ifmap_order(self, layer: Layer) -> OperandOrder:
        """Demand and prefetch order of the input."""
        window = Window.of(layer)
        if not self.row_wise:
            return ifmap_order(replace(window, words=window.words.take(self.kept)), self.grid)
        grid = self.grid
        blocks = tuple((window.pixels, window.words[at : at + grid.rows]) for at in range(0, layer.k, grid.rows))
        demand = tuple(
            _RepeatedBlocks(window, row * 2 * grid.rows, grid.rows, self.block) for row in range(grid.row_folds)
        )
        prefetch = SkewedRows(window, blocks, grid.t, grid.rows)
        return OperandOrder(
            demand, (grid.rows,) * len(demand), prefetch, "row", window.size, grid.t * grid.rows * len(blocks)
        )

    def filter_order(self, layer: Layer) -> OperandOrder:
        """Demand and prefetch order of the compressed filter, -1 where a row-wise block has fewer non-zeros."""
        if not self.row_wise:
            return filter_order(layer, self.grid, self.kept)
        grid = self.grid
        matrix = _compressed(layer, self.block, self.counts, grid.sr)
        columns = [matrix[:, at : at + grid.cols] for at in range(0, grid.sc, grid.cols)]
        padded = [np.pad(part, ((0, 0), (0, grid.cols - part.shape[1])), constant_values=-1) for part in columns]
        rows = range(0, grid.sr, grid.rows)
        demand = tuple(MatrixRows(part[at : at + grid.rows][::-1]) for part in padded for at in rows)
        offset = tuple(grid.rows - source.rows for source in demand)
        prefetch = MatrixRows(np.concatenate(padded))
        return OperandOrder(demand, offset, prefetch, "fold", layer.k * layer.n, prefetch.matrix.size)


def sparse_layer(layer: Layer, config: SystolicConfig) -> SparseLayer:
    """Compressed form of `layer` under the configuration's sparsity."""
    sparsity = config.sparsity
    if sparsity.row_wise:
        return _row_wise(layer, config)
    n, m = layer.sparse_n, layer.sparse_m
    index = np.arange(layer.k)
    kept = index[index % m < n]
    grid = FoldGrid.of(config.dataflow, config.rows, config.cols, layer.m, layer.n, len(kept))
    storage = _storage(sparsity.form, layer, len(kept) * layer.n, len(kept))
    return SparseLayer(grid, False, sparsity.block, kept, np.zeros(0, np.int64), storage, 0.0)


def _row_wise(layer: Layer, config: SystolicConfig) -> SparseLayer:
    if config.dataflow != "ws":
        raise InputError(
            f"row-wise sparsity (OptimizedMapping) with dataflow {config.dataflow}", "allowed: ws, as in SCALE-Sim"
        )
    block = config.sparsity.block
    if 2 * config.rows % block:
        raise InputError(
            f"BlockSize {block} does not divide twice the array height ({2 * config.rows})", "choose another BlockSize"
        )
    # SCALE-Sim draws with numpy's legacy generator; RandomState is the same stream without global state
    random = np.random.RandomState(config.sparsity.seed)
    counts = np.array([random.randint(1, block // 2 + 1) for _ in range(layer.n)], np.int64)
    whole, rest = divmod(layer.k, block)
    nonzeros = int((whole * counts + np.minimum(counts, rest)).sum())
    compressed = -(-layer.k // (2 * block)) * block
    grid = FoldGrid.of("ws", config.rows, config.cols, layer.m, layer.n, compressed)
    storage = _storage(config.sparsity.form, layer, nonzeros, compressed)
    efficiency = nonzeros / (grid.folds * grid.rows * grid.cols)
    return SparseLayer(grid, True, block, np.zeros(0, np.int64), counts, storage, efficiency)


def _storage(form: str, layer: Layer, nonzeros: int, compressed: int) -> SparseStorage:
    original = layer.k * layer.n
    if form == "ellpack_block":
        words = compressed * layer.n
        metadata = words * ceil(log2(layer.sparse_m)) / _BITS_PER_WORD
        return SparseStorage(original, words + metadata, metadata)
    pointers = (layer.k if form == "csr" else layer.n) + 1
    return SparseStorage(original, 2 * nonzeros + pointers, nonzeros + pointers)


def _compressed(layer: Layer, block: int, counts: npt.NDArray[np.int64], rows: int) -> AddressArray:
    """Addresses of the compressed filter: of each block, its first `counts` words in half a block's room."""
    half = block // 2
    row = np.arange(rows)
    pair, within = np.divmod(row, block)
    second, slot = np.divmod(within, max(1, half))
    word = pair * 2 * block + second * block + slot
    room = (second < 2) & (word < layer.k)
    held = room[:, None] & (slot[:, None] < counts[None, :])
    address = word[:, None] + np.arange(layer.n)[None, :] * layer.k
    return np.where(held, address, -1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _RepeatedBlocks:
    """Row-wise demand of a fold: 2R words of a window in blocks, each block read by half a block of array rows."""

    window: Window
    first_word: int
    array_rows: int
    block: int

    @property
    def rows(self) -> int:
        return len(self.window.pixels) + self.array_rows - 1

    @property
    def width(self) -> int:
        return 2 * self.array_rows // self.block * (self.block // 2) * self.block

    def chunk(self, first: int, stop: int) -> AddressArray:
        out = np.full((stop - first, self.width), -1, np.int32)
        half, block, pixels = self.block // 2, self.block, self.window.pixels
        for port in range(self.width // block):
            words = self.window.words[self.first_word + port // half * block :][:block]
            low, high = max(first, port), min(stop, port + len(pixels))
            if low < high and len(words):
                part = out[low - first : high - first, port * block : port * block + len(words)]
                self.window.fill(part, pixels[low - port : high - port], words)
        return out
