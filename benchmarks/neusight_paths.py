"""NeuSight's models by both paths: sums over the peer's operator graphs, and captures of its configurations.

    python benchmarks/neusight_paths.py [--data FOLDER] [--backend learned|analytical]

Prints how far the two lie apart, and how well each carries a measured A100-40GB row over to the H100: the median of
|predicted ratio / measured ratio - 1| over inference rows that both devices have. No error of a prediction is printed.
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from stablecast.backends.registry import parse_choice
from stablecast.validation.suites import Data, Row
from stablecast.validation.suites import neusight_models as graphs
from stablecast.validation.suites import neusight_programs as programs
from stablecast.validation.suites.neusight import DEVICES

ROOT = Path(__file__).parent.parent
FROM, TO = "a100-pcie-40gb", "h100-sxm"
KINDS = ("inf eager", "inf inductor", "train eager")
Rows = Mapping[tuple[str, str], Row]


def by_key(rows: Iterable[Row]) -> Rows:
    """Rows on one GPU by configuration with execution model, and device."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.key.removesuffix("-fusion") + " inductor" if row.key.endswith("-fusion") else row.key
        found[key if key.endswith(("eager", "inductor")) else f"{key} eager", row.device] = row
    return found


def kind_of(key: str) -> str:
    """`inf eager` and the like."""
    config, _, execution = key.partition(" ")
    return f"{config.split('-')[1]} {execution}"


def apart(tables: Rows, captured: Rows) -> list[str]:
    """How far the two paths lie apart, by kind."""
    lines: list[str] = []
    for kind in KINDS:
        keys = [key for key in captured if key in tables and kind_of(key[0]) == kind]
        ratios = np.array([captured[key].predicted_s / tables[key].predicted_s - 1.0 for key in keys])
        if len(ratios):
            worst = keys[int(np.argmax(np.abs(ratios)))]
            lines.append(
                f"{kind}: {len(ratios)} rows, median {100 * np.median(np.abs(ratios)):.1f} %, "
                f"within 3 %: {int(np.sum(np.abs(ratios) <= 0.03))}, largest {100 * np.max(np.abs(ratios)):.1f} % "
                f"({' on '.join(worst)})"
            )
    return lines


def carried(rows: Rows) -> str:
    """The error of the ratio between the two devices."""
    errors = [
        abs(rows[key, TO].predicted_s / row.predicted_s / (rows[key, TO].measured_s / row.measured_s) - 1.0)
        for (key, device), row in rows.items()
        if device == FROM and (key, TO) in rows and kind_of(key) == "inf eager"
    ]
    if not errors:
        return "no rows"
    return f"{len(errors)} rows, median {100 * float(np.median(errors)):.1f} %, largest {100 * max(errors):.1f} %"


def main() -> None:
    """Both paths, printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--backend", default="learned")
    given = parser.parse_args()
    data = Data(given.data, parse_choice(given.backend))
    tables, captured = by_key(graphs.model_rows(data)), by_key(programs.run(data, DEVICES))
    print("captures beside sums over operator graphs:", *apart(tables, captured), sep="\n  ")
    for name, rows in (("operator graphs", tables), ("captures", captured)):
        print(f"{FROM} to {TO}, {name}: {carried(rows)}")
    for note in data.notes:
        print("note:", note)


if __name__ == "__main__":
    main()
