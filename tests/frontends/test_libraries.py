"""flax and optax as people use them, explicit axes, and parameters that nobody allocates."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import stablecast
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.ir.errors import InputError
from stablecast.ir.workload import Workload
from stablecast.lowering.partition import partition
from stablecast.lowering.partition.tally import tally

P = PartitionSpec
Shape = jax.ShapeDtypeStruct
MESH = {"data": 8, "model": 4}

LINEN = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

def split(*axes):
    return nn.with_partitioning(nn.initializers.lecun_normal(), axes)

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(1024, name="up", kernel_init=split(None, "model"))(x))
        return x + nn.Dense(256, name="down", kernel_init=split("model", None))(h)

net, tx = Net(), optax.adamw(1e-3)
X = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=P("data"))

def step(params, opt, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.square(net.apply(p, x))))(params)
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, loss

def arguments():
    def init():
        params = net.init(jax.random.key(0), jnp.zeros((64, 256)))
        return params, tx.init(params)

    boxed = jax.eval_shape(init)
    specs = nn.get_partition_spec(boxed)
    shapes = jax.tree.map(lambda p: getattr(p, "value", p), boxed, is_leaf=lambda p: isinstance(p, nn.Partitioned))
    struct = lambda p, spec: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=spec)
    return *jax.tree.map(struct, shapes, specs), X
"""

NNX = """
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

def split(*axes):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)

class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 1024, rngs=rngs, kernel_init=split(None, "model"))
        self.down = nnx.Linear(1024, 256, rngs=rngs, kernel_init=split("model", None))

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))

@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x))))(model)
    optimizer.update(model, grads)
    return loss

def arguments():
    def both():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    return *nnx.eval_shape(both), jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=P("data"))
"""


def captured(tmp_path: Path, text: str) -> Workload:
    path = tmp_path / "model.py"
    path.write_text(text)
    return stablecast.load(f"{path}:step", ArgumentOptions(args=f"{path}:arguments"), mesh=MESH)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("text", [LINEN, NNX], ids=["linen", "nnx"])
def test_flax_and_optax_on_a_mesh(tmp_path: Path, text: str) -> None:
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    workload = captured(tmp_path, text)
    assert workload.num_devices == 32
    program = partition(workload.modules[0].data)
    kinds = [str(kind) for kind in program.main.body.arg_types]
    assert kinds.count("f32[256,256]") == 6, "two kernels of a quarter, each with two moments"
    assert kinds[-1] == "f32[8,256]"
    counts = tally(program)
    assert counts.matmul_flops == 2 * 8 * 256 * 256 * 5
    found = {(line.kind, line.axes) for line in counts.traffic}
    assert {("all_reduce", "data"), ("all_reduce", "model")} <= found
    assert {kind for kind, _ in found} == {"all_reduce"}


EXPLICIT = AbstractMesh((8, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def explicit_step(weights: Any, x: Array) -> Any:
    def loss(weights: Any) -> Array:
        hidden = jax.nn.relu(jnp.dot(x, weights[0], out_sharding=P("data", "model")))
        return jnp.mean(jnp.square(jnp.dot(hidden, weights[1], out_sharding=P("data", None))))

    return jax.grad(loss)(weights)


def explicit_arguments(place: Any) -> Any:
    up, down = Shape((256, 1024), jnp.float32, sharding=place(None, "model")), place("model", None)
    return (up, Shape((1024, 256), jnp.float32, sharding=down)), Shape((64, 256), jnp.float32, sharding=place("data"))


@pytest.mark.parametrize(
    ("place", "mesh"),
    [
        (lambda *axes: NamedSharding(EXPLICIT, P(*axes)), None),
        (lambda *axes: NamedSharding(EXPLICIT, P(*axes)), MESH),
        (P, MESH),
    ],
    ids=["arguments bring the mesh", "both", "the mesh is given"],
)
def test_explicit_axes(place: Any, mesh: Any) -> None:
    workload = stablecast.capture(explicit_step, *explicit_arguments(place), mesh=mesh)
    assert workload.num_devices == 32
    program = partition(workload.modules[0].data)
    assert [str(kind) for kind in program.main.body.arg_types] == ["f32[256,256]", "f32[256,256]", "f32[8,256]"]
    assert {(line.kind, line.axes, line.count) for line in tally(program).traffic} == {
        ("all_reduce", "data", 2),
        ("all_reduce", "model", 1),
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            P("data", "pipe"),
            "argument weights\\[0\\] is sharded by .*axis 'pipe', which the mesh .data=8, model=4. does",
        ),
        (P("data", "data"), "argument weights\\[0\\] is sharded by .*: it names an axis twice"),
    ],
)
def test_axes_that_the_mesh_does_not_have(spec: Any, message: str) -> None:
    def step(weights: Any) -> Array:
        return jnp.sum(weights[0])

    argument = [Shape((64, 64), jnp.float32, sharding=spec)]
    with pytest.raises(InputError, match=message):
        stablecast.capture(step, argument, mesh=MESH)


def test_half_a_trillion_parameters_are_not_allocated(examples: Path) -> None:
    """126 layers, d 16,384, 128 heads: more than Llama 405B, over 16,384 devices."""
    spec = importlib.util.spec_from_file_location("llama_example", examples / "llama.py")
    assert spec is not None
    assert spec.loader is not None
    llama = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(llama)
    args = llama.make_args(d_model=16384, layers=126, heads=128, scan=True, data=32, fsdp=64, tensor=8)
    before = sum(array.nbytes for array in jax.live_arrays())
    workload = stablecast.capture(llama.train_step, *args, platform="tpu")
    params = sum(leaf.size for leaf in jax.tree.leaves(args[0]["params"]))
    assert params > 405e9
    assert workload.num_devices == 16384
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 1e6
    program = partition(workload.modules[0].data)
    held = sum(kind.nbytes for kind in program.main.body.arg_types)
    assert held == pytest.approx(params * 3 * 2 / 512, rel=0.01), (
        "parameters and both moments in bf16, over 512 devices"
    )
