"""Nsight Systems exports: the SQLite data base (`nsys export --type sqlite`) and the CSV of `cuda_gpu_trace`."""

import csv
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

from stablecast.frontends.traces.builder import EventBuilder
from stablecast.frontends.traces.stream import Pieces, text_lines
from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import Category, TraceEvents

SQLITE_MAGIC: Final = b"SQLite format 3\x00"
_NANO: Final = 1e-9
_COPY_KINDS: Final[Mapping[int, str]] = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_UNITS: Final[Mapping[str, float]] = {"ns": 1e-9, "us": 1e-6, "μs": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_SIZES: Final[Mapping[str, float]] = {
    "b": 1.0,
    "bytes": 1.0,
    "kb": 1e3,
    "kib": 1024.0,
    "mb": 1e6,
    "mib": 1048576.0,
    "gb": 1e9,
}


def read_nsys_sqlite(path: Path) -> TraceEvents:
    """Kernels, copies, sets, runtime calls and NVTX ranges of an exported data base.

    Raises `InputError` where it is none, or holds no GPU work.
    """
    builder = EventBuilder()
    try:
        with closing(sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True)) as base:
            tables = {row[0] for row in base.execute("select name from sqlite_master where type = 'table'")}
            damage = _fill(base, tables, builder)
            device = _device_name(base, tables)
    except sqlite3.Error as error:
        raise InputError(f"{path} is a damaged or foreign SQLite file ({error})") from None
    if not len(builder):
        raise InputError(f"{path} holds no GPU work", "export with: nsys export --type sqlite report.nsys-rep")
    return builder.build(device=device, source=str(path), damage=damage)


def _fill(base: sqlite3.Connection, tables: set[str], builder: EventBuilder) -> str:
    steps = {
        "CUPTI_ACTIVITY_KIND_KERNEL": _kernels,
        "CUPTI_ACTIVITY_KIND_MEMCPY": _copies,
        "CUPTI_ACTIVITY_KIND_MEMSET": _sets,
        "CUPTI_ACTIVITY_KIND_RUNTIME": _runtime,
        "NVTX_EVENTS": _ranges,
    }
    for table, read in steps.items():
        if table not in tables:
            continue
        try:
            read(base, builder)
        except sqlite3.DatabaseError as error:
            return f"table {table} breaks after {len(builder):,} events ({error})"
    return ""


def _times(builder: EventBuilder, start: int, end: int | None) -> tuple[float, float]:
    return builder.since_origin(start) * _NANO, max((end or start) - start, 0) * _NANO


def _kernels(base: sqlite3.Connection, builder: EventBuilder) -> None:
    query = (
        "select k.start, k.end, k.deviceId, k.streamId, k.correlationId, s.value, k.gridX, k.gridY, k.gridZ, k.blockX,"
        " k.blockY, k.blockZ from CUPTI_ACTIVITY_KIND_KERNEL k left join StringIds s on s.id = k.demangledName"
    )
    for start, end, device, stream, correlation, name, *dims in base.execute(query):
        begun, took = _times(builder, start, end)
        builder.add(
            name or "kernel", begun, took, builder.stream((device, stream)), Category.KERNEL, on_device=True,
            device=device, correlation=correlation, args={"grid": dims[:3], "block": dims[3:]},
        )  # fmt: skip


def _copies(base: sqlite3.Connection, builder: EventBuilder) -> None:
    query = "select start, end, deviceId, streamId, correlationId, copyKind, bytes from CUPTI_ACTIVITY_KIND_MEMCPY"
    for start, end, device, stream, correlation, kind, nbytes in base.execute(query):
        begun, took = _times(builder, start, end)
        name = f"Memcpy {_COPY_KINDS.get(kind, 'unknown')}"
        builder.add(
            name, begun, took, builder.stream((device, stream)), Category.MEMCPY, on_device=True, device=device,
            correlation=correlation, nbytes=float(nbytes or 0),
        )  # fmt: skip


def _sets(base: sqlite3.Connection, builder: EventBuilder) -> None:
    query = "select start, end, deviceId, streamId, correlationId, bytes from CUPTI_ACTIVITY_KIND_MEMSET"
    for start, end, device, stream, correlation, nbytes in base.execute(query):
        begun, took = _times(builder, start, end)
        builder.add(
            "Memset", begun, took, builder.stream((device, stream)), Category.MEMSET, on_device=True, device=device,
            correlation=correlation, nbytes=float(nbytes or 0),
        )  # fmt: skip


