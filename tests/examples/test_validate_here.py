"""Annotate, predict, run on this processor, validate."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "validate_here.py"


@pytest.mark.slow
def test_both_frameworks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("validate_here", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--batch", "64", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    for name in ("jax", "torch"):
        assert f"\n{name}: step " in said
        prediction = json.loads((tmp_path / f"{name}.prediction.json").read_text())
        assert prediction["step_time_s"] > 0
        assert prediction["complete"]
        assert (tmp_path / f"{name}.html").read_text().count("<svg") >= 2
    assert said.count("5 steps by annotation") == 2
