"""One training step of a mixture-of-experts decoder, in plain JAX.

    stablecast predict examples/moe.py:train_step --on h100-sxm
    stablecast predict examples/moe.py:train_step --set expert=8 --on dgx-h100:8
    python examples/moe.py

Each token goes to its `TOP_K` best experts. An expert takes at most `capacity` tokens of a sequence; tokens are sent
to it and fetched back by products with one-hot matrices, as in GShard, so that splitting the experts over devices makes
all-to-alls. Parameters and AdamW's moments are float32, products run in bfloat16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import stablecast

Tree = Any

HEAD_DIM, TOP_K, CAPACITY_FACTOR = 64, 2, 1.25
NORM_EPS, BALANCE = 1e-5, 0.01
RATE, BETA1, BETA2, ADAM_EPS, WEIGHT_DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1


def make_args(
    layers: int = 8,
    width: int = 1024,
    experts: int = 8,
    batch: int = 4,
    seq: int = 1024,
    vocab: int = 32000,
    expert: int = 1,
) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`; nothing is allocated.

    Args:
        batch, seq: sequences over all devices, and tokens of each.
        experts: experts in each layer, their hidden width four times the model's.
        expert: devices that the experts and the batch are split over; with one nothing carries a sharding.

    Raises:
        ValueError: experts or a batch that `expert` does not divide.
    """
    if experts % expert or batch % expert:
        raise ValueError(f"{experts} experts and {batch} sequences cannot be split over {expert} devices")
    mesh = AbstractMesh((expert,), ("expert",)) if expert > 1 else None
    leaf = partial(_leaf, mesh)
    norm = leaf((width,))
    layer = {
        "attention_norm": norm,
        "qkv": leaf((width, 3 * width)),
        "out": leaf((width, width)),
        "mlp_norm": norm,
        "router": leaf((width, experts)),
        "up": leaf((experts, width, 4 * width), "expert"),
        "down": leaf((experts, 4 * width, width), "expert"),
    }
    params = {
        "tokens": leaf((vocab, width)),
        "layers": [layer] * layers,
        "final_norm": norm,
        "logits": leaf((width, vocab)),
    }
    state = {"step": leaf((), dtype=jnp.int32), "params": params, "mu": params, "nu": params}
    tokens = leaf((batch, seq), "expert", dtype=jnp.int32)
    return state, {"inputs": tokens, "targets": tokens}


