"""All figures of SCALE-Sim 3.0.0 that were recorded: integers equal, ratios to 1e-9."""

import csv
from pathlib import Path

import pytest

from stablecast.backends.systolic import evaluate_table

_PARTS = 4


def _differences(expected: Path, found: Path) -> list[str]:
    with expected.open(newline="") as left, found.open(newline="") as right:
        pairs = list(zip(csv.DictReader(left), csv.DictReader(right), strict=True))
    wrong: list[str] = []
    for want, got in pairs:
        for name, text in want.items():
            if text == got[name]:
                continue
            whole = text.lstrip("-").isdecimal()
            if whole or abs(float(text) - float(got[name])) > 1e-9 * abs(float(text)):
                wrong.append(f"{want['id']} {name}: {text} != {got[name]}")
    return wrong


@pytest.mark.parametrize(
    ("name", "rows", "part"),
    [("gemm", 285, 0), ("conv", 285, 0), ("sparse", 50, 0), *(("topologies", 130, part) for part in range(_PARTS))],
)
def test_every_recorded_row_is_equal(name: str, rows: int, part: int, scalesim_golden: Path, tmp_path: Path) -> None:
    source, out = scalesim_golden / f"{name}.csv", tmp_path / "out.csv"
    lines = source.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + rows
    if name == "topologies":
        source = tmp_path / "part.csv"
        source.write_text(lines[0] + "".join(lines[1 + part :: _PARTS]))
    evaluate_table(source, out)
    assert _differences(source, out) == []


def test_inputs_alone_give_the_same_table(scalesim_golden: Path, tmp_path: Path) -> None:
    whole, inputs, out = scalesim_golden / "gemm.csv", tmp_path / "in.csv", tmp_path / "out.csv"
    with whole.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    names = list(rows[0])[: list(rows[0]).index("overall_cycles")]
    with inputs.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    evaluate_table(inputs, out)
    assert _differences(whole, out) == []
