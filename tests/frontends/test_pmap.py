"""`jax.pmap` for devices that are not there: how many, what they send, what each of them holds."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

import stablecast
from stablecast._predict import Options, Session
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.ir.errors import InputError
from stablecast.ir.program import Program
from stablecast.ir.workload import Workload
from stablecast.lowering.partition import partition
from stablecast.lowering.partition.tally import tally

Shape = jax.ShapeDtypeStruct


@partial(jax.pmap, axis_name="batch", donate_argnums=(0,))
def train(params: Any, x: Array, y: Array) -> Any:
    def loss(params: Any) -> Array:
        return jnp.mean(jnp.square(jnp.tanh(x @ params["a"]) @ params["b"] - y))

    grads = lax.pmean(jax.grad(loss)(params), "batch")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def arguments(batch: int = 64) -> tuple[Any, Any, Any]:
    params = {"a": Shape((batch, 64, 32), jnp.float32), "b": Shape((batch, 32, 8), jnp.float32)}
    return params, Shape((batch, 16, 64), jnp.float32), Shape((batch, 16, 8), jnp.float32)


def partitioned(workload: Workload) -> Program:
    return partition(workload.modules[0].data)


def traffic(program: Program) -> list[tuple[str, str, int, int]]:
    return [(line.kind, line.axes, line.count, line.operand_bytes) for line in tally(program).traffic]


def test_a_train_step_over_64_devices() -> None:
    workload = stablecast.capture(train, *arguments())
    assert workload.num_devices == 64
    assert [argument.name for argument in workload.args] == ["params['a']", "params['b']", "x", "y"]
    assert [argument.aliases_output for argument in workload.args] == [0, 1, None, None]
    program = partitioned(workload)
    kinds = [str(kind) for kind in program.main.body.arg_types]
    assert kinds == ["f32[1,64,32]", "f32[1,32,8]", "f32[1,16,64]", "f32[1,16,8]"]
    assert traffic(program) == [("all_reduce", "batch", 2, (64 * 32 + 32 * 8) * 4)]
    assert tally(program).matmul_flops == 2 * 16 * (64 * 32 * 2 + 32 * 8 * 3)


def test_one_called_by_another_function() -> None:
    def twice(params: Any, x: Array, y: Array) -> Any:
        return train(train(params, x, y), x, y)

    workload = stablecast.capture(twice, *arguments(8))
    assert workload.num_devices == 8
    assert traffic(partitioned(workload)) == [("all_reduce", "batch", 4, 2 * (64 * 32 + 32 * 8) * 4)]


def test_static_and_broadcast_arguments() -> None:
    @partial(jax.pmap, axis_name="i", in_axes=(0, None, None), static_broadcasted_argnums=1)
    def gathered(x: Array, times: int, y: Array) -> Array:
        return lax.all_gather(x, "i") * times + y

    workload = stablecast.capture(gathered, Shape((8, 16), jnp.float32), 3, Shape((16,), jnp.float32))
    assert [argument.name for argument in workload.args] == ["x", "y"]
    program = partitioned(workload)
    assert [str(kind) for kind in program.main.body.arg_types] == ["f32[1,16]", "f32[16]"]
    assert traffic(program) == [("all_gather", "i", 1, 16 * 4)]


@pytest.mark.parametrize(
    ("send", "expected"),
    [
        (lambda x: lax.psum(x, "i"), ("all_reduce", "i", 1, 8 * 4 * 4)),
        (lambda x: lax.psum_scatter(x, "i", tiled=True), ("reduce_scatter", "i", 1, 8 * 4 * 4)),
        (lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True), ("all_to_all", "i", 1, 8 * 4 * 4)),
        (lambda x: lax.ppermute(x, "i", [(k, (k + 1) % 8) for k in range(8)]), ("collective_permute", "i", 1, 128)),
    ],
)
def test_collectives_over_the_mapped_axis(send: Any, expected: tuple[str, str, int, int]) -> None:
    workload = stablecast.capture(jax.pmap(send, axis_name="i"), Shape((8, 8, 4), jnp.float32))
    assert traffic(partitioned(workload)) == [expected]


@pytest.mark.parametrize(
    ("function", "args", "mesh", "message"),
    [
        (jax.pmap(jnp.sin, axis_size=4), (Shape((8, 2), jnp.float32),), None, "axis_size=4, but its arguments are 8"),
        (train, arguments(8), {"batch": 16}, "are 8 long along the axis that pmap maps, the mesh is batch=16"),
        (
            jax.pmap(lambda x, y: x + y),
            (Shape((8, 2), jnp.float32), Shape((6, 2), jnp.float32)),
            None,
            "argument x over 8 devices, but argument y is 6 long",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused_in_one_line(function: Any, args: Any, mesh: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        stablecast.capture(function, *args, mesh=mesh)
    assert "\n" not in str(caught.value)


def test_real_devices_are_used_again_afterwards() -> None:
    mapped = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
    stablecast.capture(mapped, Shape((8, 4), jnp.float32))
    assert mapped(jnp.ones((1, 4))).shape == (1, 4)
    with pytest.raises(ValueError, match="local_mesh"):
        _ = jax.sharding.AbstractMesh((8,), ("i",)).local_mesh


SCRIPT = """
import jax, jax.numpy as jnp
step = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")

def arguments(i=8):
    return (jax.ShapeDtypeStruct((i, 128), jnp.float32),)
"""


def test_from_the_command_line_the_mesh_makes_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "mapped.py"
    path.write_text(SCRIPT)
    options = Options(mesh={"i": 1024}, arguments=ArgumentOptions(args=f"{path}:arguments"))
    predicted = Session(f"{path}:step", options).predict("h100-sxm:1024")
    assert predicted.devices == 1024
