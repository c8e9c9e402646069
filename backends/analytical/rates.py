"""Which unit multiplies, and how fast: math modes of kernel rows as FLOP/s of a device."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from stablecast.backends.analytical.constants import Constants
from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, FloatArray, TextArray
from stablecast.ir.errors import InputError

PASSES: Final = {"bf16x3": ("bf16", 3), "bf16x6": ("bf16", 6), "bf16x9": ("bf16", 9), "tf32x3": ("tf32", 3)}
"""Modes that multiply several times: the mode of one pass, and the number of passes."""

FAMILY_OF_MATH: Final = {
    "bf16": "half",
    "fp16": "half",
    "tf32": "tf32",
    "fp8_e4m3": "byte",
    "fp8_e5m2": "byte",
    "int8": "byte",
    "fp6": "byte",
    "fp4": "byte",
    "int4": "byte",
    "fp32": "fma",
    "fp64": "fma",
}
"""Math modes that share efficiency constants; what is not here multiplies on the vector lanes (`fma`)."""

LANE_MODES: Final = frozenset({"vector", "", "int32", "int64"})
"""Modes for the vector lanes: wide integers at the f32 rate. Narrow ones need a peak of their own."""


@dataclass(frozen=True, slots=True)
class MatrixRates:
    """Per row: peak FLOP/s of its math mode (NaN: the device has none), its family, whether a matrix unit runs it."""

    flops: FloatArray
    family: TextArray
    on_matrix_unit: BoolArray


def one_rate(math: str, in_dtype: str, device: Device) -> tuple[float, bool]:
    """FLOP/s of math mode `math`, several passes counted as one product, and whether a matrix unit runs it.

    Raises `InputError` naming device and mode where the device has no such peak.
    """
    base, passes = PASSES.get(math, (math, 1))
    if base in LANE_MODES:
        return device.vector_rate("f64" if in_dtype in ("f64", "c128") else "f32").value, False
    return device.matmul_rate(base).value / passes, base in device.matrix_flops


def matrix_rates(math: TextArray, in_dtype: TextArray, device: Device) -> MatrixRates:
    """The rates of rows with math modes `math`; element type `in_dtype` decides those on the vector lanes."""
    flops = np.full(len(math), np.nan)
    family = np.full(len(math), "fma", dtype="<U4")
    on_unit = np.zeros(len(math), dtype=np.bool_)
    left = np.ones(len(math), dtype=np.bool_)
    while left.any():
        first = int(np.argmax(left))
        name, dtype = str(math[first]), str(in_dtype[first])
        same = left & (math == name)
        if name in LANE_MODES:
            same &= in_dtype == dtype
        left &= ~same
        try:
            rate, unit = one_rate(name, dtype, device)
        except InputError:
            continue
        flops[same] = rate
        on_unit[same] = unit
        family[same] = FAMILY_OF_MATH.get(PASSES.get(name, (name, 1))[0], "fma") if unit else "fma"
    return MatrixRates(flops, family, on_unit)


def sustained(family: str, device: Device, constants: Constants) -> float:
    """Share of the peak that large products of a family reach on `device`.

    A board with less power than the measured one of its architecture (`power`: watts for each TFLOP/s of its 16-bit
    matrix units) runs these at a clock lower by the cube root of the ratio: power grows with the clock cubed. Plain FMA
    products of an architecture that was measured on a board with little power (`power.fma`: watts for each TFLOP/s of
    its f32 lanes) are faster on one with more: they follow the power law through that board and one of an architecture
    with the same lanes in the same process (`full.power.fma`, `full.sustained.fma`), and end there.
    """
    share = constants[f"sustained.{family}"]
    watts = watts_per_tflops(device, family)
    measured = constants.by_name.get("power.fma" if family == "fma" else "power")
    if measured is None or watts is None:
        return share
    ratio = watts / measured.value
    if family != "fma":
        return share * min(1.0, ratio ** (1.0 / 3.0))
    if "full.power.fma" not in constants.by_name or ratio <= 1.0:
        return share
    full = constants["full.sustained.fma"]
    exponent = np.log(full / share) / np.log(constants["full.power.fma"] / measured.value)
    return min(full, share * float(ratio**exponent))


def watts_per_tflops(device: Device, family: str) -> float | None:
    """Board power over the dense 16-bit peak in TFLOP/s (`fma`: over the f32 lanes'), None where either is unknown."""
    peak = device.matrix_flops.get("fp16") or device.matrix_flops.get("bf16")
    if family == "fma":
        peak = device.vector_flops.get("f32")
    return 1e12 * device.tdp_w.value / peak.value if device.tdp_w and peak else None


def p_norm(first: FloatArray, second: FloatArray, power: float) -> FloatArray:
    """(first^p + second^p)^(1/p): the larger where p is large, the sum where p is 1."""
    larger = np.maximum(first, second)
    ratio = np.divide(np.minimum(first, second), larger, out=np.zeros_like(larger), where=larger > 0)
    return larger * (1.0 + ratio**power) ** (1.0 / power)
