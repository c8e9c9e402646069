"""Fitting the constants to measured kernels: coordinate descent over whatever constants are named.

Loss: mean over tables of the mean |log(predicted / measured)|, each row's capped at 1. Every table may have a launch
cost of its own, since some hold the host's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from stablecast.backends.analytical import classes
from stablecast.backends.analytical.constants import Constant, Constants, architecture_key
from stablecast.backends.analytical.rates import matrix_rates
from stablecast.backends.device import Device
from stablecast.backends.estimates import FloatArray
from stablecast.ir.kernels import KernelTable

FIT_ROWS: Final = 1500
SEED: Final = 0
_CAP: Final = 1.0
STEPS: Final = (1.3, 1.12, 1.05, 1.02)
_VANISHING: Final = 1e-3
_CEILING: Final = {
    "sustained": 1.0,
    "steady": 1.0,
    "share": 1.0,
    "tile": 1.0,
    "fma": 1.0,
    "waves": 1.0,
    "convolution": 1.0,
    "overlap": 8.0,
}
"""Largest value of constants by the first part of their name: shares of a peak, and a power that is a maximum."""
_FLOOR: Final = {"share.matmul": 0.6}
"""Smallest value, where a small table leaves it open: a product's operands stream as other data does."""


def move(
    values: dict[str, float], name: str, step: float, best: float, least: float, loss: Callable[[], float]
) -> float:
    """Multiplies or divides `values[name]` by `step` as long as that lowers `loss()`; the lowest loss.

    The value stays above `least` and below the ceiling of its kind (`sustained.*` at most 1, and so on).
    """
    start, ceiling = values[name], _CEILING.get(name.split(".")[0], np.inf)
    for factor in (step, 1.0 / step):
        while True:
            kept, tried = values[name], min(values[name] * factor, ceiling)
            if tried in (kept, 0.0) or tried < least:
                break
            values[name] = tried
            found = loss()
            if found >= best:
                values[name] = kept
                break
            best = found
        if values[name] != start:
            break
    return best


_STRETCHES: Final = 16
_SMALLEST: Final = 0.1
_EXTRA_QUANTILE: Final = 0.2


def growing_cost(rest_s: FloatArray, core_s: FloatArray, place: FloatArray) -> FloatArray:
    """What a way of timing adds to each row where it grew while the table was taken, seconds.

    A quadratic in the row's `place` in the table (0 to 1) through a low quantile of `rest_s`, measured less predicted,
    over the smallest kernels (`core_s`) of each stretch of it.
    """
    middles: list[float] = []
    values: list[float] = []
    for number in range(_STRETCHES):
        own = (place >= number / _STRETCHES) & (place < (number + 1) / _STRETCHES)
        if own.any():
            small = own & (core_s <= np.quantile(core_s[own], _SMALLEST))
            middles.append((number + 0.5) / _STRETCHES)
            values.append(float(np.quantile(rest_s[small], _EXTRA_QUANTILE)))
    curve = np.polyfit(middles, values, min(2, len(values) - 1))
    return np.maximum(np.polyval(curve, place), 0.0)


@dataclass
class Measured:
    """Measured kernels of one table on one device. `stage`: which fit uses it (empty: a check only).

    `place`: where in its table each row stands (0 to 1), given where what the host added grew while the table was
    taken. `casts`: elements of each row that were cast before the kernel, within the measured time; `cast_s`: seconds
    of one, which like `launch_s` is the table's own.
    """

    table: str
    device: Device
    kernels: KernelTable
    measured_s: FloatArray
    stage: str
    launch_s: float = 2e-6
    place: FloatArray | None = None
    casts: FloatArray | None = None
    cast_s: float = 2e-12
    rows: classes.Rows = field(init=False)

    def __post_init__(self) -> None:
        rates = matrix_rates(self.kernels.math, self.kernels.in_dtype, self.device)
        self.rows = classes.Rows.of(self.kernels, rates, self.device)

    @property
    def key(self) -> str:
        return architecture_key(self.device)

    def sample(self, count: int) -> "Measured":
        """At most `count` rows, drawn with a fixed seed."""
        if len(self.kernels) <= count:
            return self
        chosen = np.zeros(len(self.kernels), dtype=np.bool_)
        chosen[np.random.default_rng(SEED).choice(len(self.kernels), count, replace=False)] = True
        rows, measured = self.kernels.select(chosen), self.measured_s[chosen]
        place = None if self.place is None else self.place[chosen]
        casts = None if self.casts is None else self.casts[chosen]
        own = (self.stage, self.launch_s, place, casts, self.cast_s)
        return Measured(self.table, self.device, rows, measured, *own)


Values = dict[str, dict[str, float]]
"""Section of the constants file -> constant -> value."""


@dataclass
class Fit:
    """Constants under change, and the measured tables they are judged by."""

    values: Values
    like: dict[str, str]
    sources: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    first: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    def constants(self, device: Device) -> Constants:
        """What holds for `device` with the present values."""
        chain: list[str] = []
        key = architecture_key(device)
        while key in self.values and key not in chain:
            chain.insert(0, key)
            key = self.like.get(key, "")
        merged: dict[str, Constant] = {}
        for part in (device.kind, *chain):
            merged |= {name: Constant(value, "", part) for name, value in self.values[part].items()}
        return Constants(architecture_key(device), device.kind, merged, bool(chain))

    def ratios(self, data: Measured) -> FloatArray:
        """Predicted over measured."""
        time = classes.kernel_time(data.rows, data.device, self.constants(data.device), data.launch_s)[0]
        if data.casts is not None:
            time = time + data.cast_s * data.casts
        return time / data.measured_s

    def take_growing_cost(self, data: Measured) -> None:
        """Take what the host added to each row off its measured time, where that grew: by the present constants."""
        if data.place is None:
            return
        core = classes.kernel_time(data.rows, data.device, self.constants(data.device), 0.0)[0]
        added = growing_cost(data.measured_s - data.launch_s - core, core, data.place)
        data.measured_s = np.maximum(data.measured_s - added, np.minimum(core, data.measured_s))
        data.place = None

    def loss(self, datas: Sequence[Measured]) -> float:
        return float(np.mean([np.minimum(np.abs(np.log(self.ratios(data))), _CAP).mean() for data in datas]))

    def descend(self, datas: Sequence[Measured], names: Sequence[tuple[str, str]], fixed_launch: bool = False) -> float:
        """Coordinate descent over the constants `names` (section, name), and each table's launch and cast costs."""
        thin = [data.sample(FIT_ROWS) for data in datas]
        best = self.loss(thin)
        for step in STEPS:
            for _ in range(2):
                before = best
                for section, name in names:
                    first = self.first.setdefault((section, name), self.values[section][name])
                    least = _FLOOR.get(name, _VANISHING * first)
                    best = move(self.values[section], name, step, best, least, lambda: self.loss(thin))
                if not fixed_launch:
                    for data in thin:
                        self._move_own(data, "launch_s", step)
                        if data.casts is not None:
                            self._move_own(data, "cast_s", step)
                    best = self.loss(thin)
                if before - best < 1e-4:
                    break
        for data, used in zip(datas, thin, strict=True):
            data.launch_s, data.cast_s = used.launch_s, used.cast_s
        return best

    def _move_own(self, data: Measured, name: Literal["launch_s", "cast_s"], step: float) -> None:
        best = self.loss([data])
        for factor in (step, 1.0 / step):
            kept: float = getattr(data, name)
            setattr(data, name, kept * factor)
            loss = self.loss([data])
            if loss < best:
                return
            setattr(data, name, kept)
