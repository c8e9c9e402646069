"""The HTML page of a validation: both timelines under each other on one scale, and the tables."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from stablecast.backends.prediction import Prediction
from stablecast.ir.text import html_table, percent, seconds, shorten
from stablecast.validation.report import Share, ValidationReport
from stablecast.validation.report_text import at_least, graph_rows, parts_rows

_WIDTH: Final = 1100
_LANE: Final = 26
_MOST: Final = 4000
_COLOURS: Final = {
    "matmul": "#3b6fb6",
    "convolution": "#2a9d8f",
    "attention": "#7b4fa3",
    "reduction": "#e9a23b",
    "elementwise": "#f2c879",
    "gather": "#8ab17d",
    "scatter": "#5f8f5f",
    "copy": "#b0b0b0",
    "memcpy": "#999999",
    "memset": "#cccccc",
    "communication": "#d1495b",
    "sort": "#c77dbb",
    "fft": "#6f9fd8",
    "sync": "#dddddd",
    "other": "#666666",
}
_CLASS_OF: Final[Mapping[str, str]] = {"custom": "other", "moe": "matmul"}
_MARGIN: Final = 130
_LAYERS: Final = 40
_WIDE: Final = 6
_NAME: Final = 44
_FAR_SHORTER: Final = 0.4
_STYLE: Final = (
    "body{font-family:system-ui,sans-serif;margin:2em;max-width:1280px}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:2px 10px;border-bottom:1px solid #ddd}"
    "table.wide td:last-child{min-width:340px}svg{background:#fafafa;border:1px solid #ddd}"
    ".key span{display:inline-block;padding:1px 8px;margin-right:4px;color:#fff;font-size:12px}"
)


def report_html(report: ValidationReport) -> str:
    """A page without any outside file."""
    title = html.escape(Path(report.run.events.source).name or "measured run")
    parts = [f"<h1>{title}</h1>", _summary(report), _timelines(report), _tables(report)]
    head = f"<head><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style></head>"
    return f"<!doctype html><html>{head}<body>{''.join(parts)}</body></html>\n"


def _summary(report: ValidationReport) -> str:
    run, found = report.run, report.prediction
    count = f"{len(run.steps)} step" + ("" if len(run.steps) == 1 else "s")
    text = f"measured {seconds(run.mean_step_s)} a step, {count} by {html.escape(run.step_basis)}"
    if found is not None and report.matching is not None:
        time = at_least(found) + seconds(found.step_time_s)
        text += f"; predicted {time} on {found.devices} x {html.escape(found.system)}"
        text += f"; {percent(report.matching.matched_share)} of the measured device time is matched"
    if run.events.damage:
        text += f"; the file is damaged: {html.escape(run.events.damage)}"
    return f"<p>{text}</p>"


@dataclass(frozen=True, slots=True)
class _Box:
    """One interval of a picture, seconds of the step."""

    lane: str
    start_s: float
    time_s: float
    klass: str
    words: str


def _measured_boxes(report: ValidationReport) -> list[_Box]:
    run = report.run
    origin = run.windows[report.step][0]
    found: list[_Box] = []
    for position in np.nonzero(run.step == report.step)[0].tolist():
        stream = int(run.events.stream[run.work[position]])
        klass, time = run.klass(position).value, float(run.duration_s[position])
        words = f"{run.name(position)} — {seconds(time)} {klass}, {run.op_name(position) or 'no operator'}"
        lane = run.events.stream_names.get(stream, str(stream))
        found.append(_Box(lane, float(run.start_s[position]) - origin, time, klass, words))
    return found


def _predicted_boxes(prediction: Prediction) -> list[_Box]:
    found: list[_Box] = []
    for timeline in prediction.timelines:
        for entry in timeline.slices:
            klass = entry.name if entry.name in _COLOURS else _CLASS_OF.get(entry.name, "communication")
            time = entry.end_s - entry.begin_s
            words = f"{entry.name} {entry.detail.get('shape', '')} — {seconds(time)} {entry.scope}"
            lane = f"{entry.role} {entry.stream}".strip()
            found.append(_Box(lane, entry.begin_s, time, klass, words))
    return found


def _timelines(report: ValidationReport) -> str:
    """Both on one scale; where one is far shorter, it is drawn once more on a scale of its own."""
    measured = _measured_boxes(report)
    predicted = _predicted_boxes(report.prediction) if report.prediction else []
    ends = [max((box.start_s + box.time_s for box in side), default=0.0) for side in (measured, predicted)]
    end = max(ends)
    if end <= 0:
        return ""
    key = "".join(f"<span style='background:{colour}'>{name}</span>" for name, colour in _COLOURS.items())
    lanes = [_lanes("measured", measured, end)]
    if predicted:
        lanes.append(_lanes("predicted", predicted, end))
        if 0 < ends[1] < _FAR_SHORTER * end:
            lanes.append(_lanes(f"predicted, {seconds(ends[1])} wide", predicted, ends[1]))
    return f"<p class='key'>{key}</p>{''.join(lanes)}<p>{seconds(end)} wide; hover for names</p>"


def _lanes(title: str, boxes: Sequence[_Box], end_s: float) -> str:
    """One SVG, a lane a stream; the shortest items are left out where there are too many."""
    shown = sorted(boxes, key=lambda box: -box.time_s)[:_MOST]
    names = list(dict.fromkeys(box.lane for box in sorted(boxes, key=lambda box: box.start_s)))
    lane = {name: number for number, name in enumerate(names)}
    drawn: list[str] = []
    for box in shown:
        left, width = box.start_s / end_s * _WIDTH, max(box.time_s / end_s * _WIDTH, 0.4)
        place = f"x='{_MARGIN + left:.2f}' y='{lane[box.lane] * _LANE + 2}' width='{width:.2f}' height='{_LANE - 4}'"
        words = html.escape(box.words, quote=True)
        drawn.append(f"<rect {place} fill='{_COLOURS[box.klass]}'><title>{words}</title></rect>")
    labels = "".join(
        f"<text x='4' y='{number * _LANE + 17}' font-size='11'>{html.escape(shorten(name, 18))}</text>"
        for name, number in lane.items()
    )
    left_out = f" ({len(boxes) - len(shown)} shorter items are not drawn)" if len(boxes) > len(shown) else ""
    height = max(len(names), 1) * _LANE
    svg = f"<svg width='{_MARGIN + _WIDTH}' height='{height}'>{labels}{''.join(drawn)}</svg>"
    return f"<h3>{html.escape(title)}{left_out}</h3>{svg}"


def _tables(report: ValidationReport) -> str:
    shown = [_section("Parts of the step", parts_rows(report), (1, 2)), _shares("Classes", "class", report.classes)]
    if report.layers:
        shown.append(_shares("Layers", "scope", report.layers[:_LAYERS]))
    if report.largest:
        rows = [["class", "scope", "measured", "predicted", "kernel", "predicted as", "matched by", "reason"]]
        rows += [
            [
                entry.klass,
                shorten(entry.scope, _NAME),
                seconds(entry.measured_s),
                seconds(entry.predicted_s),
                shorten(entry.measured, _NAME),
                shorten(entry.predicted, _NAME),
                entry.how,
                entry.reason,
            ]
            for entry in report.largest
        ]
        shown.append(_section("Largest differences", rows, (2, 3)))
    if report.graph is not None:
        shown.append(_section("Graph", graph_rows(report.graph), (1, 2)))
    raw = json.dumps(report.to_dict()).replace("</", "<\\/")
    return f"{''.join(shown)}<script type='application/json' id='report'>{raw}</script>"


def _section(title: str, rows: list[list[str]], right: tuple[int, ...]) -> str:
    body = html_table(rows, right=right)
    return f"<h2>{title}</h2>{body.replace('<table', '<table class=wide', 1) if len(rows[0]) > _WIDE else body}"


def _shares(title: str, column: str, shares: Sequence[Share]) -> str:
    rows = [[column, "measured", "predicted", "error", "kernels measured", "predicted"]]
    for share in shares:
        error = "" if share.error is None else f"{share.error:+.0%}"
        counts = [str(share.measured_count), str(share.predicted_count)]
        name = shorten(share.name or "(no scope)", 80)
        rows.append([name, seconds(share.measured_s), seconds(share.predicted_s), error, *counts])
    return _section(title, rows, (1, 2, 3, 4, 5))
