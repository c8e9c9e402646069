"""SCALE-Sim v3's data layouts: which words share an SRAM line and a bank, and what bank conflicts cost."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stablecast.backends.systolic.config import SramBanks
from stablecast.backends.systolic.geometry import FoldGrid, IntArray
from stablecast.backends.systolic.layers import Layer
from stablecast.backends.systolic.operands import AddressArray, OperandOrder
from stablecast.backends.systolic.ring import EventChunk, Ring
from stablecast.ir.errors import InputError

_FIELDS = 20
_MANY_WORDS = 1 << 20


@dataclass(frozen=True, slots=True)
class OperandLayout:
    """Words of each dimension in one line, and the order of the dimensions within a line and between lines."""

    factors: tuple[int, ...]
    within: tuple[int, ...]
    between: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of input (height, width, channel) and filter (filter, channel, height, width)."""

    ifmap: OperandLayout
    filter: OperandLayout
    where: str = ""


def read_layout(path: str | Path) -> Layout:
    """Read a SCALE-Sim layout file: the first row below the header, which SCALE-Sim uses for every layer."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}", "give a layout CSV file") from error
    for number, cells in enumerate(csv.reader(lines), start=1):
        if number > 1 and any(cell.strip() for cell in cells):
            return _layout(path, number, [cell.strip() for cell in cells[1 : 1 + _FIELDS]])
    raise InputError(f"{path}: no layout below the header", "allowed: a header line, then name and 20 numbers a line")


def _layout(path: Path, number: int, cells: list[str]) -> Layout:
    where = f"{path}:{number}"
    if len(cells) < _FIELDS or not all(cell.isdecimal() for cell in cells):
        bad = next((cell for cell in cells if not cell.isdecimal()), "")
        raise InputError(f"{where}: {len(cells)} numbers, {bad!r} among them", "allowed: name, then 20 whole numbers")
    values = [int(cell) for cell in cells]
    height, width, filter_h, filter_w, channel, filters = values[:6]
    ifmap = OperandLayout((height, width, channel), tuple(values[6:9]), tuple(values[9:12]))
    weights = OperandLayout((filters, channel, filter_h, filter_w), tuple(values[12:16]), tuple(values[16:20]))
    for name, operand in (("ifmap", ifmap), ("filter", weights)):
        axes = sorted((*operand.within, *operand.between))
        if axes != list(range(2 * len(operand.factors))) or min(operand.factors) < 1:
            raise InputError(
                f"{where}: {name} orders {operand.within} and {operand.between}",
                f"allowed: 0 to {len(axes) - 1}, each once, and factors from 1",
            )
    return Layout(ifmap, weights, where)


def ifmap_words(layer: Layer, layout: Layout, banks: SramBanks) -> AddressArray:
    """Input addresses in the order they are laid out, -1 for padding."""
    if prod(layout.ifmap.factors) > banks.bandwidth:
        raise InputError(
            f"{layout.where}: an ifmap line holds {prod(layout.ifmap.factors)} words",
            f"allowed: up to IfmapSRAMBankBandwidth = {banks.bandwidth}",
        )
    return _laid_out((layer.ifmap_h, layer.ifmap_w, layer.channels), layout.ifmap)


def filter_words(layer: Layer, layout: Layout, banks: SramBanks) -> AddressArray:
    """Filter addresses in the order they are laid out, -1 for padding."""
    if prod(layout.filter.factors) != banks.bandwidth:
        raise InputError(
            f"{layout.where}: a filter line holds {prod(layout.filter.factors)} words",
            f"allowed: FilterSRAMBankBandwidth = {banks.bandwidth}",
        )
    return _laid_out((layer.filters, layer.channels, layer.filter_h, layer.filter_w), layout.filter)


def _laid_out(sizes: tuple[int, ...], layout: OperandLayout) -> AddressArray:
    addresses = np.arange(prod(sizes), dtype=np.int32).reshape(sizes)
    lines = [-(-size // factor) for size, factor in zip(sizes, layout.factors, strict=True)]
    short = [(0, count * factor - size) for count, factor, size in zip(lines, layout.factors, sizes, strict=True)]
    split = [part for pair in zip(lines, layout.factors, strict=True) for part in pair]
    padded = np.pad(addresses, short, constant_values=-1).reshape(split)
    tiled = padded.transpose(*range(0, len(split), 2), *range(1, len(split), 2))
    return tiled.transpose(*layout.between, *layout.within).reshape(-1)


@dataclass(frozen=True, slots=True)
class BankedOperand:
    """An operand in SRAM lines of `bandwidth` words spread over banks: where each word lies."""

    ring: Ring
    line: IntArray
    bank: IntArray
    banks: int
    ports: int

    @classmethod
    def of(cls, words: AddressArray, size: int, banks: SramBanks, total: int, offset: int = 0) -> BankedOperand:
        """Lines and banks of `words`, the laid-out order of `size` addresses from `offset` on, in `total` words."""
        if banks.bandwidth % banks.banks:
            raise InputError(
                f"{banks.bandwidth} words per cycle over {banks.banks} banks",
                "allowed: banks that divide the bandwidth",
            )
        valid = words[words >= 0]
        per_bank = banks.bandwidth // banks.banks
        line = np.zeros(size + 1, np.int64)
        line[valid] = np.arange(len(valid)) // banks.bandwidth
        bank = np.zeros(size + 1, np.int64)
        for first in range(0, len(valid), banks.bandwidth):
            # SCALE-Sim's column of a word is its place in Python's own order of the line's set
            held = set((valid[first : first + banks.bandwidth].astype(np.int64) + offset).tolist())
            bank[np.array(list(held)) - offset] = np.arange(len(held)) // per_bank
        ring = Ring.of(total, banks.bandwidth, len(valid), len(words), banks.bandwidth)
        return cls(ring, line, bank, banks.banks, banks.ports)

    def conflicts(self, lines: AddressArray) -> IntArray:
        """Extra cycles of each demand line; -1 for one that demands nothing, as SCALE-Sim has it."""
        rows, _ = lines.shape
        key = self.bank[lines] * self.ring.lines + self.line[lines]
        key[lines < 0] = self.banks * self.ring.lines
        key.sort(axis=1)
        first = np.ones_like(lines, np.bool_)
        first[:, 1:] = key[:, 1:] != key[:, :-1]
        at, column = np.nonzero(first & (key < self.banks * self.ring.lines))
        bank = key[at, column] // self.ring.lines
        counts = np.bincount(at * self.banks + bank, minlength=rows * self.banks).reshape(rows, self.banks)
        return -(-counts.max(axis=1) // self.ports) - 1


def layout_events(grid: FoldGrid, order: OperandOrder, operand: BankedOperand) -> Iterator[EventChunk]:
    """Lines that shift the window or lose cycles to conflicts, fold by fold."""
    start = 0
    ring = operand.ring
    for fold in range(grid.folds):
        block = order.block_of(fold, grid.row_folds)
        source, offset = order.demand[block], order.offset[block]
        yield from _idle(fold * grid.lines, offset)
        rows = max(1, _MANY_WORDS // source.width)
        for first in range(0, source.rows, rows):
            lines = source.chunk(first, min(first + rows, source.rows))
            extra = operand.conflicts(lines)
            shifts = np.zeros(len(lines), np.int64)
            start = _shift(lines, operand, start, shifts)
            at = np.flatnonzero((shifts > 0) | (extra != 0))
            if len(at):
                base = fold * grid.lines + offset + first
                yield EventChunk(at + base, shifts[at], extra[at])
        start %= ring.lines
        yield from _idle(fold * grid.lines + offset + source.rows, grid.lines - offset - source.rows)


def _idle(first: int, count: int) -> Iterator[EventChunk]:
    """Lines outside the stream, which demand nothing."""
    if count > 0:
        yield EventChunk(np.arange(first, first + count), np.zeros(count, np.int64), np.full(count, -1))


def _shift(lines: AddressArray, operand: BankedOperand, start: int, shifts: npt.NDArray[np.int64]) -> int:
    """Add to `shifts` what each line needs; returns where the window ends up."""
    ring, width = operand.ring, lines.shape[1]
    if ring.fits:
        return start
    flat = lines.reshape(-1)
    words = np.flatnonzero(flat >= 0)
    place = operand.line[flat[words]]
    position, look = 0, 1024
    while position < len(place):
        late = (place[position : position + look] - start) % ring.lines >= ring.active
        first = int(late.argmax())
        if not late[first]:
            position += look
            look = min(2 * look, _MANY_WORDS)
            continue
        position += first
        look = max(256, 2 * first)
        count = ring.shifts_to(int(place[position]), start)
        shifts[words[position] // width] += count
        start += count * ring.step
    return start
