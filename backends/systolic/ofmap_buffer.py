"""SCALE-Sim v3's output buffer: counts of words only, stepped from one drain to the next.

Rules (section 3 of the SCALE-Sim study, re-derived): the buffer holds `total` words in rows of `bandwidth` words and
drains up to `drain_rows` rows at a time once more than `total - active` words are used; a line waits for the running
drain only when the buffer is full. A drain counts the blanks of its last row only, as SCALE-Sim does.
"""

from __future__ import annotations

from collections import deque

from stablecast.backends.systolic.geometry import OfmapStream


class OfmapBuffer:
    """State of the output buffer of one layer. Lines and cycles are SCALE-Sim's, 0-based."""

    __slots__ = (
        "_appended",
        "_bandwidth",
        "_blanks",
        "_closed_rows",
        "_cycle",
        "_drain_rows",
        "_drained_rows",
        "_free",
        "_line",
        "_open",
        "_stream",
        "_threshold",
        "drain_end",
        "first_drain",
        "last_drain",
        "writes",
    )

    def __init__(self, stream: OfmapStream, total: int, bandwidth: int) -> None:
        active = -(-total // 2)
        self._stream = stream
        self._bandwidth = bandwidth
        self._threshold = active
        self._drain_rows = -(-(total - active) // bandwidth)
        self._free = total
        self._appended = 0
        self._open = 0
        self._closed_rows = 0
        self._drained_rows = 0
        self._blanks: deque[tuple[int, int]] = deque()
        self._line = -1
        self._cycle = -1
        self.drain_end = 0
        self.first_drain: int | None = None
        self.last_drain = 0
        self.writes = 0

    def advance(self, stop: int, stall: int) -> tuple[int, int]:
        """Take in the words of the lines before `stop`, each line at cycle `line + stall`.

        Returns (line, wait): the first line that had to wait for a drain and by how many cycles, after which the
        caller calls again with its new stall; (-1, 0) when `stop` was reached without a wait.
        """
        target = self._stream.count_before(stop)
        while self._appended < target:
            if not self._step(target, stall):
                break
            if self._cycle > self._line + stall:
                self._rest_of_line(self._stream.count_before(self._line + 1))
                return self._line, self._cycle - self._line - stall
        return -1, 0

    def _step(self, target: int, stall: int) -> bool:
        """Go to the next drain or full buffer within `target` words; False when there is none."""
        stream, appended, free = self._stream, self._appended, self._free
        trigger = appended + max(1, free - self._threshold + 1)
        free_line = self.drain_end - stall
        if stream.line_of(min(trigger, target)) < free_line:
            before = stream.count_before(free_line)
            full = appended + max(1, free)
            if full <= min(before, target):
                self._append(full - appended)
                self._line = stream.line_of(full)
                self._cycle = self.drain_end
                return True
            trigger = max(trigger, before + 1)
        if trigger > target:
            self._append(target - appended)
            return False
        self._append(trigger - appended)
        self._line = stream.line_of(trigger)
        self._cycle = self._line + stall
        self._drain(self._cycle)
        return True

    def _rest_of_line(self, end: int) -> None:
        """Take in the words of a line that has already waited: all of them at the cycle the wait ended."""
        while self._appended < end:
            if self._cycle < self.drain_end:
                step = max(1, self._free)
                if self._appended + step > end:
                    self._append(end - self._appended)
                    return
                self._append(step)
                self._cycle = self.drain_end
                continue
            step = max(1, self._free - self._threshold + 1)
            if self._appended + step > end:
                self._append(end - self._appended)
                return
            self._append(step)
            self._drain(self._cycle)

    def finish(self, cycle: int) -> None:
        """Drain what is left, in blocks one after the other from `cycle` on."""
        self._close_row()
        while self._drained_rows < self._closed_rows:
            self._drain(cycle)
            cycle = self.drain_end + 1

    def _append(self, words: int) -> None:
        self._appended += words
        self._free -= words
        rows, self._open = divmod(self._open + words, self._bandwidth)
        self._closed_rows += rows

    def _close_row(self) -> None:
        if self._open:
            self._blanks.append((self._closed_rows, self._bandwidth - self._open))
            self._closed_rows += 1
            self._open = 0

    def _drain(self, cycle: int) -> None:
        self._close_row()
        end = min(self._drained_rows + self._drain_rows, self._closed_rows)
        rows = end - self._drained_rows
        words = rows * self._bandwidth
        blanks = self._blanks
        while blanks and blanks[0][0] < end:
            row, empty = blanks.popleft()
            if row == end - 1:
                words -= empty
        self._drained_rows = end
        self._free += words
        self.writes += words
        self.drain_end = cycle + rows - 1
        self.last_drain = max(self.last_drain, self.drain_end)
        if self.first_drain is None:
            self.first_drain = cycle
