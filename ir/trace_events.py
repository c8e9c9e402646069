"""Measured runs as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """Intervals on the streams of one rank, by column.

    `start_s`, `duration_s`: seconds from the start of the trace. `name`: index into `names`. `stream`: device
    stream or host thread. `on_device`: False for host events. `args`: event index -> what the profiler attached
    (shapes, bytes, correlation id).
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

    def __len__(self) -> int:
        return len(self.start_s)
