"""What a user measured on a device, in place of the clock rule: a product and its time, or shares in a file."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from stablecast.backends import kernel_specs as specs
from stablecast.backends import units
from stablecast.backends.device import Device, Quantity
from stablecast.backends.hardware.schema import read_yaml
from stablecast.backends.learned.backend import LearnedBackend
from stablecast.backends.learned.rates import FAMILIES, MEMORY, MODELS, family_of_math
from stablecast.ir.errors import InputError, near_names
from stablecast.ir.kernels import KernelRow, KernelTable

FORM: Final = "[DEVICE/]MxNxK[xBATCH]:MATH=TIME, for example h100-sxm/4096x4096x4096:fp32=2.7ms"
_GEMM: Final = re.compile(r"(?:(?P<device>[\w.-]+)/)?(?P<sizes>\d+(?:x\d+){2,3}):(?P<math>\w+)=(?P<time>.+)")
_MATH: Final = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8_e4m3", "int8": "int8"}
_ELEMENT: Final = {"fp32": "f32", "tf32": "f32", "bf16": "bf16", "fp16": "f16", "fp8": "fp8", "int8": "i8"}
_LEAST, _MOST, _STEPS = 0.02, 1.0, 40


@dataclass(frozen=True, slots=True)
class MeasuredGemm:
    """A product [m, k] x [k, n], `batch` times, in math mode `math`, and its seconds on the device's own clock.

    `device`: its catalogue name, empty for whichever device is asked about.
    """

    m: int
    n: int
    k: int
    batch: int
    math: str
    time_s: float
    device: str = ""

    def row(self, device: Device) -> KernelRow:
        """The kernel."""
        row = specs.matmul(device, _ELEMENT[self.math], self.m, self.n, self.k, self.batch)
        return replace(row, math=_MATH[self.math])

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}{f'x{self.batch}' if self.batch > 1 else ''}:{self.math}"


def parse_gemm(text: str) -> MeasuredGemm:
    """`--measured-gemm` as a value. Raises `InputError` that shows the form."""
    found = _GEMM.fullmatch(text.strip())
    if found is None:
        raise InputError(f"'{text}' is no measured product", f"write {FORM}")
    math = found["math"]
    if math not in _MATH:
        raise InputError(f"'{text}' names math mode '{math}'", near_names(math, _MATH) or "known: " + ", ".join(_MATH))
    sizes = [int(size) for size in found["sizes"].split("x")]
    time_s, dimension = units.to_si(*units.parse(found["time"]))
    if dimension != units.SECOND or time_s <= 0 or min(sizes) < 1:
        raise InputError(f"'{text}' needs sizes from 1 up and a time with its unit", f"write {FORM}")
    m, n, k, batch = (*sizes, 1)[:4]
    return MeasuredGemm(m, n, k, batch, math, time_s, found["device"] or "")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured products, and shares of peaks (by family, or `memory`) for the device `device` (empty: any)."""

    gemms: tuple[MeasuredGemm, ...] = ()
    shares: tuple[tuple[str, float], ...] = ()
    device: str = ""
    source: str = ""
    folder: Path = MODELS

    def apply(self, device: Device) -> Device:
        """`device` with what was measured on it. Raises `InputError` for a product that it could not have run."""
        sustained = dict(device.sustained)
        if self.device in ("", device.name):
            sustained |= {name: Quantity(value, "1", self.source, "user") for name, value in self.shares}
        for gemm in self.gemms:
            if gemm.device in ("", device.name):
                share = _share(gemm, device, self.folder)
                sustained[family_of_math(_MATH[gemm.math])] = Quantity(share, "1", f"measured: {gemm}", "user")
        return replace(device, sustained=sustained)

    def __bool__(self) -> bool:
        return bool(self.gemms or self.shares)


def _share(gemm: MeasuredGemm, device: Device, folder: Path) -> float:
    """The sustained share at which the learned backend gives the measured time."""
    family, table = family_of_math(_MATH[gemm.math]), KernelTable.of([gemm.row(device)])
    backend = LearnedBackend(folder)

    def time(share: float) -> float:
        tried = replace(device, sustained={**device.sustained, family: Quantity(share, "1", "tried", "user")})
        return float(backend.estimate(table, tried).time_s[0])

    if gemm.time_s < time(_MOST) / 1.25 or gemm.time_s > time(_LEAST):
        raise InputError(
            f"{gemm} in {gemm.time_s:.3g} s does not fit {device.name}: its peak allows {time(_MOST):.3g} s",
            "check the sizes, the math mode and the unit",
        )
    shares = np.geomspace(_LEAST, _MOST, 2)
    low, high = float(shares[0]), float(shares[1])
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if time(middle) > gemm.time_s else (low, middle)
    return high


def read_calibration(path: Path) -> Calibration:
    """A calibration file: `device` (optional), `gemms` (texts as for `--measured-gemm`), `sustained` (share by family).

    Raises `InputError` naming what is wrong.
    """
    raw: dict[str, Any] = dict(read_yaml(path))
    strange = set(raw) - {"device", "gemms", "sustained"}
    if strange:
        raise InputError(f"{path} has unknown fields {', '.join(sorted(strange))}", "known: device, gemms, sustained")
    shares: dict[str, Any] = raw.get("sustained") or {}
    for name, value in shares.items():
        if name not in (*FAMILIES, MEMORY):
            raise InputError(f"{path}: '{name}' is no family", "known: " + ", ".join((*FAMILIES, MEMORY)))
        if not isinstance(value, int | float) or not 0 < value <= 1:
            raise InputError(f"{path}: sustained.{name} is {value}", "give a share between 0 and 1")
    gemms = tuple(parse_gemm(str(text)) for text in raw.get("gemms") or ())
    device = str(raw.get("device") or "")
    gemms = tuple(replace(gemm, device=gemm.device or device) for gemm in gemms)
    return Calibration(gemms, tuple((name, float(value)) for name, value in shares.items()), device, str(path))


def calibrations(texts: Sequence[str], file: Path | None) -> tuple[Calibration, ...]:
    """What `--measured-gemm` and `--calibration` say; the products given by flag come last and so win."""
    found = [read_calibration(file)] if file is not None else []
    if texts:
        found.append(Calibration(tuple(parse_gemm(text) for text in texts)))
    return tuple(found)


def adjuster(found: Sequence[Calibration]) -> Callable[[Device], Device] | None:
    """What a catalogue is to do with each device, None for nothing."""
    if not found:
        return None

    def adjust(device: Device) -> Device:
        for calibration in found:
            device = calibration.apply(device)
        return device

    return adjust
