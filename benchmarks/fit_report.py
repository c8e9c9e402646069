"""What `fit_analytical.py` writes: the constants file, and the table of errors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from stablecast.backends.analytical.fitting import Fit, Measured

KINDS: Final = ("gpu", "tpu", "cpu")


def write_constants(fit: Fit, path: Path, initial: dict[tuple[str, str], str]) -> None:
    """The constants file: sections in order of kind, then architecture."""
    lines = ["# Written by benchmarks/fit_analytical.py; change that script or its tables, not this file."]
    for key in (*KINDS, *sorted(set(fit.values) - set(KINDS))):
        lines.append(f"{key}:")
        if key in fit.like:
            lines.append(f"  like: {fit.like[key]}")
        for name, value in sorted(fit.values[key].items()):
            value = 0.0 if value < 1e-9 else value
            source = fit.sources.get((key, name)) or initial.get((key, name), "")
            source = source.replace("start of the fit", "assumption: no table measures it")
            lines.append(f'  {name}: {{value: {value:.4g}, source: "{source}"}}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def error_table(fit: Fit, datas: Sequence[Measured]) -> str:
    """Errors |predicted / measured - 1| of every table, in Markdown.

    "kind only": the median with the constants of the kind alone, as an architecture without measurements has them.
    """
    lines = [
        "| table | device | rows | median | p90 | bias | kind only | launch in the table |",
        "|---|---|---|---|---|---|---|---|",
    ]
    general = Fit({kind: fit.values[kind] for kind in KINDS}, {})
    for data in datas:
        ratios = fit.ratios(data)
        errors, carried = np.abs(ratios - 1.0), np.abs(general.ratios(data) - 1.0)
        check = "" if data.stage else " (check)"
        lines.append(
            f"| {data.table}{check} | {data.device.name} | {len(ratios)} | {np.median(errors):.1%} | "
            f"{np.quantile(errors, 0.9):.1%} | {np.median(ratios):.2f} | {np.median(carried):.1%} | "
            f"{data.launch_s * 1e6:.1f} us |"
        )
    return "\n".join(lines)
