"""One training step of GPT-2, in plain JAX.

    stablecast predict examples/gpt2.py:train_step --on h100-sxm
    stablecast predict examples/gpt2.py:train_step --set size=xl --set batch=16 --mesh data=8 --on dgx-h100:8
    python examples/gpt2.py

Parameters and AdamW's moments are float32, products run in bfloat16. Positions are learned, the logits reuse the token
embedding, and attention writes its scores to memory. Everything the step must know is in the shapes of its arguments,
but for the width of a head, which is 64 in every size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import stablecast

Tree = Any

SIZES = {  # name: (width, layers)
    "small": (768, 12),
    "medium": (1024, 24),
    "large": (1280, 36),
    "xl": (1600, 48),
}
HEAD_DIM = 64
NORM_EPS = 1e-5
RATE, BETA1, BETA2, ADAM_EPS, WEIGHT_DECAY = 6e-4, 0.9, 0.95, 1e-8, 0.1


def make_args(
    size: str = "small",
    batch: int = 8,
    seq: int = 1024,
    layers: int | None = None,
    width: int | None = None,
    vocab: int = 50257,
    data: int = 1,
) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`; nothing is allocated.

    Args:
        size: one of `SIZES`; `layers` and `width` override what it says.
        batch: sequences over all devices.
        seq: tokens in a sequence, and rows of the position embedding.
        data: devices to split the batch over; with one nothing carries a sharding.

    Raises:
        ValueError: an unknown size, a width that is no multiple of a head, or a batch that `data` does not divide.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}")
    d, depth = SIZES[size]
    d, depth = width or d, layers or depth
    if d % HEAD_DIM:
        raise ValueError(f"a width of {d} is no multiple of the {HEAD_DIM} features of a head")
    if batch % data:
        raise ValueError(f"a batch of {batch} sequences cannot be split over {data} devices")
    mesh = AbstractMesh((data,), ("data",)) if data > 1 else None
    whole = partial(_leaf, mesh, PartitionSpec())
    params = {
        "tokens": whole((vocab, d)),
        "positions": whole((seq, d)),
        "layers": [_layer(whole, d)] * depth,
        "final_norm": _norm(whole, d),
    }
    state = {"step": whole((), jnp.int32), "params": params, "mu": params, "nu": params}
    tokens = _leaf(mesh, PartitionSpec("data"), (batch, seq), jnp.int32)
    return state, {"inputs": tokens, "targets": tokens}


@stablecast.workload(args=make_args)
@partial(jax.jit, donate_argnums=0)
def train_step(state: Tree, batch: Tree) -> tuple[Tree, Array]:
    """The next state and the loss before it: forward, backward and AdamW."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    with stablecast.region("optimizer"):
        return adamw(state, grads), loss


def loss_fn(params: Tree, batch: Tree) -> Array:
    """Mean cross entropy in nats."""
    logits = network(params, batch["inputs"])
    with stablecast.region("loss"):
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def network(params: Tree, tokens: Array) -> Array:
    """Logits in float32."""
    with stablecast.region("embed"):
        x = (params["tokens"][tokens] + params["positions"]).astype(jnp.bfloat16)
    for i, layer in enumerate(params["layers"]):
        with stablecast.region(f"layer{i}"):
            x = x + attention(layer, layer_norm(x, layer["attention_norm"]))
            x = x + mlp(layer, layer_norm(x, layer["mlp_norm"]))
    with stablecast.region("logits"):
        x = layer_norm(x, params["final_norm"])
        return jnp.einsum("btd,vd->btv", x, params["tokens"].astype(x.dtype), preferred_element_type=jnp.float32)


def attention(layer: Tree, x: Array) -> Array:
    """Causal self-attention with all heads in one projection."""
    with stablecast.region("attention"):
        batch, length, width = x.shape
        mixed = dense(x, layer["qkv"]).reshape(batch, length, 3, width // HEAD_DIM, HEAD_DIM)
        query, key, value = (mixed[:, :, i] for i in range(3))
        scores = jnp.einsum("bthk,bshk->bhts", query, key).astype(jnp.float32) / HEAD_DIM**0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(x.dtype)
        return dense(jnp.einsum("bhts,bshk->bthk", weights, value).reshape(x.shape), layer["out"])


def mlp(layer: Tree, x: Array) -> Array:
    """Two products with the tanh form of GELU between them."""
    with stablecast.region("mlp"):
        return dense(jax.nn.gelu(dense(x, layer["up"])), layer["down"])


def dense(x: Array, weights: Tree) -> Array:
    """An affine map in the dtype of `x`."""
    return x @ weights["kernel"].astype(x.dtype) + weights["bias"].astype(x.dtype)


def layer_norm(x: Array, weights: Tree) -> Array:
    """Layer norm in float32, returned in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + NORM_EPS) * weights["scale"] + weights["bias"]).astype(x.dtype)


def adamw(state: Tree, grads: Tree) -> Tree:
    """The state after one AdamW update."""
    step = state["step"] + 1
    mu = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["mu"], grads)
    nu = jax.tree.map(lambda n, g: BETA2 * n + (1 - BETA2) * jnp.square(g), state["nu"], grads)
    mu_scale, nu_scale = 1 / (1 - BETA1**step), 1 / (1 - BETA2**step)

    def update(param: Array, m: Array, n: Array) -> Array:
        return param - RATE * (m * mu_scale / (jnp.sqrt(n * nu_scale) + ADAM_EPS) + WEIGHT_DECAY * param)

    return {"step": step, "params": jax.tree.map(update, state["params"], mu, nu), "mu": mu, "nu": nu}


def _layer(leaf: Any, d: int) -> Tree:
    return {
        "attention_norm": _norm(leaf, d),
        "qkv": _dense(leaf, d, 3 * d),
        "out": _dense(leaf, d, d),
        "mlp_norm": _norm(leaf, d),
        "up": _dense(leaf, d, 4 * d),
        "down": _dense(leaf, 4 * d, d),
    }


def _dense(leaf: Any, inputs: int, outputs: int) -> Tree:
    return {"kernel": leaf((inputs, outputs)), "bias": leaf((outputs,))}


def _norm(leaf: Any, d: int) -> Tree:
    return {"scale": leaf((d,)), "bias": leaf((d,))}


def _leaf(
    mesh: AbstractMesh | None, spec: PartitionSpec, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=None if mesh is None else NamedSharding(mesh, spec))


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
    """Train a tiny one on random tokens and print the loss."""
    shapes, _ = make_args(layers=2, width=64, batch=2, seq=32, vocab=96)
    state, text = init(shapes), np.random.default_rng(1).integers(96, size=(2, 33))
    tokens = {"inputs": jnp.asarray(text[:, :-1], jnp.int32), "targets": jnp.asarray(text[:, 1:], jnp.int32)}
    for i in range(steps):
        state, loss = train_step(state, tokens)
        print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
