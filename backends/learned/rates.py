"""What a device sustains: shares of its printed peaks, measured where it was, by a frozen rule where it was not.

`backends/models/learned/devices.json` holds the measured shares (each with its source) and the rule's constants.
A device's own file, a calibration file or one measured product (`calibrate`) comes before both.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from stablecast.backends.analytical.constants import Section, architecture_key, read_constants
from stablecast.backends.analytical.rates import FAMILY_OF_MATH
from stablecast.backends.device import Device
from stablecast.ir.errors import InputError

MODELS: Final = Path(__file__).parent.parent / "models" / "learned"
DEVICES_FILE: Final = "devices.json"
BASE_FILE: Final = "base.yaml"
"""The analytical constants that a folder's models were trained on: later ones must not move what they correct."""
FAMILIES: Final = ("fp32", "tf32", "half", "fp8", "int8")
MEMORY: Final = "memory"
REDUCE: Final = "reduce"
_OF_MATH: Final[Mapping[str, str]] = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "half",
    "fp16": "half",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "int8": "int8",
}
_REFERENCE_MATH: Final[Mapping[str, tuple[str, ...]]] = {
    "fp32": ("fp32",),
    "tf32": ("tf32",),
    "half": ("bf16", "fp16"),
    "fp8": ("fp8_e4m3",),
    "int8": ("int8",),
}


def family_of_math(math: str) -> str:
    """The numeric family of a math mode, empty where no model knows it."""
    return _OF_MATH.get(math, "")


@dataclass(frozen=True, slots=True)
class Share:
    """A sustained share of a printed peak, with its source. `measured`: on this device; else by the rule."""

    value: float
    source: str
    measured: bool


@dataclass(frozen=True, slots=True)
class Rates:
    """Sustained shares by family (`FAMILIES`), of the memory rate by streams (`memory`) and by kernels that fold rows
    (`reduce`); what is not there is not known. `base`: the file of analytical constants under them, None for those of
    the analytical backend."""

    shares: Mapping[str, Share]
    base: Path | None = None

    def analytical(self) -> dict[str, float]:
        """The same as constants of the analytical model, by their names there."""
        found: dict[str, float] = {}
        for family, share in self.shares.items():
            if family == MEMORY:
                found |= {"share.stream": share.value, "share.copy": share.value}
            elif family == REDUCE:
                found["share.reduce"] = share.value
            else:
                found[f"sustained.{FAMILY_OF_MATH[_REFERENCE_MATH[family][0]]}"] = share.value
        return found


