"""One training step of Llama 3.1 as MaxText trains it on TPUs: grouped heads, every layer run again, fully sharded.

    stablecast predict examples/llama_tpu.py:train_step --set size=70b --set fsdp=128 --on tpu-v7x --attention flash
    python examples/llama_tpu.py

Parameters and AdamW's moments are float32 and split over all devices on their model width; products run in bfloat16.
The layers are stacked and looped over, and each keeps its input only, or also what attention mixed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from llama import adamw, cross_entropy, init, one_hot, rms_norm, rope

import stablecast

Tree = Any

SIZES = {  # name: (width, layers, heads, key heads, mlp width)
    "8b": (4096, 32, 32, 8, 14336),
    "70b": (8192, 80, 64, 8, 28672),
    "405b": (16384, 126, 128, 8, 53248),
}
HEAD_DIM, RATE, FAR = 128, 3e-5, 1e30


def make_args(
    size: str = "8b",
    batch: int | None = None,
    seq: int = 8192,
    layers: int | None = None,
    vocab: int = 128256,
    fsdp: int = 1,
    context: int = 1,
) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`.

    Args:
        size: one of `SIZES`; `layers` overrides what it says.
        batch: sequences over all devices; one for each of `fsdp` unless given.
        fsdp: devices that everything is split over; with one nothing carries a sharding.
        context: devices that share a sequence: each has its queries, and all keys and values.
    """
    width, depth, heads, groups, hidden = SIZES[size]
    depth = layers or depth
    mesh = AbstractMesh((fsdp, context), ("fsdp", "context")) if context > 1 else AbstractMesh((fsdp,), ("fsdp",))
    leaf = partial(leaf_of, mesh if mesh.size > 1 else None)
    layer = {
        "attention_norm": leaf((depth, width)),
        "query": leaf((depth, width, heads, HEAD_DIM), None, "fsdp"),
        "key": leaf((depth, width, groups, HEAD_DIM), None, "fsdp"),
        "value": leaf((depth, width, groups, HEAD_DIM), None, "fsdp"),
        "out": leaf((depth, heads, HEAD_DIM, width), None, None, None, "fsdp"),
        "mlp_norm": leaf((depth, width)),
        "wi_0": leaf((depth, width, hidden), None, "fsdp"),
        "wi_1": leaf((depth, width, hidden), None, "fsdp"),
        "wo": leaf((depth, hidden, width), None, None, "fsdp"),
    }
    params = {
        "embedding": leaf((vocab, width), None, "fsdp"),
        "layers": layer,
        "final_norm": leaf((width,)),
        "logits": leaf((width, vocab), "fsdp"),
    }
    state = {"params": params, "adam": {"count": leaf((), dtype=jnp.int32), "mu": params, "nu": params}}
    parts = ("fsdp", "context") if context > 1 else ("fsdp",)
    tokens = leaf((fsdp if batch is None else batch, seq), *parts, dtype=jnp.int32)
    return state, {"inputs": tokens, "targets": tokens}


@stablecast.workload(args=make_args)
@partial(jax.jit, donate_argnums=0)
def train_step(state: Tree, batch: Tree) -> tuple[Tree, Array]:
    """The next state and the loss: forward, backward and AdamW."""
    return step(jax.checkpoint_policies.nothing_saveable, state, batch)


@stablecast.workload(args=make_args)
@partial(jax.jit, donate_argnums=0)
def train_step_keeping_context(state: Tree, batch: Tree) -> tuple[Tree, Array]:
    """As `train_step`; layers also keep what attention mixed, so that it does not run again."""
    return step(jax.checkpoint_policies.save_only_these_names("context"), state, batch)