def _runtime(base: sqlite3.Connection, builder: EventBuilder) -> None:
    query = (
        "select r.start, r.end, r.globalTid, r.correlationId, s.value from CUPTI_ACTIVITY_KIND_RUNTIME r"
        " left join StringIds s on s.id = r.nameId"
    )
    for start, end, thread, correlation, name in base.execute(query):
        begun, took = _times(builder, start, end)
        stream = builder.stream(("host", thread))
        builder.add(name or "runtime", begun, took, stream, Category.RUNTIME, on_device=False, correlation=correlation)


def _ranges(base: sqlite3.Connection, builder: EventBuilder) -> None:
    query = (
        "select n.start, n.end, n.globalTid, coalesce(n.text, s.value) from NVTX_EVENTS n"
        " left join StringIds s on s.id = n.textId where n.end is not null"
    )
    for start, end, thread, name in base.execute(query):
        begun, took = _times(builder, start, end)
        builder.add(
            name or "range", begun, took, builder.stream(("host", thread)), Category.ANNOTATION, on_device=False
        )


def _device_name(base: sqlite3.Connection, tables: set[str]) -> str:
    if "TARGET_INFO_GPU" not in tables:
        return ""
    row = base.execute("select name from TARGET_INFO_GPU order by id limit 1").fetchone()
    return str(row[0]) if row else ""


def read_nsys_csv(path: Path) -> TraceEvents:
    """The CSV of `nsys stats --report cuda_gpu_trace --format csv`. Raises `InputError` where no row was read."""
    pieces = Pieces(path)
    builder = EventBuilder()
    skipped = 0
    rows = csv.reader(line for line in text_lines(pieces) if line.strip())
    columns: dict[str, tuple[int, str]] = {}
    for row in rows:
        if not columns:
            columns = _columns(row)
            continue
        try:
            _csv_row(row, columns, builder)
        except (ValueError, IndexError):
            skipped += 1
    if not len(builder):
        raise InputError(
            f"{path} is no table of cuda_gpu_trace", "make it with: nsys stats --report cuda_gpu_trace --format csv"
        )
    return builder.build(source=str(path), damage=pieces.damage, skipped=skipped)


def _columns(row: list[str]) -> dict[str, tuple[int, str]]:
    """Column name -> place and unit, once the head is reached: `Start (ns)` is `start` in ns."""
    found: dict[str, tuple[int, str]] = {}
    for place, title in enumerate(row):
        name, _, unit = title.strip().lower().partition("(")
        found[name.strip()] = (place, unit.rstrip(") "))
    return found if "start" in found and "duration" in found and "name" in found else {}


def _csv_row(row: list[str], columns: Mapping[str, tuple[int, str]], builder: EventBuilder) -> None:
    def cell(name: str) -> str:
        place = columns.get(name)
        return row[place[0]].strip() if place and place[0] < len(row) else ""

    def seconds(name: str) -> float:
        return float(cell(name).replace(",", "")) * _UNITS.get(columns[name][1], 1e-9)

    name = cell("name")
    kind = (
        Category.MEMCPY
        if "memcpy" in name.lower()
        else Category.MEMSET
        if "memset" in name.lower()
        else Category.KERNEL
    )
    unit = columns["bytes"][1] if "bytes" in columns else ""
    moved = cell("bytes").replace(",", "")
    stream = int(cell("strm") or cell("stream") or 0)
    builder.add(
        name,
        builder.since_origin(seconds("start")),
        seconds("duration"),
        builder.stream((cell("device"), stream)),
        kind,
        on_device=True,
        device=0,
        correlation=int(cell("corrid") or -1),
        nbytes=float(moved) * _SIZES.get(unit, 1.0) if moved else 0.0,
    )


def looks_like_csv(head: bytes) -> bool:
    """Whether a file that begins with `head` is the CSV of `cuda_gpu_trace`."""
    text = head.decode(errors="replace").lower()
    return "start (" in text and "duration (" in text and "name" in text
