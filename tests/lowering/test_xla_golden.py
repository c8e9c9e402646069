"""The goldens of XLA:GPU are whole and consistent; that ours come near them is `benchmarks/xla_golden.py`."""

import json
from pathlib import Path
from typing import Any

import pytest

GOLDENS = Path(__file__).parents[2] / "benchmarks" / "golden" / "xla_gpu"
STEPS = ("dlrm", "gpt2", "llama_1b", "llama_7b_fsdp16_tp4", "mlp", "moe", "resnet50", "unet", "vit")


def golden(name: str) -> Any:
    return json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))


def test_every_step_has_a_golden() -> None:
    assert sorted(path.stem for path in GOLDENS.glob("*.json")) == list(STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_totals_are_sums(name: str) -> None:
    held = golden(name)
    assert held["forms"]
    for form in held["forms"].values():
        memory = form["memory"]
        assert form["launches_total"] == sum(form["launches"].values())
        assert abs(form["bytes_total"] - sum(form["bytes"].values())) <= len(form["bytes"])
        assert memory["total"] == memory["argument"] + memory["output"] + memory["temp"] - memory["alias"]


def test_products_of_the_mlp_by_hand() -> None:
    first, second, last = 784 * 1024, 1024 * 1024, 1024 * 10
    flops = 2 * 128 * (2 * first + 3 * second + 3 * last)
    assert [form["matmul_flops"] for form in golden("mlp")["forms"].values()] == [flops, flops]


def test_gathered_bytes_of_the_sharded_step_by_hand() -> None:
    """Every weight of a layer is gathered over fsdp for the forward and again for the backward pass, but the last norms."""
    gathered = golden("llama_7b_fsdp16_tp4")["forms"]["generated"]["collectives"]["all_gather"]
    layer = 4 * 4096 * 32 * 128 + 3 * 4096 * 14336
    whole = 2 * (32 * layer + 4096 * 32000) // 4
    assert whole < gathered["bytes"] <= 2 * whole
