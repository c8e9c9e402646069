"""What a capture says a rank dispatches, against what eight real gloo processes dispatched (`gloo_run.py`)."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra")

KINDS = ("ddp", "fsdp", "hsdp", "tp", "tp_sp", "fsdp_tp")


@pytest.fixture(scope="module")
def gloo() -> Any:
    path = Path(__file__).parent / "gloo_run.py"
    spec = importlib.util.spec_from_file_location("gloo_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gloo_run"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_and_collectives_are_those_of_eight_processes(gloo: Any, kind: str) -> None:
    real, ours = gloo.kernels(gloo.recorded()[kind]), gloo.kernels(gloo.captured(kind))
    assert Counter(call[0] for call in ours) == Counter(call[0] for call in real)
    assert ours == real


def test_collectives_in_flight_are_waited_for_at_their_first_use(gloo: Any) -> None:
    for kind in ("tp", "tp_sp"):
        real, ours = (
            [gloo.ALIKE.get(call[0], call[0]) for call in calls]
            for calls in (gloo.recorded()[kind], gloo.captured(kind))
        )
        names = ("aten.split.Tensor", "aten.chunk.default")
        assert [name for name in ours if name not in names] == [name for name in real if name not in names]
