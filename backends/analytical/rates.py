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

_LEAST_DYNAMIC: Final = 0.1


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

    A board with less power than the measured one of its architecture runs these at a lower clock (`power_clock`). Plain
    FMA products of an architecture that was measured on a board with little power (`power.fma`: watts for each TFLOP/s
    of its f32 lanes) are faster on one with more: they follow the power law through that board and one of an
    architecture with the same lanes in the same process (`full.power.fma`, `full.sustained.fma`), and end there.
    """
    share = constants[f"sustained.{family}"]
    if family != "fma":
        return share * power_clock(device, constants)
    watts, measured = watts_per_tflops(device, family), constants.by_name.get("power.fma")
    if measured is None or watts is None:
        return share
    ratio = watts / measured.value
    if "full.power.fma" not in constants.by_name or ratio <= 1.0:
        return share
    full = constants["full.sustained.fma"]
    exponent = np.log(full / share) / np.log(constants["full.power.fma"] / measured.value)
    return min(full, share * float(ratio**exponent))


def steady(family: str, device: Device, constants: Constants) -> float | None:
    """Share of the peak that the longest products of a family keep up, once the board is at its power limit.

    What a tile reaches in a short product (`sustained`) may be more. None where there is no such constant.
    """
    known = constants.by_name.get(f"steady.{family}")
    return known.value * power_clock(device, constants) if known else None


def power_clock(device: Device, constants: Constants) -> float:
    """What a board's matrix units sustain of their peak beside the measured board of its architecture, at most 1.

    Where that board was not at its limit (its long products are as fast as short ones): the cube root of the ratio of
    watts for each TFLOP/s (`power`), since power grows with clock times voltage squared, and voltage at most with the
    clock. Where it was, the clock goes with the power `power.exponent` of the watts of a core (`power.core`) less what
    does not go with the clock (the share `power.static` of the measured board's: leakage, memory, fans); a peak that
    the data sheet states for a lower clock is more fully used.
    """
    measured, watts = constants.by_name.get("power"), watts_per_tflops(device, "half")
    if measured is None or watts is None or device.tdp_w is None:
        return 1.0
    core, limit = constants.by_name.get("power.core"), constants.by_name.get("steady.half")
    if core is None or device.cores is None or limit is None or limit.value >= constants["sustained.half"]:
        return min(1.0, (watts / measured.value) ** (1.0 / 3.0))
    own, still = device.tdp_w.value / device.cores.value, constants["power.static"] * core.value
    clock = (max(own - still, _LEAST_DYNAMIC * core.value) / (core.value - still)) ** constants["power.exponent"]
    return min(1.0, clock * (core.value / measured.value) / (own / watts))


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