@stablecast.workload(args=make_args)
@partial(jax.jit, donate_argnums=0)
def train_step(state: Tree, batch: Tree) -> tuple[Tree, Array]:
    """The next state and the loss before it: forward, backward and AdamW."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    with stablecast.region("optimizer"):
        return adamw(state, grads), loss


def loss_fn(params: Tree, batch: Tree) -> Array:
    """Mean cross entropy in nats, and what uneven use of the experts costs."""
    logits, imbalance = network(params, batch["inputs"])
    with stablecast.region("loss"):
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked) + BALANCE * imbalance


def network(params: Tree, tokens: Array) -> tuple[Array, Array]:
    """Logits in float32, and the imbalance summed over the layers."""
    with stablecast.region("embed"):
        x = params["tokens"][tokens].astype(jnp.bfloat16)
    total = jnp.zeros(())
    for i, layer in enumerate(params["layers"]):
        with stablecast.region(f"layer{i}"):
            x = x + attention(layer, rms_norm(x, layer["attention_norm"]))
            mixed, imbalance = mixture(layer, rms_norm(x, layer["mlp_norm"]))
            x, total = x + mixed, total + imbalance
    with stablecast.region("logits"):
        weights = params["logits"].astype(x.dtype)
        x = rms_norm(x, params["final_norm"])
        return jnp.einsum("btd,dv->btv", x, weights, preferred_element_type=jnp.float32), total


def attention(layer: Tree, x: Array) -> Array:
    """Causal self-attention with all heads in one projection."""
    with stablecast.region("attention"):
        batch, length, width = x.shape
        mixed = (x @ layer["qkv"].astype(x.dtype)).reshape(batch, length, 3, width // HEAD_DIM, HEAD_DIM)
        query, key, value = (mixed[:, :, i] for i in range(3))
        scores = jnp.einsum("bthk,bshk->bhts", query, key).astype(jnp.float32) / HEAD_DIM**0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(x.dtype)
        return jnp.einsum("bhts,bshk->bthk", weights, value).reshape(x.shape) @ layer["out"].astype(x.dtype)


def mixture(layer: Tree, x: Array) -> tuple[Array, Array]:
    """What the chosen experts make of each token, and how unevenly they are used (1 is even)."""
    with stablecast.region("router"):
        chances = jax.nn.softmax((x @ layer["router"].astype(x.dtype)).astype(jnp.float32), axis=-1)
        experts = chances.shape[-1]
        capacity = int(CAPACITY_FACTOR * TOP_K * x.shape[1] / experts)
        combine, imbalance = routes(chances, capacity)
        dispatch = (combine > 0).astype(x.dtype)
    with stablecast.region("experts"):
        taken = jnp.einsum("btec,btd->ebcd", dispatch, x)
        hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", taken, layer["up"].astype(x.dtype)))
        made = jnp.einsum("ebcf,efd->ebcd", hidden, layer["down"].astype(x.dtype))
        return jnp.einsum("btec,ebcd->btd", combine.astype(x.dtype), made), imbalance


def routes(chances: Array, capacity: int) -> tuple[Array, Array]:
    """The weight of each token in each place of each expert, as f32[b, t, e, c]; and the imbalance."""
    experts = chances.shape[-1]
    weights, chosen = lax.top_k(chances, TOP_K)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    wanted = jax.nn.one_hot(chosen, experts)
    first_choices_first = wanted.swapaxes(1, 2).reshape(len(wanted), -1, experts)
    place = jnp.cumsum(first_choices_first, axis=1) - first_choices_first
    place = place.reshape(len(wanted), TOP_K, -1, experts).swapaxes(1, 2)
    place = jnp.sum(place * wanted, axis=-1).astype(jnp.int32)
    slots = jax.nn.one_hot(place, capacity)
    combine = jnp.einsum("btk,btke,btkc->btec", weights, wanted, slots)
    imbalance = experts * jnp.sum(jnp.mean(wanted[:, :, 0], axis=(0, 1)) * jnp.mean(chances, axis=(0, 1)))
    return combine, imbalance


def rms_norm(x: Array, scale: Array) -> Array:
    """Root-mean-square norm in float32, returned in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + NORM_EPS) * scale).astype(x.dtype)


def adamw(state: Tree, grads: Tree) -> Tree:
    """The state after one AdamW update."""
    step = state["step"] + 1
    mu = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["mu"], grads)
    nu = jax.tree.map(lambda n, g: BETA2 * n + (1 - BETA2) * jnp.square(g), state["nu"], grads)
    mu_scale, nu_scale = 1 / (1 - BETA1**step), 1 / (1 - BETA2**step)

    def update(param: Array, m: Array, n: Array) -> Array:
        return param - RATE * (m * mu_scale / (jnp.sqrt(n * nu_scale) + ADAM_EPS) + WEIGHT_DECAY * param)

    return {"step": step, "params": jax.tree.map(update, state["params"], mu, nu), "mu": mu, "nu": nu}


def _leaf(
    mesh: AbstractMesh | None, shape: tuple[int, ...], *axes: str, dtype: Any = jnp.float32
) -> jax.ShapeDtypeStruct:
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def init(state: Tree, seed: int = 0) -> Tree:
    """A state to start from: random matrices, norms of one, the rest zero."""
    random = np.random.default_rng(seed)

    def start(leaf: jax.ShapeDtypeStruct) -> Array:
        if len(leaf.shape) < 2:
            return jnp.ones(leaf.shape, leaf.dtype)
        return jnp.asarray(0.02 * random.standard_normal(leaf.shape), leaf.dtype)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    return zeros | {"params": jax.tree.map(start, state["params"])}


def main(steps: int = 3) -> None:
    """Train a tiny one on random tokens and print the loss."""
    shapes, _ = make_args(layers=2, width=64, experts=4, batch=2, seq=32, vocab=96)
    state, text = init(shapes), np.random.default_rng(1).integers(96, size=(2, 33))
    tokens = {"inputs": jnp.asarray(text[:, :-1], jnp.int32), "targets": jnp.asarray(text[:, 1:], jnp.int32)}
    for i in range(steps):
        state, loss = train_step(state, tokens)
        print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
