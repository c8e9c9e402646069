"""What a suite is: cases with a measured time, turned into rows with a predicted one."""

import csv
import gzip
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stablecast.backends.analytical.constants import CONSTANTS_FILE
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.collectives import COLLECTIVE_CONSTANTS_FILE
from stablecast.backends.device import Device
from stablecast.backends.learned.calibration import FORM, Calibration, MeasuredGemm, adjuster
from stablecast.backends.learned.store import model_keys, read_model
from stablecast.backends.pricing import price
from stablecast.backends.registry import Choice
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelRow, KernelTable

FloatArray = npt.NDArray[np.float64]
Record = Mapping[str, str]
MAX_ROWS: Final = 4000
"""Rows that are scored of one table and device; a larger table is thinned with a fixed seed."""

ANALYTICAL: Final = Choice()
_SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One measured time beside its prediction, seconds.

    `item`: what was measured; `device`: the catalogue's name. `peer`, `peer_predicted_s`: the peer whose prediction the
    data hold; `peers`: all of them. `group`: the part of the suite that it counts in. `path`: `table` for a kernel from
    its sizes, `program` for a captured program. `rounding_s`: half of the last digit that the label keeps. `in_sample`:
    the table is one that the shipped constants were fitted on. `key`: equal for the same item on different devices.
    """

    suite: str
    item: str
    device: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    peer: str = ""
    peer_predicted_s: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict[str, float])
    group: str = ""
    path: str = "table"
    rounding_s: float | None = None
    in_sample: bool = False
    key: str = ""
    basis: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "item": self.item,
            "device": self.device,
            "measured_s": self.measured_s,
            "predicted_s": self.predicted_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "peer": self.peer,
            "peer_predicted_s": self.peer_predicted_s,
            "peers": dict(self.peers),
            "group": self.group,
            "path": self.path,
            "rounding_s": self.rounding_s,
            "in_sample": self.in_sample,
            "basis": self.basis,
        }


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with its measured time; fields as in `Row`. `extra_s`: what its way of timing adds to it."""

    item: str
    kernel: KernelRow
    measured_s: float
    group: str
    peers: Mapping[str, float] = field(default_factory=dict[str, float])
    rounding_s: float | None = None
    key: str = ""
    extra_s: float = 0.0


Make = Callable[[Device, Record], Case | None]
Progress = Callable[[str], None]


def _silent(what: str) -> None:
    """Tells nobody."""


def examples_folder() -> Path | None:
    """Where the example programs lie: beside this package in the repository, or in the folder that one works in."""
    here = Path(__file__).resolve().parents[2] / "examples"
    return next((folder for folder in (here, Path("examples")) if (folder / "llama.py").is_file()), None)


