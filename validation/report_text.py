"""How a validation report prints."""

from collections import Counter
from typing import TYPE_CHECKING, Final

from stablecast.backends.prediction import Prediction
from stablecast.backends.prediction_text import unmodelled_lines
from stablecast.ir.text import percent, seconds, shorten, table, time_range
from stablecast.validation.graph import GraphCheck
from stablecast.validation.report import Share, ValidationReport

if TYPE_CHECKING:
    import pandas as pd

_ROWS: Final = 15


def report_text(report: ValidationReport) -> str:
    """The report for a terminal."""
    lines = [*_head(report), "", *_parts(report), "", *_classes(report)]
    if report.layers:
        lines += ["", *_layers(report)]
    if report.prediction is not None:
        lines += ["", *_largest(report), "", *_graph(report)]
    else:
        lines += ["", *_kernels(report)]
    return "\n".join(lines)


def _head(report: ValidationReport) -> list[str]:
    run = report.run
    times = run.step_times_s
    many = f"{len(run.steps)} steps" if len(run.steps) > 1 else "1 step"
    spread = f" ({time_range(float(times.min()), float(times.max()))})" if len(times) > 1 else ""
    lines = [
        run.events.source or "trace",
        f"  measured   {seconds(run.mean_step_s)} a step{spread}; {many} by {run.step_basis}",
    ]
    found = report.prediction
    if found is not None and report.matching is not None:
        error = found.step_time_s / run.mean_step_s - 1.0
        lines.append(
            f"  predicted  {at_least(found)}{seconds(found.step_time_s)} a step on {found.devices} x {found.system} "
            f"(range {time_range(found.step_time_low_s, found.step_time_high_s)}), {error:+.1%} of the measurement"
        )
        lines.append(
            f"  matched    {percent(report.matching.matched_share)} of the measured device time, "
            f"{percent(report.matching.predicted_share)} of the predicted"
        )
        copied = sum(share.measured_s for share in report.classes if share.name == "memcpy")
        if copied:
            lines[-1] += f"; {seconds(copied)} of copies between host and device apart"
    where = run.events.device or "a device"
    lines.append(f"  on {where}, rank {run.events.rank}, device {run.device}")
    if run.events.damage:
        lines.append(f"  the file is damaged: {run.events.damage}; what was read before is used")
    if run.events.skipped:
        lines.append(f"  {run.events.skipped} records could not be read")
    if found is not None and not found.complete:
        left_out = unmodelled_lines(found)
        lines += ["", *left_out[:_ROWS], *([f"    {len(left_out) - _ROWS} more"] if len(left_out) > _ROWS else [])]
    return lines


def at_least(prediction: Prediction) -> str:
    """What comes before a time that is only a lower bound."""
    return "" if prediction.complete else "at least "


def _parts(report: ValidationReport) -> list[str]:
    return table(parts_rows(report), right=(1, 2), indent="  ")


def parts_rows(report: ValidationReport) -> list[list[str]]:
    """Where the typical step's time goes on both sides, head first."""
    data = report.to_dict()
    measured, predicted = data["measured_parts"], data["predicted_parts"]
    names = {
        "window_s": "step on the device",
        "compute_s": "compute",
        "communication_s": "communication",
        "exposed_s": "  of it exposed",
        "idle_s": "idle",
        "host_s": "  of it waiting for the host",
    }
    rows = [["typical step", "measured", "predicted"]]
    for key, name in names.items():
        rows.append([name, seconds(measured[key]), seconds(predicted[key]) if predicted else ""])
    if report.waiting_s is not None:
        rows.insert(-2, ["  of it waiting for other ranks", seconds(report.waiting_s), ""])
    ours, theirs = report.device_s
    rows.append(["device time, without waits", seconds(ours), seconds(theirs) if predicted else ""])
    return rows


def _classes(report: ValidationReport) -> list[str]:
    return _share_table("class", report.classes, report.prediction is not None)


def _layers(report: ValidationReport) -> list[str]:
    return _share_table("scope", report.layers[:_ROWS], report.prediction is not None)


