"""TorchTitan's rows: how a row becomes a program, and what 8 bits and FlashAttention-2 change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.kernel_specs import attention, elementwise, matmul
from stablecast.backends.pricing import price
from stablecast.backends.registry import parse_choice
from stablecast.ir.device_program import Collective, DeviceProgram, Kernel
from stablecast.ir.kernels import KernelClass, KernelTable
from stablecast.ir.work import SymbolicWork
from stablecast.lowering.products import TF32_ARITHMETIC
from stablecast.lowering.target import Target
from stablecast.validation.suites import titan
from stablecast.validation.suites.base import Data, examples_folder
from stablecast.validation.suites.captures import kernels

H100 = Catalogue().device("h100-sxm")
RECORD = {
    "gpu": "H100-96GB-HBM2e-500W",
    "gpus": "512",
    "model": "llama3.1-405b",
    "fsdp": "8",
    "tp": "8",
    "pp": "8",
    "cp": "1",
    "schedule": "1f1b",
    "local_batch": "32",
    "seq_len": "8192",
    "activation_checkpointing": "full",
    "compile": "1",
    "float8": "yes",
    "async_tp": "1",
}


def program(*rows: object) -> DeviceProgram:
    table = KernelTable.of(rows)  # type: ignore[arg-type]
    body = tuple(Kernel(index) for index in range(len(rows)))
    return DeviceProgram("test", body, table, SymbolicWork())


def test_a_pipeline_splits_its_batch_into_as_many_parts_as_stages() -> None:
    case = titan.case_of(RECORD)
    assert (case.size, case.batch, case.float8, case.overlapped) == ("405b", 4, True, True)
    assert titan.case_of(RECORD | {"pp": "1", "float8": "no"}).batch == 32


def test_layers_go_to_8_bits_and_logits_stay() -> None:
    layer, logits = matmul(H100, "bf16", 4096, 4096, 1024), matmul(H100, "bf16", 4096, titan.VOCAB, 1024)
    changed, casts = titan.in_float8(program(layer, logits, elementwise(H100, "bf16", 100)))
    assert [row.math for row in changed.table.rows] == ["fp8_e4m3", "bf16", "vector"]
    assert casts == [4096 * 1024 + 1024 * 4096]
    assert changed.table.rows[0].bytes_read == layer.bytes_read - casts[0]


def test_attention_takes_the_time_of_flash_attention_2() -> None:
    row = attention(H100, "bf16", 2, 32, 8192, 8192, 128, 32, 1)
    choice = parse_choice("analytical")
    changed = titan.with_flash2(program(row), H100, choice)
    time = price(changed.table, H100, choice).estimates.time_s[0]
    flops = 4 * 2 * 32 * 8192**2 * 128 / 2
    assert time == pytest.approx(flops / (0.35 * H100.peak("bf16").value), rel=0.03)
    slow = titan.with_flash2(program(replace(row, sq=128, skv=128)), H100, choice)
    assert slow.table.rows[0].hq == 32


def test_memory_in_words() -> None:
    assert "median error 10.0%, 67% within 10 %, from -5% to +30%" in titan.memory_note([-0.05, 0.1, 0.3])


def test_ring_attention_passes_keys_on_and_shards_over_both_axes() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    folder = examples_folder()
    if folder is None:
        pytest.skip("the example programs are not at hand")
    from stablecast.frontends.script import load_module
    from stablecast.frontends.torch import capture_torch

    module: Any = load_module(folder / "torch_llama.py")

    def build(mesh: Any) -> Any:
        return module.build_mixed(mesh, "tiny", layers=1, vocab=1024)

    workload = capture_torch(build, module.ring_step, lambda: module.inputs(1, 64), mesh={"dp": 2, "cp": 2})
    lowered = kernels(workload, "ring", Target("cuda", TF32_ARITHMETIC, False, "eager"))
    parts = [node for node in lowered.body if isinstance(node, Collective)]
    assert {node.groups.size for node in parts if node.kind == "reduce_scatter"} == {4}
    assert "collective_permute" in {node.kind for node in parts}
    rows = [lowered.table.rows[node.row] for node in lowered.body if isinstance(node, Kernel)]
    seen = [(row.sq, row.skv, row.causal) for row in rows if row.klass == KernelClass.ATTENTION]
    assert seen == [(64, 64, 1), (32, 64, 0)] * 3


def test_a_stage_keeps_gradients_unsharded_until_the_last_micro_batch() -> None:
    folder = examples_folder()
    if folder is None:
        pytest.skip("the example programs are not at hand")
    pytest.importorskip("torch", reason="torch is not installed")
    model = titan.Titan(Data(Path(), parse_choice("analytical")), folder)
    case = titan.case_of(RECORD)
    weights = model.module.layer_parameters("405b") / 8
    assert weights == pytest.approx(3.19e9 / 8, rel=0.01)
    kept = weights * (12 / 8 + 1 + 4)
    assert model._stage_bytes(case, weights * 12 / 8, 16, 8, 1) == pytest.approx(16 * kept)
    assert model._stage_bytes(case, weights * 12 / 8 + 1, 16, 8, 1) == pytest.approx(16 * (kept + 8))
