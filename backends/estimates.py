"""The contract between backends and everything that uses their numbers."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from stablecast.backends.device import Device
from stablecast.ir.kernels import KernelTable

CONTRACT = 1
"""Version of the backend contract; a backend that needs a newer one says so in `contract`."""

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
TextArray = npt.NDArray[np.str_]


class Source(StrEnum):
    """Where a time comes from."""

    MEASURED = "measured"
    LEARNED = "learned"
    SIMULATED = "simulated"
    COMPILER = "compiler"
    ANALYTICAL = "analytical"
    BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Estimates:
    """Times of one run of each kernel of a table, seconds, launch included.

    `low_s <= time_s <= high_s`. `source`: a `Source` each. `bound`: what limits it: `compute`, `memory`, `launch` or
    `unknown`.
    """

    time_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray
    source: TextArray
    bound: TextArray

    def __len__(self) -> int:
        return len(self.time_s)


@runtime_checkable
class Backend(Protocol):
    """Prices kernels. Third parties register one as an entry point of the group `stablecast.backends`."""

    @property
    def name(self) -> str: ...

    def covers(self, kernels: KernelTable, device: Device) -> BoolArray:
        """Which rows it can price on `device`."""
        ...

    def estimate(self, kernels: KernelTable, device: Device) -> Estimates:
        """Times of all rows, each of which `covers` said True for."""
        ...

    def assumptions(self, device: Device) -> tuple[str, ...]:
        """What its numbers take for granted, one sentence each."""
        ...
