"""Accuracy of a backend over suites: summaries by group and device, beside the peers, and the log of test-set looks."""

import csv
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import stablecast.backends
from stablecast.backends.learned.calibration import Calibration
from stablecast.backends.registry import parse_choice
from stablecast.ir.errors import InputError
from stablecast.ir.text import percent, table
from stablecast.validation.metrics import ErrorStats, across, error_stats, grouped_ratio_error
from stablecast.validation.suites import SUITES, Data, Row, run_suite, suite_names
from stablecast.validation.suites.base import MAX_ROWS

LOG_COLUMNS: Final[tuple[str, ...]] = (
    "date", "suite", "backend", "models", "data", "path", "rows", "mape", "median", "p90", "bias", "weighted",
    "across_devices",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of one group of rows that share a suite and a path.

    `across_devices`: ratio error between devices for the same item; `across_sizes`: between items on the same device;
    `order`: share of device pairs whose faster one is picked. `peers`: the same errors of each peer, on its rows only.
    `in_sample`: share of rows from tables that the constants were fitted on.
    """

    suite: str
    name: str
    path: str
    stats: ErrorStats
    across_devices: float | None
    across_sizes: float | None
    order: float | None
    in_sample: float
    peers: Mapping[str, ErrorStats]

    def to_dict(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "group": self.name,
            "path": self.path,
            **self.stats.to_dict(),
            "across_devices": self.across_devices,
            "across_sizes": self.across_sizes,
            "order": self.order,
            "in_sample": self.in_sample,
            "peers": {name: stats.to_dict() for name, stats in self.peers.items()},
        }


@dataclass(frozen=True, repr=False)
class AccuracyReport:
    """Rows of the suites that ran, their summaries, and what could not run. `walls_s`: seconds that each suite took."""

    rows: tuple[Row, ...]
    backend: str
    skipped: Mapping[str, str]
    notes: tuple[str, ...]
    hashes: Mapping[str, str]
    models: str
    walls_s: Mapping[str, float] = field(default_factory=dict[str, float])

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """One a suite and group."""
        return self._by(lambda row: row.group)

    @cached_property
    def by_device(self) -> tuple[Summary, ...]:
        """One a suite and device."""
        return self._by(lambda row: row.device)

    @cached_property
    def totals(self) -> tuple[Summary, ...]:
        """One a suite and path: rows from tables and from programs are never put together."""
        return self._by(lambda row: "all")

    def _by(self, key: Callable[[Row], str]) -> tuple[Summary, ...]:
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.suite, row.path, key(row)), []).append(row)
        return tuple(summarise(suite, name, path, rows) for (suite, path, name), rows in groups.items())

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "backend": self.backend,
            "models": self.models,
            "rows": [row.to_dict() for row in self.rows],
            "summaries": [summary.to_dict() for summary in (*self.totals, *self.summaries)],
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
            "data": dict(self.hashes),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def to_csv(self) -> str:
        """The rows as CSV."""
        out = io.StringIO()
        names = [name for name in self.rows[0].to_dict() if name != "peers"] if self.rows else ["suite"]
        writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.to_dict() for row in self.rows)
        return out.getvalue()

    def __repr__(self) -> str:
        lines = [f"accuracy of {self.backend} (models {self.models})", ""]
        for name in dict.fromkeys(row.suite for row in self.rows):
            lines.append(f"{name}: {SUITES[name].title}")
            own = [summary for summary in (*self.totals, *self.summaries, *self.by_device) if summary.suite == name]
            lines += summary_table(own)
            lines.append("")
        lines += [f"{name} did not run: {why}" for name, why in self.skipped.items()]
        lines += [f"note: {note}" for note in self.notes]
        if self.walls_s:
            walls = ", ".join(f"{name} {wall:.0f} s" for name, wall in self.walls_s.items())
            lines.append(f"took {sum(self.walls_s.values()):.0f} s, captures that were not on disk included: {walls}")
        lines.append(
            "errors are of predicted against measured; * the shipped constants were fitted on that table. "
            "95 % of it: bootstrap interval of the mean; across devices: median error of the ratio between two "
            "devices for one item, across sizes between two items on one device; order: how often the faster device "
            "is picked; rounding: mean share that the last digit of a label leaves open."
        )
        return "\n".join(lines)


def summary_table(summaries: Sequence[Summary]) -> list[str]:
    """Lines of a table, one a summary; the rounding of labels is a column where a label has one."""
    rounded = any(summary.stats.rounding is not None for summary in summaries)
    columns = [title for title in _COLUMNS if rounded or title != "rounding"]
    rows = [[_COLUMNS[title](summary) for title in columns] for summary in summaries]
    return table([columns, *rows], right=range(2, len(columns) - 1), indent="  ")


def _interval(stats: ErrorStats) -> str:
    if stats.interval is None:
        return ""
    return f"{100 * stats.interval.low:.1f} to {percent(stats.interval.high)}"


def _share(value: float | None) -> str:
    return "" if value is None else percent(value)


_COLUMNS: Final[Mapping[str, Callable[[Summary], str]]] = {
    "group": lambda one: one.name + ("*" if one.in_sample > 0 else ""),
    "path": lambda one: one.path,
    "rows": lambda one: str(one.stats.count),
    "mean": lambda one: percent(one.stats.mape),
    "95 % of it": lambda one: _interval(one.stats),
    "median": lambda one: percent(one.stats.median),
    "p90": lambda one: percent(one.stats.p90),
    "rounding": lambda one: _share(one.stats.rounding),
    "bias": lambda one: f"{one.stats.bias * 100:+.1f} %",
    "by time": lambda one: percent(one.stats.weighted),
    "rank": lambda one: "" if one.stats.rank is None else f"{one.stats.rank:.3f}",
    "in range": lambda one: _share(one.stats.coverage),
    "width": lambda one: _share(one.stats.width),
    "across devices": lambda one: _share(one.across_devices),
    "across sizes": lambda one: _share(one.across_sizes),
    "order": lambda one: _share(one.order),
    "peers (mean)": lambda one: ", ".join(
        f"{name} {percent(stats.mape)} of {stats.count}" for name, stats in one.peers.items()
    ),
}
"""Title -> what stands in a column of `summary_table`."""


def summarise(suite: str, name: str, path: str, rows: Sequence[Row]) -> Summary:
    """The errors of `rows`."""
    measured, predicted = _column(rows, "measured_s"), _column(rows, "predicted_s")
    roundings = [row.rounding_s for row in rows]
    rounding = np.array([value or 0.0 for value in roundings]) if any(roundings) else None
    stats = error_stats(measured, predicted, _column(rows, "low_s"), _column(rows, "high_s"), rounding)
    peers: dict[str, ErrorStats] = {}
    for peer in dict.fromkeys(name for row in rows for name in row.peers):
        own = [row for row in rows if row.peers.get(peer)]
        theirs = np.array([row.peers[peer] for row in own])
        peers[peer] = error_stats(_column(own, "measured_s"), theirs, bootstrap=False)
    devices = [row.device for row in rows]
    between, order = across([row.key for row in rows], devices, measured, predicted)
    return Summary(
        suite,
        name,
        path,
        stats,
        between,
        grouped_ratio_error(devices, measured, predicted),
        order,
        float(np.mean([row.in_sample for row in rows])),
        peers,
    )


def _column(rows: Sequence[Row], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([getattr(row, name) for row in rows], dtype=np.float64)


def run_accuracy(
    suites: str,
    folder: Path,
    backend: str,
    max_rows: int | None = None,
    *,
    examples: bool = True,
    calibrations: Sequence[Calibration] = (),
    progress: Callable[[str], None] | None = None,
) -> AccuracyReport:
    """The suites that `suites` names, on the data under `folder`, by `backend`.

    `calibrations`: what was measured on devices beforehand; rows of these products are left out of the score.
    `max_rows`: rows to score of one table and device. `examples`: whether to capture programs that are not on disk.
    `progress`: is told what is at hand.
    A suite without data is skipped with a reason where several were asked for. Raises `InputError` where none can run.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", "say where the measurements lie with --data")
    names = suite_names(suites)
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    notes: list[str] = []
    hashes: dict[str, str] = {}
    walls: dict[str, float] = {}
    for name in names:
        data = Data(folder, parse_choice(backend), max_rows or MAX_ROWS)
        data.examples = data.examples if examples else None
        data.capture = examples
        data.calibrate(calibrations)
        if progress is not None:
            place = f"{name} ({len(walls) + 1} of {len(names)})"
            progress(f"scoring {place}")
            data.progress = partial(_tell, progress, place)
        began = time.perf_counter()
        try:
            rows += run_suite(name, data)
        except InputError as error:
            if len(names) == 1:
                raise
            skipped[name] = str(error)
        walls[name] = time.perf_counter() - began
        notes += data.notes
        hashes |= data.hashes
    if not rows:
        raise InputError(f"{folder} holds no data of any suite", "; ".join(skipped.values())[:400])
    return AccuracyReport(tuple(rows), str(parse_choice(backend)), skipped, tuple(notes), hashes, model_hash(), walls)


def beside(report: AccuracyReport, other: AccuracyReport) -> AccuracyReport:
    """`report` with the predictions of `other`, another backend's run of the same suites, among the peers."""
    theirs: dict[tuple[str, ...], list[float]] = {}
    for row in other.rows:
        theirs.setdefault(_row_key(row), []).append(row.predicted_s)
    rows: list[Row] = []
    for row in report.rows:
        found = theirs.get(_row_key(row))
        rows.append(replace(row, peers={**row.peers, other.backend: found.pop(0)}) if found else row)
    walls = {name: wall + other.walls_s.get(name, 0.0) for name, wall in report.walls_s.items()}
    return replace(report, rows=tuple(rows), walls_s=walls)


def _row_key(row: Row) -> tuple[str, ...]:
    return row.suite, row.path, row.group, row.item, row.device


def _tell(progress: Callable[[str], None], place: str, what: str) -> None:
    progress(f"scoring {place}: {what}")


def model_hash() -> str:
    """Short hash over the models that ship with stablecast: it changes when a prediction may."""
    digest = hashlib.sha256()
    for folder in stablecast.backends.__path__:
        for path in sorted((Path(folder) / "models").rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def log_rows(report: AccuracyReport) -> list[dict[str, Any]]:
    """What the log keeps of a report: one row a suite that holds a test set."""
    found: list[dict[str, Any]] = []
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    data = hashlib.sha256(json.dumps(dict(sorted(report.hashes.items()))).encode()).hexdigest()[:12]
    for summary in report.totals:
        if not SUITES[summary.suite].held_out:
            continue
        stats = summary.stats
        values = (
            *(stamp, summary.suite, report.backend, report.models, data, summary.path, stats.count),
            *(round(value, 4) for value in (stats.mape, stats.median, stats.p90, stats.bias, stats.weighted)),
            round(summary.across_devices, 4) if summary.across_devices is not None else "",
        )
        found.append(dict(zip(LOG_COLUMNS, values, strict=True)))
    return found


def append_log(report: AccuracyReport, path: Path) -> int:
    """Append the scores on test sets to the log at `path`; how many rows were added.

    Raises `InputError` where it cannot be written.
    """
    rows = log_rows(report)
    if not rows:
        return 0
    try:
        fresh = not path.exists() or not path.stat().st_size
        with path.open("a", newline="", encoding="utf-8") as out:
            writer: csv.DictWriter[str] = csv.DictWriter(out, LOG_COLUMNS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", "choose another place with --log") from None
    return len(rows)


def scatter(rows: Iterable[Row], width: int = 640) -> str:
    """An SVG picture of predicted against measured time, both on logarithmic axes."""
    listed = list(rows)
    measured, predicted = _column(listed, "measured_s"), _column(listed, "predicted_s")
    low = float(np.floor(np.log10(min(measured.min(), predicted.min()))))
    high = float(np.ceil(np.log10(max(measured.max(), predicted.max()))))
    side, edge = width - 80, 50

    def along(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return (np.log10(values) - low) / max(high - low, 1.0) * side

    groups = {name: number for number, name in enumerate(dict.fromkeys(row.group for row in listed))}
    tint = {row_group: f"hsl({number * 47 % 360},60%,45%)" for row_group, number in groups.items()}
    dots = "".join(
        f'<circle cx="{edge + x:.1f}" cy="{edge + side - y:.1f}" r="2" fill="{tint[row.group]}" fill-opacity="0.4"/>'
        for row, x, y in zip(listed, along(measured), along(predicted), strict=True)
    )
    step = side / max(high - low, 1.0)
    ticks = "".join(
        f'<text x="{edge + place * step:.0f}" y="{edge + side + 16}" font-size="10">1e{low + place:.0f} s</text>'
        f'<text x="2" y="{edge + side - place * step:.0f}" font-size="10">1e{low + place:.0f} s</text>'
        for place in range(int(high - low) + 1)
    )
    line = f'<line x1="{edge}" y1="{edge + side}" x2="{edge + side}" y2="{edge}" stroke="#888"/>'
    box = f'<rect x="{edge}" y="{edge}" width="{side}" height="{side}" fill="none" stroke="#ccc"/>'
    caption = (
        f'<text x="{edge}" y="30" font-size="12">predicted (up) against measured (right), {len(listed)} rows</text>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{width}" font-family="sans-serif">'
    return f"{head}{caption}{box}{line}{dots}{ticks}</svg>\n"
