"""Accuracy suites on the shared measurements."""

import csv
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stablecast.backends.registry import parse_choice
from stablecast.ir.errors import InputError
from stablecast.validation import gate
from stablecast.validation.accuracy import append_log, beside, run_accuracy, summarise, summary_table
from stablecast.validation.suites import SUITES, Data, run_suite
from stablecast.validation.suites.base import half_digit
from stablecast.validation.suites.neusight import peer_errors

_ROWS = {"neusight": 50, "gemm": 50, "vidur": 60, "collectives": 50}
GOLDEN = Path(__file__).parent / "golden" / "accuracy.json"


_SLOW = ("gemm", "neusight", "torchtitan", "tpu-steps")
_TORCH = ("vtrain", "torchtitan")
_SUITES = [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in SUITES if name != "hespas"]


@pytest.mark.parametrize("name", _SUITES)
def test_suite_runs(shared_data: Path, name: str) -> None:
    data = Data(shared_data, parse_choice("analytical"), _ROWS.get(name, 200), capture=False)
    if name == "timm":
        pytest.skip("its captures take minutes: tests/validation/test_timm.py")
    if name in _TORCH:
        pytest.importorskip("torch", reason="its programs are PyTorch's, an optional extra")
    rows = run_suite(name, data)
    assert not data.missing
    assert all(row.measured_s > 0 and 0 < row.low_s <= row.predicted_s <= row.high_s for row in rows)
    assert SUITES[name].path in {row.path for row in rows} <= {SUITES[name].path, "program"}


def test_peer_errors_are_reproduced(shared_data: Path) -> None:
    """NeuSight's published errors follow from its predictions as read here, so that the comparison is like with like."""
    data = Data(shared_data, parse_choice("analytical"))
    found = peer_errors(data.read("neusight/e2e_labels.csv"))
    names = {"inf_torch_compile": "inf+torch.compile", "train_4gpu": "train 4-GPU"}
    published = [row for row in data.read("neusight/peer_errors_e2e.csv") if row["method"] == "neusight"]
    assert len(published) == len(found)
    for row in published:
        kind = names.get(row["kind"], row["kind"])
        assert found[row["device"], kind] == pytest.approx(float(row["mape"]), abs=0.01)


def test_program_suite(shared_data: Path) -> None:
    """The peer's module is predicted; without the example programs the rest is left out and said."""
    data = Data(shared_data, parse_choice("analytical"), examples=None)
    rows = run_suite("hespas", data)
    assert [(row.path, row.peer) for row in rows] == [("program", "hespas xla profiling (compute)")]
    assert (rows[0].measured_s, rows[0].rounding_s) == (pytest.approx(0.101198), pytest.approx(0.001508))
    assert data.notes == ["hespas: the example programs are not at hand, so only the module is scored"]


@pytest.mark.slow
def test_example_programs(shared_data: Path) -> None:
    """Every measured step is predicted from its program, on GPUs and on a TPU."""
    rows = run_suite("hespas", Data(shared_data, parse_choice("analytical")))
    assert len(rows) == 23
    assert {row.device for row in rows} == {"a100-sxm-40gb", "h100-sxm", "b200-sxm", "tpu-v3"}
    assert all(abs(row.predicted_s / row.measured_s - 1) < 0.6 for row in rows)


