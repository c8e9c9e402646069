"""The benchmark runs, and what it writes is a sound trace."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from stablecast.ir.chakra import check
from stablecast.lowering.chakra import Target, emit

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("chakra_emit", FOLDER / "chakra_emit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "chakra_emit", module)
    spec.loader.exec_module(module)
    return module


def test_figures(load: ModuleType, tmp_path: Path) -> None:
    figures = load.measure(64, tmp_path, Target.FILES)
    assert figures["check_ok"]
    assert figures["nodes_per_rank"] >= 300
    assert figures["bytes_per_rank"] >= 50_000
    assert load.measure(64, tmp_path, Target.TAR)["bytes_per_rank"] == figures["bytes_per_rank"]


def test_published_layouts(load: ModuleType, tmp_path: Path) -> None:
    gpt, mixtral = load.layouts([(model, replace(plan, micro=1)) for model, plan in load.LAYOUTS])
    axes = {(one["kind"], one["axes"]) for one in gpt["classes"]}
    assert axes == {("COMP", ""), ("all_reduce", "tp"), ("all_reduce", "dp"), ("COMM_SEND", "pp"), ("COMM_RECV", "pp")}
    assert gpt["ranks"] == 64
    assert {one["axes"] for one in mixtral["classes"] if one["kind"] == "all_to_all"} == {"ep"}
    model, plan = load.LAYOUTS[1]
    emit(load.stage_parts(model, replace(plan, micro=1)), None, tmp_path / "s")
    assert check(tmp_path / "s").ok
