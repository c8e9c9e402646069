"""SCALE-Sim v3's read buffers with a given bandwidth (USER): a window that slides over a ring of prefetched lines.

The buffer holds `active` lines of the ring; a demand outside them shifts the window by `step` lines until it is
inside. Which line shifts how often depends on the order of the demands only, never on time, so it is found first
(`RingEvents`) and the clock runs over those events afterwards (`ReadClock`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stablecast.backends.systolic.calc_reads import DramStream
from stablecast.backends.systolic.geometry import FoldGrid, IntArray, trapezoid_array

_CHUNK_EVENTS = 1 << 18
_CACHED_EVENTS = 1 << 21
_ALWAYS_LATE = np.int64(1 << 62)
_NEVER_LATE = np.int64(-1)


@dataclass(frozen=True, slots=True)
class Ring:
    """Sizes of one read buffer of `total` words fed at `bandwidth` words per cycle.

    `per_line` words make a ring line, `lines` lines the ring, of which `active` are held and `step` replaced per
    prefetch; `prefetch_rows` and `first_rows` are the cycles of a prefetch and of the first fill.
    """

    per_line: int
    lines: int
    active: int
    step: int
    prefetch_rows: int
    first_rows: int
    bandwidth: int

    @classmethod
    def of(cls, total: int, bandwidth: int, valid: int, elements: int, per_line: int | None = None) -> Ring:
        """Ring over `valid` addresses among `elements` (with blanks) of the prefetch order."""
        active = -(-total // 2)
        rest = total - active
        per_line = per_line or -(-total // 100)
        lines = valid // per_line + 1
        held = min(-(-active // per_line), lines)
        step = min(-(-rest // per_line), lines - held)
        first = min(-(-active // bandwidth), -(-elements // bandwidth))
        return cls(per_line, lines, held, step, -(-rest // bandwidth), first, bandwidth)

    @property
    def fits(self) -> bool:
        """True when the whole operand stays in the buffer."""
        return self.active >= self.lines

    def shifts_to(self, line: int, start: int) -> int:
        """Window shifts until ring line `line` is inside a window that starts at `start`."""
        distance = (line - start) % self.lines
        return 0 if distance < self.active else (distance - self.active) // self.step + 1


class EventChunk(NamedTuple):
    """Lines (0-based cycles without stalls, rising), the shifts each needs, and cycles lost to bank conflicts.

    `conflicts` is None without a layout. With one, SCALE-Sim adds a prefetch's lateness once instead of twice.
    """

    lines: IntArray
    shifts: IntArray
    conflicts: IntArray | None = None


def no_events() -> Iterator[EventChunk]:
    """Events of an operand that fits."""
    return iter(())


class _Collector:
    """Gathers events fold by fold and hands them out in chunks."""

    def __init__(self) -> None:
        self._lines: list[IntArray] = []
        self._shifts: list[IntArray] = []
        self._size = 0

    def add(self, lines: IntArray, shifts: IntArray) -> None:
        self._lines.append(lines)
        self._shifts.append(shifts)
        self._size += len(lines)

    @property
    def full(self) -> bool:
        return self._size >= _CHUNK_EVENTS

    def take(self) -> EventChunk:
        lines, shifts = np.concatenate(self._lines), np.concatenate(self._shifts)
        self._lines, self._shifts, self._size = [], [], 0
        return merge_lines(lines, shifts)

    def __bool__(self) -> bool:
        return self._size > 0


def merge_lines(lines: IntArray, shifts: IntArray) -> EventChunk:
    """Events of one line added up (lines must not fall)."""
    if len(lines) < 2:
        return EventChunk(lines, shifts)
    first = np.flatnonzero(np.concatenate(([True], lines[1:] != lines[:-1])))
    if len(first) == len(lines):
        return EventChunk(lines, shifts)
    return EventChunk(lines[first], np.add.reduceat(shifts, first))


@dataclass(frozen=True, slots=True)
class StreamedBlocks:
    """A skewed operand: `blocks` blocks of T rows by `width` columns, the last one `last_width` wide.

    The prefetch order stacks the blocks and reads the anti-diagonals of the stack; a fold demands the
    anti-diagonals of one block.
    """

    t: int
    width: int
    blocks: int
    last_width: int

    @property
    def valid(self) -> int:
        """Words without the blanks of the last block."""
        return self.t * (self.width * (self.blocks - 1) + self.last_width)

    def inner(self, block: int) -> bool:
        """True for a block whose positions are those of any other inner block, moved by T x `width` words a block."""
        return block * self.t >= self.width - 1 and (self.blocks - 2 - block) * self.t >= self.width - 1

    def inner_positions(self) -> tuple[IntArray, IntArray]:
        """Positions within an inner block, counted from where block 0 would start."""
        line = np.arange(self.t + self.width - 1)
        before = line * self.width - self.width * (self.width - 1) // 2
        return before + np.maximum(0, line - self.t + 1), before + np.minimum(line, self.width - 1)

    def positions(self, block: int) -> tuple[IntArray, IntArray]:
        """Prefetch positions of the first and last word of each line of a fold of `block`."""
        width = self.last_width if block == self.blocks - 1 else self.width
        line = np.arange(self.t + width - 1)
        high = np.minimum(line, width - 1)
        low = np.maximum(0, line - self.t + 1)
        diagonal = line + block * self.t
        rows = self.blocks * self.t
        before = trapezoid_array(diagonal, rows, self.width) - np.maximum(0, diagonal - rows + 1)
        blank = self.width - self.last_width
        if blank:
            top = diagonal - rows + self.t
            before -= trapezoid_array(top - self.last_width, self.t, blank)
            if block < self.blocks - 1:
                floor = np.maximum(self.last_width, top - self.t + 1)
                low_blanks = np.maximum(0, np.minimum(np.minimum(top, self.width - 1), low - 1) - floor + 1)
                high_blanks = np.maximum(0, np.minimum(np.minimum(top, self.width - 1), high - 1) - floor + 1)
                return before + low - low_blanks, before + high - high_blanks
        return before + low, before + high


def streamed_events(
    grid: FoldGrid, blocks: StreamedBlocks, ring: Ring, offset: int, per_column: bool
) -> Iterator[EventChunk]:
    """Events of a streamed operand whose words have one address each.

    `per_column`: the block is chosen by the column fold (os filter), else by the row fold. `offset` is the line of
    a fold at which the stream starts.
    """
    if ring.fits:
        return
    inner = blocks.inner_positions()
    spans_block, spans = -1, inner
    cache: dict[tuple[int, int], tuple[IntArray, IntArray, int]] = {}
    cached = 0
    start = 0
    out = _Collector()
    for fold in range(grid.folds):
        block = fold // grid.row_folds if per_column else fold % grid.row_folds
        known = cache.get((block, start))
        if known is None:
            if blocks.inner(block):
                lines, shifts, _ = _fold_events(inner, ring, start, block * blocks.t * blocks.width)
            else:
                if spans_block != block:
                    spans_block, spans = block, blocks.positions(block)
                lines, shifts, _ = _fold_events(spans, ring, start, 0)
            known = lines + offset, shifts, (start + int(shifts.sum()) * ring.step) % ring.lines
            cached += len(lines) + 8
            if cached > _CACHED_EVENTS:
                cache.clear()
                cached = 0
            cache[block, start] = known
        lines, shifts, start = known
        if len(lines):
            out.add(lines + fold * grid.lines, shifts)
            if out.full:
                yield out.take()
    if out:
        yield out.take()


def _fold_events(spans: tuple[IntArray, IntArray], ring: Ring, start: int, moved: int) -> EventChunk:
    """Missing lines of one fold whose demanded positions, `spans` plus `moved`, rise from line to line."""
    first, last = spans
    per_line, step = ring.per_line, ring.step
    current = (int(first[0]) + moved) // per_line
    end = (int(last[-1]) + moved) // per_line
    lines: list[int] = []
    shifts: list[int] = []
    opening = ring.shifts_to(current, start)
    if opening:
        lines.append(0)
        shifts.append(opening)
        start += opening * step
    while (border := current + ring.active - (current - start) % ring.lines) <= end:
        borders = np.arange(border, end + 1, step)
        at = np.searchsorted(last, borders * per_line - moved)
        met = np.maximum(borders * per_line, first[at] + moved) // per_line
        wrong = np.flatnonzero(met != borders)
        good = int(wrong[0]) if len(wrong) else len(borders)
        lines.extend(at[:good].tolist())
        shifts.extend([1] * good)
        start += good * step
        if good == len(borders):
            break
        # no demanded word falls on this border's line: go on from the first word behind it
        current = int(met[good])
        count = ring.shifts_to(current, start)
        if count:
            lines.append(int(at[good]))
            shifts.append(count)
            start += count * step
    return EventChunk(np.array(lines, np.int64), np.array(shifts, np.int64))


def stationary_events(grid: FoldGrid, ring: Ring) -> Iterator[EventChunk]:
    """Events of a stationary operand: prefetched row by row, loaded bottom row first."""
    if ring.fits:
        return
    start = 0
    out = _Collector()
    per_line = ring.per_line
    for fold in range(grid.folds):
        column, row_fold = divmod(fold, grid.row_folds)
        height, width = grid.fold_rows(row_fold), grid.fold_cols(column)
        base = column * grid.sr * grid.cols + row_fold * grid.rows * width
        low, high = base // per_line, (base + height * width - 1) // per_line
        near, far = (low - start) % ring.lines, (high - start) % ring.lines
        if near <= far < ring.active and high - low < ring.lines:
            continue
        lines: list[int] = []
        shifts: list[int] = []
        for at, ring_line in _stationary_walk(base, height, width, per_line):
            count = ring.shifts_to(ring_line, start)
            if count:
                lines.append(at)
                shifts.append(count)
                start = (start + count * ring.step) % ring.lines
        if lines:
            offset = fold * grid.lines + grid.rows - height
            out.add(np.array(lines, np.int64) + offset, np.array(shifts, np.int64))
            if out.full:
                yield out.take()
    if out:
        yield out.take()


def _stationary_walk(base: int, height: int, width: int, per_line: int) -> list[tuple[int, int]]:
    """(demand line, ring line) in order, runs of the same ring line once."""
    begin = base + np.arange(height - 1, -1, -1) * width
    first, last = begin // per_line, (begin + width - 1) // per_line
    spans = last - first + 1
    at = np.repeat(np.arange(height), spans)
    within = np.arange(len(at)) - np.repeat(np.cumsum(spans) - spans, spans)
    ring_line = np.repeat(first, spans) + within
    keep = np.concatenate(([True], ring_line[1:] != ring_line[:-1]))
    return list(zip(at[keep].tolist(), ring_line[keep].tolist(), strict=True))


class ReadClock:
    """Times the events of one read operand. `last` is the cycle the latest prefetch ends."""

    def __init__(self, ring: Ring, chunks: Iterator[EventChunk]) -> None:
        self.ring = ring
        self.shifts = 0
        self._chunks = chunks
        self._gap = ring.prefetch_rows + 1
        self._index = 0
        self._lines: list[int] = []
        self._counts: list[int] = []
        self._before: list[int] = []
        self._conflicts: list[int] | None = None
        self._slack: list[int] = []
        self._slack_array: IntArray = np.zeros(0, np.int64)
        self._refill()

    def _refill(self) -> bool:
        chunk = next(self._chunks, None)
        self._index = 0
        if chunk is None:
            self._lines = []
            return False
        lines, counts, conflicts = chunk
        total = np.cumsum(counts)
        self._lines, self._counts = lines.tolist(), counts.tolist()
        self._before = (self.shifts + total - counts).tolist()
        self.shifts += int(total[-1])
        latest = -1 + self._gap * (self.shifts - int(total[-1]) + total)
        if conflicts is None:
            self._conflicts = None
            self._slack_array = np.where(counts > 1, latest + self._gap, latest) - lines - 1
        else:
            self._conflicts = conflicts.tolist()
            waits = np.where(counts > 0, latest - lines - 1, _NEVER_LATE)
            self._slack_array = np.where(conflicts > 0, _ALWAYS_LATE, waits)
        self._slack = self._slack_array.tolist()
        return True

    def next_late(self, stall: int, limit: int) -> int:
        """Line below `limit` of the next event that could stall given `stall` cycles so far; `limit` if none."""
        while True:
            index, lines = self._index, self._lines
            if index >= len(lines):
                if not self._refill():
                    return limit
                continue
            if lines[index] >= limit:
                return limit
            if self._slack[index] > stall:
                return lines[index]
            end = bisect_left(lines, limit, index)
            late = self._slack_array[index:end] > stall
            step = int(late.argmax())
            if late[step]:
                self._index = index + step
                return lines[self._index]
            self._index = end
            if end < len(lines):
                return limit

    def serve(self, line: int, stall: int) -> int:
        """Cycle at which the words of `line` are there (line + stall + 1: a hit). Lines rise from call to call."""
        x = line + stall + 1
        while not self._lines or self._lines[-1] < line:
            if not self._refill():
                return x
        index = bisect_left(self._lines, line, self._index)
        if self._lines[index] != line:
            return x
        self._index = index + 1
        if self._conflicts is not None:
            count = self._counts[index]
            ready = max(x, -1 + self._gap * (self._before[index] + count)) if count else x
            return ready + self._conflicts[index]
        return late_time(x, -1 + self._gap * self._before[index], self._gap, self._counts[index])

    def dram(self) -> DramStream:
        """Prefetch traffic; valid after `drain`."""
        ring = self.ring
        words = (ring.first_rows + ring.prefetch_rows * self.shifts) * ring.bandwidth
        return DramStream(-ring.first_rows, max(-1, -1 + self._gap * self.shifts), words)

    def drain(self) -> None:
        """Read the events that are left, so that `shifts` is final."""
        while self._refill():
            pass


def late_time(x: int, last: int, gap: int, count: int) -> int:
    """`x` after `count` prefetches of `gap` cycles that follow one ending at `last`.

    Each prefetch sets x to its end when that has passed, else to as far behind its end as x was before it.
    """
    ahead = x - last
    if count and ahead < 0:
        ahead, last, count = gap - ahead, last + gap, count - 1
    if count and ahead >= gap:
        ahead, last, count = 0, last + gap, count - 1
    return last + gap * count + (gap - ahead if count & 1 else ahead)
