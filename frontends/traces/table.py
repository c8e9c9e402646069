"""Plain CSV: a row an event.

Columns: `name`; `start_s` and `duration_s` (or with `_ms`, `_us`, `_ns`; without any unit, seconds); and, if wanted,
`stream`, `device`, `rank`, `category` (a `Category`; `kernel` where left out), `bytes`, `shape`, `scope`.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stablecast.frontends.traces.builder import EventBuilder
from stablecast.frontends.traces.stream import Pieces, text_lines
from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import Category, TraceEvents

_UNITS: Final[Mapping[str, float]] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "": 1.0}
_HOST: Final = frozenset({Category.OP, Category.RUNTIME, Category.PYTHON, Category.OTHER})


def read_csv(path: Path) -> TraceEvents:
    """The events of a plain table; rows whose numbers cannot be read are counted in `skipped`.

    Without a start column the rows follow one another. Raises `InputError` for missing columns and where no row is
    left.
    """
    pieces = Pieces(path)
    rows = csv.DictReader(text_lines(pieces))
    fields = rows.fieldnames or ()
    start, duration = _timed(fields, "start"), _timed(fields, "duration")
    if "name" not in fields or duration is None:
        raise InputError(f"{path} has no columns name and duration_s", "its first line is: " + ",".join(fields)[:200])
    builder = EventBuilder()
    skipped = 0
    clock, rank = 0.0, 0
    for row in rows:
        try:
            took = float(row[duration[0]]) * duration[1]
            begun = float(row[start[0]]) * start[1] if start else clock
            rank = int(row.get("rank") or rank)
            category = Category(row.get("category") or "kernel")
            device = int(row.get("device") or 0)
            moved = float(row.get("bytes") or 0)
            stream = row.get("stream") or "0"
        except (ValueError, TypeError):
            skipped += 1
            continue
        clock = begun + took
        on_device = category not in _HOST
        kept = {"Input Dims": row.get("shape"), "tf_op": row.get("scope")}
        builder.add(
            row["name"] or "",
            begun,
            took,
            builder.stream(int(stream) if stream.isdigit() else stream),
            category,
            on_device=on_device,
            device=device if on_device else -1,
            nbytes=moved,
            args={key: value for key, value in kept.items() if value},
        )
    if not len(builder):
        raise InputError(f"{path} has no readable row")
    return builder.build(rank=rank, source=str(path), damage=pieces.damage, skipped=skipped)


def _timed(fields: Sequence[str], name: str) -> tuple[str, float] | None:
    for unit, scale in _UNITS.items():
        column = f"{name}_{unit}" if unit else name
        if column in fields:
            return column, scale
    return None


def looks_like(head: bytes) -> bool:
    """Whether the first line of a file names the columns of a plain table."""
    first = head.split(b"\n", 1)[0].decode(errors="replace").lower()
    return "," in first and "name" in first and "duration" in first
