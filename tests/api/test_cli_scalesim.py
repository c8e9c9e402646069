"""`scalesim` on the command line, and the systolic backend beside others in `compare`, `predict` and `kernel`."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stablecast

Run = Callable[..., Any]
CONFIG = """[general]
run_name = small
[architecture_presets]
ArrayHeight: 32
ArrayWidth: 32
IfmapSramSzkB: 64
FilterSramSzkB: 64
OfmapSramSzkB: 64
Dataflow : ws
[run_presets]
InterfaceBandwidth: CALC
"""
CONV = """Layer name, IFMAP Height, IFMAP Width, Filter Height, Filter Width, Channels, Num Filter, Strides,
Conv1, 16, 16, 3, 3, 8, 32, 1,
"""
GEMM = "Layer, M, N, K,\nqkv, 64, 96, 128,\nmlp, 64, 256, 128,\n"
REPORTS = {"COMPUTE_REPORT.csv", "BANDWIDTH_REPORT.csv", "DETAILED_ACCESS_REPORT.csv"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """small.cfg, conv.csv and gemm.csv in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.cfg").write_text(CONFIG)
    (tmp_path / "conv.csv").write_text(CONV)
    (tmp_path / "gemm.csv").write_text(GEMM)
    return tmp_path


def test_a_drop_in_for_scalesim(run: Run, files: Path) -> None:
    result = run("scalesim", "-c", "small.cfg", "-t", "gemm.csv", "-i", "gemm", "-p", "out", "--compat", "scalesim-3.0")
    assert result.code == 0, result.err
    assert "qkv" in result.out
    assert "written to out/small" in result.out
    assert {path.name for path in (files / "out" / "small").iterdir()} == REPORTS
    rows = list(csv.reader((files / "out" / "small" / "COMPUTE_REPORT.csv").read_text().splitlines()))
    # 4 row folds and 3 column folds of 64 + 2 x 32 + 32 - 2 lines, counted from 0
    assert int(float(rows[1][2])) == 12 * 158 - 1


def test_corrected_by_default(run: Run, files: Path) -> None:
    answer = json.loads(run("scalesim", "-c", "small.cfg", "-t", "gemm.csv", "-p", "out", "--json").out)
    assert answer["mode"] == "corrected"
    assert [layer["name"] for layer in answer["layers"]] == ["qkv", "mlp"]
    assert answer["layers"][0]["total_cycles"] == 12 * 158
    assert answer["total_cycles"] == sum(layer["total_cycles"] for layer in answer["layers"])
    assert {Path(name).name for name in answer["files"]} == REPORTS


def test_traces_of_layers(run: Run, files: Path) -> None:
    words = ("scalesim", "-c", "small.cfg", "-t", "conv.csv", "-p", "out", "--compat", "scalesim-3.0")
    assert run(*words, "-s", "N").code == 0
    assert not (files / "out" / "small" / "layer0").exists()
    assert run(*words, "-s").code == 0
    assert len(list((files / "out" / "small" / "layer0").iterdir())) == 6


def test_tables_of_rows(run: Run, files: Path) -> None:
    (files / "rows.csv").write_text(
        "id,rows,cols,dataflow,kind,M,N,K,mode,total_cycles\na,32,32,ws,gemm,64,96,128,CALC,\n"
    )
    assert run("scalesim", "--table", "rows.csv", "-o", "out.csv").code == 0
    assert next(csv.DictReader((files / "out.csv").read_text().splitlines()))["total_cycles"] == str(12 * 158 - 1)
    assert run("scalesim", "--table", "rows.csv", "-o", "out.csv", "--compat", "corrected", "--json").code == 0
    row = next(csv.DictReader((files / "out.csv").read_text().splitlines()))
    assert row["total_cycles"] == str(12 * 158)
    assert row["id"] == "a"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "scalesim needs -c, -t, -p"),
        ("-c small.cfg -t gemm.csv", "scalesim needs -p"),
        ("-c none.cfg -t gemm.csv -p out", "none.cfg"),
        ("-c small.cfg -t none.csv -p out", "none.csv"),
        ("-c small.cfg -t gemm.csv -p gemm.csv", "gemm.csv is a file"),
        ("-c small.cfg -t gemm.csv -p out -i matrix", "unknown -i 'matrix'"),
        ("-c small.cfg -t gemm.csv -p out --compat scalesim-2", "unknown --compat 'scalesim-2'"),
        ("-c small.cfg -t gemm.csv -p out -s", "add --compat scalesim-3.0"),
        ("-c small.cfg -t gemm.csv -p out more", "unexpected 'more'"),
        ("-c small.cfg -t gemm.csv -p out -o a.csv", "-o does not go with this form"),
        ("--table rows.csv", "--table needs -o"),
        ("--table rows.csv -o out.csv", "rows.csv"),
        ("--table gemm.csv -o out.csv -c small.cfg", "-c does not go with this form"),
        ("-c small.cfg -t bad.csv -p out", "bad.csv:2"),
        ("-c bad.cfg -t gemm.csv -p out", "no ArrayHeight"),
    ],
)
def test_errors_in_one_line(run: Run, files: Path, words: str, message: str) -> None:
    (files / "bad.csv").write_text(CONV.replace("3, 3, 8", "20, 3, 8"))
    (files / "bad.cfg").write_text(CONFIG.replace("ArrayHeight: 32\n", ""))
    result = run("scalesim", *words.split())
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert not (files / "out").exists()
    assert not (files / "out.csv").exists()


def test_fidelities_side_by_side(run: Run, module: str) -> None:
    words = ("compare", module, "--on", "tpu-v4", "--on", "tpu-v6e", "--on", "a100-sxm-80gb")
    both = ("--backend", "analytical", "--backend", "systolic")
    answer = json.loads(run(*words, *both, "--json").out)
    assert [row["backend"] for row in answer["rows"]].count("systolic") == 3
    for entry in answer["fidelities"]:
        times = entry["step_time_s"].values()
        assert entry["spread"] == pytest.approx(max(times) / min(times))
        assert entry["class"] == "matmul"
        assert 0 < entry["share"] <= 1
    text = run(*words, *both).out
    assert "step by" in text
    assert "of the difference)" in text
    assert "step by" not in run(*words).out
    page = stablecast.compare(module, on=["tpu-v4", "tpu-v6e"], backends=["analytical", "systolic"])._repr_html_()
    assert "step by" in page


def test_predict_and_kernel(run: Run, module: str) -> None:
    answer = json.loads(run("predict", module, "--on", "tpu-v5p", "--backend", "systolic", "--json").out)
    assert {kernel["basis"] for kernel in answer["kernels"]} == {"simulated"}
    assert any("weight-stationary arrays of 128x128" in text for text in answer["assumptions"])
    mixed = run("predict", module, "--on", "h100-sxm", "--backend", "elementwise=analytical,default=systolic")
    assert mixed.code == 0, mixed.err
    words = ("kernel", "matmul", "--m", "512", "--n", "512", "--k", "512", "--on", "tpu-v4", "--backend", "systolic")
    assert json.loads(run(*words, "--json").out)["basis"] == "simulated"
