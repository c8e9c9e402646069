"""One training step of a ResNet on images, in plain JAX.

    stablecast predict examples/resnet.py:train_step --set depth=50 --on a100-sxm-40gb
    python examples/resnet.py

Images are NHWC and kernels HWIO. Parameters, momentum and batch statistics are float32, the convolutions run in half
precision. Batch norm sees the whole batch, so splitting the batch over devices makes its statistics collectives.

The number of stages and blocks, and whether blocks are bottlenecks, follow from the structure of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import stablecast

Tree = Any
Leaf = Callable[..., jax.ShapeDtypeStruct]

DEPTHS = {  # name: (blocks in each stage, bottleneck blocks)
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    200: ((3, 24, 36, 3), True),
}
DTYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32}
CLASSES = 1000
WIDTH = 64

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-4
NORM_EPS, NORM_MOMENTUM = 1e-5, 0.9
LABEL_SMOOTHING = 0.1


def make_args(
    depth: int = 50, batch: int = 256, image: int = 224, dtype: str = "f16", data: int = 1
) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`.

    Args:
        depth: one of `DEPTHS`.
        batch: images over all devices.
        image: height and width in pixels.
        dtype: `f16`, `bf16` or `f32`, of the images and so of the convolutions.
        data: devices to split the batch over; with one nothing carries a sharding.

    Raises:
        ValueError: an unknown depth or dtype, or a batch that `data` does not divide.
    """
    compute = _lookup("dtype", dtype, DTYPES)
    params = _params(*_lookup("depth", depth, DEPTHS))
    if batch % data:
        raise ValueError(f"a batch of {batch} images cannot be split over {data} devices")
    state = {
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "params": params,
        "momentum": params,
        "statistics": _statistics(params),
    }
    inputs = {
        "images": jax.ShapeDtypeStruct((batch, image, image, 3), compute),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    if data == 1:
        return state, inputs
    mesh = AbstractMesh((data,), ("data",))
    return _shard(state, mesh), _shard(inputs, mesh, "data")


@stablecast.workload(args=make_args)
@partial(jax.jit, donate_argnums=0)
def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, Array]]:
    """The next state and this step's metrics: forward, backward and SGD with momentum."""
    (loss, (statistics, accuracy)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
        state["params"], state["statistics"], batch
    )
    with stablecast.region("optimizer"):
        params, momentum = sgd(state["params"], grads, state["momentum"])
    state = {"step": state["step"] + 1, "params": params, "momentum": momentum, "statistics": statistics}
    return state, {"loss": loss, "accuracy": accuracy}


step = train_step


# The model.


def loss_fn(params: Tree, statistics: Tree, batch: Tree) -> tuple[Array, tuple[Tree, Array]]:
    """Cross entropy with smoothed labels, and the new batch statistics and the accuracy beside it."""
    logits, statistics = network(params, statistics, batch["images"])
    with stablecast.region("loss"):
        smooth = (1 - LABEL_SMOOTHING) * jax.nn.one_hot(batch["labels"], CLASSES) + LABEL_SMOOTHING / CLASSES
        loss = -jnp.mean(jnp.sum(smooth * jax.nn.log_softmax(logits), axis=-1))
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["labels"])
    return loss, (statistics, accuracy)


def network(params: Tree, statistics: Tree, images: Array) -> tuple[Array, Tree]:
    """Logits in float32 and the new batch statistics."""
    new: Tree = {"stages": []}
    with stablecast.region("stem"):
        x, new["stem"] = unit(params["stem"], statistics["stem"], images, stride=2)
        x = max_pool(jax.nn.relu(x))
    for i, (blocks, block_statistics) in enumerate(zip(params["stages"], statistics["stages"], strict=True)):
        stage = []
        for j, (block, old) in enumerate(zip(blocks, block_statistics, strict=True)):
            with stablecast.region(f"stage{i}"), stablecast.region(f"block{j}"):
                x, updated = residual(block, old, x, stride=2 if i > 0 and j == 0 else 1)
            stage.append(updated)
        new["stages"].append(stage)
    with stablecast.region("head"):
        x = jnp.mean(x, axis=(1, 2))
        logits = x @ params["head"]["kernel"].astype(x.dtype) + params["head"]["bias"].astype(x.dtype)
    return logits.astype(jnp.float32), new


def residual(block: Tree, statistics: Tree, x: Array, stride: int) -> tuple[Array, Tree]:
    """A block's units with a shortcut around them; the first 3x3 convolution takes the stride."""
    new: Tree = {"units": []}
    strided = next(i for i, part in enumerate(block["units"]) if part["kernel"].shape[0] == 3)
    y = x
    for i, (part, old) in enumerate(zip(block["units"], statistics["units"], strict=True)):
        y, updated = unit(part, old, jax.nn.relu(y) if i else y, stride if i == strided else 1)
        new["units"].append(updated)
    if "shortcut" in block:
        x, new["shortcut"] = unit(block["shortcut"], statistics["shortcut"], x, stride)
    return jax.nn.relu(x + y), new


def unit(params: Tree, statistics: Tree, x: Array, stride: int) -> tuple[Array, Tree]:
    """A convolution and its batch norm."""
    with stablecast.region("conv"):
        x = convolution(x, params["kernel"].astype(x.dtype), stride)
    with stablecast.region("norm"):
        return batch_norm(params, statistics, x)


