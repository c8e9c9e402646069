"""TorchTitan's rows: how a row becomes a program, and what 8 bits and FlashAttention-2 change."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.kernel_specs import attention, elementwise, matmul
from stablecast.backends.pricing import price
from stablecast.backends.registry import parse_choice
from stablecast.ir.device_program import Collective, DeviceProgram, Kernel
from stablecast.ir.groups import Groups
from stablecast.ir.kernels import KernelClass, KernelTable
from stablecast.ir.work import SymbolicWork
from stablecast.lowering.products import TF32_ARITHMETIC
from stablecast.lowering.target import Target
from stablecast.validation.suites import titan
from stablecast.validation.suites.base import Data, examples_folder
from stablecast.validation.suites.captures import example_kernels, kernels
from stablecast.validation.suites.titan_async import pipelined_share
from stablecast.validation.suites.titan_float8 import RECIPES, as_torchao, in_float8

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
    assert (case.size, case.batch, case.float8, case.overlapped) == ("405b", 4, "yes", True)
    assert titan.case_of(RECORD | {"pp": "1", "float8": "no"}).batch == 32


WEIGHTS = "forward/FSDPLlama/layers/0/c10d._allgather_base_"
GATHERED = "layers/0/attention/_c10d_functional.all_gather_into_tensor"
LINEAR = "FSDPLlama/layers/0/attention/wq/aten.mm"
OVER_8 = Groups(1, 8)


def layer(recipe: str) -> tuple[DeviceProgram, list[float]]:
    """Tokens are gathered and multiplied by a gathered weight, forward and for both gradients, and by the output's."""
    forward, over = matmul(H100, "bf16", 4096, 512, 1024), matmul(H100, "bf16", 1024, 512, 4096)
    copy = replace(elementwise(H100, "bf16", 4096, 1024), klass=KernelClass.COPY)
    logits = matmul(H100, "bf16", 4096, titan.VOCAB, 1024)
    backward = matmul(H100, "bf16", 4096, 1024, 512)
    body = (
        Collective("all_gather", OVER_8, 1 << 17, 1 << 20, dtype="bf16", scope=WEIGHTS),
        Collective("all_gather", OVER_8, 1 << 20, 1 << 23, dtype="bf16", scope=f"forward/FSDPLlama/{GATHERED}"),
        Kernel(0, scope="forward/FSDPLlama/layers/0/attention/aten.cat", deps=(1,)),
        Kernel(1, scope=f"forward/{LINEAR}", deps=(0, 2)),
        Kernel(2, scope="backward/FSDPLlama/layers/0/attention/aten.mul"),
        Kernel(3, scope=f"backward/{LINEAR}", deps=(0, 4)),
        Kernel(4, scope=f"backward/{LINEAR}", deps=(2, 4)),
        Kernel(5, scope="forward/FSDPLlama/head/aten.mm", deps=(2,)),
    )
    table = KernelTable.of([copy, forward, elementwise(H100, "bf16", 4096, 512), backward, over, logits])
    return as_torchao(DeviceProgram("test", body, table, SymbolicWork()), RECIPES[recipe])


def test_layers_go_to_8_bits_and_logits_stay() -> None:
    changed, _ = layer("tensorwise")
    assert [row.math for row in changed.table.rows][:6] == ["vector", "fp8_e4m3", "vector", *["fp8_e4m3"] * 2, "bf16"]
    assert changed.table.rows[1].bytes_read == (4096 * 1024 + 1024 * 512)
    assert [row.math for row in in_float8(changed).table.rows][5] == "bf16"


def test_what_is_gathered_in_8_bits() -> None:
    """Tokens by tensorwise recipes, parameters where FSDP gathers them so; then the copy of what came is halved too."""
    sizes = {name: [node.result_bytes for node in layer(name)[0].body[:2]] for name in RECIPES}  # type: ignore[union-attr]
    assert sizes == {"yes": [1 << 19, 1 << 22], "tensorwise": [1 << 20, 1 << 22], "rowwise": [1 << 20, 1 << 23]}
    changed, _ = layer("yes")
    copy = changed.body[2]
    assert isinstance(copy, Kernel)
    assert changed.table.rows[copy.row].bytes_written == 4096 * 1024
    assert changed.table.count[[0, copy.row]].tolist() == [0.0, 1.0]
    changed, _ = layer("rowwise")
    assert len(changed.table) == 6


