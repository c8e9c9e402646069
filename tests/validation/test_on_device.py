"""The command that measures on a device, rehearsed on the processor."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "on_device.py"


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("on_device", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "on_device", module)
    spec.loader.exec_module(module)
    return module


def test_one_line_and_out_without_a_gpu(
    on_device: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(on_device, "has_gpu", lambda: False)
    on_device.main(["--on", "h100-sxm", "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out == "no GPU on this machine: nothing is measured\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_rehearsal_predicts_first_and_resumes(
    on_device: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    command = ["--cpu-rehearsal", "--only", "gemm_64", "--out", str(tmp_path)]
    on_device.main([*command, "--minutes", "0"])
    assert "time is up before jax_gemm_64" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("*.prediction.json")) == [
        "jax_gemm_64.prediction.json",
        "torch_gemm_64.prediction.json",
    ]
    assert not list(tmp_path.glob("*.medians.json"))
    on_device.main(command)
    for name, profile in (("jax_gemm_64", "xplane.pb"), ("torch_gemm_64", "kineto.json.gz")):
        assert json.loads((tmp_path / f"{name}.medians.json").read_text())["median_s"] > 0
        found = json.loads((tmp_path / f"{name}.validation.json").read_text())
        assert found["matched_share"] == pytest.approx(1.0)
        assert (tmp_path / f"{name}.{profile}").is_file()
    assert (tmp_path / "jax_gemm_64.hlo.txt.gz").is_file()
    capsys.readouterr()
    on_device.main(command)
    assert capsys.readouterr().out.splitlines() == [f"2 predictions are written to {tmp_path}"]


def test_a_program_that_cannot_be_made_is_left_out(
    on_device: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A package that does not load must not cost the hour on the device: the others go on."""

    def absent(_: str) -> None:
        raise ImportError("No module named 'transformers'")

    whole = next(one for one in on_device.jax_programs(on_device.TINY) if one.name == "jax_gemm_64")
    broken = replace(whole, name="torch_gpt2", capture=absent)
    monkeypatch.setattr(on_device, "programs", lambda _: [broken, whole])
    on_device.main(["--cpu-rehearsal", "--minutes", "0", "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == [
        "torch_gpt2 is left out: No module named 'transformers'",
        f"1 predictions are written to {tmp_path}",
        "time is up before jax_gemm_64; run again to go on",
    ]
