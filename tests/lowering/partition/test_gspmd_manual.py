"""`shard_map` as JAX wrote it before Shardy, whole and along some axes only: the same program of one device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax
from jax.sharding import AbstractMesh, PartitionSpec

from stablecast.ir import mlir
from stablecast.ir.errors import InputError
from stablecast.lowering.partition import partition
from stablecast.lowering.partition.tally import tally

P = PartitionSpec
Case = Callable[[AbstractMesh], Callable[..., Any]]
MESH = AbstractMesh((2, 4), ("d", "m"))


def over(mesh: AbstractMesh, axes: set[str], inputs: Any, outputs: Any) -> Callable[..., Any]:
    return partial(jax.shard_map, mesh=mesh, axis_names=axes, in_specs=inputs, out_specs=outputs, check_vma=False)


def rows(mesh: AbstractMesh) -> Callable[..., Any]:
    """The data axis by hand, the model axis by the partitioner."""
    mapped = over(mesh, {"d"}, (P("d"), P()), P())
    return mapped(lambda x, w: lax.psum(jnp.sum(x @ w, axis=0), "d"))


def gradients(mesh: AbstractMesh) -> Callable[..., Any]:
    inner = rows(mesh)
    return jax.grad(lambda x, w: jnp.sum(jnp.square(inner(x, w))), argnums=(0, 1))


def constraint(mesh: AbstractMesh) -> Callable[..., Any]:
    """A constraint on the free axis inside."""

    def local(x: Array, w: Array) -> Array:
        y = lax.with_sharding_constraint(jnp.tanh(x @ w), P(None, "m"))
        return lax.psum(y @ w.T, "d")

    return over(mesh, {"d"}, (P("d"), P()), P())(local)


def loop_inside(mesh: AbstractMesh) -> Callable[..., Any]:
    def local(x: Array, w: Array) -> Array:
        def body(_: int, c: Array) -> Array:
            return lax.ppermute(jnp.tanh(c @ (w @ w.T)), "d", [(0, 1), (1, 0)])

        return lax.fori_loop(0, 3, body, x)

    return over(mesh, {"d"}, (P("d"), P()), P("d"))(local)


def loop_around(mesh: AbstractMesh) -> Callable[..., Any]:
    def local(c: Array, w: Array) -> Array:
        return lax.psum_scatter(lax.all_gather(c, "d", tiled=True) @ w @ w.T, "d", tiled=True)

    mapped = over(mesh, {"d"}, (P("d"), P()), P("d"))(local)
    return lambda x, w: lax.fori_loop(0, 3, lambda _, c: mapped(c, w), x)


def two_in_a_row(mesh: AbstractMesh) -> Callable[..., Any]:
    first = rows(mesh)
    second = over(mesh, {"m"}, P("m"), P())(lambda a: lax.all_gather(a, "m", axis=0, tiled=True))
    return lambda x, w: second(jnp.tile(jnp.tanh(first(x, w)), (4, 1)))


def nested(mesh: AbstractMesh) -> Callable[..., Any]:
    def local(x: Array, w: Array) -> Array:
        inside: Any = jax.sharding.get_abstract_mesh()
        inner = over(inside, {"m"}, (P(None, "m"), P("m")), P())(lambda x, w: lax.psum(x @ w, "m"))
        return lax.psum(inner(x, w), "d")

    return over(mesh, {"d"}, (P("d"), P()), P())(local)


def minor_axis(mesh: AbstractMesh) -> Callable[..., Any]:
    return over(mesh, {"m"}, (P(None, "m"), P("m")), P())(lambda x, w: lax.psum(x @ w, "m"))


def own_place(mesh: AbstractMesh) -> Callable[..., Any]:
    return over(mesh, {"d"}, (P("d"), P()), P("d"))(lambda x, w: x @ w * lax.axis_index("d"))


def all_axes(mesh: AbstractMesh) -> Callable[..., Any]:
    def local(x: Array, w: Array) -> Array:
        return lax.all_to_all(lax.psum(x @ w, "m"), "d", 0, 1, tiled=True)

    return over(mesh, {"d", "m"}, (P("d", "m"), P("m")), P("d"))(local)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        *(rows, gradients, constraint, loop_inside, loop_around, two_in_a_row, nested, minor_axis, own_place),
        all_axes,
    )
}


def summary(data: bytes, names: dict[str, str]) -> Any:
    program = partition(data)
    counts = tally(program)
    lines = [
        (line.kind, ",".join(names.get(axis, axis) for axis in line.axes.split(",")), line.count, line.operand_bytes)
        for line in counts.traffic
    ]
    types = [str(kind) for kind in (*program.main.body.arg_types, *program.main.result_types)]
    return sorted(lines), counts.matmul_flops, types


@pytest.mark.parametrize("name", CASES)
def test_as_with_shardy(on: Callable[..., Any], name: str) -> None:
    mesh = on(d=2, m=4)
    function = CASES[name](mesh.mesh)
    args = mesh.shape(32, 64, axes=("d",)), mesh.shape(64, 16, axes=(None, "m"))
    new = summary(mesh.module(function, *args), {})
    with jax._src.config.use_shardy_partitioner(False):  # pyright: ignore[reportAttributeAccessIssue]
        old = mesh.module(function, *args)
    assert b"SPMDFullToShardShape" in old
    assert summary(old, {"axis_0": "d", "axis_1": "m"}) == new


@pytest.mark.parametrize("name", ["shard_map_collectives", "ppermute_pipeline"])
def test_families_in_the_old_form(families: Any, name: str) -> None:
    family = families.FAMILIES[name]
    mesh = AbstractMesh(tuple(family.mesh.values()), tuple(family.mesh))
    new = mlir.write_bytecode(families.lowered(name, family, mesh).compiler_ir("stablehlo"))
    with jax._src.config.use_shardy_partitioner(False):  # pyright: ignore[reportAttributeAccessIssue]
        old = mlir.write_bytecode(families.lowered(name, family, mesh).compiler_ir("stablehlo"))
    names = {f"axis_{place}": axis for place, axis in enumerate(family.mesh)}
    assert summary(old, names) == summary(new, {})


MODULE = """
module @m attributes {{mhlo.num_partitions = 8 : i32}} {{
  func.func public @main(%x: tensor<8x4xf32> {{mhlo.sharding = "{{devices=[2,1,4]<=[8] last_tile_dim_replicate}}"}},
                         %y: tensor<4x4xf32>) -> tensor<8x4xf32> {{
    %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {{
      mhlo.sharding = "{{devices=[1,1,2,4]<=[8] last_tile_dims={{{kinds}}}}}"}} : (tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %0, {other} : tensor<4x4xf32>
    %2 = stablehlo.custom_call @SPMDShardToFullShape(%1) {{
      mhlo.sharding = "{{devices=[2,1,4]<=[8] last_tile_dim_replicate}}"}} : (tensor<4x4xf32>) -> tensor<8x4xf32>
    return %2 : tensor<8x4xf32>
  }}
}}
"""


def test_written_by_hand_without_annotations_around_it() -> None:
    program = partition(MODULE.format(kinds="manual, replicated", other="%0").encode())
    assert [str(kind) for kind in program.main.result_types] == ["f32[4,4]"]
    assert tally(program).traffic == ()


@pytest.mark.parametrize(
    ("kinds", "other", "message"),
    [
        ("manual, replicated", "%y", "reads a value that is not"),
        ("manual, unreduced", "%0", "has unreduced subgroups"),
    ],
)
def test_what_is_refused(kinds: str, other: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition(MODULE.format(kinds=kinds, other=other).encode())
