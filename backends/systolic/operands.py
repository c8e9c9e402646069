"""Address matrices of operands, built a few lines at a time: what the array demands and what is prefetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stablecast.backends.systolic.geometry import FoldGrid
from stablecast.backends.systolic.layers import Layer

AddressArray = npt.NDArray[np.int32]
BLANK = -1


class AddressRows(Protocol):
    """A matrix of addresses, -1 where a port idles, that is read in order of its rows."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        ...

    @property
    def width(self) -> int:
        """Number of columns."""
        ...

    def chunk(self, first: int, stop: int) -> AddressArray:
        """Rows `first` to `stop` (exclusive)."""
        ...


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the im2col matrix: the share of address, input row and input column of each index."""

    base: AddressArray
    row: AddressArray
    col: AddressArray

    def __getitem__(self, at: slice) -> Axis:
        return Axis(self.base[at], self.row[at], self.col[at])

    def __len__(self) -> int:
        return len(self.base)

    def take(self, index: npt.NDArray[np.int64]) -> Axis:
        """The axis at `index` only."""
        return Axis(self.base[index], self.row[index], self.col[index])


@dataclass(frozen=True, slots=True)
class Window:
    """The im2col matrix of a convolution's input: address[p, k] = pixels.base[p] + words.base[k] inside the input."""

    pixels: Axis
    words: Axis
    height: int
    width: int
    partial: bool
    size: int

    @classmethod
    def of(cls, layer: Layer) -> Window:
        """Window of `layer` with addresses from 0 (row, column, channel; channel fastest)."""
        row, col = np.divmod(np.arange(layer.m, dtype=np.int32), np.int32(layer.out_w))
        row, col = row * layer.stride_h, col * layer.stride_w
        channels = np.int32(layer.channels)
        word_row, rest = np.divmod(np.arange(layer.k, dtype=np.int32), np.int32(layer.filter_w * layer.channels))
        word_col, channel = np.divmod(rest, channels)
        pixels = Axis((row * layer.ifmap_w + col) * channels, row, col)
        words = Axis((word_row * layer.ifmap_w + word_col) * channels + channel, word_row, word_col)
        size = layer.ifmap_h * layer.ifmap_w * layer.channels
        return cls(pixels, words, layer.ifmap_h, layer.ifmap_w, layer.partial_windows, size)

    def fill(self, out: AddressArray, down: Axis, across: Axis) -> None:
        """Write the addresses of `down` x `across` to `out`."""
        np.add(down.base[:, None], across.base[None, :], out=out)
        if self.partial:
            outside = down.row[:, None] + across.row[None, :] >= self.height
            outside |= down.col[:, None] + across.col[None, :] >= self.width
            out[outside] = BLANK


@dataclass(frozen=True, slots=True)
class SkewedRows:
    """Blocks stacked on top of each other and read along the anti-diagonals (row + column constant)."""

    window: Window
    blocks: tuple[tuple[Axis, Axis], ...]
    block_rows: int
    width: int

    @property
    def rows(self) -> int:
        """Number of anti-diagonals."""
        return len(self.blocks) * self.block_rows + self.width - 1

    def chunk(self, first: int, stop: int) -> AddressArray:
        """Anti-diagonals `first` to `stop`."""
        total = len(self.blocks) * self.block_rows
        low, high = max(0, first - self.width + 1), min(total, stop)
        buffer = np.full((high - low + self.width - 1, self.width), BLANK, np.int32)
        item = buffer.itemsize
        skew = np.lib.stride_tricks.as_strided(
            buffer, (high - low, self.width), (self.width * item, (self.width + 1) * item)
        )
        for index in range(low // self.block_rows, -(-high // self.block_rows)):
            down, across = self.blocks[index]
            begin = max(low, index * self.block_rows)
            end = min(high, (index + 1) * self.block_rows)
            rows = slice(begin - index * self.block_rows, end - index * self.block_rows)
            self.window.fill(skew[begin - low : end - low, : len(across)], down[rows], across)
        return buffer[first - low : stop - low]


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Blocks stacked on top of each other and read row by row."""

    window: Window
    blocks: tuple[tuple[Axis, Axis], ...]
    width: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(len(down) for down, _ in self.blocks)

    def chunk(self, first: int, stop: int) -> AddressArray:
        """Rows `first` to `stop`."""
        buffer = np.full((stop - first, self.width), BLANK, np.int32)
        top = 0
        for down, across in self.blocks:
            begin, end = max(first, top), min(stop, top + len(down))
            if begin < end:
                self.window.fill(
                    buffer[begin - first : end - first, : len(across)], down[begin - top : end - top], across
                )
            top += len(down)
        return buffer


def _slices(total: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, total)) for at in range(0, total, size)]


@dataclass(frozen=True, slots=True)
class OperandOrder:
    """Demand and prefetch order of a read operand on one array.

    `demand[b]` are the lines a fold demands from line `offset[b]` of the fold on; `block_of` tells which a fold uses.
    `size` bounds the addresses, `prefetch_words` counts the prefetch order with its blanks.
    """

    demand: tuple[AddressRows, ...]
    offset: tuple[int, ...]
    prefetch: AddressRows
    by_fold: bool
    size: int
    prefetch_words: int

    def block_of(self, fold: int, row_folds: int) -> int:
        """Index into `demand` for a fold."""
        return fold if self.by_fold else fold % row_folds


def ifmap_order(window: Window, grid: FoldGrid) -> OperandOrder:
    """Orders of the input behind `window` under the dataflow of `grid`."""
    pixels, words = window.pixels, window.words
    if grid.dataflow == "is":
        columns = _slices(grid.sc, grid.cols)
        rows = _slices(grid.sr, grid.rows)
        flipped = [_reversed(words[part]) for part in rows]
        demand = tuple(PlainRows(window, ((down, pixels[part]),), grid.cols) for part in columns for down in flipped)
        offset = tuple(grid.rows - len(down) for _ in columns for down in flipped)
        prefetch = PlainRows(window, tuple((words, pixels[part]) for part in columns), grid.cols)
        words_in_all = grid.sr * grid.cols * grid.col_folds
        return OperandOrder(demand, offset, prefetch, True, window.size, words_in_all)
    down, across = (words, pixels) if grid.dataflow == "os" else (pixels, words)
    blocks = tuple((down, across[part]) for part in _slices(grid.sr, grid.rows))
    demand = tuple(SkewedRows(window, (block,), grid.t, grid.rows) for block in blocks)
    start = 0 if grid.dataflow == "os" else grid.rows
    stacked = SkewedRows(window, blocks, grid.t, grid.rows)
    return OperandOrder(demand, (start,) * len(demand), stacked, False, window.size, grid.t * grid.rows * len(blocks))


def _reversed(axis: Axis) -> Axis:
    return Axis(axis.base[::-1], axis.row[::-1], axis.col[::-1])
