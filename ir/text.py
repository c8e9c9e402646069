"""Numbers and tables as people read them; shared by every report."""

import html
from collections.abc import Sequence

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z")


def seconds(value: float) -> str:
    """Three significant digits with a unit: `12.3 ms`."""
    for scale, unit in _TIMES:
        if abs(value) >= scale * 0.9995:
            return f"{significant(value / scale)} {unit}"
    return "0 s" if value == 0 else f"{significant(value / 1e-9)} ns"


def quantity(value: float, unit: str) -> str:
    """Decimal prefix and three significant digits: `6.25 TFLOP`, `40.6 GB`."""
    scaled, index = float(value), 0
    while abs(scaled) >= 999.5 and index < len(_DECIMAL) - 1:
        scaled, index = scaled / 1000, index + 1
    return f"{significant(scaled)} {_DECIMAL[index]}{unit}"


def significant(value: float) -> str:
    """Three significant digits, whole from 100 on."""
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def percent(share: float) -> str:
    """`41.2 %`; small shares keep a digit."""
    return f"{share * 100:.1f} %" if share < 0.995 else f"{share * 100:.0f} %"


def count(value: float) -> str:
    """A number of runs; whole where it is."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def time_range(low: float, high: float) -> str:
    """`90.1 to 120 ms`: both in the unit of the larger."""
    for scale, unit in _TIMES:
        if high >= scale * 0.9995:
            return f"{significant(low / scale)} to {significant(high / scale)} {unit}"
    return f"{seconds(low)} to {seconds(high)}"


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "") -> list[str]:
    """Lines of an aligned table whose first row is the head; columns in `right` are flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return (indent + "  ".join(cells)).rstrip()

    return [line(rows[0]), indent + "  ".join("─" * width for width in widths), *map(line, rows[1:])]


def html_table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """The same as an HTML table."""

    def cells(row: Sequence[str], tag: str) -> str:
        styles = [
            'style="text-align:right"' if index in right else 'style="text-align:left"' for index in range(len(row))
        ]
        return "".join(f"<{tag} {style}>{html.escape(cell)}</{tag}>" for cell, style in zip(row, styles, strict=True))

    head = f"<thead><tr>{cells(rows[0], 'th')}</tr></thead>"
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows[1:])
    return f"<table>{head}<tbody>{body}</tbody></table>"


def shorten(text: str, width: int) -> str:
    """`text` in at most `width` characters, the middle left out."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[-(width - 1 - head) :]}"
