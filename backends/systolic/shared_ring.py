"""Ring events of a convolution's input, where several windows share a word: a demand hits if any copy is held."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stablecast.backends.systolic.geometry import FoldGrid, IntArray
from stablecast.backends.systolic.operands import AddressArray, AddressRows, OperandOrder
from stablecast.backends.systolic.ring import EventChunk, Ring, merge_lines

_CHUNK_WORDS = 1 << 20
_KEPT_WORDS = 24 << 20
_LOOK_WORDS = 1 << 17
_RENUMBER_AT = 1_000_000_000


class _PrefetchOrder:
    """The prefetch order without blanks, by position; parts are rebuilt when they do not all fit."""

    def __init__(self, source: AddressRows) -> None:
        self._source = source
        self._rows = max(1, _CHUNK_WORDS // source.width)
        self._total = source.rows
        self._parts: dict[int, AddressArray] = {}
        self._kept = 0
        self._ends: list[int] = []

    def _part(self, index: int) -> AddressArray:
        part = self._parts.get(index)
        if part is None:
            first = index * self._rows
            flat = self._source.chunk(first, min(first + self._rows, self._total)).reshape(-1)
            part = flat[flat >= 0]
            if self._kept + len(part) > _KEPT_WORDS:
                self._parts.clear()
                self._kept = 0
            self._parts[index] = part
            self._kept += len(part)
        return part

    def words(self, first: int, stop: int) -> AddressArray:
        """Addresses at positions `first` to `stop`; fewer at the end of the order."""
        parts: list[AddressArray] = []
        index = int(np.searchsorted(self._ends, first, side="right")) if self._ends else 0
        begin = self._ends[index - 1] if index else 0
        while begin < stop and index * self._rows < self._total:
            part = self._part(index)
            end = begin + len(part)
            if index == len(self._ends):
                self._ends.append(end)
            if end > first:
                parts.append(part[max(0, first - begin) : stop - begin])
            begin, index = end, index + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


class _SharedWindow:
    """Which addresses the window holds, by the newest ring line that brought each."""

    def __init__(self, order: OperandOrder, ring: Ring) -> None:
        self._order = _PrefetchOrder(order.prefetch)
        self._ring = ring
        self._newest = np.full(order.size + 1, -1, np.int32)
        self._newest[-1] = np.iinfo(np.int32).max
        self._start = 0
        self._end = 0
        self._load()

    @property
    def place(self) -> int:
        """Where the window stands on the ring; it settles what is held."""
        return self._start % self._ring.lines

    def move_to(self, place: int) -> None:
        """Put the window at `place` of the ring."""
        self._start = self._end + (place - self._end) % self._ring.lines
        self._end = self._start
        self._load()

    def _load(self) -> None:
        """Mark the ring lines from the last one marked to the end of the window."""
        ring = self._ring
        line, stop = max(self._end, self._start), self._start + ring.active
        self._end = stop
        while line < stop:
            lap, place = divmod(line, ring.lines)
            count = min(stop - line, ring.lines - place)
            words = self._order.words(place * ring.per_line, (place + count) * ring.per_line)
            if count == 1:
                self._newest[words] = line
            else:
                lines = np.repeat(np.arange(line, line + count, dtype=np.int32), ring.per_line)
                self._newest[words] = lines[: len(words)]
            line += count
            if lap > _RENUMBER_AT // ring.lines:
                self._restart()
                return

    def _restart(self) -> None:
        """Number the ring lines from the start again before they pass 32 bits."""
        place = self.place
        self._newest[:-1] = -1
        self._start = self._end = place
        self._load()

    def misses(self, flat: AddressArray) -> tuple[list[int], list[int]]:
        """Indices into `flat` that miss, and the shifts until each is held; the window moves along."""
        at: list[int] = []
        shifts: list[int] = []
        position, look, size = 0, 4096, len(flat)
        while position < size:
            missing = self._newest[flat[position : position + look]] < self._start
            first = int(missing.argmax())
            if not missing[first]:
                position += look
                look = min(2 * look, _CHUNK_WORDS)
                continue
            position += first
            look = max(1024, 2 * first)
            at.append(position)
            shifts.append(self._shift_to(int(flat[position])))
        return at, shifts

    def _shift_to(self, address: int) -> int:
        """Shifts until `address`, which the window lacks, is held; what the window passes over is never marked."""
        ring = self._ring
        beyond = self._next_line(address) + 1 - (self._start + ring.active)
        count = -(-beyond // ring.step)
        self._start += count * ring.step
        self._load()
        return count

    def _next_line(self, address: int) -> int:
        """The first ring line from the end of the window on that brings `address`."""
        ring = self._ring
        line, look = self._end, max(1, ring.step)
        while True:
            place = line % ring.lines
            count = min(look, ring.lines - place)
            words = self._order.words(place * ring.per_line, (place + count) * ring.per_line)
            same = words == address
            first = int(same.argmax()) if len(words) else 0
            if len(words) and same[first]:
                return line + first // ring.per_line
            line += count
            look = min(2 * look, max(1, _LOOK_WORDS // ring.per_line))


def shared_events(grid: FoldGrid, order: OperandOrder, ring: Ring) -> Iterator[EventChunk]:
    """Events of a convolution's input under USER bandwidth."""
    if ring.fits:
        return
    window = _SharedWindow(order, ring)
    cache: dict[tuple[int, int], tuple[IntArray, IntArray, int]] = {}
    cached = 0
    place = 0
    for fold in range(grid.folds):
        block = order.block_of(fold, grid.row_folds)
        known = cache.get((block, place))
        if known is None:
            if window.place != place:
                window.move_to(place)
            lines, counts = _fold_misses(order.demand[block], window)
            known = lines + order.offset[block], counts, window.place
            cached += len(lines) + 8
            if cached > 1 << 21:
                cache.clear()
                cached = 0
            cache[block, place] = known
        lines, counts, place = known
        if len(lines):
            yield merge_lines(lines + fold * grid.lines, counts)


def _fold_misses(source: AddressRows, window: _SharedWindow) -> tuple[IntArray, IntArray]:
    lines: list[IntArray] = []
    counts: list[IntArray] = []
    rows = max(1, _CHUNK_WORDS // source.width)
    for first in range(0, source.rows, rows):
        flat = source.chunk(first, min(first + rows, source.rows)).reshape(-1)
        at, shifts = window.misses(flat)
        lines.append(np.array(at, np.int64) // source.width + first)
        counts.append(np.array(shifts, np.int64))
    return np.concatenate(lines), np.concatenate(counts)
