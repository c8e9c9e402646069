"""`AnalyticalBackend`: times of kernels from their shapes, a data sheet and a few sourced constants."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from stablecast.backends.analytical import classes
from stablecast.backends.analytical.constants import CONSTANTS_FILE, Constants, constants_for
from stablecast.backends.analytical.rates import MatrixRates, matrix_rates, one_rate, sustained
from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, Estimates, FloatArray, Source, TextArray
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelTable

_UNKNOWN_WORK_HIGH: Final = 10.0


@dataclass(frozen=True, slots=True)
class AnalyticalBackend:
    """Roofline with launch cost, tiles and waves, and efficiency constants; every constant has a source.

    One run of a kernel takes

        time = launches * launch + (compute^p + memory^p)^(1/p),

    compute from `tiles` (matrix products, convolutions as their im2col product), attention blocks or the vector
    lanes; memory = bytes / (share * peak rate). No time is below work / peak, so no utilisation exceeds 100 %.
    A device without measurements of its own architecture takes the constants of its kind, with a wider range.

    `launch_s`: seconds of one launch, in place of the constant for kernels that follow each other in a compiled
    graph. `constants_file`: another file of constants.
    """

    launch_s: float | None = None
    constants_file: Path = CONSTANTS_FILE
    name: str = "analytical"

    def covers(self, kernels: KernelTable, device: Device) -> BoolArray:
        """All rows but those whose products need a math mode that `device` has no peak for."""
        return ~(np.isnan(_rates(kernels, device).flops) & _multiplies(kernels))

    def estimate(self, kernels: KernelTable, device: Device) -> Estimates:
        """Times of all rows. Raises `InputError` naming device and math mode for a row it does not cover."""
        rates = _rates(kernels, device)
        bare = np.isnan(rates.flops) & _multiplies(kernels)
        if bare.any():
            row = int(np.argmax(bare))
            one_rate(str(kernels.math[row]), str(kernels.in_dtype[row]), device)
        constants = constants_for(device, self.constants_file)
        launch_s = self.launch_s if self.launch_s is not None else constants["launch"]
        rows = classes.Rows.of(kernels, rates, device)
        time, floor, launch, compute_bound = classes.kernel_time(rows, device, constants, launch_s)
        return _with_ranges(rows, time, floor, launch, compute_bound, constants)

    def assumptions(self, device: Device) -> tuple[str, ...]:
        """What its numbers take for granted, one sentence each."""
        constants = constants_for(device, self.constants_file)
        launch_s = self.launch_s if self.launch_s is not None else constants["launch"]
        origin = "given" if self.launch_s is not None else constants.source("launch")
        found = [
            f"{launch_s * 1e6:.2g} us a launch ({origin})",
            f"peaks are dense; large products reach {sustained('half', device, constants):.0%} of the "
            "16-bit peak "
            f"({constants.source('sustained.half')})",
            f"streaming kernels reach {constants['share.stream']:.0%} of the memory rate "
            f"({constants.source('share.stream')})",
            "operands come from device memory; what the cache still holds is not counted",
        ]
        if not constants.measured:
            found.append(
                f"no kernel of architecture {constants.architecture} was measured: constants of "
                f"{constants.like or constants.kind}, wider ranges"
            )
        return tuple(found)


def uncovered_reasons(kernels: KernelTable, device: Device) -> tuple[str, ...]:
    """For every math mode of `kernels` that `device` has no peak for: a sentence that names both."""
    bare = np.isnan(_rates(kernels, device).flops) & _multiplies(kernels)
    found: dict[str, str] = {}
    for row in np.nonzero(bare)[0]:
        math = str(kernels.math[row])
        if math not in found:
            try:
                one_rate(math, str(kernels.in_dtype[row]), device)
            except InputError as error:
                found[math] = str(error)
    return tuple(found.values())


def _rates(kernels: KernelTable, device: Device) -> MatrixRates:
    return matrix_rates(kernels.math, kernels.in_dtype, device)


def _multiplies(kernels: KernelTable) -> BoolArray:
    return np.asarray(kernels.matmul_flops > 0)


def _with_ranges(
    rows: classes.Rows,
    time: FloatArray,
    floor: FloatArray,
    launch: FloatArray,
    compute_bound: BoolArray,
    constants: Constants,
) -> Estimates:
    low_share, high_share = classes.ranges(rows, constants)
    unknown = rows.modelled == 0
    high_share = np.where(unknown, _UNKNOWN_WORK_HIGH, high_share)
    bound = np.where(compute_bound, "compute", "memory")
    bound = np.where(launch > 0.5 * time, "launch", bound)
    bound = np.where(unknown, "unknown", bound)
    source: TextArray = np.where(unknown, str(Source.BOUND), str(Source.ANALYTICAL))
    return Estimates(time, np.minimum(np.maximum(time * low_share, floor), time), time * high_share, source, bound)
