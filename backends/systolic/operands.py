"""Address matrices of operands, built a few lines at a time: what the array demands and what is prefetched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from stablecast.backends.systolic.geometry import FoldGrid
from stablecast.backends.systolic.layers import Layer
from stablecast.ir.errors import InputError

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

    @property
    def one_place(self) -> bool:
        """True when all indices share one row and column."""
        return bool((self.row == self.row[0]).all() and (self.col == self.col[0]).all())

    def take(self, index: npt.NDArray[np.int64]) -> Axis:
        """The axis at `index` only."""
        return Axis(self.base[index], self.row[index], self.col[index])

    def reversed(self) -> Axis:
        """The axis from its end."""
        return Axis(self.base[::-1], self.row[::-1], self.col[::-1])

    @classmethod
    def plain(cls, base: npt.NDArray[np.int64]) -> Axis:
        """An axis of a plain matrix: no rows or columns of an input behind it."""
        nothing = np.zeros(len(base), np.int32)
        return cls(base.astype(np.int32), nothing, nothing)


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
        size = layer.ifmap_h * layer.ifmap_w * layer.channels
        if size > np.iinfo(np.int32).max:
            raise InputError(f"{layer.where or layer.name}: an input of {size} words", "allowed: up to 2^31 - 1 words")
        row, col = np.divmod(np.arange(layer.m, dtype=np.int32), np.int32(layer.out_w))
        row, col = row * layer.stride_h, col * layer.stride_w
        channels = np.int32(layer.channels)
        word_row, rest = np.divmod(np.arange(layer.k, dtype=np.int32), np.int32(layer.filter_w * layer.channels))
        word_col, channel = np.divmod(rest, channels)
        pixels = Axis((row * layer.ifmap_w + col) * channels, row, col)
        words = Axis((word_row * layer.ifmap_w + word_col) * channels + channel, word_row, word_col)
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


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """Addresses given as a matrix."""

    matrix: AddressArray

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.matrix.shape[0]

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.matrix.shape[1]

    def chunk(self, first: int, stop: int) -> AddressArray:
        """Rows `first` to `stop`."""
        return np.ascontiguousarray(self.matrix[first:stop])


def _slices(total: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, total)) for at in range(0, total, size)]


@dataclass(frozen=True, slots=True)
class OperandOrder:
    """Demand and prefetch order of an operand on one array.

    `demand[b]` are the lines a fold demands from line `offset[b]` of the fold on; a fold uses the block of its row
    fold, its column fold, or one of its own. `size` bounds the addresses, `prefetch_words` counts the prefetch order
    with its blanks. The blocks in `distinct` are known to demand no word twice.
    """

    demand: tuple[AddressRows, ...]
    offset: tuple[int, ...]
    prefetch: AddressRows
    block_by: Literal["row", "column", "fold"]
    size: int
    prefetch_words: int
    distinct: frozenset[int] = frozenset()

    def block_of(self, fold: int, row_folds: int) -> int:
        """Index into `demand` for a fold."""
        if self.block_by == "fold":
            return fold
        return fold % row_folds if self.block_by == "row" else fold // row_folds


def streamed_order(window: Window, down: Axis, across: Axis, width: int, start: int, by_column: bool) -> OperandOrder:
    """Skewed operand: `down` are the steps, `across` is cut into blocks of `width` ports; lines from `start` on."""
    blocks = tuple((down, across[part]) for part in _slices(len(across), width))
    demand = tuple(SkewedRows(window, (block,), len(down), width) for block in blocks)
    stacked = SkewedRows(window, blocks, len(down), width)
    elements = len(down) * width * len(blocks)
    block_by: Literal["row", "column"] = "column" if by_column else "row"
    return OperandOrder(demand, (start,) * len(demand), stacked, block_by, window.size, elements)


def stationary_order(window: Window, down: Axis, across: Axis, grid: FoldGrid) -> OperandOrder:
    """Stationary operand of S_r (`down`) x S_c (`across`), each fold loaded bottom row first."""
    columns = [across[part] for part in _slices(grid.sc, grid.cols)]
    flipped = [down[part].reversed() for part in _slices(grid.sr, grid.rows)]
    demand = tuple(PlainRows(window, ((rows, part),), grid.cols) for part in columns for rows in flipped)
    offset = tuple(grid.rows - len(rows) for _ in columns for rows in flipped)
    prefetch = PlainRows(window, tuple((down, part) for part in columns), grid.cols)
    return OperandOrder(demand, offset, prefetch, "fold", window.size, grid.sr * grid.cols * grid.col_folds)


def ifmap_order(window: Window, grid: FoldGrid) -> OperandOrder:
    """Orders of the input behind `window` under the dataflow of `grid`."""
    pixels, words = window.pixels, window.words
    if grid.dataflow == "os":
        return streamed_order(window, words, pixels, grid.rows, 0, False)
    # words of one place in the window differ by channel, and their pixels by place: no word comes up twice
    single = [index for index, part in enumerate(_slices(len(words), grid.rows)) if words[part].one_place]
    if grid.dataflow == "ws":
        order = streamed_order(window, pixels, words, grid.rows, grid.rows, False)
        return replace(order, distinct=frozenset(single))
    order = stationary_order(window, words, pixels, grid)
    folds = (column * grid.row_folds + row for column in range(grid.col_folds) for row in single)
    return replace(order, distinct=frozenset(folds))


def filter_order(layer: Layer, grid: FoldGrid, kept: npt.NDArray[np.int64] | None = None) -> OperandOrder:
    """Orders of the filter matrix (filter x words + word); `kept` are the words left by N:M sparsity."""
    filters = Axis.plain(np.arange(layer.n, dtype=np.int64) * layer.k)
    words = Axis.plain(np.arange(layer.k, dtype=np.int64) if kept is None else kept)
    window = Window(filters, words, 1, 1, False, layer.k * layer.n)
    if grid.dataflow == "ws":
        return stationary_order(window, words, filters, grid)
    if grid.dataflow == "os":
        return streamed_order(window, words, filters, grid.cols, 0, True)
    return streamed_order(window, filters, words, grid.rows, grid.rows, False)


def ofmap_block(layer: Layer, grid: FoldGrid, fold: int) -> tuple[int, AddressRows]:
    """(First line within the fold, lines) of the results one fold writes; address = pixel x filters + filter."""
    column, row = divmod(fold, grid.row_folds)
    pixels = Axis.plain(np.arange(layer.m, dtype=np.int64) * layer.n)
    filters = Axis.plain(np.arange(layer.n, dtype=np.int64))
    window = Window(pixels, filters, 1, 1, False, layer.m * layer.n)
    across = slice(column * grid.cols, (column + 1) * grid.cols)
    if grid.dataflow == "os":
        down = pixels[row * grid.rows : (row + 1) * grid.rows].reversed()
        start = grid.t - 1 + grid.rows - len(down)
        return start, SkewedRows(window, ((down, filters[across]),), len(down), grid.cols)
    down, ports = (pixels, filters[across]) if grid.dataflow == "ws" else (filters, pixels[across])
    return 2 * grid.rows - 1, SkewedRows(window, ((down, ports),), len(down), grid.cols)
