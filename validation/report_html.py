"""The HTML page of a validation: both timelines under each other on one scale, and the tables."""

import html
import json
from collections.abc import Sequence
from typing import Any, Final

from stablecast.ir.text import html_table, percent, seconds
from stablecast.validation.items import Item, measured_items
from stablecast.validation.report import ValidationReport

_WIDTH: Final = 1200
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
    "other": "#666666",
}
_STYLE: Final = (
    "body{font-family:system-ui,sans-serif;margin:2em;max-width:1280px}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:2px 10px;border-bottom:1px solid #ddd}svg{background:#fafafa;border:1px solid #ddd}"
    ".key span{display:inline-block;padding:1px 8px;margin-right:4px;color:#fff;font-size:12px}"
)


def report_html(report: ValidationReport) -> str:
    """A page without any outside file."""
    title = html.escape(report.run.events.source or "measured run")
    parts = [f"<h1>{title}</h1>", _summary(report), _timelines(report), _tables(report)]
    head = f"<head><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style></head>"
    return f"<!doctype html><html>{head}<body>{''.join(parts)}</body></html>\n"


def _summary(report: ValidationReport) -> str:
    run, found = report.run, report.prediction
    text = f"measured {seconds(run.mean_step_s)} a step, {len(run.steps)} steps by {html.escape(run.step_basis)}"
    if found is not None and report.matching is not None:
        text += f"; predicted {seconds(found.step_time_s)} on {found.devices} x {html.escape(found.system)}"
        text += f"; {percent(report.matching.matched_share)} of the measured device time is matched"
    return f"<p>{text}</p>"


def _timelines(report: ValidationReport) -> str:
    measured = measured_items(report.run, report.step)
    predicted = report.matching.predicted if report.matching else ()
    end = max((item.start_s + item.time_s for item in (*measured, *predicted)), default=0.0)
    if end <= 0:
        return ""
    key = "".join(f"<span style='background:{colour}'>{name}</span>" for name, colour in _COLOURS.items())
    lanes = [_lanes("measured", measured, end)]
    if predicted:
        lanes.append(_lanes("predicted", predicted, end))
    return f"<p class='key'>{key}</p>{''.join(lanes)}<p>{seconds(end)} wide; hover for names</p>"


def _lanes(title: str, items: Sequence[Item], end_s: float) -> str:
    """One SVG, a lane a stream; the shortest items are left out where there are too many."""
    shown = sorted(items, key=lambda item: -item.time_s)[:_MOST]
    streams = {
        stream: lane
        for lane, stream in enumerate(dict.fromkeys(item.stream for item in sorted(items, key=lambda i: i.start_s)))
    }
    boxes: list[str] = []
    for item in shown:
        left, width = item.start_s / end_s * _WIDTH, max(item.time_s / end_s * _WIDTH, 0.4)
        colour = _COLOURS.get(item.klass.value, "#666666")
        words = html.escape(f"{item.label} — {seconds(item.time_s)} {item.klass.value} {item.scope}", quote=True)
        top = streams[item.stream] * _LANE + 2
        place = f"x='{left:.2f}' y='{top}' width='{width:.2f}' height='{_LANE - 4}'"
        boxes.append(f"<rect {place} fill='{colour}'><title>{words}</title></rect>")
    left_out = f" ({len(items) - len(shown)} shorter items are not drawn)" if len(items) > len(shown) else ""
    height = max(len(streams), 1) * _LANE
    return f"<h3>{title}{left_out}</h3><svg width='{_WIDTH}' height='{height}'>{''.join(boxes)}</svg>"


def _tables(report: ValidationReport) -> str:
    data: dict[str, Any] = report.to_dict()
    classes = [["class", "measured", "predicted", "error"]]
    for share in report.classes:
        error = "" if share.error is None else f"{share.error:+.0%}"
        classes.append([share.name, seconds(share.measured_s), seconds(share.predicted_s), error])
    text = f"<h2>Classes</h2>{html_table(classes, right=(1, 2, 3))}"
    if report.largest:
        rows = [["class", "scope", "measured", "predicted", "kernel", "reason"]]
        rows += [
            [
                entry.klass,
                entry.scope,
                seconds(entry.measured_s),
                seconds(entry.predicted_s),
                entry.measured or entry.predicted,
                entry.reason,
            ]
            for entry in report.largest
        ]
        text += f"<h2>Largest differences</h2>{html_table(rows, right=(2, 3))}"
    raw = json.dumps(data).replace("</", "<\\/")
    return f"{text}<script type='application/json' id='report'>{raw}</script>"