def convolution(x: Array, kernel: Array, stride: int) -> Array:
    """A convolution padded by half its kernel."""
    pad = [((size - 1) // 2, (size - 1) // 2) for size in kernel.shape[:2]]
    return lax.conv_general_dilated(x, kernel, (stride, stride), pad, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(params: Tree, statistics: Tree, x: Array) -> tuple[Array, Tree]:
    """Normalise over batch and space with this batch's statistics, in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=(0, 1, 2))
    variance = jnp.mean(jnp.square(wide), axis=(0, 1, 2)) - jnp.square(mean)
    y = (wide - mean) * (lax.rsqrt(variance + NORM_EPS) * params["scale"]) + params["bias"]
    new = {"mean": _mix(statistics["mean"], mean), "variance": _mix(statistics["variance"], variance)}
    return y.astype(x.dtype), new


def max_pool(x: Array) -> Array:
    """The maximum of each 3x3 window, two pixels apart."""
    pad = ((0, 0), (1, 1), (1, 1), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pad)


def sgd(params: Tree, grads: Tree, momentum: Tree) -> tuple[Tree, Tree]:
    """One step with Nesterov momentum; kernels decay, norms and biases do not."""

    def accumulate(param: Array, grad: Array, moving: Array) -> Array:
        decay = WEIGHT_DECAY * param if param.ndim > 1 else 0.0
        return MOMENTUM * moving + grad + decay

    def update(param: Array, grad: Array, moving: Array) -> Array:
        return param - LEARNING_RATE * (grad + MOMENTUM * moving)

    momentum = jax.tree.map(accumulate, params, grads, momentum)
    return jax.tree.map(update, params, grads, momentum), momentum


def _mix(old: Array, new: Array) -> Array:
    return NORM_MOMENTUM * old + (1 - NORM_MOMENTUM) * new


# Shapes and shardings.


def _params(blocks: tuple[int, ...], bottleneck: bool) -> Tree:
    stages, channels = [], WIDTH
    for i, count in enumerate(blocks):
        stage = []
        for j in range(count):
            block = _block(channels, WIDTH * 2**i, bottleneck, stride=2 if i > 0 and j == 0 else 1)
            channels = block["units"][-1]["kernel"].shape[-1]
            stage.append(block)
        stages.append(stage)
    head = {"kernel": _f32(channels, CLASSES), "bias": _f32(CLASSES)}
    return {"stem": _unit(7, 3, WIDTH), "stages": stages, "head": head}


def _block(channels: int, width: int, bottleneck: bool, stride: int) -> Tree:
    if bottleneck:
        units = [_unit(1, channels, width), _unit(3, width, width), _unit(1, width, 4 * width)]
    else:
        units = [_unit(3, channels, width), _unit(3, width, width)]
    out = units[-1]["kernel"].shape[-1]
    if stride == 1 and channels == out:
        return {"units": units}
    return {"units": units, "shortcut": _unit(1, channels, out)}


def _unit(size: int, channels: int, features: int) -> Tree:
    return {"kernel": _f32(size, size, channels, features), "scale": _f32(features), "bias": _f32(features)}


def _statistics(params: Tree) -> Tree:
    def of_unit(part: Tree) -> Tree:
        return {"mean": part["scale"], "variance": part["scale"]}

    trunk = {name: params[name] for name in ("stem", "stages")}
    return jax.tree.map(of_unit, trunk, is_leaf=lambda node: isinstance(node, dict) and "scale" in node)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _shard(tree: Tree, mesh: AbstractMesh, *axes: str) -> Tree:
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def _lookup(what: str, name: Any, known: dict[Any, Any]) -> Any:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}: choose one of {', '.join(map(str, known))}")
    return known[name]


# Real values, for running the step.


def init(state: Tree, seed: int = 0) -> Tree:
    """A state to start from, shaped like the one of `make_args`."""
    random = np.random.default_rng(seed)

    def start(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        if path[-1].key == "kernel":
            spread = np.sqrt(2 / np.prod(leaf.shape[:-1]))
            return jnp.asarray(spread * random.standard_normal(leaf.shape), leaf.dtype)
        return jnp.full(leaf.shape, float(path[-1].key in ("scale", "variance")), leaf.dtype)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    started = {name: jax.tree_util.tree_map_with_path(start, state[name]) for name in ("params", "statistics")}
    return zeros | started


def random_batch(batch: Tree, seed: int = 0) -> Tree:
    """Noise with random labels, shaped like the batch of `make_args`."""
    random = np.random.default_rng(seed)
    images, labels = batch["images"], batch["labels"]
    return {
        "images": jnp.asarray(random.standard_normal(images.shape), images.dtype),
        "labels": jnp.asarray(random.integers(CLASSES, size=labels.shape), labels.dtype),
    }


def main(steps: int = 2) -> None:
    """Run a small ResNet-18 for a few steps and print its loss."""
    state, batch = make_args(depth=18, batch=8, image=32, dtype="bf16")
    state, batch = init(state), random_batch(batch)
    for i in range(steps):
        state, metrics = train_step(state, batch)
        print(f"step {i}: loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.2f}")


if __name__ == "__main__":
    main()