def step(policy: Any, state: Tree, batch: Tree) -> tuple[Tree, Array]:
    """A step of which layers keep what `policy` says."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, policy)
    with stablecast.region("optimizer"):
        params, adam = adamw(state["params"], grads, state["adam"], jnp.float32(RATE))
    return {"params": params, "adam": adam}, loss


def loss_fn(params: Tree, batch: Tree, policy: Any = jax.checkpoint_policies.nothing_saveable) -> Array:
    """Mean cross entropy in nats."""
    tokens = batch["inputs"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with stablecast.region("embed"):
        hot = one_hot(tokens, params["embedding"].shape[0], jnp.bfloat16)
        x = jnp.einsum("btv,vd->btd", hot, narrow(params["embedding"]))
    layer = jax.checkpoint(block, policy=policy, prevent_cse=False)
    with stablecast.region("layers"):
        x = lax.scan(lambda x, weights: (layer(weights, x, positions), None), split(x), params["layers"])[0]
    with stablecast.region("logits"):
        logits = jnp.einsum("btd,dv->btv", rms_norm(x, narrow(params["final_norm"])), narrow(params["logits"]))
    with stablecast.region("loss"):
        return cross_entropy(logits, batch["targets"], jnp.ones(tokens.shape, bool))


def narrow(weights: Array) -> Array:
    """Weights as products take them, whole on every device."""
    made = weights.astype(jnp.bfloat16)
    mesh = jax.typeof(weights).sharding.mesh
    if mesh.empty:
        return made
    return lax.with_sharding_constraint(made, NamedSharding(mesh, PartitionSpec()))


def split(x: Array) -> Array:
    """Activations split over the batch, and along the sequence where devices share one."""
    mesh = jax.typeof(x).sharding.mesh
    return x if mesh.empty else lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*mesh.axis_names)))


def whole(x: Array) -> Array:
    """Activations split over the batch alone."""
    mesh = jax.typeof(x).sharding.mesh
    return x if mesh.empty else lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("fsdp")))


def block(layer: Tree, x: Array, positions: Array) -> Array:
    """One layer: attention and mlp, each behind a norm and added to its input."""
    layer = jax.tree.map(narrow, layer)
    with stablecast.region("attention"):
        x = x + attention(layer, rms_norm(x, layer["attention_norm"]), positions)
    with stablecast.region("mlp"):
        y = rms_norm(x, layer["mlp_norm"])
        gate = jax.nn.silu(jnp.einsum("btd,df->btf", y, layer["wi_0"]))
        up = jnp.einsum("btd,df->btf", y, layer["wi_1"])
        x = x + jnp.einsum("btf,fd->btd", gate * up, layer["wo"])
    return split(x)


def attention(layer: Tree, x: Array, positions: Array) -> Array:
    """Causal attention, several query heads to a key head.

    The barrier keeps the mask in the layer: a scan would make it once for all layers, as large as the scores.
    """
    query = rope(jnp.einsum("btd,dhk->bthk", x, layer["query"]), positions)
    key = whole(rope(jnp.einsum("btd,dhk->bthk", x, layer["key"]), positions))
    value = whole(jnp.einsum("btd,dhk->bthk", x, layer["value"]))
    query = query.reshape(*query.shape[:2], key.shape[2], -1, HEAD_DIM)
    scores = jnp.einsum("btghk,bsgk->bghts", query, key).astype(jnp.float32) / HEAD_DIM**0.5
    at, _ = lax.optimization_barrier((jnp.arange(x.shape[1]), query))
    hidden = ((at[:, None] >= at[None, :]).astype(jnp.float32) - 1) * FAR
    weights = jax.nn.softmax(scores + hidden, axis=-1).astype(x.dtype)
    mixed = checkpoint_name(jnp.einsum("bghts,bsgk->btghk", weights, value), "context")
    return jnp.einsum("bthk,hkd->btd", mixed.reshape(*x.shape[:2], -1, HEAD_DIM), layer["out"])


def leaf_of(
    mesh: AbstractMesh | None, shape: tuple[int, ...], *axes: Any, dtype: Any = jnp.float32
) -> jax.ShapeDtypeStruct:
    """The shape of a leaf, one mesh axis (or several, or none) for each of its first dimensions."""
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def main() -> None:
    """Run a tiny one and print its loss."""
    SIZES["tiny"] = (256, 2, 2, 1, 512)
    shapes, tokens = make_args("tiny", batch=2, seq=32, vocab=128)
    text = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)
    _, loss = train_step(init(shapes), dict.fromkeys(tokens, text))
    print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