def _share_table(title: str, shares: tuple[Share, ...], predicted: bool) -> list[str]:
    rows = [[title, "measured", "predicted", "error", "kernels"]]
    for share in shares:
        error = "" if share.error is None or not predicted else f"{share.error:+.0%}"
        both = f"{share.measured_count} / {share.predicted_count}" if predicted else str(share.measured_count)
        time = seconds(share.predicted_s) if predicted else ""
        rows.append([shorten(share.name or "(no scope)", 48), seconds(share.measured_s), time, error, both])
    return table(rows, right=(1, 2, 3, 4), indent="  ")


def _largest(report: ValidationReport) -> list[str]:
    rows = [["largest differences", "measured", "predicted", "kernel", "by", "reason"]]
    for entry in report.largest:
        name = entry.measured or entry.predicted
        label = f"{entry.klass}" + (f" in {shorten(entry.scope, 24)}" if entry.scope else "")
        rows.append(
            [
                label,
                seconds(entry.measured_s),
                seconds(entry.predicted_s),
                shorten(name, 40),
                entry.how or "-",
                entry.reason,
            ]
        )
    return table(rows, right=(1, 2), indent="  ")


def _graph(report: ValidationReport) -> list[str]:
    graph = report.graph
    if graph is None:
        return []
    verdict = "agrees" if graph.ok else "differs"
    order = f"{graph.order_checked} dependencies checked, {len(graph.order_faults)} broken"
    return [*table(graph_rows(graph), right=(1, 2), indent="  "), f"  the graph {verdict}; {order}"]


def graph_text(report: ValidationReport) -> str:
    """What `validate --graph` prints: numbers on both sides, and what only one side has, with scopes."""
    graph = report.graph
    if graph is None:
        return "nothing was predicted"
    lines = _graph(report)
    lines.append(
        f"  streams: {graph.streams[0]} measured, {graph.streams[1]} predicted; collectives on their own streams: "
        f"{_yes(graph.apart[0])} measured, {_yes(graph.apart[1])} predicted"
    )
    for title, names in (("missing", graph.missing), ("extra", graph.extra), ("out of order", graph.order_faults)):
        lines += [f"  {title}: {name} ({count})" for name, count in Counter(names).items()]
    return "\n".join(lines)


def _yes(value: bool | None) -> str:
    return "none" if value is None else "yes" if value else "no"


def graph_rows(graph: GraphCheck) -> list[list[str]]:
    """Numbers of operators and collectives on both sides, head first."""
    rows = [["graph", "measured", "predicted"]]
    rows += [[name, str(ours), str(theirs)] for name, (ours, theirs) in graph.operators.items()]
    for (kind, group, nbytes), (ours, theirs) in graph.collectives.items():
        rows.append([f"{kind} over {group}, {nbytes:,} B", str(ours), str(theirs)])
    return rows


def _kernels(report: ValidationReport) -> list[str]:
    total = float(report.run.duration_s.sum())
    rows = [["time", "share", "runs", "class", "kernel"]]
    for kernel in report.run.by_name[:_ROWS]:
        share = percent(kernel.time_s / total) if total else ""
        rows.append([seconds(kernel.time_s), share, str(kernel.count), kernel.klass.value, shorten(kernel.name, 72)])
    return table(rows, right=(0, 1, 2), indent="  ")


def report_frame(report: ValidationReport) -> "pd.DataFrame":
    """One row an item of either side; partners share a row."""
    import pandas as pd

    rows: list[dict[str, object]] = []
    matching = report.matching
    if matching is None:
        return pd.DataFrame([{"class": share.name, "measured_s": share.measured_s} for share in report.classes])
    for pair in matching.pairs:
        ours, theirs = matching.measured[pair.measured], matching.predicted[pair.predicted]
        rows.append(
            {
                "class": ours.klass.value, "scope": ours.scope or theirs.scope,
                "measured": ours.label, "predicted": theirs.label,
                "measured_s": ours.time_s, "predicted_s": theirs.time_s, "matched_by": pair.how,
            }
        )  # fmt: skip
    for index in matching.only_measured:
        item = matching.measured[index]
        rows.append(
            {
                "class": item.klass.value,
                "scope": item.scope,
                "measured": item.label,
                "measured_s": item.time_s,
                "matched_by": "",
            }
        )
    for index in matching.only_predicted:
        item = matching.predicted[index]
        rows.append(
            {
                "class": item.klass.value,
                "scope": item.scope,
                "predicted": item.label,
                "predicted_s": item.time_s,
                "matched_by": "",
            }
        )
    return pd.DataFrame(rows)