@dataclass
class Data:
    """The folder of measurements: tables by path, the catalogue, the chosen backends, and what was left out and why.

    `examples`: folder of the example programs, None where they are not at hand. `capture`: whether models are captured
    whose captures are not on disk. `progress`: is told what is at hand.
    """

    folder: Path
    choice: Choice
    max_rows: int = MAX_ROWS
    examples: Path | None = field(default_factory=examples_folder)
    capture: bool = True
    catalogue: Catalogue = field(default_factory=Catalogue)
    missing: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    hashes: dict[str, str] = field(default_factory=dict[str, str])
    given: tuple[MeasuredGemm, ...] = ()
    progress: Progress = _silent

    def say(self, what: str) -> None:
        """Tell whoever waits what is at hand."""
        self.progress(what)

    def calibrate(self, found: Sequence[Calibration]) -> None:
        """Use what was measured on devices beforehand, and leave the measured products out of the score.

        Raises `InputError` for a product that names no device.
        """
        self.given = tuple(gemm for calibration in found for gemm in calibration.gemms)
        if not all(gemm.device for gemm in self.given):
            raise InputError("a measured product needs its device here", f"write {FORM}")
        self.catalogue = Catalogue(adjust=adjuster(found))

    def _is_given(self, device: str, row: KernelRow) -> bool:
        return any(
            gemm.device == device
            and (gemm.m, gemm.n, gemm.k, gemm.batch) == (row.m, row.n, row.k, row.batch)
            and gemm.row(self.catalogue.device(device)).math == row.math
            for gemm in self.given
        )

    def read(self, path: str) -> list[Record]:
        """The rows of a table, none where the folder does not hold it (then it is in `missing`)."""
        full = self.folder / path
        if not full.is_file():
            self.missing.append(path)
            return []
        content = full.read_bytes()
        self.hashes[path] = hashlib.sha256(content).hexdigest()[:12]
        text = (gzip.decompress(content) if full.suffix == ".gz" else content).decode()
        return list(csv.DictReader(io.StringIO(text)))

    def find(self, path: str) -> Path | None:
        """A file of the folder, None where it is missing."""
        full = self.folder / path
        if full.is_file():
            self.hashes[path] = hashlib.sha256(full.read_bytes()).hexdigest()[:12]
            return full
        self.missing.append(path)
        return None

    def thinned(self, records: Sequence[Record], what: str, columns: int = 1) -> Sequence[Record]:
        """At most `max_rows` of them, the same ones every time; `columns`: measurements in a record."""
        limit = max(self.max_rows // columns, 1)
        if len(records) <= limit:
            return records
        chosen = np.random.default_rng(_SEED).choice(len(records), limit, replace=False)
        self.notes.append(f"{what}: {limit} of {len(records)} rows, fixed seed")
        return [records[int(index)] for index in np.sort(chosen)]

    def kernels(self, suite: str, device: str, records: Iterable[Record], make: Make, fitted: str = "") -> list[Row]:
        """Rows of kernels on one device. `make` gives None for a record that does not count.

        `fitted`: the name by which the constants' sources know the table.
        """
        found = self.catalogue.device(device)
        cases = [case for record in records if (case := make(found, record)) is not None and case.measured_s > 0]
        if self.given:
            cases = [case for case in cases if not self._is_given(device, case.kernel)]
        if not cases:
            return []
        estimates = self._price(suite, [case.kernel for case in cases], found)
        if estimates is None:
            return []
        extra = np.array([case.extra_s for case in cases])
        time, low, high = (column + extra for column in estimates[:3])
        basis = estimates[3]
        seen = bool(fitted) and is_fitted(fitted, self.choice)
        return [
            make_row(suite, device, case, (float(time[i]), float(low[i]), float(high[i])), str(basis[i]), seen)
            for i, case in enumerate(cases)
        ]

    def _price(
        self, suite: str, kernels: Sequence[KernelRow], device: Device
    ) -> tuple[FloatArray, FloatArray, FloatArray, Sequence[str]] | None:
        try:
            estimates = price(KernelTable.of(kernels), device, self.choice).estimates
        except InputError as error:
            self.notes.append(f"{suite} on {device.name} is left out: {error.message}")
            return None
        return estimates.time_s, estimates.low_s, estimates.high_s, list(map(str, estimates.source))


def make_row(suite: str, device: str, case: Case, times: tuple[float, float, float], basis: str, seen: bool) -> Row:
    """The row of a priced case."""
    peer = next(iter(case.peers), "")
    return Row(
        suite,
        case.item,
        device,
        case.measured_s,
        *times,
        peer=peer,
        peer_predicted_s=case.peers.get(peer),
        peers=case.peers,
        group=case.group,
        rounding_s=case.rounding_s,
        in_sample=seen,
        key=case.key or case.item,
        basis=basis,
    )


@cache
def _fit_sources() -> str:
    files = (CONSTANTS_FILE, COLLECTIVE_CONSTANTS_FILE)
    return "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())


@cache
def _learned_tables() -> frozenset[str]:
    models = [read_model(key) for key in model_keys()]
    return frozenset(str(entry["table"]) for model in models if model for entry in model.card["data"])


def is_fitted(table: str, choice: Choice = ANALYTICAL) -> bool:
    """Whether what prices with `choice` names `table` among the tables that it was fitted on."""
    learned = "learned" in choice.names
    if learned and any(known.startswith(table) or table.startswith(known) for known in _learned_tables()):
        return True
    return table in _fit_sources()


@dataclass(frozen=True, slots=True)
class Suite:
    """A named set of measurements.

    `run`: the rows that the data give. `origin`: where to get the data. `held_out`: scoring it is a look at a test set,
    and is logged. `path`: what its rows start from, `table` or `program`.
    """

    name: str
    title: str
    run: Callable[[Data], list[Row]]
    origin: str
    held_out: bool = False
    path: str = "table"


def whole(record: Record, *columns: str) -> list[int]:
    """Columns as whole numbers; an empty cell is 0."""
    return [int(float(record.get(column) or 0)) for column in columns]


def number(record: Record, column: str) -> float:
    """A column as a number; an empty cell is 0."""
    return float(record.get(column) or 0)


def half_digit(text: str, unit_s: float) -> float | None:
    """Half of the last digit that `text` keeps, in seconds."""
    if not text:
        return None
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** (-decimals + int(exponent or 0)) * unit_s
