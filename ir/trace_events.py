"""Measured runs as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class Category(StrEnum):
    """What an event is, whichever profiler wrote it.

    On the device: `kernel`, `memcpy` and `memset` are work; `sync` waits; `module` (a compiled program's whole run),
    `step`, `annotation` and `derived` (a second view of the same work) only mark time; `async` is a transfer between
    its start and its end. On the host: `op` (an operator of the framework), `runtime` (a call of the device's runtime),
    `annotation`, `python`.
    """

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    SYNC = "sync"
    MODULE = "module"
    STEP = "step"
    ANNOTATION = "annotation"
    DERIVED = "derived"
    ASYNC = "async"
    OP = "op"
    RUNTIME = "runtime"
    PYTHON = "python"
    OTHER = "other"


DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
"""Categories that keep a device busy."""


def _no_ints() -> IntArray:
    return np.zeros(0, dtype=np.int64)


def _no_floats() -> FloatArray:
    return np.zeros(0)


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """Intervals on the streams of one rank, by column, in order of their start.

    `start_s`, `duration_s`: seconds from the start of the trace. `name`: index into `names`. `stream`: device
    stream or host thread. `on_device`: False for host events. `args`: event index -> what the profiler attached
    (shapes, bytes, correlation id).

    `category`: index into `categories`, which hold `Category` values. `correlation`: number that a launch on the host
    and its kernel share, -1 without one. `device_index`: which device, -1 on the host. `nbytes`: bytes that it moved,
    0 where not said. `stream_names`: stream -> name. `epoch_s`: time of the trace's zero on the profiler's own clock.
    `damage`: empty, or where the file broke and what was read before. `skipped`: records that could not be read.
    `metadata`: facts about the run (devices, world size, process groups, framework).
    """

    start_s: FloatArray
    duration_s: FloatArray
    name: IntArray
    stream: IntArray
    on_device: npt.NDArray[np.bool_]
    names: tuple[str, ...]
    rank: int = 0
    device: str = ""
    source: str = ""
    args: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    category: IntArray = field(default_factory=_no_ints)
    categories: tuple[str, ...] = ()
    correlation: IntArray = field(default_factory=_no_ints)
    device_index: IntArray = field(default_factory=_no_ints)
    nbytes: FloatArray = field(default_factory=_no_floats)
    stream_names: Mapping[int, str] = field(default_factory=dict[int, str])
    epoch_s: float = 0.0
    damage: str = ""
    skipped: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def end_s(self) -> FloatArray:
        """Where each event ends, seconds."""
        return self.start_s + self.duration_s

    def is_a(self, *wanted: str) -> npt.NDArray[np.bool_]:
        """Mask of the events whose category is one of `wanted`."""
        chosen = np.array([name in wanted for name in self.categories], dtype=np.bool_)
        return chosen[self.category]

    def name_of(self, index: int) -> str:
        """The name of event `index`."""
        return self.names[int(self.name[index])]

    def args_of(self, index: int) -> Mapping[str, Any]:
        """What the profiler attached to event `index`."""
        return self.args.get(index, NO_ARGS)
