"""Measured traces from files: profilers' own formats to `TraceEvents`.

    events = read_trace("worker0.pt.trace.json.gz")

What a file is is told from its content. A damaged file gives what could be read before the damage, and
`TraceEvents.damage` says where it broke; only a file from which nothing at all was read raises `InputError`.
"""

from stablecast.frontends.traces.read import FORMATS, TraceFormat, detect, read_ranks, read_trace

__all__ = ["FORMATS", "TraceFormat", "detect", "read_ranks", "read_trace"]
