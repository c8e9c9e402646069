"""JAX programs on meshes without devices: local shapes, named groups, old forms, donation, scale."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from stablecast.ir import mlir
from stablecast.ir.attributes import Shift
from stablecast.ir.program import Op, Program, Stage
from stablecast.lowering.device import Target, lower
from stablecast.lowering.partition import partition, start_worker
from stablecast.lowering.partition.program import ORDER_NOTE, SCATTER_NOTE
from stablecast.lowering.partition.ragged import RAGGED_NOTE
from stablecast.lowering.partition.tally import tally

P = PartitionSpec


def traffic(program: Program) -> dict[tuple[str, str], tuple[int, int]]:
    return {(line.kind, line.axes): (line.count, line.operand_bytes) for line in tally(program).traffic}


def named(program: Program, name: str) -> list[Op]:
    return [op for op in program.main.body.walk() if op.name == name]


def mlp_grads(weights: Any, x: Array) -> Any:
    return jax.grad(lambda w: jnp.sum(jnp.square(jnp.tanh(x @ w[0]) @ w[1])))(weights)


def mlp_args(mesh: Any) -> tuple[Any, Any]:
    weights = (mesh.shape(64, 128, axes=(None, "m")), mesh.shape(128, 64, axes=("m",)))
    return weights, mesh.shape(32, 64, axes=("d",))


def test_local_shapes_and_named_groups(on: Callable[..., Any]) -> None:
    mesh = on(d=2, m=4)
    program = partition(mesh.module(mlp_grads, *mlp_args(mesh)))
    assert [str(argument.type) for argument in program.main.arguments] == ["f32[64,32]", "f32[32,64]", "f32[16,64]"]
    assert [argument.name for argument in program.main.arguments] == ["weights[0]", "weights[1]", "x"]
    assert program.stage is Stage.PER_DEVICE
    assert traffic(program) == {("all_reduce", "d"): (2, 16384), ("all_reduce", "m"): (1, 4096)}
    assert named(program, "stablehlo.all_reduce")[0].attrs["replica_groups"].num_devices == 8


def test_equal_ops_share_a_signature(on: Callable[..., Any]) -> None:
    mesh = on(d=4)

    def twice(x: Array) -> Array:
        return jnp.tanh(jnp.tanh(x) + 1.0) + 1.0

    program = partition(mesh.module(twice, mesh.shape(8, 16, axes=("d",))))
    assert len({op.signature for op in named(program, "stablehlo.tanh")}) == 1
    assert {op.signature for op in program.main.body.ops} >= {op.signature for op in named(program, "stablehlo.add")}


def test_loop_carries_are_local(on: Callable[..., Any]) -> None:
    mesh = on(d=2, m=4)

    def loop(weights: Array, x: Array) -> Array:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0]

    program = partition(
        mesh.module(loop, mesh.shape(3, 64, 64, axes=(None, None, "m")), mesh.shape(32, 64, axes=("d",)))
    )
    (op,) = named(program, "stablehlo.while")
    assert op.count == 3
    assert op.regions[1].arg_types == op.result_types == op.operand_types
    assert "f32[3,64,16]" in map(str, op.result_types)


def test_donated_buffer_goes_to_the_result_of_its_type(on: Callable[..., Any]) -> None:
    mesh = on(d=2, m=4)

    def step(w: Array, x: Array) -> Array:
        return w - jax.grad(lambda w: jnp.sum(jnp.square(x @ w)))(w)

    data = mesh.module(step, mesh.shape(16, 32, axes=(None, "m")), mesh.shape(8, 16, axes=("d",)), donate_argnums=0)
    program = partition(data)
    assert [argument.aliases_output for argument in program.main.arguments] == [0, None]


@pytest.mark.parametrize("axes", [{"d": 1, "m": 1}, {"d": 8, "m": 1}])
def test_axes_of_one_device(on: Callable[..., Any], axes: dict[str, int]) -> None:
    mesh = on(**axes)
    program = partition(mesh.module(mlp_grads, *mlp_args(mesh)))
    assert program.num_devices == axes["d"]
    assert set(traffic(program)) == ({("all_reduce", "d")} if axes["d"] > 1 else set())
    assert lower(program, Target("cuda")).complete


def test_several_meshes(on: Callable[..., Any]) -> None:
    one, other = on(x=4), on(a=2, b=2)

    def both(x: Array, y: Array) -> Array:
        return jnp.sum(x) + jnp.sum(y)

    program = partition(one.module(both, one.shape(8, 16, axes=("x",)), other.shape(8, 16, axes=("a", "b"))))
    assert program.num_devices == 4
    assert sum(count for count, _ in traffic(program).values()) >= 2


def test_explicit_axes() -> None:
    mesh = AbstractMesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in (((8, 16), P("d", "m")), ((16, 32), P("m", None)))
        ]
        traced = jax.jit(lambda x, y: jnp.dot(x, y, out_sharding=P("d", None))).trace(*shapes)
        text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert traffic(partition(text.encode())) == {("all_reduce", "m"): (1, 4 * 32 * 4)}


def test_gspmd_module_gives_the_same_traffic(on: Callable[..., Any]) -> None:
    mesh = on(d=2, m=4)
    with jax._src.config.use_shardy_partitioner(False):  # pyright: ignore[reportAttributeAccessIssue]
        data = mesh.module(mlp_grads, *mlp_args(mesh))
    assert b"sdy" not in data
    program = partition(data)
    assert traffic(program) == {("all_reduce", "axis_0"): (2, 16384), ("all_reduce", "axis_1"): (1, 4096)}
    assert any("GSPMD" in note for note in program.notes)


def _psum(x: Array, w: Array) -> Array:
    return lax.psum(x @ w, "m")


@pytest.mark.parametrize("shardy", [True, False])
def test_shard_map_old_and_new(on: Callable[..., Any], shardy: bool) -> None:
    mesh = on(d=2, m=4)
    mapped = jax.shard_map(_psum, mesh=mesh.mesh, in_specs=(P("d", "m"), P("m")), out_specs=P("d"), check_vma=False)
    with jax._src.config.use_shardy_partitioner(shardy):  # pyright: ignore[reportAttributeAccessIssue]
        data = mesh.module(mapped, mesh.shape(32, 64, axes=("d", "m")), mesh.shape(64, 16, axes=("m",)))
    program = partition(data)
    assert traffic(program) == {("all_reduce", "m" if shardy else "axis_1"): (1, 16 * 16 * 4)}
    assert tally(program).matmul_flops == 2 * 16 * 16 * 16


def test_exported_artifact(on: Callable[..., Any]) -> None:
    mesh = on(d=2, m=4)
    data = jax.export.export(jax.jit(mlp_grads), platforms=["cpu"])(*mlp_args(mesh)).mlir_module_serialized
    assert traffic(partition(data)) == {("all_reduce", "d"): (2, 16384), ("all_reduce", "m"): (1, 4096)}


def test_partly_manual_body(on: Callable[..., Any]) -> None:
    mesh = on(d=2, m=4)
    mapped = jax.shard_map(
        lambda x, w: lax.psum(jnp.sum(x @ w), "d"),
        mesh=mesh.mesh,
        in_specs=(P("d"), P()),
        out_specs=P(),
        axis_names={"d"},
        check_vma=False,
    )
    program = partition(mesh.module(mapped, mesh.shape(32, 64, axes=("d",)), mesh.shape(64, 16, axes=(None, "m"))))
    assert set(traffic(program)) == {("all_reduce", "d"), ("all_reduce", "m")}
    assert tally(program).matmul_flops == 2 * 16 * 64 * 4


def test_loop_around_shard_map_is_noted(on: Callable[..., Any]) -> None:
    mesh = on(d=4)
    mapped = jax.shard_map(
        lambda h: h - lax.pmean(h, "d"), mesh=mesh.mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False
    )

    def loop(weights: Array, x: Array) -> Array:
        return lax.scan(lambda c, w: (mapped(c @ w), None), x, weights)[0]

    program = partition(mesh.module(loop, mesh.shape(3, 16, 16, axes=(None, "d")), mesh.shape(8, 16, axes=("d",))))
    assert ORDER_NOTE in program.notes
    assert traffic(program)[("all_gather", "d")][0] == 3


def _ring(size: int) -> list[tuple[int, int]]:
    return [(place, (place + 1) % size) for place in range(size)]


def test_permutation_over_131072_devices_is_a_shift(on: Callable[..., Any]) -> None:
    mesh = on(d=16384, m=8)
    mapped = jax.shard_map(
        lambda x: lax.psum(lax.ppermute(x, "d", _ring(16384)), "m"),
        mesh=mesh.mesh,
        in_specs=P("d", "m"),
        out_specs=P("d"),
        check_vma=False,
    )
    program = partition(mesh.module(mapped, mesh.shape(32768, 16, axes=("d", "m"))))
    (op,) = named(program, "stablehlo.collective_permute")
    assert op.attrs["shift"] == Shift("d", 1, cyclic=True)
    assert "source_target_pairs" not in op.attrs
    groups = op.attrs["replica_groups"]
    assert (groups.axes, groups.size, groups.count) == (("d",), 16384, 8)
    assert groups.members(9)[:2] == (1, 9)


@pytest.mark.parametrize(
    ("pairs", "shift"),
    [
        ([(0, 1), (1, 2), (2, 3)], Shift("d", 1, cyclic=False)),
        ([(2, 0), (3, 1)], Shift("d", -2, cyclic=False)),
        ([(0, 3), (1, 0), (2, 1), (3, 2)], Shift("d", -1, cyclic=True)),
        ([(0, 1), (1, 2)], None),
        ([(3, 0)], Shift("d", -3, cyclic=False)),
        ([(0, 1), (1, 0)], None),
    ],
)
def test_which_permutations_are_shifts(on: Callable[..., Any], pairs: list[tuple[int, int]], shift: Any) -> None:
    mesh = on(d=4)
    mapped = jax.shard_map(
        lambda x: lax.ppermute(x, "d", pairs), mesh=mesh.mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False
    )
    program = partition(mesh.module(mapped, mesh.shape(8, 16, axes=("d",))))
    (op,) = named(program, "stablehlo.collective_permute")
    assert op.attrs.get("shift") == shift


@pytest.mark.parametrize("rows", [(), ("e",)])
def test_ragged_product_with_sharded_experts(on: Callable[..., Any], rows: tuple[str, ...]) -> None:
    """Every device multiplies an eighth of the rows; the sum over experts is scattered where the rows are split."""
    mesh = on(e=8)

    def product(x: Array, w: Array, sizes: Array) -> Array:
        return lax.ragged_dot(x, w, sizes)

    args = mesh.shape(1024, 256, axes=rows), mesh.shape(16, 256, 512, axes=("e",)), mesh.shape(16, dtype="int32")
    program = partition(mesh.module(product, *args, platform="tpu"))
    assert tally(program).matmul_flops == 2 * (1024 // 8) * 256 * 512
    whole = 1024 * 512 * 4
    if rows:
        assert traffic(program) == {("all_gather", "e"): (1, 131072), ("reduce_scatter", "e"): (1, whole)}
    else:
        assert traffic(program) == {("all_reduce", "e"): (1, whole)}
    assert RAGGED_NOTE in program.notes
    assert lower(program, Target("tpu")).complete


def test_part_of_a_sum_is_scattered_and_the_rest_reduced(on: Callable[..., Any]) -> None:
    """HSDP: gradients summed over data and fsdp, kept along fsdp."""
    mesh = on(data=2, fsdp=4)

    def loss(w: Array, x: Array) -> Array:
        return jnp.sum(jnp.square(lax.with_sharding_constraint(x @ w, mesh.sharding(("data", "fsdp"), None))))

    def step(w: Array, x: Array) -> Array:
        return w - jax.grad(loss)(w, x)

    args = mesh.shape(64, 32, axes=("fsdp",)), mesh.shape(4096, 64, axes=(("data", "fsdp"),))
    found = traffic(partition(mesh.module(step, *args)))
    assert found[("reduce_scatter", "fsdp")] == (1, 64 * 32 * 4)
    assert found[("all_reduce", "data")] == (1, 16 * 32 * 4)


def test_what_becomes_of_sums_of_which_a_part_is_kept(on: Callable[..., Any]) -> None:
    """FSDP by the target's compiler: reduce-scatters, with a note where they are a model; XLA for CPU leaves the sum."""
    mesh = on(d=4)

    def step(w: Array, x: Array) -> Array:
        return w - jax.grad(lambda w: jnp.sum(jnp.square(mesh_rows(mesh, x @ w))))(w)

    data = mesh.module(step, mesh.shape(64, 32, axes=("d",)), mesh.shape(128, 64, axes=("d",)))
    found = {platform: partition(data, platform=platform) for platform in ("cuda", "rocm", "tpu", "cpu")}
    whole = 64 * 32 * 4
    for platform in ("cuda", "rocm", "tpu"):
        assert traffic(found[platform])[("reduce_scatter", "d")] == (1, whole)
        assert ("all_reduce", "d") not in traffic(found[platform])
    assert traffic(found["cpu"])[("all_reduce", "d")] == (1, whole)
    assert ("reduce_scatter", "d") not in traffic(found["cpu"])
    assert [platform for platform, made in found.items() if any(SCATTER_NOTE in note for note in made.notes)] == ["tpu"]
    assert len({str(made.main.result_types) for made in found.values()}) == 1


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_reduce_scatter_that_the_program_wrote_stays(on: Callable[..., Any], platform: str) -> None:
    mesh = on(d=4)
    mapped = jax.shard_map(
        lambda x: lax.psum_scatter(x, "d", tiled=True), mesh=mesh.mesh, in_specs=P(), out_specs=P("d"), check_vma=False
    )
    program = partition(mesh.module(mapped, mesh.shape(8, 16)), platform=platform)
    assert traffic(program) == {("reduce_scatter", "d"): (1, 8 * 16 * 4)}
    assert program.notes == ()