@dataclass(frozen=True, slots=True)
class Anchor:
    """A measured device as the rule sees it. `density`: watts for each TFLOP/s of the family's peak, None if unknown.

    `lanes`: f32 lanes a core; `lane_density`: watts for each TFLOP/s of these. Process, chip and vendor as
    `process_of`, `chip_of` and the data sheet give them. `memory`: its kind, as `memory_of`.
    """

    family: str
    share: float
    device: str
    chip: str
    vendor: str
    process: str
    lanes: int
    density: float | None
    lane_density: float | None
    memory: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """Sustained share of a GPU that nobody measured, from measured ones (`anchors`) and its data sheet.

    A device of the same chip, else of the same vendor and process, nearest in watts per FLOP/s: its share times the
    ratio of these watts to the power `exponent` (dynamic power grows with the cube of the clock), at most 1; plain FP32
    at most what the best measured device with as many lanes a core sustains (issue slots bound it). Across processes a
    FLOP costs less energy each time, so that the watts say nothing: then the median over chips of the family, those of
    the vendor where there are any (whose library and power management it shares), for `fp32` over those with as many
    f32 lanes a core (with twice the lanes for each scheduler, loads take issue slots from multiply-adds), if
    `by_lanes`. Where devices of the process were measured in another family, it is lowered for one with fewer watts for
    each f32 lane than the nearest of them.

    The share of the memory rate: that of the same chip, else the median over chips of the vendor with the same kind of
    memory (HBM, GDDR).
    """

    anchors: tuple[Anchor, ...]
    exponent: float
    by_lanes: bool = True

    def share(self, device: Device, family: str) -> float | None:
        """The share of `family`'s peak, None where no device of the family was measured or it has no such peak."""
        own = [anchor for anchor in self.anchors if anchor.family == family]
        if not own or device.kind != "gpu" or family_peak(device, family) is None:
            return None
        density = density_of(device, family)
        chip, process = chip_of(device.name), process_of(device)
        for near in (
            [anchor for anchor in own if anchor.chip == chip],
            [anchor for anchor in own if anchor.process == process and anchor.vendor == device.vendor],
        ):
            known = [anchor for anchor in near if anchor.density]
            if known and density:
                best = min(known, key=lambda anchor: abs(math.log(density / (anchor.density or 1.0))))
                return min(self._ceiling(own, device), best.share * (density / (best.density or 1.0)) ** self.exponent)
        own = [anchor for anchor in own if anchor.vendor == device.vendor] or own
        alike = [anchor for anchor in own if anchor.lanes == lanes_of(device)]
        return self._power(device) * _median_by_chip(alike if family == "fp32" and self.by_lanes and alike else own)

    def _ceiling(self, own: Sequence[Anchor], device: Device) -> float:
        """Past all power, issue slots bound plain FP32: no more than the best board with as many lanes a core."""
        alike = [anchor.share for anchor in own if anchor.family == "fp32" and anchor.lanes == lanes_of(device)]
        return max(alike, default=1.0)

    def memory_share(self, device: Device) -> float | None:
        """The share of the memory rate that streams reach, None where no GPU was measured."""
        found = [anchor for anchor in self.anchors if anchor.family == MEMORY]
        if not found or device.kind != "gpu":
            return None
        chip, kind = chip_of(device.name), memory_of(device)
        alike = [anchor for anchor in found if anchor.memory == kind]
        narrowing = (
            [anchor for anchor in found if anchor.chip == chip],
            [anchor for anchor in alike if anchor.vendor == device.vendor],
            alike,
            found,
        )
        return _median_by_chip(next(anchors for anchors in narrowing if anchors))

    def _power(self, device: Device) -> float:
        density = density_of(device, "fp32")
        process = process_of(device)
        products = [anchor for anchor in self.anchors if anchor.family != MEMORY]
        near = [a.lane_density for a in products if a.process == process and a.vendor == device.vendor]
        known = [value for value in near if value]
        if not known or not density:
            return 1.0
        nearest = min(known, key=lambda value: abs(math.log(density / value)))
        return min(1.0, (density / nearest) ** self.exponent)


def _median_by_chip(anchors: Sequence[Anchor]) -> float:
    by_chip: dict[str, list[float]] = {}
    for anchor in anchors:
        by_chip.setdefault(anchor.chip, []).append(anchor.share)
    return statistics.median(statistics.fmean(shares) for shares in by_chip.values())


_PROCESS: Final[Mapping[str, str]] = {
    "sm_52": "28 nm",
    "sm_60": "16 nm",
    "sm_61": "16 nm",
    "sm_70": "12 nm",
    "sm_75": "12 nm",
    "sm_80": "7 nm",
    "sm_86": "8 nm",
    "sm_89": "4 nm",
    "sm_90": "4 nm",
    "sm_100": "4 nm",
    "sm_103": "4 nm",
    "sm_120": "4 nm",
    "gfx900": "14 nm",
    "gfx908": "7 nm",
    "gfx90a": "6 nm",
    "gfx942": "5 nm",
    "gfx950": "3 nm",
}
"""Manufacturing process by architecture, general knowledge of the vendors' announcements."""

_YEARS_AHEAD, _TIMES_MIN = 2.0, 3
_YEARS: Final[Mapping[str, int]] = {
    "p100-": 2016, "p4": 2016, "v100-": 2017, "t4": 2018, "a100-pcie-80gb": 2021, "a100-": 2020, "mi100": 2020,
    "mi210": 2022, "mi250": 2021, "h100-": 2022, "h200-": 2024, "b200-": 2025, "mi355x": 2025,
}  # fmt: skip
"""When a board came, by the start of its name: general knowledge of the vendors' announcements."""

