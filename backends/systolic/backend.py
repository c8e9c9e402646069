"""`SystolicBackend`: kernels as cycles of a device's arrays and vector unit, and cycles as calibrated seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from stablecast.backends.analytical.constants import Constants
from stablecast.backends.analytical.rates import matrix_rates
from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, Estimates, FloatArray, Source
from stablecast.backends.systolic import rows, vector_unit
from stablecast.backends.systolic.machine import ArrayMachine, array_machine
from stablecast.backends.systolic.products import ArrayWork, array_work
from stablecast.backends.systolic.time_map import (
    CONSTANTS_FILE,
    Parts,
    array_seconds,
    f16_time,
    overlapped,
    systolic_constants,
)
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelTable

_SCORE_OPERATIONS: Final = 4.0
"""Maximum, subtraction, sum and scaling of a score; its exponential apart."""

DETAILS: Final = (
    "cycles",
    "stall_cycles",
    "utilisation",
    "mapping_efficiency",
    "bandwidth_bytes_per_s",
    "transposed",
)
"""What `SystolicBackend.detail` answers for each row."""


@dataclass(frozen=True, slots=True)
class SystolicBackend:
    """Matrix products, convolutions and attention on systolic arrays, the rest on the vector unit.

    TPUs: `machine`, `products`, `vector_unit`. GPUs: products only, their tensor cores as arrays of equal rate.
    Cycles become seconds by `time_map`, whose constants were calibrated on TPU v4 (f16), TPU v6e (other types) and
    XLA's products on H100 and B200; other devices take them by ratio of their rates, with a wider range. No time is
    below work over peak.

    `constants_file`: another file of constants.
    """

    constants_file: Path = CONSTANTS_FILE
    name: str = "systolic"

    def covers(self, kernels: KernelTable, device: Device) -> BoolArray:
        """Products in math modes of the matrix unit; on TPUs attention, elementwise kernels, reductions, copies too."""
        if array_machine(device) is None:
            return np.zeros(len(kernels), dtype=np.bool_)
        rates = matrix_rates(kernels.math, kernels.in_dtype, device)
        return rows.kinds(kernels, rates, device.kind).covered

    def estimate(self, kernels: KernelTable, device: Device) -> Estimates:
        """Times of all rows. Raises `InputError` naming the device for rows that it does not cover."""
        return _Run(kernels, device, self.constants_file).estimates()

    def detail(self, kernels: KernelTable, device: Device) -> Mapping[str, FloatArray]:
        """`DETAILS` of every row, NaN where it does not run on the arrays.

        `cycles`: of the array clock, as predicted, launch left out. `stall_cycles`: those in which the busiest array
        neither streams nor fills. `utilisation`: multiply-adds over cells and `cycles`, 0 to 1. `mapping_efficiency`:
        share of the cells of all folds that hold an element. `bandwidth_bytes_per_s`: bytes of the kernel over its
        time. `transposed`: 1 for the order that holds the left operand.
        """
        return _Run(kernels, device, self.constants_file).detail()

    def assumptions(self, device: Device) -> tuple[str, ...]:
        """What its numbers take for granted, one sentence each."""
        machine = array_machine(device)
        if machine is None:
            return ()
        fit = systolic_constants(device, self.constants_file)
        found = [_machine_sentence(device, machine), _map_sentence(device, fit)]
        if device.kind == "tpu":
            found.append(_half_sentence(device, fit))
            found.append(
                "vector unit: streams reach "
                f"{fit['vector.memory']:.0%} of the memory rate ({fit.source('vector.memory')})"
            )
        return tuple(found)


def _machine_sentence(device: Device, machine: ArrayMachine) -> str:
    shape = f"{machine.rows}x{machine.cols} at {machine.clock_hz / 1e9:.2f} GHz"
    if machine.kind == "gpu":
        return f"the tensor cores of each of {machine.cores} cores as one output-stationary array of {shape}"
    doubled = next((peak.value for peak in device.matrix_flops.values()), 0.0) / machine.cell_flops
    rate = f", {doubled:.0f} multiply-adds a cell and cycle to meet the printed peak" if doubled > 1.5 else ""
    return f"{machine.arrays} weight-stationary arrays of {shape}{rate}"


def _map_sentence(device: Device, fit: Constants) -> str:
    constant = fit.by_name["array"]
    launch = f"launch {fit['launch'] * 1e6:.2g} us"
    text = f"arrays reach {constant.value:.0%} of their rate, memory {fit['memory']:.0%}, {launch}"
    if constant.of == fit.architecture:
        return f"{text} ({constant.source})"
    return f"{text}, carried to {device.name} by ratio ({constant.source})"


def _half_sentence(device: Device, fit: Constants) -> str:
    constant = fit.by_name["f16.streamed.even"]
    carried = "" if constant.of == fit.architecture else f", carried to {device.name} by ratio"
    return f"f16 is converted on its way to the arrays: a map of its own{carried} ({constant.source})"


class _Run:
    """One table on one device."""

    def __init__(self, kernels: KernelTable, device: Device, path: Path) -> None:
        machine = array_machine(device)
        if machine is None:
            raise InputError(f"device {device.name} has no systolic arrays", "use the analytical backend for it")
        self.kernels, self.device, self.machine = kernels, device, machine
        self.fit = systolic_constants(device, path)
        self.rates = matrix_rates(kernels.math, kernels.in_dtype, device)
        self.kinds = rows.kinds(kernels, self.rates, device.kind)
        if not self.kinds.covered.all():
            row = kernels.rows[int(np.argmin(self.kinds.covered))]
            raise InputError(f"backend systolic has no model for {row.klass} {row.shape} on {device.name}")
        self.peak = np.where(np.isnan(self.rates.flops), 1.0, self.rates.flops)
        self.half = rows.is_half(kernels) & (device.kind == "tpu")
        self.nbytes = np.asarray(kernels.bytes_read + kernels.bytes_written)

    def parts(self) -> tuple[Parts, FloatArray, ArrayWork]:
        """Seconds of each row, array cycles at the arrays' full rate (0 on the lanes), and work on the arrays."""
        size = len(self.kernels)
        found = Parts(*(np.zeros(size) for _ in range(4)))
        cycles = np.zeros(size)
        none, nowhere = np.full(size, np.nan), np.zeros(size, dtype=np.bool_)
        work = ArrayWork(none.copy(), none.copy(), none.copy(), none.copy(), nowhere, none.copy())
        if self.kinds.product.any():
            self._products(self.kinds.product, found, cycles, work)
        if self.kinds.attention.any():
            self._attention(self.kinds.attention, found, cycles, work)
        if self.kinds.lanes.any():
            table = self.kernels.select(self.kinds.lanes)
            _put(found, self.kinds.lanes, vector_unit.vector_parts(table, self.device, self.machine, self.fit))
        return found, cycles, work

    def _products(self, mask: BoolArray, found: Parts, cycles: FloatArray, work: ArrayWork) -> None:
        table = self.kernels.select(mask)
        products = rows.products_of(table, skips_zeros=self.device.kind == "gpu")
        mine = array_work(products, self.machine, self.fit["fill"])
        launches = np.maximum(table.launches.astype(np.float64), 1.0)
        peak = self.peak[mask]
        compute = np.minimum(array_seconds(mine.cycles, peak, self.machine), self._on_lanes(table))
        parts = overlapped(compute, products.nbytes, self.fit["launch"] * launches, self.machine, self.fit)
        half = self.half[mask]
        if half.any():
            own = f16_time(products, mine, peak, launches, self.machine, self.fit)
            parts = _choose(half, own, parts)
        _put(found, mask, parts)
        cycles[mask] = mine.cycles
        _put_work(work, mask, mine)

    def _on_lanes(self, table: KernelTable) -> FloatArray:
        """Seconds of grouped convolutions on the lanes, where they may be faster; infinite for all other products."""
        flops = np.where(table.groups > 1, table.matmul_flops + table.dilation_flops, np.inf)
        rate = self.device.vector_rate("f32").value
        return flops / (rate * self.fit["vector.issue"])

    def _attention(self, mask: BoolArray, found: Parts, cycles: FloatArray, work: ArrayWork) -> None:
        table = self.kernels.select(mask)
        scores, context, share = rows.attention_products(table)
        first, second = (array_work(part, self.machine, self.fit["fill"]) for part in (scores, context))
        busy = (first.cycles + second.cycles) * share
        elements = scores.batch * scores.m * scores.n * share
        rate = self.device.vector_rate("f32").value * self.fit["vector.issue"]
        lanes = elements * _SCORE_OPERATIONS / rate
        lanes += elements * self.fit["vector.transcendental"] / vector_unit.lane_rate(self.machine)
        compute = np.maximum(array_seconds(busy, self.peak[mask], self.machine), lanes * self.fit["array"])
        launches = np.maximum(table.launches.astype(np.float64), 1.0)
        _put(found, mask, overlapped(compute, scores.nbytes, self.fit["launch"] * launches, self.machine, self.fit))
        cycles[mask] = busy
        _put_work(work, mask, first)

    def floor(self) -> FloatArray:
        """Seconds that no execution can beat: useful work over the peak, bytes over the memory's rate."""
        useful = np.where(self.kinds.lanes, 0.0, np.asarray(self.kernels.useful_flops) / self.peak)
        return np.maximum(useful, self.nbytes / self.machine.hbm_bytes_per_s)

    def estimates(self) -> Estimates:
        """Times with their ranges."""
        parts, _, _ = self.parts()
        floor = self.floor()
        time = np.maximum(parts.time, floor)
        low, high = self._ranges()
        bound = np.where(parts.compute > parts.memory, "compute", "memory")
        bound = np.where(parts.launch > 0.5 * time, "launch", bound)
        source: npt.NDArray[np.str_] = np.full(len(time), str(Source.SIMULATED))
        return Estimates(time, np.minimum(np.maximum(time * low, floor), time), time * high, source, bound)

    def _ranges(self) -> tuple[FloatArray, FloatArray]:
        """Shares of the time; wider for constants carried from another generation, and for what nobody measured."""
        names = np.where(self.kinds.lanes, "vector", np.where(self.kinds.attention, "attention", "product"))
        names = np.where(self.half & ~self.kinds.attention, np.char.add("f16.", names), names)
        low, high = np.ones(len(names)), np.ones(len(names))
        for name in np.unique(names):
            of = self.fit.by_name[f"low.{name}"].of
            wider = 1.0 if of == self.fit.architecture else self.fit["carried"]
            low[names == name] = self.fit[f"low.{name}"] / wider
            high[names == name] = self.fit[f"high.{name}"] * wider
        return low, high

    def detail(self) -> Mapping[str, FloatArray]:
        """The columns of `DETAILS`."""
        parts, busy, work = self.parts()
        time = np.maximum(parts.time, self.floor())
        on_arrays = ~self.kinds.lanes
        scale = np.where(on_arrays, self.peak / self.machine.cell_flops, np.nan)
        clocks = np.maximum(time - parts.launch, 0.0) * self.machine.clock_hz
        cycles = np.where(on_arrays, np.maximum(clocks, busy / scale), np.nan)
        useful = np.asarray(self.kernels.useful_flops)
        return {
            "cycles": cycles,
            "stall_cycles": np.where(on_arrays, cycles - busy / scale, np.nan),
            "utilisation": useful / self.peak * self.machine.clock_hz / cycles,
            "mapping_efficiency": work.mapping_eff,
            "bandwidth_bytes_per_s": self.nbytes / time,
            "transposed": np.where(on_arrays, work.swapped.astype(np.float64), np.nan),
        }


def _choose(mask: BoolArray, first: Parts, second: Parts) -> Parts:
    return Parts(
        np.where(mask, first.time, second.time),
        np.where(mask, first.compute, second.compute),
        np.where(mask, first.memory, second.memory),
        np.where(mask, first.launch, second.launch),
    )


def _put(into: Parts, mask: BoolArray, parts: Parts) -> None:
    for target, values in (
        (into.time, parts.time),
        (into.compute, parts.compute),
        (into.memory, parts.memory),
        (into.launch, parts.launch),
    ):
        target[mask] = values


def _put_work(into: ArrayWork, mask: BoolArray, work: ArrayWork) -> None:
    into.mapping_eff[mask] = work.mapping_eff
    into.swapped[mask] = work.swapped
