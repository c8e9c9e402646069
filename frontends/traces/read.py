"""One door for every format: what a file is, and its events."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from stablecast.frontends.traces import chakra, chrome, nsys, pytorch_et, table, xplane
from stablecast.frontends.traces.stream import head
from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import TraceEvents


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format: its name for people, how the first bytes show it, and its reader."""

    name: str
    matches: Callable[[bytes], bool]
    read: Callable[[Path], TraceEvents]


def _read_et(path: Path) -> TraceEvents:
    return pytorch_et.et_events(pytorch_et.read_et(path))


FORMATS: Final[Mapping[str, TraceFormat]] = {
    "nsys-sqlite": TraceFormat(
        "Nsight Systems SQLite", lambda data: data.startswith(nsys.SQLITE_MAGIC), nsys.read_nsys_sqlite
    ),
    "pytorch-et": TraceFormat("PyTorch execution trace", pytorch_et.looks_like, _read_et),
    "chakra": TraceFormat("Chakra execution trace", chakra.looks_like, chakra.read_chakra),
    "chrome": TraceFormat("Chrome trace (Kineto, JAX profiler)", chrome.looks_like, chrome.read_chrome),
    "xplane": TraceFormat("JAX profiler xplane.pb", xplane.looks_like, xplane.read_xplane),
    "nsys-csv": TraceFormat("Nsight Systems cuda_gpu_trace CSV", nsys.looks_like_csv, nsys.read_nsys_csv),
    "csv": TraceFormat("plain CSV", table.looks_like, table.read_csv),
}
"""Every format that is read, in the order in which a file is tried."""


def detect(path: Path) -> str:
    """The key of `FORMATS` that the content of `path` shows. Raises `InputError` where it shows none."""
    data = head(path)
    for key, form in FORMATS.items():
        if form.matches(data):
            return key
    known = ", ".join(form.name for form in FORMATS.values())
    raise InputError(f"{path} is no trace that is known", f"known: {known}")


def read_trace(path: str | Path) -> TraceEvents:
    """The events of one file, gzip or not. Raises `InputError` where it is no trace or nothing could be read."""
    file = Path(path)
    return FORMATS[detect(file)].read(file)


def read_ranks(paths: Iterable[str | Path]) -> tuple[TraceEvents, ...]:
    """The traces of several ranks in the order of their ranks. Raises `InputError` where two have the same rank."""
    traces = sorted((read_trace(path) for path in paths), key=lambda trace: trace.rank)
    for before, after in pairwise(traces):
        if before.rank == after.rank:
            raise InputError(f"{before.source} and {after.source} are both of rank {before.rank}")
    return tuple(traces)
