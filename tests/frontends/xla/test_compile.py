"""Compiling for devices that are not there: descriptions of targets, refusals, and XLA itself where it is installed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from stablecast.frontends.files import from_module
from stablecast.frontends.xla import (
    Settings,
    boards,
    compile_ahead,
    compiler_installed,
    target_config,
    topology,
)
from stablecast.frontends.xla import compile as ahead
from stablecast.frontends.xla.targets import slice_options
from stablecast.ir.errors import InputError, ToolError
from stablecast.ir.hlo import is_scheduled
from stablecast.ir.reader import read
from stablecast.ir.workload import Workload

TEXT = b"""module @jit_step {
 func.func public @main(%a: tensor<512x256xbf16>, %b: tensor<256x128xbf16>) -> tensor<512x128xbf16> {
 %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<512x256xbf16>, tensor<256x128xbf16>) -> tensor<512x128xbf16>
 %1 = stablehlo.tanh %0 : tensor<512x128xbf16>
 return %1 : tensor<512x128xbf16> } }"""

needs_compiler = pytest.mark.skipif(not compiler_installed(), reason="the extra xla-gpu is not installed")


@pytest.fixture
def workload() -> Workload:
    return from_module(TEXT, "step.mlir")


def test_targets_hold_the_numbers_of_the_data_sheets() -> None:
    assert boards() == ("a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm")
    text = target_config("h100-sxm")
    for line in ("core_count: 132", "memory_bandwidth: 3352000000000", "cuda_compute_capability { major: 9 minor: 0 }"):
        assert line in text
    assert "core_count: 108" in target_config("a100-sxm-40gb")
    assert "major: 10 minor: 0" in target_config("b200-sxm")


@pytest.mark.parametrize(
    ("device", "count", "name"),
    [
        ("tpu-v5e", 1, "v5e:1x1"),
        ("tpu-v5e", 8, "v5e:2x4"),
        ("tpu-v6e", 256, "v6e:16x16"),
        ("tpu-v5p", 8, "v5p:2x2x2"),
        ("tpu-v5p", 8960, "v5p:16x20x28"),
        ("tpu-v7x", 8, "tpu7x:2x2x1"),
        ("tpu-v7x", 1, "tpu7x:1x1x1"),
        ("tpu-v4", 2, "v4:2x1x1"),
        ("tpu-v3", 8, "v3:2x2"),
    ],
)
def test_slices_by_number_of_devices(device: str, count: int, name: str) -> None:
    assert topology(device, count) == name


def test_what_cannot_be_compiled_for(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"for h1000: there is no description of it; did you mean h100-sxm"):
        compile_ahead(workload, "h1000")
    with pytest.raises(InputError, match="do not fill chips"):
        topology("tpu-v7x", 3)
    with pytest.raises(InputError, match="libtpu, which comes under the Google Cloud Platform Terms"):
        compile_ahead(workload, "v5e:1x1")
    with pytest.raises(InputError, match="products='fast' is not known"):
        compile_ahead(workload, "h100-sxm", Settings(products="fast"))
    monkeypatch.setattr(ahead, "_installed", lambda module: False)
    with pytest.raises(ToolError, match=r"not installed; pip install 'stablecast\[xla-gpu\]'"):
        compile_ahead(workload, "h100-sxm")
    with pytest.raises(ToolError, match="libtpu, which is not installed"):
        compile_ahead(workload, "v5e:1x1", Settings(accept_libtpu_terms=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("v5e:4x4", {"chips_per_host_bounds": [2, 2, 1]}),
        ("v6e:1x1", {"chips_per_host_bounds": [1, 1, 1]}),
        ("v4:2x1x1", {"chips_per_host_bounds": [2, 1, 1], "chip_config_name": "megacore"}),
        ("v5p:2x2x2", {"chips_per_host_bounds": [2, 2, 1]}),
    ],
)
def test_hosts_of_a_slice_and_cores_that_are_one_device(name: str, options: dict[str, Any]) -> None:
    assert slice_options(name) == options


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import time; time.sleep(9)", "did not compile step.mlir within 0.5 s; give it longer, or use --exec xla"),
        ("import os; os.abort()", "XLA died compiling step.mlir"),
        ('print(\'{"error": "no\\\\nreally"}\')', "XLA does not compile step.mlir: no; try --exec xla"),
        (
            'print(\'{"error": "RESOURCE_EXHAUSTED: Ran out of memory: needs 22G, has 15G.;"}\')',
            "step.mlir does not fit, says XLA: Ran out of memory: needs 22G, has 15G; --exec xla says what holds the memory",
        ),
    ],
)
def test_a_compiler_that_hangs_dies_or_refuses(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    run: Any = subprocess.run
    monkeypatch.setattr(ahead, "_installed", lambda module: True)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run([sys.executable, "-c", script], **options))
    with pytest.raises(ToolError) as caught:
        compile_ahead(workload, "h100-sxm", Settings(timeout_s=0.5 if "sleep" in script else 60.0))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_products_fall_back_to_the_library(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def answer(request: bytes, timeout_s: float, source: str) -> tuple[dict[str, Any], bytes]:
        asked.append(b"xla_gpu_enable_triton_gemm" in request)
        if len(asked) == 1:
            raise ToolError("INTERNAL: Couldn't find output tile sizes that satisfy hlo")
        return {"memory": {"argument": 8, "output": 4, "alias": 2, "temp": 1}}, b"HloModule x"

    monkeypatch.setattr(ahead, "_installed", lambda module: True)
    monkeypatch.setattr(ahead, "_ask", answer)
    made = compile_ahead(workload, "h100-sxm")
    assert asked == [False, True]
    assert (made.memory.peak_bytes, made.notes) == (11, (ahead.UNTUNED_NOTE, ahead.LIBRARY_NOTE))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("board", ["a100-sxm-40gb", "h100-sxm", "b200-sxm"])
def test_xla_compiles_for_a_gpu_that_is_not_there(workload: Workload, board: str) -> None:
    made = compile_ahead(workload, board)
    assert is_scheduled(made.text)
    found = read(made.text, "step")
    assert found.platform == "cuda"
    assert made.memory.argument_bytes == 2 * (512 * 256 + 256 * 128)
    assert made.memory.output_bytes == 2 * 512 * 128
