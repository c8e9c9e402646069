"""How a prediction prints: text, HTML, CSV and data frame."""

import csv
import html
import io
from typing import TYPE_CHECKING, Any

from stablecast.backends.prediction import CollectiveTime, KernelTime, Prediction
from stablecast.ir.errors import InputError
from stablecast.ir.scopes import family
from stablecast.ir.text import count, html_table, percent, quantity, seconds, shorten, table, time_range

if TYPE_CHECKING:
    import pandas as pd

LARGEST = 12
"""Kernels that a report lists; the rest is one line."""
_SCOPE_WIDTH = 44
_CRITICAL = 4
_HOLDERS = 5
_KERNEL_HEAD = ("time", "share", "runs", "kernel", "shape", "bound by", "scope", "source")
_RIGHT = (0, 1, 2)


def headline(prediction: Prediction) -> list[str]:
    """The answer: step time and range, what bounds it, utilisation, memory."""
    many = f"{prediction.devices} x " if prediction.devices > 1 else ""
    atleast = "" if prediction.complete else "at least "
    answer = (
        f"{atleast}{seconds(prediction.step_time_s)} a step on {many}{prediction.system}"
        f"  (range {time_range(prediction.step_time_low_s, prediction.step_time_high_s)})"
    )
    lines = [f"{prediction.workload}", f"  {answer}", f"  {_bound_line(prediction)}"]
    lines.append(f"  {_memory_line(prediction)}")
    return lines + [f"  {line}" for line in _timeline_lines(prediction)]


