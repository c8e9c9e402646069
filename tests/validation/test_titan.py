"""TorchTitan's rows: how a row becomes a program, and what 8 bits and FlashAttention-2 change."""

from dataclasses import replace

import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.kernel_specs import attention, elementwise, matmul
from stablecast.backends.pricing import price
from stablecast.backends.registry import parse_choice
from stablecast.ir.device_program import DeviceProgram, Kernel
from stablecast.ir.kernels import KernelTable
from stablecast.ir.work import SymbolicWork
from stablecast.validation.suites import titan

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
