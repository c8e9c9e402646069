"""Pipelines of `shard_map` and `ppermute`: their stages and the loops that micro-batches go through."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax
from jax.sharding import AbstractMesh, PartitionSpec

from stablecast.ir import mlir
from stablecast.ir.device_program import DeviceProgram, MicroBatches
from stablecast.ir.program_json import device_program_of_json, device_program_to_json
from stablecast.lowering.device import Target, lower
from stablecast.lowering.partition import partition
from stablecast.lowering.partition.stages import stage_axes, stage_note, stage_roles

P = PartitionSpec


@pytest.fixture
def ring(families: Any) -> DeviceProgram:
    """Eight stages, sixteen micro-batches, the last stage sends to the first."""
    family = families.FAMILIES["ppermute_pipeline"]
    mesh = AbstractMesh(tuple(family.mesh.values()), tuple(family.mesh))
    program = partition(mlir.write_bytecode(families.lowered("pipeline", family, mesh).compiler_ir("stablehlo")))
    assert stage_axes(program) == ("stage",)
    return lower(program, Target("cuda"))


def chain(on: Callable[..., Any], trips: int, stages: int = 4, *, back: bool = False) -> DeviceProgram:
    """Stages whose ends do not meet; with `back`, the loss and its gradient."""
    mesh = on(stage=stages)

    def local(weights: Array, x: Array) -> Array:
        def tick(held: Array, fed: Array) -> tuple[Array, Array]:
            out = jnp.tanh((held + fed) @ weights[0])
            return lax.ppermute(out, "stage", [(i, i + 1) for i in range(stages - 1)]), out

        return lax.scan(tick, jnp.zeros_like(x[0]), x)[1]

    mapped = jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(P("stage"), P()), out_specs=P(None, "stage"), check_vma=False
    )
    function = jax.grad(lambda w, x: jnp.sum(jnp.square(mapped(w, x)))) if back else mapped
    data = mesh.module(function, mesh.shape(stages, 16, 16, axes=("stage",)), mesh.shape(trips, 8, 16))
    return lower(partition(data), Target("cuda"))


def passing(program: DeviceProgram) -> list[MicroBatches | None]:
    return [loop.micro_batches for loop in program.pipeline_loops()]


def test_stages_are_roles(ring: DeviceProgram) -> None:
    assert ring.num_stages == 8
    assert [role.coords for role in stage_roles(ring, "main")] == [{"stage": place} for place in range(8)]


def test_micro_batches_of_a_ring_are_what_its_loop_takes_in(ring: DeviceProgram) -> None:
    (loop,) = ring.pipeline_loops()
    assert loop.count == 23 == 16 + 8 - 1
    assert loop.micro_batches == MicroBatches("stage", 8, by=1, cyclic=True, count=16)
    assert "in at least 7 of 23 trips (30 %) a stage has no micro-batch" in stage_note(ring, {})


def test_trips_that_a_chain_of_stages_leaves_idle(on: Callable[..., Any]) -> None:
    program = chain(on, 12)
    assert (program.stage_axis, program.num_stages) == ("stage", 4)
    assert passing(program) == [MicroBatches("stage", 4, by=1, count=9)]
    assert "in at least 3 of 12 trips (25 %) a stage has no micro-batch" in stage_note(program, {})
    assert stage_note(replace(program, stage_axis=""), {}) == ""
    assert replace(program, stage_axis="").num_stages == 1


def test_fewer_trips_than_stages_say_nothing_of_micro_batches(on: Callable[..., Any]) -> None:
    program = chain(on, 3)
    assert passing(program) == [MicroBatches("stage", 4, by=1)]
    assert stage_note(program, {}).endswith("they wait for each other as it makes them")


def test_gradients_go_back_through_a_loop_of_their_own(on: Callable[..., Any]) -> None:
    found = passing(chain(on, 12, back=True))
    assert found == [MicroBatches("stage", 4, by=1, count=9), MicroBatches("stage", 4, by=-1, count=9)]


def test_loops_keep_their_micro_batches_on_disk(on: Callable[..., Any]) -> None:
    program = chain(on, 12)
    assert passing(device_program_of_json(device_program_to_json(program))) == passing(program)


def test_rounds_of_a_circular_pipeline(on: Callable[..., Any]) -> None:
    """Six micro-batches pass four stages three times: 6 * 3 + 4 - 1 trips."""
    mesh = on(stage=4)

    def local(weights: Array, x: Array) -> Array:
        stage = lax.axis_index("stage")

        def tick(held: Array, time: Array) -> tuple[Array, Array]:
            fresh = (stage == 0) & (time < 6)
            fed = jnp.where(fresh, x[jnp.minimum(time, 5)], held)
            out = jnp.tanh(fed @ weights[0, (time // 6) % 3])
            return lax.ppermute(out, "stage", [(i, (i + 1) % 4) for i in range(4)]), out

        return lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(21))[1]

    mapped = jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(P("stage"), P()), out_specs=P(None, "stage"), check_vma=False
    )
    args = mesh.shape(4, 3, 16, 16, axes=("stage",)), mesh.shape(6, 8, 16)
    program = lower(partition(mesh.module(mapped, *args)), Target("cuda"))
    assert passing(program) == [MicroBatches("stage", 4, by=1, cyclic=True, count=6, rounds=3)]


def test_llama_goes_forward_and_back(examples: Path) -> None:
    spec = importlib.util.spec_from_file_location("llama_example", examples / "llama.py")
    assert spec is not None
    assert spec.loader is not None
    llama = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(llama)
    args = llama.make_args(layers=4, d_model=128, vocab=512, seq=64, pp=4, dp=2)
    lowered = llama.train_step.trace(*args).lower(lowering_platforms=("cuda",))
    program = lower(partition(mlir.write_bytecode(lowered.compiler_ir("stablehlo"))), Target("cuda"))
    assert passing(program) == [
        MicroBatches("pipeline", 4, by=1, count=8),
        MicroBatches("pipeline", 4, by=-1, count=8),
    ]
