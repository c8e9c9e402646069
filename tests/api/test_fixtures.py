"""Real modules: the ResNet-50 and MLP fixtures of another tool, and the bundled examples."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stablecast
from stablecast._predict import Options, Session
from stablecast.frontends.arguments import ArgumentOptions

Run = Callable[..., Any]


def test_inference_fixture_and_mlp_are_modelled_wholly(shared_data: Path) -> None:
    """Forward convolutions of ResNet-50 at batch 256: 2.093 TFLOP dense, padding counted."""
    inference = stablecast.predict(
        shared_data / "hespas/resnet_50_inference_step_4_devices_1024_batch.mlir.gz", on="h100-sxm"
    )
    assert inference.complete
    assert inference.unmodelled == ()
    assert inference.devices == 4
    convolutions = sum(kernel.matmul_flops for kernel in inference.kernels if kernel.klass == "convolution")
    assert convolutions == pytest.approx(2.093e12, rel=1e-3)
    mlp = stablecast.predict(shared_data / "hespas/jax_example.mlir", on="h100-sxm")
    assert mlp.complete
    assert mlp.unmodelled == ()


def test_training_fixture(shared_data: Path, run: Run) -> None:
    """158 convolutions; 375 all-reduces of 102.9 MB; 101.2 ms measured on 4 A100 (a module with loss scaling on top)."""
    path = shared_data / "hespas/resnet_50_train_step_4_devices_1024_batch.mlir.gz"
    answer = json.loads(run("predict", path, "--on", "a100-sxm-40gb", "--json").out)
    assert answer["devices"] == 4
    assert answer["complete"]
    assert sum(kernel["count"] for kernel in answer["kernels"] if kernel["class"] == "convolution") == 158
    assert sum(entry["bytes"] * entry["count"] for entry in answer["collectives"]) == pytest.approx(102.9e6, rel=1e-3)
    assert answer["step_time_s"] == pytest.approx(0.1012, rel=0.25)
    wrong = run("predict", path, "--on", "a100-sxm-40gb:8")
    assert wrong.code == 2
    assert "has 8 device(s), but the program is written for 4" in wrong.err


@pytest.mark.parametrize(("size", "tera"), [("100m", 6.25), ("200m", 11.98)])
def test_llama_totals_are_those_that_its_sizes_give(examples: Path, size: str, tera: float) -> None:
    options = Options(arguments=ArgumentOptions(settings=[f"size={size}"]))
    work = Session(f"{examples}/llama.py:train_step", options).work()
    assert work["matmul_flops"] == pytest.approx(tera * 1e12, rel=0.02)
    assert work["complete"]


def test_scopes_reach_the_kernel_table(examples: Path) -> None:
    prediction = Session(f"{examples}/llama.py:train_step", Options()).predict("h100-sxm")
    scopes = {kernel.scope for kernel in prediction.kernels}
    assert {"layer*/attention", "layer*/attention (backward)", "layer*/attention (recomputed)", "layer*/mlp"} <= scopes
    assert any("optimizer" in scope for scope in scopes)
    assert all(kernel.source.startswith("llama.py:") for kernel in prediction.kernels if kernel.klass == "matmul")


def test_a_sharded_example_is_partitioned_and_priced_with_its_collectives(examples: Path) -> None:
    """FSDP over 4 devices: the matrix work of one device stays that of its own sequence; weights are gathered."""
    options = Options(
        arguments=ArgumentOptions(settings=["layers=2", "d_model=256", "vocab=1024", "seq=256", "fsdp=4"])
    )
    session = Session(f"{examples}/llama.py:train_step", options)
    prediction = session.predict("a100-sxm-40gb:4")
    kinds = {collective.kind for collective in prediction.collectives}
    assert "all_gather" in kinds
    assert kinds & {"all_reduce", "reduce_scatter"}
    assert {collective.axes for collective in prediction.collectives} == {("fsdp",)}
    alone = Options(arguments=ArgumentOptions(settings=["layers=2", "d_model=256", "vocab=1024", "seq=256"]))
    single = Session(f"{examples}/llama.py:train_step", alone).work()
    assert session.work()["matmul_flops"] == single["matmul_flops"]
    assert prediction.mesh["fsdp"] == 4
    assert prediction.exposed_communication_s > 0