_YEARS_OF_ARCHITECTURES: Final[Mapping[str, int]] = {
    "sm_52": 2015, "sm_60": 2016, "sm_61": 2016, "gfx900": 2017, "sm_70": 2017, "sm_75": 2018, "sm_80": 2020,
    "sm_86": 2020, "gfx908": 2020, "gfx90a": 2021, "sm_89": 2022, "sm_90": 2022, "gfx942": 2023, "sm_100": 2024,
    "sm_103": 2025, "gfx950": 2025, "sm_120": 2025,
}  # fmt: skip

_CHIPS: Final[Mapping[str, tuple[str, ...]]] = {
    "gh100": ("h100-", "h200-"),
    "ga100": ("a100-",),
    "gv100": ("v100-",),
    "gp100": ("p100-",),
    "gp102": ("titan-xp", "titan-x-pascal", "gtx-1080-ti"),
    "gm200": ("m40", "titan-x-maxwell"),
    "gb100": ("b200-", "gb200", "b300-", "gb300"),
    "ga102": ("a40", "a6000", "rtx-3090"),
    "gb202": ("rtx-pro-6000-", "rtx-5090"),
    "ad102": ("rtx-4090", "l40s"),
    "aldebaran": ("mi210", "mi250"),
}


def chip_of(device: str) -> str:
    """The chip on a board: boards of one chip count as one device when devices are left out."""
    for chip, names in _CHIPS.items():
        if device.startswith(names):
            return chip
    return device


def board_year(name: str, otherwise: int = 2020) -> int:
    """The year of the board `name`."""
    return next((year for start, year in _YEARS.items() if name.startswith(start)), otherwise)


def year_of(device: Device) -> int:
    """The year of the board, else of its architecture; this year's newest where neither is known."""
    newest = max(_YEARS_OF_ARCHITECTURES.values())
    return board_year(device.name, _YEARS_OF_ARCHITECTURES.get(architecture_key(device), newest))


def memory_of(device: Device) -> str:
    """The kind of a device's memory: `HBM`, `GDDR` or as its data sheet says."""
    label = device.labels.get("mem_type")
    text = label.text.upper() if label is not None else ""
    return next((kind for kind in ("HBM", "GDDR") if text.startswith(kind)), text)


def process_of(device: Device) -> str:
    """The manufacturing process, the architecture's own name where it is not known."""
    key = architecture_key(device)
    return _PROCESS.get(key, key)


def lanes_of(device: Device) -> int:
    """f32 lanes a core, 0 where the data sheet does not say."""
    fact = device.facts.get("fp32_lanes_per_core")
    return int(fact.value) if fact is not None else 0


def density_of(device: Device, family: str) -> float | None:
    """Watts for each TFLOP/s of the family's peak."""
    peak = family_peak(device, family)
    return 1e12 * device.tdp_w.value / peak if device.tdp_w is not None and peak else None


def family_peak(device: Device, family: str) -> float | None:
    """The device's peak FLOP/s in `family`, None where it has none."""
    for mode in _REFERENCE_MATH[family]:
        try:
            return device.matmul_rate(mode).value
        except InputError:
            continue
    return None


@dataclass(frozen=True, slots=True)
class Measured:
    """The file: shares by device, the rule, and what ways of timing add to a kernel by device."""

    devices: Mapping[str, Mapping[str, Share]]
    rule: Rule
    timing: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def extra_s(self, timing: str, device: Device) -> float:
        """What a way of timing (`neusight linear`) adds to a kernel on `device`, seconds.

        Most of it is the host's. On a device that it was not measured on: the trend of its logarithm over the years of
        the boards that it was measured on (hosts grow faster), times what the device is known to need beside the trend
        of the same table's other ways; 0 for a way that nobody measured.
        """
        measured = self.timing.get(timing, {})
        if device.name in measured or not measured:
            return measured.get(device.name, 0.0)
        table, year = timing.partition(" ")[0], year_of(device)
        others = [
            known[device.name] / _trend(known, year)
            for name, known in self.timing.items()
            if name.partition(" ")[0] == table and known.get(device.name)
        ]
        return _trend(measured, year) * (statistics.median(others) if others else 1.0)