def _timeline_lines(prediction: Prediction) -> list[str]:
    """Exposed communication by axis, bubble, and the scopes that decide the end; only where devices talk."""
    if not prediction.collectives:
        return []
    total = prediction.step_time_s or 1.0
    axes = sorted(prediction.exposed_by_axis_s.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{axis} {seconds(time)}" for axis, time in axes if time > 0)
    spent = sum(collective.time_s for collective in prediction.collectives)
    lines = [
        f"communication {seconds(spent)}, of it exposed {seconds(prediction.exposed_communication_s)}"
        + (f" ({parts})" if parts else "")
        + (f"   bubble {percent(prediction.bubble)}" if prediction.bubble > 0 else "")
    ]
    scopes: dict[str, float] = {}
    for scope, time in prediction.critical_s.items():
        scopes[family(scope)] = scopes.get(family(scope), 0.0) + time
    largest = sorted(scopes.items(), key=lambda item: -item[1])[:_CRITICAL]
    said = ", ".join(f"{shorten(scope, _SCOPE_WIDTH)} {percent(time / total)}" for scope, time in largest)
    return [*lines, f"critical path: {said}"] if said else lines


def _bound_line(prediction: Prediction) -> str:
    parts = sorted(prediction.bound_s.items(), key=lambda item: -item[1])
    total = prediction.step_time_s or 1.0
    shares = ", ".join(f"{name} {percent(time / total)}" for name, time in parts if time > 0)
    utilisation = ""
    if prediction.mfu is not None:
        utilisation = f"   MFU {percent(prediction.mfu)}"
    if prediction.hfu is not None and prediction.mfu is not None and prediction.hfu > prediction.mfu * 1.005:
        utilisation += f" (HFU {percent(prediction.hfu)})"
    rate = prediction.items_per_s
    speed = f"   {quantity(rate, '').rstrip()} {prediction.throughput.unit}/s" if rate and prediction.throughput else ""
    return f"bound by {shares or 'nothing'}{utilisation}{speed}"


def _memory_line(prediction: Prediction) -> str:
    work = prediction.work
    peak, capacity = quantity(prediction.peak_memory_bytes, "B"), quantity(prediction.memory_bytes, "B")
    if prediction.reserved_memory_bytes is not None:
        peak += f" ({quantity(prediction.reserved_memory_bytes, 'B')} reserved)"
    free = f"fits, {quantity(prediction.headroom_bytes, 'B')} free" if prediction.fits else prediction.verdict.upper()
    away = "".join(
        f", {name} {quantity(used, 'B')}" + (f" of {quantity(room, 'B')}" if room is not None else "")
        for name, (used, room) in prediction.tiers.items()
    )
    return (
        f"memory peak {peak} of {capacity}{away}: {free}"
        f"   work {quantity(work.matmul_flops, 'FLOP')} matrix, {quantity(work.nbytes, 'B')} moved"
    )


def _memory_lines(prediction: Prediction) -> list[str]:
    """What holds device memory at the peak: state and results, then the scopes of temporaries."""
    held = {name: size for name, size in prediction.memory_by_scope.items() if size > 0 and name != "temporaries"}
    largest = sorted(held.items(), key=lambda item: -item[1])[:_HOLDERS]
    said = ", ".join(f"{shorten(name, _SCOPE_WIDTH)} {quantity(size, 'B')}" for name, size in largest)
    return [f"  at the peak: {said}"] if said else []


def kernel_rows(prediction: Prediction, limit: int = LARGEST) -> list[tuple[str, ...]]:
    """Cells of the largest kernels and collectives, with a last line for all others."""
    total = prediction.step_time_s or 1.0
    entries: list[tuple[float, tuple[str, ...]]] = [(k.time_s, _kernel_cells(k, total)) for k in prediction.kernels]
    for collective in prediction.collectives:
        shape = f"{quantity(collective.nbytes, 'B')} over {collective.group_size}"
        where = ",".join(collective.axes)
        time = collective.time_s
        numbers = (seconds(time), percent(time / total), count(collective.count))
        entries.append((time, (*numbers, collective.kind, shape, "communication", where, collective.algorithm)))
    entries.sort(key=lambda entry: -entry[0])
    rows: list[tuple[str, ...]] = [_KERNEL_HEAD, *(cells for _, cells in entries[:limit])]
    rest = entries[limit:]
    if rest:
        time = sum(time for time, _ in rest)
        rows.append((seconds(time), percent(time / total), "", f"{len(rest)} more", "", "", "", ""))
    return rows


def _kernel_cells(kernel: KernelTime, total: float) -> tuple[str, ...]:
    return (
        seconds(kernel.time_s),
        percent(kernel.time_s / total),
        count(kernel.count),
        kernel.klass,
        kernel.shape,
        kernel.bound,
        shorten(kernel.scope, _SCOPE_WIDTH),
        kernel.source,
    )


def prediction_text(prediction: Prediction) -> str:
    """The report: answer, largest kernels, what was not modelled, what was assumed."""
    lines = [*headline(prediction), *_memory_lines(prediction), ""]
    lines += table(kernel_rows(prediction), right=_RIGHT, indent="  ")
    lines += ["", *unmodelled_lines(prediction), *_shares(prediction), "  assumed:"]
    lines += [f"    {text}" for text in prediction.assumptions]
    if prediction.wall_s:
        lines += ["", f"  predicted in {seconds(prediction.wall_s)}"]
    return "\n".join(lines)


def unmodelled_lines(prediction: Prediction) -> list[str]:
    """What the time leaves out, an op a line, or that nothing is left out."""
    if prediction.unmodelled:
        lines = ["  not modelled, only their bytes are counted:"]
        for entry in prediction.unmodelled:
            why = f"  ({entry.reason})" if entry.reason else ""
            lines.append(
                f"    {entry.op} x {count(entry.count)}: {quantity(entry.nbytes, 'B')}, "
                f"{percent(entry.share)} of all bytes{why}"
            )
        return lines
    if not prediction.complete:
        return ["  a loop's trip count is unknown and counted once: set it with --loop NAME=N"]
    return ["  everything in the program is modelled"]


def _shares(prediction: Prediction) -> list[str]:
    if len(prediction.backend_share) < 2:
        return []
    shares = ", ".join(f"{name} {percent(share)}" for name, share in prediction.backend_share.items())
    return [f"  kernel time by backend: {shares}"]


def prediction_html(prediction: Prediction) -> str:
    """The report as HTML, for notebooks."""
    head = "<br>".join(html.escape(line.strip()) for line in headline(prediction)[1:])
    notes = "".join(f"<li>{html.escape(text)}</li>" for text in prediction.assumptions)
    missing = "<br>".join(html.escape(line.strip()) for line in unmodelled_lines(prediction))
    return (
        f"<div><b>{html.escape(prediction.workload)}</b><br>{head}"
        f"{html_table(kernel_rows(prediction), right=_RIGHT)}<p>{missing}</p>"
        f"<details><summary>assumed</summary><ul>{notes}</ul></details></div>"
    )


FRAME_COLUMNS = (
    "workload",
    "system",
    "devices",
    "backend",
    "class",
    "scope",
    "source",
    "shape",
    "count",
    "time_s",
    "low_s",
    "high_s",
    "basis",
    "bound",
)


def prediction_records(prediction: Prediction) -> list[dict[str, Any]]:
    """One record a kernel or collective of a scope, with the columns `FRAME_COLUMNS`."""
    shared = {"workload": prediction.workload, "system": prediction.system, "devices": prediction.devices}
    records = [{**shared, **kernel.to_dict()} for kernel in prediction.kernels]
    records += [{**shared, **_collective_record(collective)} for collective in prediction.collectives]
    return [{name: record[name] for name in FRAME_COLUMNS} for record in records]


def _collective_record(collective: CollectiveTime) -> dict[str, Any]:
    return {
        "backend": "collectives",
        "class": collective.kind,
        "scope": ",".join(collective.axes),
        "source": "",
        "shape": f"{collective.nbytes} B over {collective.group_size}",
        "count": collective.count,
        "time_s": collective.time_s,
        "low_s": collective.low_s,
        "high_s": collective.high_s,
        "basis": "analytical",
        "bound": "communication",
    }


def prediction_csv(prediction: Prediction) -> str:
    out = io.StringIO()
    columns: list[str] = list(FRAME_COLUMNS)
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(prediction_records(prediction))
    return out.getvalue()


def prediction_frame(prediction: Prediction) -> "pd.DataFrame":
    """The records as a data frame. Raises `InputError` where pandas is missing."""
    return to_frame(prediction_records(prediction), FRAME_COLUMNS)


def to_frame(records: list[dict[str, Any]], columns: tuple[str, ...]) -> "pd.DataFrame":
    try:
        import pandas as pd
    except ImportError:
        raise InputError("pandas is not installed", "pip install 'stablecast[pandas]'") from None
    return pd.DataFrame.from_records(records, columns=list(columns))
