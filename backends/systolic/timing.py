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
    watched = sorted({*watch, last_line})
    position = 0
    while position < len(watched):
        line = limit = watched[position]
        if ifmap is not None:
            line = ifmap.next_late(stall, line)
        if filters is not None:
            line = filters.next_late(stall, line)
        waited, wait = ofmap.advance(line, stall)
        if waited >= 0:
            stall += wait
            continue
        cycle = line + stall
        ready_ifmap = ifmap.serve(line, stall) if ifmap is not None else cycle + 1
        ready_filter = filters.serve(line, stall) if filters is not None else cycle + 1
        waited, wait = ofmap.advance(line + 1, stall)
        written = cycle + wait
        if line == limit:
            ifmap_at[line], filter_at[line], ofmap_at[line] = ready_ifmap, ready_filter, written
            position += 1
        stall = max(ready_ifmap, ready_filter, written + 1) - line - 1
    total = ofmap_at[last_line]
    for clock in (ifmap, filters):
        if clock is not None:
            clock.drain()
    ofmap.finish(total)
    return Clocked(total, stall, ifmap_at, filter_at, ofmap_at)
