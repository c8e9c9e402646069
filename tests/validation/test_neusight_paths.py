"""NeuSight's models by both paths: captures of its configurations beside sums over its operator graphs."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from stablecast.backends.registry import parse_choice
from stablecast.validation.suites import Data
from stablecast.validation.suites import neusight_models as graphs
from stablecast.validation.suites import neusight_programs as programs
from stablecast.validation.suites.neusight import DEVICES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "neusight_paths.py"
SINGLE_GPU = 112
SWITCH = 8
"""Labels on one GPU, and those of the model whose routing reads values."""


@pytest.fixture
def paths() -> Any:
    if not SCRIPT.is_file():
        pytest.skip("the benchmarks are not at hand")
    spec = importlib.util.spec_from_file_location("neusight_paths", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_captures_agree_with_operator_graphs(shared_data: Path, paths: Any) -> None:
    """Eager and compiled, inference and training: every row within 3 %."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    data = Data(shared_data, parse_choice("learned"))
    tables, captured = paths.by_key(graphs.model_rows(data)), paths.by_key(programs.run(data, DEVICES))
    assert len(captured) == SINGLE_GPU - SWITCH
    apart = {key: row.predicted_s / tables[key].predicted_s - 1.0 for key, row in captured.items()}
    assert {key: share for key, share in apart.items() if abs(share) > 0.03} == {}
    assert all("aten.nonzero" in note for note in data.notes)


def test_nothing_captured_is_said(paths: Any) -> None:
    assert paths.carried({}) == "no rows"
    assert paths.apart({}, {}) == []
