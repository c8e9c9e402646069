"""TorchTitan's memory: which steps a row stands for, how layers are split, and what small steps ask for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.frontends.script import load_module
from stablecast.lowering.caching_allocator import replay
from stablecast.validation.suites import titan_memory
from stablecast.validation.suites.base import examples_folder
from stablecast.validation.suites.titan_memory import Step, asked_of, steps_of

RECORD = {
    "model": "llama3.1-405b",
    "fsdp": "8",
    "tp": "4",
    "pp": "8",
    "cp": "2",
    "schedule": "1f1b",
    "local_batch": "32",
    "seq_len": "8192",
    "activation_checkpointing": "full",
    "compile": "1",
}
SMALL = Step("tiny", 2, 1, 1, 1, 2, 64, "full", False)


@pytest.fixture
def examples() -> Path:
    folder = examples_folder()
    if folder is None:
        pytest.skip("the example programs are not at hand")
    pytest.importorskip("torch", reason="torch is not installed")
    return folder


@pytest.fixture
def small(examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Peaks (in use, reserved) of small steps, with nothing kept on disk."""
    monkeypatch.setenv("STABLECAST_CACHE", str(tmp_path))
    whole = titan_memory.capture

    def capture(folder: Path, script: str, step: Step) -> Any:
        return whole(folder, script, step, layers=4, vocab=1024)

    monkeypatch.setattr(titan_memory, "capture", capture)
    return lambda step: replay(asked_of(examples, "torch_titan.py", step))


def test_a_pipeline_is_its_first_and_its_last_rank() -> None:
    first, last = steps_of(RECORD)
    assert first == Step("405b", 8, 4, 2, 8, 32, 4096, "full", True, "1f1b", 0)
    assert last == replace(first, stage=7)
    assert list(first.mesh.items()) == [("pp", 8), ("dp", 8), ("cp", 2), ("tp", 4)]
    (one,) = steps_of(RECORD | {"pp": "1"})
    assert (one.schedule, one.mesh) == ("", {"dp": 8, "cp": 2, "tp": 4})


def test_layers_are_split_as_torchtitan_does_it(examples: Path) -> None:
    stages: Any = load_module(examples / "torch_titan_stages.py")
    assert stages.split(126, 8) == [0, 15, 31, 47, 63, 79, 95, 111, 126]
    assert stages.split(8, 4) == [0, 2, 4, 6, 8]
    assert stages.split(11, 4) == [0, 2, 5, 8, 11]  # what is over beyond the middle goes to the last


@pytest.mark.slow
def test_checkpoints_and_compiled_layers_save_memory(small: Any) -> None:
    large = replace(SMALL, batch=64)
    full, some = small(large), small(replace(large, recompute="selective"))
    fused = small(replace(large, recompute="selective", compiled=True))
    assert full.allocated < fused.allocated < some.allocated
    # a selective checkpoint saves the second product of the feed-forward part, which no gradient needs
    assert some.allocated - fused.allocated == pytest.approx(4 * 64 * 64 * 256 * 2, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_a_pipeline_keeps_weights_gathered_and_gradients_whole(small: Any, schedule: str) -> None:
    """Against the same layers alone: two layers' weights in bfloat16, and their gradients in float32."""
    step = replace(SMALL, pp=2, tp=2, batch=4, schedule=schedule)
    first, last = small(step), small(replace(step, stage=1))
    weights = 2 * (4 * 256 * 256 + 3 * 256 * 688) / 2
    assert min(first.allocated, last.allocated) > weights * (12 / 2 + 2 + 4)
    assert first.reserved >= first.allocated


def test_usable_memory_bounds_what_is_reserved(small: Any, examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titan_memory, "steps_of", lambda record: [SMALL])
    device = Catalogue().device("h100-sxm")
    found = titan_memory.reserved(examples, "torch_titan.py", RECORD, device)
    workspaces = 2 * (32 << 20)
    assert found.reserved >= small(SMALL).reserved + workspaces - (40 << 20)
    assert found.short == found.retries == 0
