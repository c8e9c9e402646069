"""One training step of a vision transformer, in plain JAX.

    stablecast predict examples/vit.py:train_step --on h100-sxm
    stablecast predict examples/vit.py:train_step --set size=large --set batch=64 --on a100-sxm-80gb
    python examples/vit.py

Images are NHWC; patches become tokens by a convolution as large as its stride, and a class token is put before them.
Parameters and AdamW's moments are float32, products run in bfloat16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import stablecast

Tree = Any

SIZES = {  # name: (width, layers)
    "small": (384, 12),
    "base": (768, 12),
    "large": (1024, 24),
}
HEAD_DIM = 64
NORM_EPS = 1e-6
RATE, BETA1, BETA2, ADAM_EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.05


def make_args(
    size: str = "base",
    batch: int = 128,
    image: int = 224,
    patch: int = 16,
    classes: int = 1000,
    layers: int | None = None,
    width: int | None = None,
) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`; nothing is allocated.

    Args:
        size: one of `SIZES`; `layers` and `width` override what it says.
        batch: images.
        image, patch: height and width of both in pixels.

    Raises:
        ValueError: an unknown size, or patches that do not cover the image.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}")
    if image % patch:
        raise ValueError(f"patches of {patch} pixels do not cover an image of {image}")
    d, depth = SIZES[size]
    d, depth = width or d, layers or depth
    params = {
        "patches": {"kernel": _f32(patch, patch, 3, d), "bias": _f32(d)},
        "class_token": _f32(1, 1, d),
        "positions": _f32(1, (image // patch) ** 2 + 1, d),
        "layers": [_layer(d)] * depth,
        "final_norm": _norm(d),
        "head": _dense(d, classes),
    }
    state = {"step": jax.ShapeDtypeStruct((), jnp.int32), "params": params, "mu": params, "nu": params}
    images = jax.ShapeDtypeStruct((batch, image, image, 3), jnp.bfloat16)
    return state, {"images": images, "labels": jax.ShapeDtypeStruct((batch,), jnp.int32)}


@stablecast.workload(args=make_args)
@partial(jax.jit, donate_argnums=0)
def train_step(state: Tree, batch: Tree) -> tuple[Tree, Array]:
    """The next state and the loss before it: forward, backward and AdamW."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    with stablecast.region("optimizer"):
        return adamw(state, grads), loss


def loss_fn(params: Tree, batch: Tree) -> Array:
    """Mean cross entropy."""
    logits = network(params, batch["images"])
    with stablecast.region("loss"):
        wanted = jax.nn.one_hot(batch["labels"], logits.shape[-1])
        return -jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(logits), axis=-1))


def network(params: Tree, images: Array) -> Array:
    """Logits in float32."""
    with stablecast.region("embed"):
        x = patches(params["patches"], images)
        first = jnp.broadcast_to(params["class_token"].astype(x.dtype), (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([first, x], axis=1) + params["positions"].astype(x.dtype)
    for i, layer in enumerate(params["layers"]):
        with stablecast.region(f"layer{i}"):
            x = x + attention(layer, layer_norm(x, layer["attention_norm"]))
            x = x + mlp(layer, layer_norm(x, layer["mlp_norm"]))
    with stablecast.region("head"):
        return dense(layer_norm(x[:, 0], params["final_norm"]), params["head"]).astype(jnp.float32)


def patches(weights: Tree, images: Array) -> Array:
    """One token for each patch, row by row."""
    kernel = weights["kernel"].astype(images.dtype)
    x = lax.conv_general_dilated(images, kernel, kernel.shape[:2], "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return (x + weights["bias"].astype(x.dtype)).reshape(len(x), -1, x.shape[-1])


def attention(layer: Tree, x: Array) -> Array:
    """Self-attention over all tokens."""
    with stablecast.region("attention"):
        batch, length, width = x.shape
        mixed = dense(x, layer["qkv"]).reshape(batch, length, 3, width // HEAD_DIM, HEAD_DIM)
        query, key, value = (mixed[:, :, i] for i in range(3))
        scores = jnp.einsum("bthk,bshk->bhts", query, key).astype(jnp.float32) / HEAD_DIM**0.5
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        return dense(jnp.einsum("bhts,bshk->bthk", weights, value).reshape(x.shape), layer["out"])


def mlp(layer: Tree, x: Array) -> Array:
    """Two products with an exact GELU between them."""
    with stablecast.region("mlp"):
        return dense(jax.nn.gelu(dense(x, layer["up"]), approximate=False), layer["down"])


def dense(x: Array, weights: Tree) -> Array:
    """An affine map in the dtype of `x`."""
    return x @ weights["kernel"].astype(x.dtype) + weights["bias"].astype(x.dtype)


def layer_norm(x: Array, weights: Tree) -> Array:
    """Layer norm in float32, returned in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * lax.rsqrt(variance + NORM_EPS) * weights["scale"] + weights["bias"]).astype(x.dtype)


def adamw(state: Tree, grads: Tree) -> Tree:
    """The state after one AdamW update."""
    step = state["step"] + 1
    mu = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["mu"], grads)
    nu = jax.tree.map(lambda n, g: BETA2 * n + (1 - BETA2) * jnp.square(g), state["nu"], grads)
    mu_scale, nu_scale = 1 / (1 - BETA1**step), 1 / (1 - BETA2**step)

    def update(param: Array, m: Array, n: Array) -> Array:
        return param - RATE * (m * mu_scale / (jnp.sqrt(n * nu_scale) + ADAM_EPS) + WEIGHT_DECAY * param)

    return {"step": step, "params": jax.tree.map(update, state["params"], mu, nu), "mu": mu, "nu": nu}


def _layer(d: int) -> Tree:
    return {
        "attention_norm": _norm(d),
        "qkv": _dense(d, 3 * d),
        "out": _dense(d, d),
        "mlp_norm": _norm(d),
        "up": _dense(d, 4 * d),
        "down": _dense(4 * d, d),
    }


def _dense(inputs: int, outputs: int) -> Tree:
    return {"kernel": _f32(inputs, outputs), "bias": _f32(outputs)}


def _norm(d: int) -> Tree:
    return {"scale": _f32(d), "bias": _f32(d)}


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def init(state: Tree, seed: int = 0) -> Tree:
    """A state to start from: random matrices, norms of one, the rest zero."""
    random = np.random.default_rng(seed)

    def start(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        if path[-1].key == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        spread = 0.0 if path[-1].key == "bias" else 0.02
        return jnp.asarray(spread * random.standard_normal(leaf.shape), leaf.dtype)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    return zeros | {"params": jax.tree_util.tree_map_with_path(start, state["params"])}


def main(steps: int = 3) -> None:
    """Train a tiny one on noise and print the loss."""
    shapes, batch = make_args(layers=2, width=64, batch=4, image=32, patch=8, classes=10)
    random = np.random.default_rng(1)
    state = init(shapes)
    images = jnp.asarray(random.standard_normal(batch["images"].shape), jnp.bfloat16)
    labels = jnp.asarray(random.integers(10, size=4), jnp.int32)
    for i in range(steps):
        state, loss = train_step(state, {"images": images, "labels": labels})
        print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