def test_why_no_row_could_be_made(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reason is the cause; that nothing was on disk either only follows from it."""

    def absent(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'timm'")

    monkeypatch.setenv("STABLECAST_CACHE", str(tmp_path))
    monkeypatch.setattr("stablecast.validation.suites.timm._capture", absent)
    data = Data(shared_data, parse_choice("analytical"))
    data.notes.append("of another suite")
    with pytest.raises(InputError, match=r"could be made: timm: its models cannot be captured here: No module named"):
        run_suite("timm", data)


def test_every_figure_is_a_column(shared_data: Path) -> None:
    """Ratios between devices and between sizes, the interval of the mean, and how far labels are rounded."""
    report = run_accuracy("llmcompass", shared_data, "analytical")
    head, first = summary_table(report.totals)[0], report.totals[0]
    titles = re.split(r"  +", head.strip())
    assert titles[:4] == ["group", "path", "rows", "mean"]
    assert titles[4:8] == ["95 % of it", "median", "p90", "bias"]
    assert titles[8:] == [
        "by time",
        "rank",
        "in range",
        "width",
        "across devices",
        "across sizes",
        "order",
        "peers (mean)",
    ]
    assert first.across_sizes is not None
    assert f"{100 * first.across_sizes:.1f} %" in summary_table(report.totals)[2]
    module = run_suite("hespas", Data(shared_data, parse_choice("analytical"), examples=None))
    table = summary_table([summarise("hespas", "all", "program", module)])
    assert "rounding" in table[0]
    assert " 1.5 % " in table[2], "0.0015 of 0.1012 s"


def test_paths_are_never_mixed(shared_data: Path) -> None:
    report = run_accuracy("llmcompass,hespas", shared_data, "analytical", examples=False)
    assert {(summary.suite, summary.path) for summary in report.totals} == {
        ("llmcompass", "table"),
        ("hespas", "program"),
    }
    assert "llmcompass" in repr(report)


def test_log_of_test_sets(shared_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    report = run_accuracy("llmcompass,deepbench", shared_data, "analytical", 50)
    assert append_log(report, path) == append_log(report, path) == 1
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["suite"] for row in rows] == ["llmcompass", "llmcompass"]
    assert rows[0]["models"] == report.models


def test_absent_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no data of suite"):
        run_accuracy("gemm", tmp_path, "analytical")
    with pytest.raises(InputError, match="no data of any suite"):
        run_accuracy("all", tmp_path, "analytical")
    with pytest.raises(InputError, match="unknown suite"):
        run_accuracy("gem", tmp_path, "analytical")


def test_command_line(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stablecast.cli.app import _load_commands, app  # pyright: ignore[reportPrivateUsage]

    _load_commands()
    monkeypatch.chdir(tmp_path)
    plot = tmp_path / "plot.svg"
    answer = CliRunner().invoke(
        app, ["accuracy", "--suite", "llmcompass", "--data", str(shared_data), "--json", "--plot", str(plot)]
    )
    assert answer.exit_code == 0
    row = json.loads(answer.stdout)["rows"][0]
    wanted = {"suite", "item", "device", "measured_s", "predicted_s", "low_s", "high_s", "peer", "peer_predicted_s"}
    assert wanted <= set(row)
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("text", "half"), [("0.09", 0.005), ("12", 0.5), ("1.250", 0.0005), ("2e-05", 5e-06), ("", None)]
)
def test_half_digit(text: str, half: float | None) -> None:
    assert half_digit(text, 1.0) == (None if half is None else pytest.approx(half))


@pytest.mark.slow
def test_no_suite_got_worse(shared_data: Path) -> None:
    """The gate: no group of a suite is further off than when the golden file was made, beyond its noise."""
    golden = json.loads(GOLDEN.read_text())
    report = run_accuracy("all", shared_data, golden["backend"])
    ran = {row.suite for row in report.rows}
    found = gate.verdicts(golden, report, sorted(ran))
    assert not [str(verdict) for verdict in found if verdict.worse]
    lost = [str(verdict) for verdict in found if verdict.now is None]
    absent = {entry["suite"] for entry in golden["groups"]} - ran
    if lost or absent:
        pytest.skip(f"not at hand: {', '.join([*sorted(absent), *lost])}; {'; '.join(report.skipped.values())}"[:600])


def test_gate(shared_data: Path) -> None:
    """A golden of one suite: what it says of the same report, of a worse one, and of another suite's groups."""
    report = run_accuracy("llmcompass", shared_data, "analytical")
    golden = gate.golden_of(report, "1.0")
    assert not any(verdict.worse for verdict in gate.verdicts(golden, report))
    assert gate.differences(gate.verdicts(golden, report)) == "no group moved"
    entry = golden["groups"][0]
    better = {**golden, "groups": [{**entry, "median": entry["median"] - entry["noise"] - 0.01}]}
    (verdict,) = gate.verdicts(better, report)
    assert verdict.worse
    assert "worse" in gate.differences([verdict])
    other = {**entry, "suite": "timm", "group": "train eager"}
    kept = gate.golden_of(report, "1.0", {**golden, "groups": [*golden["groups"], other]})
    assert kept["groups"] == [other, *golden["groups"]]
    assert [v.now for v in gate.verdicts(kept, report, ["timm"])] == [None]
    with pytest.raises(InputError, match="is of learned"):
        gate.verdicts({**golden, "backend": "learned"}, report)


def test_backends_beside_each_other(shared_data: Path) -> None:
    reports = [run_accuracy("llmcompass", shared_data, name) for name in ("analytical", "systolic")]
    both = beside(*reports)
    assert both.backend == "analytical"
    assert [row.peers["systolic"] for row in both.rows] == [row.predicted_s for row in reports[1].rows]
    assert "systolic" in repr(both)


def test_help_names_every_suite() -> None:
    from stablecast.cli.validate import _SUITES  # pyright: ignore[reportPrivateUsage]

    named = _SUITES.partition(": ")[2].rstrip(".").split(", ")
    assert sorted(named) == sorted(SUITES)
