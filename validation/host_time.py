"""Whose time the host's is: nested and concurrent operators as one sequence without overlaps."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stablecast.ir.trace_events import Category, TraceEvents
from stablecast.validation.launches import IntArray

FloatArray = npt.NDArray[np.float64]
BLOCKING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "hipDeviceSynchronize",
    "hipStreamSynchronize",
    "hipEventSynchronize",
    "hipMemcpy",
    "hipMemcpyWithStream",
)
"""Calls of the runtime that return when the device has done its work."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds of each operator that are its own, and seconds before it in which no operator ran."""

    own_s: FloatArray
    gap_s: FloatArray


def blocking_calls(events: TraceEvents) -> IntArray:
    """The calls of the runtime that wait for the device, in order."""
    names = np.array([name in BLOCKING for name in events.names], dtype=np.bool_)
    return np.nonzero(events.is_a(Category.RUNTIME) & names[events.name])[0]


def host_time(start_s: FloatArray, end_s: FloatArray, waits: Sequence[tuple[float, float]]) -> HostTime:
    """The host's time by operator.

    An instant belongs to the operator that began last among those that run, over all threads: a caller does not keep
    the time of what it calls, nor a thread that waits that of the one it waits for. `start_s` ascends; `waits` are
    intervals in which the host waits for the device, which belong to nobody.
    """
    count = len(start_s)
    begins = [*zip(start_s.tolist(), end_s.tolist(), range(count), strict=True)]
    begins += [(low, high, -1) for low, high in waits]
    begins.sort(key=lambda entry: entry[0])
    own, gap = np.zeros(count), np.zeros(count)
    running: list[tuple[float, int, float, int]] = []
    free = 0.0
    clock = begins[0][0] if begins else 0.0
    for order, (low, high, index) in enumerate(begins):
        clock, idle = _advance(running, clock, low, own)
        free += idle
        if index >= 0:
            gap[index], free = free, 0.0
        heapq.heappush(running, (-low, -order, high, index))
    _advance(running, clock, float("inf"), own)
    return HostTime(own, gap)


def _advance(
    running: list[tuple[float, int, float, int]], clock: float, until: float, own: FloatArray
) -> tuple[float, float]:
    """Give the time from `clock` to `until` to those who run; the new clock, and seconds in which none did."""
    while running:
        _, _, end, index = running[0]
        if end <= clock:
            heapq.heappop(running)
            continue
        upto = min(end, until)
        if index >= 0:
            own[index] += upto - clock
        clock = upto
        if end > until:
            return until, 0.0
        heapq.heappop(running)
    return until, max(until - clock, 0.0)