def _trend(seconds: Mapping[str, float], year: float) -> float:
    """Seconds at `year` by the trend of their logarithm over the boards' years."""
    known = [(float(board_year(name)), math.log(value)) for name, value in seconds.items() if value > 0]
    return math.exp(trend_at(known, year)) if known else 0.0


def trend_at(points: Sequence[tuple[float, float]], when: float) -> float:
    """Least squares of values over times, at time `when`, but no more than two years past the last; the median where
    fewer than three times are known."""
    times, values = [time for time, _ in points], [value for _, value in points]
    when = min(when, max(times) + _YEARS_AHEAD)
    if len(set(times)) < _TIMES_MIN:
        return statistics.median(values)
    slope, start = statistics.linear_regression(times, values)
    return start + slope * when


@cache
def read_measured(folder: Path = MODELS) -> Measured:
    """The shares and the rule of a models folder; empty ones where it holds none."""
    path = folder / DEVICES_FILE
    if not path.is_file():
        return Measured({}, Rule((), 0.0))
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    devices = {
        name: {family: Share(float(e["value"]), str(e["source"]), True) for family, e in entries.items()}
        for name, entries in raw["devices"].items()
    }
    rule = raw["rule"]
    anchors = tuple(Anchor(**entry) for entry in rule["anchors"])
    rule_of = Rule(anchors, float(rule["exponent"]), bool(rule["by_lanes"]))
    return Measured(devices, rule_of, raw.get("timing", {}))


def rates_for(device: Device, folder: Path = MODELS) -> Rates:
    """What `device` sustains: its own calibration, else measured, else the rule."""
    measured = read_measured(folder)
    return resolved(device, measured.devices.get(device.name, {}), measured.rule, base_file(folder))


def base_file(folder: Path) -> Path | None:
    """The file of analytical constants that the models of a folder rest on, None where it has none of its own."""
    path = folder / BASE_FILE
    return path if path.is_file() else None


def resolved(device: Device, known: Mapping[str, Share], rule: Rule, base: Path | None = None) -> Rates:
    """What `device` sustains: its own calibration, else what is `known` of it, else by `rule`."""
    shares: dict[str, Share] = {}
    for family in (*FAMILIES, MEMORY):
        own = device.sustained.get(family)
        if own is not None:
            shares[family] = Share(own.value, own.source, True)
        elif family in known:
            shares[family] = known[family]
        elif family == MEMORY:
            if (value := rule.memory_share(device)) is not None:
                shares[family] = Share(value, "boards of the same chip, else with the same kind of memory", False)
        elif (value := rule.share(device, family)) is not None:
            shares[family] = Share(value, "clock rule for devices that nobody measured", False)
    if MEMORY in shares and (value := _reduce_share(device, shares[MEMORY].value, base)) is not None:
        shares[REDUCE] = Share(value, "that of streams times the trend of their ratio over the vendor's years", False)
    return Rates(shares, base)


def _reduce_share(device: Device, stream: float, base: Path | None) -> float | None:
    """The share of the memory rate in kernels that fold rows, where no table measures the architecture; else None.

    Measured architectures come ever closer to their streams: of NVIDIA's, one left out at a time, the trend of the
    ratio is off by 8 %, its median by 11 %, the median of the shares themselves by 19 %.
    """
    key, kind = architecture_key(device), device.kind
    sections = read_constants() if base is None else read_constants(base)
    ratios = {name: ratio for name, section in sections.items() if (ratio := _fitted_ratio(section))}
    vendor = key[:2]
    alike = {name: ratio for name, ratio in ratios.items() if name.startswith(vendor)}
    if kind != "gpu" or key in ratios or not alike:
        return None
    known = [(float(_YEARS_OF_ARCHITECTURES[name]), math.log(ratio)) for name, ratio in alike.items()]
    return stream * min(1.0, math.exp(trend_at(known, year_of(device))))


def _fitted_ratio(section: Section) -> float | None:
    reduce, stream = (section.constants.get(f"share.{name}") for name in ("reduce", "stream"))
    if reduce is None or stream is None or not (reduce.source + stream.source).startswith("fitted"):
        return None
    return reduce.value / stream.value
