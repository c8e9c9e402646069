"""Tables of layers."""

import csv
from pathlib import Path

import pytest

from stablecast.backends.systolic import evaluate_table
from stablecast.ir.errors import InputError

_HEADER = "id,rows,cols,dataflow,M,N,K\n"


def test_few_columns_are_enough(tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(_HEADER + "a,8,4,os,30,50,100\nb,8,4,ws,30,50,100\n")
    assert evaluate_table(source, out) == 2
    with out.open(newline="") as handle:
        first, second = csv.DictReader(handle)
    assert (first["id"], first["total_cycles"]) == ("a", str(52 * 110 - 1))
    assert (second["id"], second["total_cycles"]) == ("b", str(169 * 48 - 1))
    assert evaluate_table(source, out, compat=None) == 2
    with out.open(newline="") as handle:
        assert [row["total_cycles"] for row in csv.DictReader(handle)] == [str(52 * 118), str(169 * 48)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,8,4,os,30,,100", r"in.csv:2: N = ''; allowed: whole numbers from 1"),
        ("a,8,0,os,30,5,100", r"in.csv:2: cols = '0'"),
        ("a,8,4,xs,30,5,100", r"in.csv:2: unknown dataflow 'xs'"),
    ],
)
def test_a_bad_row_leaves_no_table(row: str, message: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(_HEADER + row + "\n")
    with pytest.raises(InputError, match=message):
        evaluate_table(source, out)
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        evaluate_table(tmp_path / "none.csv", tmp_path / "out.csv")
