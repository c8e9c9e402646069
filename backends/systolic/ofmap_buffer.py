"""SCALE-Sim v3's output buffer: counts of words only, stepped from one drain to the next.

Rules (section 3 of the SCALE-Sim study, re-derived): the buffer holds `total` words in rows of `bandwidth` words and
drains up to `drain_rows` rows at a time once more than `total - active` words are used; a line waits for the running
drain only when the buffer is full. A drain counts the blanks of its last row only, as SCALE-Sim does.
"""

from __future__ import annotations

from collections import deque

from stablecast.backends.systolic.geometry import OfmapStream


class OfmapBuffer:
    """State of the output buffer of one layer. Lines and cycles are SCALE-Sim's, 0-based.

    Words are taken in lazily: the state stands at the last drain or wait, and `_trigger_line`, the line of the word
    that could start the next drain, bounds the next event from below. Lines before `_seen` are settled: a later stall
    does not change when their words came. With `keep_log`, `log` lists each drain as (first cycle, rows) and `partial`
    the words of rows that were closed before they were full.
    """

    __slots__ = (
        "_appended",
        "_bandwidth",
        "_blanks",
        "_closed_rows",
        "_drain_rows",
        "_drained_rows",
        "_free",
        "_full_line",
        "_open",
        "_seen",
        "_stream",
        "_threshold",
        "_trigger_line",
        "drain_end",
        "first_drain",
        "last_drain",
        "log",
        "partial",
        "writes",
    )

    def __init__(self, stream: OfmapStream, total: int, bandwidth: int, *, keep_log: bool = False) -> None:
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
        self._seen = 0
        self._blanks: deque[tuple[int, int]] = deque()
        self.drain_end = 0
        self.first_drain: int | None = None
        self.last_drain = 0
        self.writes = 0
        self.log: list[tuple[int, int]] | None = [] if keep_log else None
        self.partial: dict[int, int] = {}
        self._look_ahead()

    def _look_ahead(self) -> None:
        self._trigger_line = self._stream.line_of(self._appended + max(1, self._free - self._threshold + 1))
        self._full_line = -1

    def advance(self, stop: int, stall: int) -> tuple[int, int]:
        """Take in the words of the lines before `stop`, each line at cycle `line + stall`.

        Returns (line, wait): the first line that had to wait for a drain and by how many cycles, after which the
        caller calls again with its new stall; (-1, 0) when `stop` was reached without a wait.
        """
        while self._trigger_line < stop:
            line = self._trigger_line
            free_line = max(self.drain_end - stall, self._seen)
            word = self._appended + max(1, self._free - self._threshold + 1)
            if line < free_line:
                if self._full_line < 0:
                    self._full_line = self._stream.line_of(self._appended + max(1, self._free))
                if self._full_line < free_line:
                    if self._full_line >= stop:
                        break
                    return self._wait(stall)
                word = max(word, self._stream.count_before(free_line) + 1)
                line = self._stream.line_of(word)
                if line >= stop:
                    break
            self._append(word - self._appended)
            self._drain(line + stall)
            self._look_ahead()
        self._seen = stop
        return -1, 0

    def _wait(self, stall: int) -> tuple[int, int]:
        """The buffer is full at `_full_line`: that line goes on when the drain ends, and may drain and wait again."""
        line = self._full_line
        end = self._stream.count_before(line + 1)
        self._append(max(1, self._free))
        cycle = self.drain_end
        while self._appended < end:
            step = max(1, self._free if cycle < self.drain_end else self._free - self._threshold + 1)
            if self._appended + step > end:
                break
            self._append(step)
            if cycle < self.drain_end:
                cycle = self.drain_end
            else:
                self._drain(cycle)
        # what is left of the line is taken in at the time it was served, so that nothing of it happens later
        self._append(end - self._appended)
        self._look_ahead()
        return line, cycle - line - stall

    def finish(self, cycle: int) -> None:
        """Take in the rest and drain it, in blocks one after the other from `cycle` on."""
        self._append(self._stream.total - self._appended)
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
            if self.log is not None:
                self.partial[self._closed_rows] = self._open
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
        if self.log is not None:
            self.log.append((cycle, rows))
