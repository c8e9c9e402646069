"""A pipeline of PyTorch stages through `predict` and `chakra`: a role for each stage, sends that meet receives."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is an optional extra")
pytest.importorskip("transformers", reason="transformers is an optional extra")

import stablecast
from stablecast.frontends.torch import capture_hf

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}


def test_stages_are_roles_of_predictions_and_traces(tmp_path: Path) -> None:
    workload = capture_hf(CONFIG, 4, 32, "train", "bf16", "pp2")
    made = stablecast.predict(workload, on="h100-sxm:2")
    assert made.step_time_s > 0
    sent = {(row.kind, row.axes, row.nbytes, row.count) for row in made.collectives}
    assert sent == {(kind, ("pp",), 1 * 32 * 64 * 2, 4.0) for kind in ("send", "recv")}
    report = stablecast.to_chakra(workload, out=tmp_path / "step", on="h100-sxm:2")
    assert [role.name for role in report.roles] == ["stage0", "stage1"]
    assert (tmp_path / "step.1.et").is_file()
