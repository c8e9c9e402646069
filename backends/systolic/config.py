"""Settings of a systolic run, and SCALE-Sim's .cfg files read leniently into them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from stablecast.backends.systolic.geometry import DATAFLOWS, Dataflow, as_dataflow
from stablecast.ir.errors import InputError

BandwidthMode = Literal["CALC", "USER"]
SparseFormat = Literal["csr", "csc", "ellpack_block"]
SPARSE_FORMATS: tuple[SparseFormat, ...] = ("csr", "csc", "ellpack_block")


@dataclass(frozen=True, slots=True)
class SramBanks:
    """Banks of one read SRAM, for layout modelling: `bandwidth` words a cycle over `banks` banks of `ports` ports."""

    bandwidth: int = 10
    banks: int = 1
    ports: int = 2
    custom_layout: bool = False


@dataclass(frozen=True, slots=True)
class SparsityConfig:
    """SCALE-Sim's [sparsity] section. `row_wise` is OptimizedMapping: random N per filter in blocks of `block`."""

    enabled: bool = False
    row_wise: bool = False
    block: int = 8
    seed: int = 40
    form: SparseFormat = "ellpack_block"


@dataclass(frozen=True, slots=True)
class SystolicConfig:
    """One array and its buffers. Sizes in array elements and kB (1024 words of one byte); bandwidths in words/cycle.

    `mode` CALC estimates the DRAM bandwidth a stall-free run needs, USER stalls at the given one. In compatibility
    mode the first of `bandwidths` is the output's and the reads use `ifmap.bandwidth` and `filter.bandwidth`, as
    SCALE-Sim does even without a layout; corrected, `bandwidths` are those of ifmap, filter and ofmap (one: all three).
    `dram_latency` cycles stand before each fold's first word in the corrected mode. `notes` lists what a file asked
    for and is not supported, or was defaulted.
    """

    rows: int
    cols: int
    ifmap_kb: int = 64
    filter_kb: int = 64
    ofmap_kb: int = 64
    dataflow: Dataflow = "ws"
    mode: BandwidthMode = "CALC"
    bandwidths: tuple[int, ...] = (10,)
    ifmap: SramBanks = SramBanks()
    filter: SramBanks = SramBanks()
    ifmap_offset: int = 0
    filter_offset: int = 10_000_000
    ofmap_offset: int = 20_000_000
    sparsity: SparsityConfig = SparsityConfig()
    run_name: str = "scale_run"
    topology: str = ""
    dram_latency: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (
            ("array height", self.rows),
            ("array width", self.cols),
            ("ifmap SRAM kB", self.ifmap_kb),
            ("filter SRAM kB", self.filter_kb),
            ("ofmap SRAM kB", self.ofmap_kb),
            ("number of bandwidths", len(self.bandwidths)),
            ("bandwidth", min(self.bandwidths, default=1)),
            ("ifmap SRAM bandwidth", self.ifmap.bandwidth),
            ("filter SRAM bandwidth", self.filter.bandwidth),
        ):
            if value < 1:
                raise InputError(f"{name} is {value}", "allowed: whole numbers from 1")
        if self.dataflow not in DATAFLOWS:
            raise InputError(f"unknown dataflow {self.dataflow!r}", "allowed: os, ws, is")

    @property
    def bandwidth(self) -> int:
        """Output bandwidth in compatibility mode, words per cycle."""
        return self.bandwidths[0]

    @property
    def operand_bandwidths(self) -> tuple[int, int, int]:
        """Bandwidths of ifmap, filter and ofmap in the corrected mode; what is not given is the first one's."""
        first, second, third = (*self.bandwidths, *self.bandwidths[:1] * 2)[:3]
        return first, second, third


