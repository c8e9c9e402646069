"""`compare`: one workload on several systems and by several backends, side by side."""

import csv
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stablecast._predict import Options, Session, platform_of, split_system
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.prediction import Prediction
from stablecast.backends.prediction_text import prediction_csv, prediction_records, to_frame
from stablecast.ir.errors import InputError
from stablecast.ir.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Failed:
    """A row without a time: which system and backend, and why."""

    system: str
    backend: str
    error: str

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "system": self.system, "backend": self.backend, "error": self.error}


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One system as several backends see it.

    `step_time_s`: by backend. `spread`: slowest over fastest. `klass`: the class of kernel whose times differ most
    between these two, and `share`: its part of all such differences, 0 to 1; empty and 0 where they agree.
    """

    system: str
    devices: int
    step_time_s: Mapping[str, float]
    spread: float
    klass: str
    share: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "devices": self.devices,
            "step_time_s": dict(self.step_time_s),
            "spread": self.spread,
            "class": self.klass,
            "share": self.share,
        }


def _fidelity(rows: Sequence[Prediction]) -> Fidelity:
    fast, slow = (pick(rows, key=lambda row: row.step_time_s) for pick in (min, max))
    left, right = _by_class(fast), _by_class(slow)
    apart = {name: abs(left.get(name, 0.0) - right.get(name, 0.0)) for name in dict.fromkeys((*left, *right))}
    total = sum(apart.values())
    klass = max(apart, key=lambda name: apart[name]) if total > 0 else ""
    return Fidelity(
        fast.system,
        fast.devices,
        {row.backend: row.step_time_s for row in rows},
        slow.step_time_s / fast.step_time_s if fast.step_time_s else 1.0,
        klass,
        apart[klass] / total if klass else 0.0,
    )


def _by_class(row: Prediction) -> dict[str, float]:
    times: dict[str, float] = {}
    for kernel in row.kernels:
        times[kernel.klass] = times.get(kernel.klass, 0.0) + kernel.time_s
    return times


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Predictions of one workload side by side.

    `rows`: fastest first, rows without a time last. `wall_s`: seconds that it took.
    """

    workload: str
    rows: tuple[Prediction, ...]
    failed: tuple[Failed, ...] = ()
    wall_s: float = 0.0

    @property
    def ties(self) -> tuple[tuple[str, str], ...]:
        """Pairs of rows whose ranges overlap: which is faster is not known."""
        return tuple(
            (label(left), label(right))
            for left, right in combinations(self.rows, 2)
            if left.step_time_low_s <= right.step_time_high_s and right.step_time_low_s <= left.step_time_high_s
        )

    @property
    def disagreements(self) -> tuple[dict[str, Any], ...]:
        """Pairs of systems that two backends put in opposite order."""
        by_backend: dict[str, dict[str, float]] = {}
        for row in self.rows:
            by_backend.setdefault(row.backend, {})[row.system] = row.step_time_s
        found: list[dict[str, Any]] = []
        for (one, times), (two, others) in combinations(by_backend.items(), 2):
            for left, right in combinations([system for system in times if system in others], 2):
                if (times[left] - times[right]) * (others[left] - others[right]) < 0:
                    found.append({"systems": [left, right], "backends": [one, two]})
        return tuple(found)

    @property
    def fidelities(self) -> tuple[Fidelity, ...]:
        """Every system that several backends price, in the order of its fastest row."""
        by_system: dict[tuple[str, int], list[Prediction]] = {}
        for row in self.rows:
            by_system.setdefault((row.system, row.devices), []).append(row)
        return tuple(_fidelity(rows) for rows in by_system.values() if len(rows) > 1)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `stablecast compare --json`."""
        return {
            "schema": SCHEMA,
            "rows": [row.to_dict() for row in (*self.rows, *self.failed)],
            "ties": [list(pair) for pair in self.ties],
            "disagreements": list(self.disagreements),
            "fidelities": [entry.to_dict() for entry in self.fidelities],
            "wall_s": self.wall_s,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_pandas(self) -> "pd.DataFrame":
        """One row a system and backend; needs pandas."""
        return to_frame(self._records(), _COLUMNS)

    def kernels_to_pandas(self) -> "pd.DataFrame":
        """One row a kernel of each system and backend; needs pandas."""
        from stablecast.backends.prediction_text import FRAME_COLUMNS

        return to_frame([record for row in self.rows for record in prediction_records(row)], FRAME_COLUMNS)

    def to_csv(self) -> str:
        """The rows as CSV."""
        out = io.StringIO()
        columns: list[str] = list(_COLUMNS)
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._records())
        return out.getvalue()

    def _records(self) -> list[dict[str, Any]]:
        records = [{name: getattr(row, name) for name in _COLUMNS[:-1]} | {"error": ""} for row in self.rows]
        empty = dict.fromkeys(_COLUMNS, "")
        return records + [
            empty | {"workload": self.workload, "system": row.system, "backend": row.backend, "error": row.error}
            for row in self.failed
        ]

    def __repr__(self) -> str:
        from stablecast.report.comparison import comparison_text

        return comparison_text(self)

    def _repr_html_(self) -> str:
        from stablecast.report.comparison import comparison_html

        return comparison_html(self)


_COLUMNS = (
    "workload",
    "system",
    "devices",
    "backend",
    "exec",
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    "compute_s",
    "exposed_communication_s",
    "bound",
    "mfu",
    "hfu",
    "peak_memory_bytes",
    "memory_bytes",
    "fits",
    "complete",
    "error",
)


def label(row: Prediction) -> str:
    """`4 x h100-sxm (analytical)`, as in `ties`."""
    many = f"{row.devices} x " if row.devices > 1 else ""
    return f"{many}{row.system} ({row.backend})"


def compare(
    source: Workload | Callable[..., Any] | str | Path,
    *args: Any,
    on: Sequence[str],
    backends: Sequence[str] = ("analytical",),
    options: Options | None = None,
    **kwargs: Any,
) -> Comparison:
    """Predict one program on every system of `on` by every backend of `backends`.

    A JAX function is captured once per platform. A device that lacks the peak for a product's math mode gives a
    failed row, not an error. Raises `StablecastError` for everything else.
    """
    started = time.perf_counter()
    if not on:
        raise InputError("nothing to compare on", "give --on DEVICE once for each device")
    base = options or Options()
    catalogue = Catalogue()
    sessions: dict[str, Session] = {}
    rows: list[Prediction] = []
    failed: list[Failed] = []
    for spec in on:
        platform = platform_of(catalogue.resolve(spec).device)
        key = platform if callable(source) else ""
        if key not in sessions:
            sessions[key] = Session(_captured(source, args, kwargs, platform), base, catalogue)
        for backend in backends:
            session = sessions[key].with_backend(backend)
            system = session.system(spec)
            session.device_program(system.device)
            try:
                rows.append(session.predict(spec))
            except InputError as error:
                failed.append(Failed(split_system(spec)[0], backend, str(error)))
    rows.sort(key=lambda row: row.step_time_s)
    name = next(iter(sessions.values())).name
    return Comparison(name, tuple(rows), tuple(failed), time.perf_counter() - started)


def _captured(
    source: Workload | Callable[..., Any] | str | Path, args: Sequence[Any], kwargs: dict[str, Any], platform: str
) -> Workload | str | Path:
    if isinstance(source, (Workload, str, Path)):
        return source
    from stablecast._capture import capture

    return capture(source, *args, platform=platform, **kwargs)


__all__ = ["Comparison", "Failed", "Fidelity", "compare", "label", "prediction_csv"]
