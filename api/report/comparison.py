"""Text and HTML of a comparison."""

import html
from typing import TYPE_CHECKING

from stablecast.ir.text import html_table, percent, quantity, seconds, table, time_range

if TYPE_CHECKING:
    from stablecast._compare import Comparison
    from stablecast.backends.prediction import Prediction

_HEAD = ("system", "backend", "step", "range", "vs first", "bound by", "MFU", "items/s", "memory", "free", "")
_RIGHT = (2, 4, 6)


def _rows(comparison: "Comparison") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [_HEAD]
    first = comparison.rows[0] if comparison.rows else None
    for row in comparison.rows:
        many = f"{row.devices} x " if row.devices > 1 else ""
        ratio = row.step_time_s / first.step_time_s if first and first.step_time_s else 1.0
        tied = first is not None and row is not first and row.step_time_low_s <= first.step_time_high_s
        remarks = [
            "tie with the first" if tied else "",
            "" if row.fits else row.verdict,
            "" if row.complete else "incomplete",
        ]
        rows.append(
            (
                f"{many}{row.system}",
                row.backend,
                seconds(row.step_time_s),
                time_range(row.step_time_low_s, row.step_time_high_s),
                f"{ratio:.2f} x",
                row.bound,
                percent(row.mfu) if row.mfu is not None else "",
                items(row),
                f"{quantity(row.peak_memory_bytes, 'B')} of {quantity(row.memory_bytes, 'B')}",
                quantity(row.headroom_bytes, "B") if row.fits else "",
                ", ".join(filter(None, remarks)),
            )
        )
    rows += [(row.system, row.backend, "none", "", "", "", "", "", "", "", row.error) for row in comparison.failed]
    return rows


def items(row: "Prediction") -> str:
    """`57.0 k tokens`, of what the step works through a second."""
    if row.throughput is None or row.items_per_s is None:
        return ""
    return f"{quantity(row.items_per_s, '').rstrip()} {row.throughput.unit}"


def fidelity_rows(comparison: "Comparison") -> list[tuple[str, ...]]:
    """Device x fidelity: a column a backend, the spread, and the class of kernel that explains most of it."""
    entries = comparison.fidelities
    if not entries:
        return []
    names = list(dict.fromkeys(name for entry in entries for name in entry.step_time_s))
    rows: list[tuple[str, ...]] = [("step by", *names, "spread", "mostly")]
    for entry in entries:
        times = (seconds(entry.step_time_s[name]) if name in entry.step_time_s else "none" for name in names)
        why = f"{entry.klass} ({percent(entry.share)} of the difference)" if entry.klass else ""
        many = f"{entry.devices} x " if entry.devices > 1 else ""
        rows.append((f"{many}{entry.system}", *times, f"{entry.spread:.2f} x", why))
    return rows


def _remarks(comparison: "Comparison") -> list[str]:
    lines: list[str] = []
    if comparison.ties:
        lines.append("ranges overlap, so which is faster is not known:")
        lines += [f"  {left} and {right}" for left, right in comparison.ties]
    for entry in comparison.disagreements:
        left, right = entry["systems"]
        one, two = entry["backends"]
        lines.append(f"{one} and {two} disagree on whether {left} or {right} is faster")
    for row in comparison.rows[:1]:
        missing = [f"{entry.op} ({percent(entry.share)} of the bytes)" for entry in row.unmodelled]
        lines.append("not modelled: " + ", ".join(missing) if missing else "everything in the program is modelled")
    return lines


def comparison_text(comparison: "Comparison") -> str:
    """The table, ties and disagreements, and what each row assumed that others did not."""
    lines = [comparison.workload, ""]
    lines += table(_rows(comparison), right=_RIGHT, indent="  ")
    side_by_side = fidelity_rows(comparison)
    if side_by_side:
        lines += ["", *table(side_by_side, right=range(1, len(side_by_side[0]) - 1), indent="  ")]
    lines += ["", *("  " + line for line in _remarks(comparison)), *_assumed(comparison)]
    if comparison.wall_s:
        lines += ["", f"  compared in {seconds(comparison.wall_s)}"]
    return "\n".join(lines)


def _assumed(comparison: "Comparison") -> list[str]:
    if not comparison.rows:
        return []
    common = [
        text for text in comparison.rows[0].assumptions if all(text in row.assumptions for row in comparison.rows)
    ]
    lines = ["  assumed for all:", *(f"    {text}" for text in common)] if common else []
    for row in comparison.rows:
        own = [text for text in row.assumptions if text not in common]
        if own:
            lines += [f"  assumed for {row.system} ({row.backend}):", *(f"    {text}" for text in own)]
    return lines


def comparison_html(comparison: "Comparison") -> str:
    """The same as HTML, for notebooks."""
    remarks = "<br>".join(html.escape(line.strip()) for line in _remarks(comparison))
    side_by_side = fidelity_rows(comparison)
    beside = html_table(side_by_side, right=range(1, len(side_by_side[0]) - 1)) if side_by_side else ""
    return (
        f"<div><b>{html.escape(comparison.workload)}</b>"
        f"{html_table(_rows(comparison), right=_RIGHT)}{beside}<p>{remarks}</p></div>"
    )