# an assumption: about 100 ns at 1 GHz
_ASSUMED_DRAM_LATENCY = 100
_IGNORED = {
    "memorybanks": "has no effect on cycles (nor in SCALE-Sim)",
    "onchipmemorybanks": "has no effect on cycles (nor in SCALE-Sim)",
    "onchipmemorybankports": "has no effect on cycles (nor in SCALE-Sim)",
}
_REQUEST_BUFFERS = ("readrequestbuffer", "writerequestbuffer")
_SECTION = re.compile(r"\[([^\]]*)\]\s*$")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class _Keys:
    """The keys of a .cfg with their lines; each is taken once, so that what is left is unknown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, tuple[str, str, int]] = {}
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}: {error}", "give a SCALE-Sim .cfg file") from error
        for number, raw in enumerate(text.splitlines(), start=1):
            line = raw.strip()
            if not line or line[0] in "#;" or _SECTION.match(line):
                continue
            key, sign, value = (part.strip() for part in _split(line))
            if not sign:
                raise InputError(f"{path}:{number}: {line!r} is neither a section nor a key", "allowed: key : value")
            self.found[key.lower()] = (key, value, number)

    def text(self, key: str, default: str) -> str:
        """Value of `key`."""
        found = self.found.pop(key.lower(), None)
        return default if found is None or not found[1] else found[1].strip().strip("'\"")

    def number(self, key: str, default: int | None, least: int) -> int:
        """Whole number of `key`; `default` None makes it required."""
        found = self.found.pop(key.lower(), None)
        if found is None or not found[1]:
            if default is None:
                raise InputError(f"{self.path}: no {key}", f"add '{key} : <whole number from {least}>'")
            return default
        return self._whole(found, found[1], least)

    def numbers(self, key: str, default: int, least: int) -> tuple[int, ...]:
        """Comma list of whole numbers of `key`."""
        found = self.found.pop(key.lower(), None)
        if found is None or not found[1]:
            return (default,)
        return tuple(self._whole(found, part.strip(), least) for part in found[1].rstrip(", ").split(","))

    def _whole(self, found: tuple[str, str, int], text: str, least: int) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            place = f"{self.path}:{found[2]}: {found[0]} = {found[1]!r}"
            raise InputError(place, f"allowed: whole numbers from {least}")
        return value

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """One of `allowed`, whatever its case."""
        found = self.found.pop(key.lower(), None)
        if found is None or not found[1]:
            return default
        for option in allowed:
            if option.lower() == found[1].lower():
                return option
        raise InputError(f"{self.path}:{found[2]}: {found[0]} = {found[1]!r}", "allowed: " + ", ".join(allowed))

    def flag(self, key: str) -> bool:
        """A yes or no; no by default."""
        found = self.found.pop(key.lower(), None)
        if found is None or not found[1]:
            return False
        value = _BOOLEANS.get(found[1].lower())
        if value is None:
            raise InputError(f"{self.path}:{found[2]}: {found[0]} = {found[1]!r}", "allowed: True, False")
        return value


def _split(line: str) -> tuple[str, str, str]:
    match = re.search(r"[:=]", line)
    if match is None:
        return line, "", ""
    return line[: match.start()], match.group(), line[match.end() :]


def read_config(path: str | Path) -> SystolicConfig:
    """Read a SCALE-Sim v3 .cfg leniently: only the array's height and width are required.

    What is not supported, or has no effect, is named in `notes`. Raises InputError with file, line and key.
    """
    path = Path(path)
    keys = _Keys(path)
    notes: list[str] = []
    bandwidths = keys.numbers("Bandwidth", 10, 1)
    mode: BandwidthMode = "USER" if keys.choice("InterfaceBandwidth", "CALC", ("CALC", "USER")) == "USER" else "CALC"
    ramulator = keys.flag("UseRamulatorTrace")
    if ramulator:
        notes.append(
            "UseRamulatorTrace: Ramulator is not called; the corrected mode assumes a DRAM latency of "
            f"{_ASSUMED_DRAM_LATENCY} cycles per fold, the compatibility mode none"
        )
    config = SystolicConfig(
        rows=keys.number("ArrayHeight", None, 1),
        cols=keys.number("ArrayWidth", None, 1),
        ifmap_kb=keys.number("IfmapSramSzkB", 64, 1),
        filter_kb=keys.number("FilterSramSzkB", 64, 1),
        ofmap_kb=keys.number("OfmapSramSzkB", 64, 1),
        dataflow=as_dataflow(keys.choice("Dataflow", "ws", DATAFLOWS)),
        mode=mode,
        bandwidths=bandwidths,
        ifmap=_banks(keys, "Ifmap", bandwidths[0], notes),
        filter=_banks(keys, "Filter", bandwidths[0], notes),
        ifmap_offset=keys.number("IfmapOffset", 0, 0),
        filter_offset=keys.number("FilterOffset", 10_000_000, 0),
        ofmap_offset=keys.number("OfmapOffset", 20_000_000, 0),
        sparsity=_sparsity(keys),
        run_name=_run_name(keys, path),
        topology=keys.text("TopologyCsvLoc", ""),
        dram_latency=_ASSUMED_DRAM_LATENCY if ramulator else 0,
    )
    notes.extend(_leftovers(keys, ramulator))
    return replace(config, notes=tuple(notes))


def _run_name(keys: _Keys, path: Path) -> str:
    line = keys.found.get("run_name", ("", "", 0))[2]
    name = keys.text("run_name", path.stem)
    if name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise InputError(f"{path}:{line}: run_name = {name!r}", "allowed: a folder name without separators")
    return name


def _banks(keys: _Keys, operand: str, bandwidth: int, notes: list[str]) -> SramBanks:
    if f"{operand}SRAMBankBandwidth".lower() not in keys.found:
        notes.append(f"{operand}SRAMBankBandwidth is missing: Bandwidth = {bandwidth} words/cycle is used")
    return SramBanks(
        bandwidth=keys.number(f"{operand}SRAMBankBandwidth", bandwidth, 1),
        banks=keys.number(f"{operand}SRAMBankNum", 1, 1),
        ports=keys.number(f"{operand}SRAMBankPort", 2, 1),
        custom_layout=keys.flag(f"{operand}CustomLayout"),
    )


def _sparsity(keys: _Keys) -> SparsityConfig:
    form = keys.choice("SparseRep", "ellpack_block", SPARSE_FORMATS)
    return SparsityConfig(
        enabled=keys.flag("SparsitySupport"),
        row_wise=keys.flag("OptimizedMapping"),
        block=keys.number("BlockSize", 8, 2),
        seed=keys.number("RandomNumberGeneratorSeed", 40, 0),
        form="csr" if form == "csr" else "csc" if form == "csc" else "ellpack_block",
    )


def _leftovers(keys: _Keys, ramulator: bool) -> list[str]:
    notes: list[str] = []
    for low, (key, value, line) in keys.found.items():
        if low in _REQUEST_BUFFERS:
            if ramulator:
                notes.append(f"{key} (line {line}): not modelled")
            continue
        reason = _IGNORED.get(low, f"= {value} is not supported")
        notes.append(f"{key} (line {line}) {reason}")
    return notes
