"""The gate of accuracy: what a golden file says of every group of the suites, and what has become worse since.

A group is worse where its median error exceeds the golden one by more than its noise: half the width of the bootstrap
interval of its mean error, at least two points.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from stablecast.ir.errors import InputError
from stablecast.ir.text import table
from stablecast.validation.accuracy import AccuracyReport, Summary

LEAST_NOISE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """One group of the golden file: its median error then and now (None: it has no rows now), and its noise."""

    suite: str
    group: str
    path: str
    before: float
    now: float | None
    noise: float

    @property
    def worse(self) -> bool:
        return self.now is not None and self.now > self.before + self.noise

    def __str__(self) -> str:
        now = "no rows" if self.now is None else f"{self.now:.3f}"
        return f"{self.suite} {self.group}: {self.before:.3f} -> {now} (noise {self.noise:.3f})"


def golden_of(report: AccuracyReport, version: str, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of a golden file. `before`: an older one, whose groups of suites that did not run are kept."""
    ran = {row.suite for row in report.rows}
    old: Mapping[str, Any] = before or {"groups": [], "data": {}}
    kept = [entry for entry in old["groups"] if entry["suite"] not in ran]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "stablecast": version,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "backend": report.backend,
        "models": report.models,
        "data": dict(sorted({**old["data"], **report.hashes}.items())),
        "groups": [*kept, *(_group(summary) for summary in report.summaries)],
    }


def _group(summary: Summary) -> dict[str, object]:
    stats = summary.stats
    width = (stats.interval.high - stats.interval.low) / 2 if stats.interval else 0.0
    return {
        "suite": summary.suite,
        "group": summary.name,
        "path": summary.path,
        "rows": stats.count,
        "mape": round(stats.mape, 4),
        "median": round(stats.median, 4),
        "noise": round(max(width, LEAST_NOISE), 4),
    }


def verdicts(golden: Mapping[str, Any], report: AccuracyReport, suites: Sequence[str] = ()) -> list[Verdict]:
    """Every group of the golden file, of `suites` alone where given. Raises `InputError` for another backend's file."""
    if golden["backend"] != report.backend:
        raise InputError(f"the golden file is of {golden['backend']}, the report of {report.backend}")
    now = {(summary.suite, summary.path, summary.name): summary.stats.median for summary in report.summaries}
    return [
        Verdict(
            entry["suite"],
            entry["group"],
            entry["path"],
            float(entry["median"]),
            now.get((entry["suite"], entry["path"], entry["group"])),
            float(entry["noise"]),
        )
        for entry in golden["groups"]
        if not suites or entry["suite"] in suites
    ]


def differences(found: Sequence[Verdict]) -> str:
    """The groups whose median moved by a tenth of a point or more, as text."""
    moved = [v for v in found if v.now is None or abs(v.now - v.before) >= 0.001]
    if not moved:
        return "no group moved"
    body = [
        [
            v.suite,
            v.group,
            f"{v.before:.1%}",
            "no rows" if v.now is None else f"{v.now:.1%}",
            "worse" if v.worse else "",
        ]
        for v in moved
    ]
    return "\n".join(table([["suite", "group", "before", "now", ""], *body], right=range(2, 4), indent="  "))


def write(golden: Mapping[str, Any]) -> str:
    """The text of a golden file."""
    return json.dumps(golden, indent=1) + "\n"
