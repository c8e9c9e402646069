"""The compiler's own cycle estimates, where a compiled program carries them, as times."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, Estimates, Source
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelTable

LOW: Final = 0.5
HIGH: Final = 2.0


@dataclass(frozen=True, slots=True)
class CompilerBackend:
    """Prices kernels by `estimated_cycles` over the device's clock.

    TPU compilers write their estimate into the backend configuration of each windowed fusion; nobody has laid these
    beside measurements here, so the range is a factor of two both ways. Other kernels are not covered.
    """

    name: str = "compiler"

    def covers(self, kernels: KernelTable, device: Device) -> BoolArray:
        """Rows for which the compiler said how many cycles they take."""
        return np.asarray(kernels.estimated_cycles > 0) & (device.clock_hz is not None)

    def estimate(self, kernels: KernelTable, device: Device) -> Estimates:
        """Cycles over clock. Raises `InputError` for a device without a clock."""
        if device.clock_hz is None:
            raise InputError(f"{device.name} has no clock to turn the compiler's cycles into time")
        time = np.asarray(kernels.estimated_cycles, dtype=np.float64) / device.clock_hz.value
        source = np.full(len(time), str(Source.COMPILER))
        return Estimates(time, time * LOW, time * HIGH, source, np.full(len(time), "unknown"))

    def assumptions(self, device: Device) -> tuple[str, ...]:
        """What its numbers take for granted, one sentence each."""
        return ("cycles as the compiler estimates them, at the device's clock; not checked against measurements",)