def test_what_is_cast() -> None:
    """A tensor once in each pass, before it is gathered; by rows for one product and by columns for another."""
    tokens, weight, gradient = 4096 * 1024, 1024 * 512, 4096 * 512
    once = [tokens / 8 * 3, gradient * 3, tokens / 8 * 3]
    assert sorted(layer("yes")[1]) == sorted(once)
    assert sorted(layer("tensorwise")[1]) == sorted([*once, weight * 3, weight * 3])
    rows, columns = (tokens + weight + gradient) * 3, (tokens + weight + gradient) * 5
    assert sum(layer("rowwise")[1]) == rows + columns


def test_which_transfers_are_pipelined() -> None:
    """A gather that products read from the left, and a scatter of one product; not one of a sum, nor what is cast."""
    product, total = matmul(H100, "bf16", 4096, 512, 1024), elementwise(H100, "bf16", 4096, 512)
    gather, scatter = f"x/{GATHERED}", "x/layers/0/attention/_c10d_functional.reduce_scatter_tensor"
    body = (
        Collective("all_gather", OVER_8, 100, 800, dtype="bf16", scope=gather),
        Kernel(0, deps=(0,)),
        Collective("reduce_scatter", OVER_8, 400, 50, dtype="bf16", scope=scatter, deps=(1,)),
        Kernel(1, deps=(1,)),
        Collective("reduce_scatter", OVER_8, 400, 50, dtype="bf16", scope=scatter, deps=(3,)),
        Collective(
            "all_gather", OVER_8, 100, 800, dtype="bf16", scope="x/head/_c10d_functional.all_gather_into_tensor"
        ),
    )
    made = DeviceProgram("test", body, KernelTable.of([product, total]), SymbolicWork())
    assert pipelined_share(made, cast_after=False) == 1200 / 1600
    assert pipelined_share(made, cast_after=True) == 400 / 1600
    assert pipelined_share(program(product), cast_after=False) == 0.0


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

    module: Any = load_module(folder / "torch_titan.py")

    def build(mesh: Any) -> Any:
        return module.build_mixed(mesh, "tiny", layers=1, vocab=1024)

    workload = capture_torch(build, module.ring_step, lambda: module.inputs(1, 64, head=32), mesh={"dp": 2, "cp": 2})
    lowered = kernels(workload, "ring", Target("cuda", TF32_ARITHMETIC, False, "eager"))
    parts = [node for node in lowered.body if isinstance(node, Collective)]
    assert {node.groups.size for node in parts if node.kind == "reduce_scatter"} == {4}
    assert "collective_permute" in {node.kind for node in parts}
    rows = [lowered.table.rows[node.row] for node in lowered.body if isinstance(node, Kernel)]
    seen = [(row.sq, row.skv, row.causal) for row in rows if row.klass == KernelClass.ATTENTION]
    assert seen == [(64, 64, 1), (32, 64, 0)] * 3


def test_a_pipeline_waits_for_fsdp_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = titan.Titan(Data(Path(), parse_choice("analytical")), Path())
    layer, rest = titan.Cost(np.ones(3), exposed=0.25), titan.Cost(np.ones(3))
    monkeypatch.setattr(model, "_parts", lambda case, device: (layer, rest))
    # 16 of 126 layers a stage, for 8 micro-batches and 7 others' places
    assert model.step(RECORD).time.tolist() == [(15 * 0.75 + 0.25) * 16] * 3
    assert model.step(RECORD | {"schedule": "interleaved-1f1b"}).time.tolist() == [(11.5 * 0.75 + 0.25) * 16] * 3


def test_what_dtensor_advises_authors_stays_out_of_a_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STABLECAST_CACHE", str(tmp_path / "cache"))
    logger = logging.getLogger("torch.distributed.tensor._redistribute")

    def make() -> DeviceProgram:
        logger.warning("this is suboptimal")
        logger.error("this is wrong")
        return DeviceProgram("none", (), KernelTable.of([]), SymbolicWork())

    example_kernels(tmp_path, "torch", "advice", make)
    assert [record.message for record in caplog.records] == ["this is wrong"]
    logger.warning("of the user's own program")
    assert len(caplog.records) == 2
