"""A third party's backend for stablecast: the plain roofline, for products and elementwise kernels."""

from dataclasses import dataclass

import numpy as np

from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, Estimates, FloatArray, Source
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelClass, KernelTable

LAUNCH_S = 5e-6


@dataclass(frozen=True)
class RooflineOnly:
    """Launch cost plus the larger of work over peak and bytes over memory rate."""

    name: str = "roofline_only"
    contract: int = 1

    def covers(self, kernels: KernelTable, device: Device) -> BoolArray:
        """Products and elementwise kernels whose math mode the device has."""
        own = (kernels.klass == KernelClass.MATMUL) | (kernels.klass == KernelClass.ELEMENTWISE)
        return np.asarray(own & np.isfinite(_rates(kernels, device)))

    def estimate(self, kernels: KernelTable, device: Device) -> Estimates:
        """Times of all rows."""
        compute = kernels.matmul_flops / _rates(kernels, device)
        memory = (kernels.bytes_read + kernels.bytes_written) / device.hbm_bytes_per_s.value
        time = LAUNCH_S + np.maximum(compute, memory)
        bound = np.where(compute > memory, "compute", "memory")
        source = np.full(len(kernels), str(Source.BOUND))
        return Estimates(time, time, 2.0 * time, source, bound)

    def assumptions(self, device: Device) -> tuple[str, ...]:
        """What its numbers take for granted."""
        return (f"{device.name} reaches its printed peaks, {LAUNCH_S * 1e6:.0f} us a launch",)


def _rates(kernels: KernelTable, device: Device) -> FloatArray:
    found = np.full(len(kernels), np.inf)
    for math in np.unique(kernels.math[kernels.matmul_flops > 0]):
        try:
            rate = device.matmul_rate(str(math)).value
        except InputError:
            rate = np.nan
        found[(kernels.math == math) & (kernels.matmul_flops > 0)] = rate
    return found
