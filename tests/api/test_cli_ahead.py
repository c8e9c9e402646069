"""Compiled programs on the command line: dumps of XLA as inputs, and `--exec xla-aot`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stablecast._ahead import can_compile
from stablecast._predict import Options, Session
from stablecast.backends.catalogue import Catalogue
from stablecast.frontends.xla import Compiled, Settings
from stablecast.ir.device_program import Buffers, Collective
from stablecast.ir.errors import InputError, ToolError

DUMP = b"""HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[1024,512]{1,0}, bf16[512,256]{1,0})->bf16[2048,256]{1,0}}, num_partitions=8

%gemm (p0: bf16[1024,512], p1: bf16[512,256]) -> bf16[1024,256] {
  %p0 = bf16[1024,512]{1,0} parameter(0)
  %p1 = bf16[512,256]{1,0} parameter(1)
  %dot = bf16[1024,256]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %act = bf16[1024,256]{1,0} tanh(%dot)
}

ENTRY %main (a: bf16[1024,512], b: bf16[512,256]) -> bf16[2048,256] {
  %a = bf16[1024,512]{1,0} parameter(0)
  %b = bf16[512,256]{1,0} parameter(1)
  %out = bf16[1024,256]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm, backend_config={"operation_queue_id":"0","fusion_backend_config":{"kind":"__triton_gemm"}}
  %start = (bf16[1024,256]{1,0}, bf16[2048,256]{1,0}) all-gather-start(%out), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true
  ROOT %done = bf16[2048,256]{1,0} all-gather-done(%start)
}
"""
STEP = """
import jax, jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
MESH = AbstractMesh((4, 2), ("data", "model"))
def make_args():
    sharding = NamedSharding(MESH, P("data", None))
    return (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding),)
def step(x):
    return jnp.sum(x * 2)
"""


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "module_0001.jit_step.sm_9.0_gpu_after_optimizations.txt.gz"
    path.write_bytes(gzip.compress(DUMP))
    return path


def test_a_dump_of_a_real_run_is_priced_as_compiled(dump: Path) -> None:
    made = json.loads(Session(str(dump), Options()).predict("dgx-h100").to_json())
    assert (made["devices"], made["platform"], made["exec"]) == (8, "cuda", "as-written")
    assert [(kernel["class"], kernel["count"]) for kernel in made["kernels"]] == [("matmul", 1)]
    (gather,) = made["collectives"]
    assert (gather["kind"], gather["group_size"], gather["bytes"]) == ("all_gather", 2, 2 * 2048 * 256)


def test_a_dump_is_not_compiled_again(dump: Path) -> None:
    with pytest.raises(InputError, match="is compiled already; leave out --exec xla-aot"):
        Session(str(dump), Options(exec="xla-aot")).predict("dgx-h100")


def test_unknown_execution_models_are_named() -> None:
    with pytest.raises(InputError, match=r"known: .*xla-aot"):
        Session("x.mlir", Options(exec="quick"))


def captured(tmp_path: Path) -> Session:
    script = tmp_path / "step.py"
    script.write_text(STEP)
    from stablecast.frontends.arguments import ArgumentOptions

    options = Options(exec="xla-aot", arguments=ArgumentOptions(args=f"{script}:make_args"), cache=False)
    return Session(f"{script}:step", options)


def test_what_xla_made_is_laid_over_the_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compiled(workload: Any, target: str, settings: Settings, *, data: bytes) -> Compiled:
        asked.append(target)
        return Compiled(DUMP, Buffers(100, 50, 20, 7), ("as told",))

    monkeypatch.setattr("stablecast._ahead.compile_ahead", compiled)
    session = captured(tmp_path)
    program = session.device_program(Catalogue().resolve("h100-sxm").device)
    (gather,) = [node for node in program.body if isinstance(node, Collective)]
    assert asked == ["h100-sxm"]
    assert gather.groups.axes == ("model",)
    assert gather.asynchronous
    assert program.buffers is not None
    assert (program.exec_model, program.buffers.peak_bytes, program.notes[-1]) == ("xla-aot", 137, "as told")


def test_auto_keeps_our_own_kernels_where_xla_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Compiled:
        raise ToolError("XLA died compiling step")

    monkeypatch.setattr("stablecast._ahead.compile_ahead", refuse)
    monkeypatch.setattr("stablecast._predict.can_compile", lambda device, workload: True)
    session = captured(tmp_path)
    with pytest.raises(ToolError):
        session.predict("dgx-h100")
    auto = Session(session._source, Options(arguments=session.options.arguments, cache=False))
    program = auto.device_program(Catalogue().resolve("h100-sxm").device)
    assert (program.exec_model, program.notes[-1]) == ("xla", "kernels by our own rules: XLA died compiling step")


def test_compiled_programs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setenv("STABLECAST_CACHE", str(tmp_path / "cache"))
    made: list[str] = []

    def compiled(workload: Any, target: str, settings: Settings, *, data: bytes) -> Compiled:
        made.append(target)
        return Compiled(DUMP, Buffers(100, 50, 20, 7))

    monkeypatch.setattr("stablecast._ahead.compile_ahead", compiled)
    for device in ("h100-sxm", "h100-sxm", "b200-sxm"):
        session = captured(tmp_path)
        session.options = replace(session.options, cache=True)
        program = session.device_program(Catalogue().resolve(device).device)
        assert program.buffers is not None
        assert program.buffers.peak_bytes == 137
    assert made == ["h100-sxm", "b200-sxm"]


def test_only_described_gpus_are_compiled_for_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stablecast._ahead.compiler_installed", lambda: True)
    workload = captured(tmp_path).workload("cuda")
    able = [name for name in ("h100-sxm", "a100-sxm-40gb", "v100-sxm2", "tpu-v5e") if _can(name, workload)]
    assert able == ["h100-sxm", "a100-sxm-40gb"]


def _can(name: str, workload: Any) -> bool:
    return can_compile(Catalogue().resolve(name).device, workload)


def test_memory_that_the_compiler_laid_out_stands_beside_the_dump(dump: Path) -> None:
    beside = dump.with_name("module_0001.jit_step.sm_9.0_gpu_after_optimizations-buffer-assignment.txt")
    beside.write_text(
        "allocation 0: size 1000, parameter 0, shape |f32[250]|:\nallocation 1: size 24, preallocated-temp:\n"
    )
    made = json.loads(Session(str(dump), Options()).predict("dgx-h100").to_json())
    assert made["peak_memory_bytes"] == 1024


def test_cycles_of_the_compiler_are_a_source_of_their_own(tmp_path: Path) -> None:
    text = DUMP.decode().replace('"operation_queue_id":"0"', '"window_config":{"estimated_cycles":"170000"}')
    path = tmp_path / "module_0001.jit_step.tpu_after_optimizations.txt"
    path.write_text(text.replace("{1,0}", "{1,0:T(8,128)(2,1)}"))
    made = json.loads(Session(str(path), Options(backend="compiler")).predict("tpu-v5e").to_json())
    (kernel,) = made["kernels"]
    clock = Catalogue().resolve("tpu-v5e").device.clock_hz
    assert clock is not None
    assert kernel["basis"] == "compiler"
    assert kernel["time_s"] == pytest.approx(170000 / clock.value)
    assert made["platform"] == "tpu"
