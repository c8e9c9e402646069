"""The clock of a SCALE-Sim v3 run: read misses and output drains against the lines of the array."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stablecast.backends.systolic.ofmap_buffer import OfmapBuffer
from stablecast.backends.systolic.ring import ReadClock


@dataclass(frozen=True, slots=True)
class Clocked:
    """Cycles of a run: `total` at the last line, `stalls`, and for each watched line when it was served."""

    total: int
    stalls: int
    ifmap_at: dict[int, int]
    filter_at: dict[int, int]
    ofmap_at: dict[int, int]


def run_clock(
    last_line: int, ofmap: OfmapBuffer, ifmap: ReadClock | None, filters: ReadClock | None, watch: Iterable[int]
) -> Clocked:
    """Run all lines up to `last_line` (0-based). A read clock of None never stalls.

    A line stalls by the latest of its two reads and its writes; what is late moves all later lines.
    """
    stall = 0
    ifmap_at: dict[int, int] = {}
    filter_at: dict[int, int] = {}
    ofmap_at: dict[int, int] = {}
    advance = ofmap.advance
    for limit in sorted({*watch, last_line}):
        # an event that could stall stays a stop until its line is served: later stalls only make it harmless
        next_ifmap = limit if ifmap is None else ifmap.next_late(stall, limit)
        next_filter = limit if filters is None else filters.next_late(stall, limit)
        while True:
            line = min(next_ifmap, next_filter)
            waited, wait = advance(line, stall)
            if waited >= 0:
                stall += wait
                continue
            if line == limit:
                break
            waited, wait = advance(line + 1, stall)
            ready = line + stall + wait + 1
            if line == next_ifmap and ifmap is not None:
                ready = max(ready, ifmap.serve(line, stall))
            if line == next_filter and filters is not None:
                ready = max(ready, filters.serve(line, stall))
            later = ready - line - 1
            if line == next_ifmap and ifmap is not None:
                next_ifmap = ifmap.next_late(later, limit)
            if line == next_filter and filters is not None:
                next_filter = filters.next_late(later, limit)
            stall = later
        ifmap_at[limit] = limit + stall + 1 if ifmap is None else ifmap.serve(limit, stall)
        filter_at[limit] = limit + stall + 1 if filters is None else filters.serve(limit, stall)
        waited, wait = advance(limit + 1, stall)
        ofmap_at[limit] = limit + stall + wait
        stall = max(ifmap_at[limit], filter_at[limit], ofmap_at[limit] + 1) - limit - 1
    total = ofmap_at[last_line]
    for clock in (ifmap, filters):
        if clock is not None:
            clock.drain()
    ofmap.finish(total)
    return Clocked(total, stall, ifmap_at, filter_at, ofmap_at)