def mesh_rows(mesh: Any, x: Array) -> Array:
    return lax.with_sharding_constraint(x, mesh.sharding("d", None))


def test_uneven_parts_travel_with_their_padding(on: Callable[..., Any]) -> None:
    """30 rows and 62 columns over 8 devices: as XLA, 32 rows are gathered, and 64 columns change places with them."""
    mesh = on(d=8)

    def rows(x: Array, w: Array) -> Array:
        return jnp.tanh(lax.with_sharding_constraint(x @ w, mesh.sharding("d", None)))

    def gathered(x: Array, w: Array) -> Array:
        return rows(x, w) @ w.T

    def turned(x: Array, w: Array) -> Array:
        return lax.with_sharding_constraint(rows(x, w), mesh.sharding(None, "d"))

    args = mesh.shape(30, 64), mesh.shape(64, 62)
    for function, kind in ((gathered, "all_gather"), (turned, "all_to_all")):
        program = partition(mesh.module(function, *args))
        op = named(program, f"stablehlo.{kind}")[0]
        found = str(op.operand_types[0]), str(op.result_type)
        assert (
            found
            == {
                "all_gather": ("f32[4,64]", "f32[32,64]"),
                "all_to_all": ("f32[4,64]", "f32[32,8]"),
            }[kind]
        )
        assert str(program.main.result_types[0]) in ("f32[30,64]", "f32[30,62]")


def test_waiting_worker_is_used_once(on: Callable[..., Any]) -> None:
    mesh = on(d=2)
    worker = start_worker()
    partition(mesh.module(jnp.sum, mesh.shape(8, axes=("d",))), worker=worker)
    assert worker.process.poll() == 0


def test_unused_worker_is_ended() -> None:
    worker = start_worker()
    worker.close()
    assert worker.process.poll() is not None


def test_llama_100m_gathers_and_reduces_as_the_published_export(examples: Any) -> None:
    """FSDP over 4 devices: 14 all-gathers a layer and 2 more; every matrix's gradient is reduced once."""
    spec = importlib.util.spec_from_file_location("llama_example", examples / "llama.py")
    assert spec is not None
    assert spec.loader is not None
    llama = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(llama)
    state, batch = llama.make_args("100m", fsdp=4)
    lowered = llama.train_step.trace(state, batch).lower(lowering_platforms=("cuda",))
    found = traffic(partition(mlir.write_bytecode(lowered.compiler_ir("stablehlo"))))
    assert found[("all_gather", "fsdp")][0] == 14 * 7 + 2 == 100
    assert found[("reduce_scatter", "fsdp")][0] == 7 * 7 + 2
