"""One training step of large mixtures of experts as MaxText trains them on TPUs: GPT-OSS 120B and DeepSeek-V3.

    stablecast predict examples/moe_tpu.py:train_step --set fsdp=64 --set outer=2 --on tpu-v7x:128 --attention flash
    python examples/moe_tpu.py

Each device sorts its tokens by expert, and experts are products over groups of rows (none are dropped). Parameters and
AdamW's moments are float32 and split over all devices; products run in bfloat16. Layers are looped over and keep their
input only, or also what attention mixed. Biases and sinks of attention, the multi-token head and the balance loss are
left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from llama import adamw, cross_entropy, init, one_hot, rms_norm, rope

import stablecast

Tree = Any
Axes = str | tuple[str, ...] | None
RATE = 3e-5
FAR = 1e30
LIMIT = 7.0
DATA = ("fsdp", "outer", "expert")
WIDE = ("fsdp", "expert")
EXPERT_PARTS = ("wi_0", "wi_1", "wo", "wi_0_bias", "wi_1_bias", "wo_bias")


class Size(NamedTuple):
    """A model. `window`: positions that every other layer looks back on, 0 for all in all layers.

    With `latent`, queries and keys come from `query_rank` and `key_rank` dimensions and have `rotary` positional ones
    beside `head` others. `bias`: whether experts have biases and clip what they gate. `dense`: leading layers with one
    mlp of `dense_hidden`; `shared`: hidden width of an expert that all tokens take.
    """

    width: int
    layers: int
    heads: int
    groups: int
    head: int
    experts: int
    top: int
    hidden: int
    vocab: int
    window: int = 0
    bias: bool = False
    latent: bool = False
    query_rank: int = 0
    key_rank: int = 0
    rotary: int = 0
    dense: int = 0
    dense_hidden: int = 0
    shared: int = 0


SIZES = {
    "gpt-oss-120b": Size(2880, 36, 64, 8, 64, 128, 4, 2880, 201088, window=128, bias=True),
    "deepseek-v3": Size(
        *(7168, 61, 128, 128, 128, 256, 8, 2048, 129280),
        latent=True,
        query_rank=1536,
        key_rank=512,
        rotary=64,
        dense=3,
        dense_hidden=18432,
        shared=2048,
    ),
}


def make_args(
    size: str = "gpt-oss-120b",
    batch: int | None = None,
    seq: int = 8192,
    fsdp: int = 1,
    outer: int = 1,
    expert: int = 1,
) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`.

    Args:
        size: one of `SIZES`.
        batch: sequences over all devices; one a device unless given.
        fsdp, outer: devices that everything is split over, one dimension of a matrix by each; with one device nothing
            carries a sharding.
        expert: devices that have a part of the experts each, and split everything else as `fsdp` does.
    """
    model = SIZES[size]
    devices = fsdp * outer * expert
    mesh = AbstractMesh((fsdp, outer, expert), DATA) if devices > 1 else None
    leaf = partial(_leaf, mesh)
    stacks = {"layers": _layer(leaf, model, model.layers - model.dense, model.experts)}
    if model.dense:
        stacks["dense"] = _layer(leaf, model, model.dense, 0)
    params = {
        "embedding": leaf((model.vocab, model.width), "outer", WIDE),
        "final_norm": leaf((model.width,)),
        "logits": leaf((model.width, model.vocab), WIDE, "outer"),
        **stacks,
    }
    state = {"params": params, "adam": {"count": leaf((), dtype=jnp.int32), "mu": params, "nu": params}}
    tokens = leaf((devices if batch is None else batch, seq), DATA, dtype=jnp.int32)
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
    model = _model(params)
    tokens = batch["inputs"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with stablecast.region("embed"):
        hot = one_hot(tokens, params["embedding"].shape[0], jnp.bfloat16)
        x = jnp.einsum("btv,vd->btd", hot, narrow(params["embedding"], ("outer", WIDE)))
    with stablecast.region("layers"):
        x = _looped(policy, partial(block, model), split(x), params["dense"], positions) if model.dense else split(x)
        if model.window:
            params = {**params, "layers": jax.tree.map(_in_pairs, params["layers"])}
        x = _looped(policy, partial(pair if model.window else block, model), x, params["layers"], positions)
    with stablecast.region("logits"):
        table = narrow(params["logits"], (WIDE, "outer"))
        logits = jnp.einsum("btd,dv->btv", rms_norm(x, narrow(params["final_norm"], ())), table)
    with stablecast.region("loss"):
        return cross_entropy(logits, batch["targets"], jnp.ones(tokens.shape, bool))


def _model(params: Tree) -> Size:
    """The size that `params` have."""
    vocab, width = params["embedding"].shape
    return next(size for size in SIZES.values() if (size.vocab, size.width) == (vocab, width))


def _looped(policy: Any, body: Any, x: Array, layers: Tree, positions: Array) -> Array:
    layer = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return lax.scan(lambda x, weights: (layer(weights, x, positions), None), x, layers)[0]


def _in_pairs(stack: Array) -> Array:
    return stack.reshape(stack.shape[0] // 2, 2, *stack.shape[1:])


def pair(model: Size, layers: Tree, x: Array, positions: Array) -> Array:
    """A layer that looks back on a window, and one that looks back on everything."""
    for number, window in enumerate((model.window, 0)):
        x = block(model, jax.tree.map(lambda part, at=number: part[at], layers), x, positions, window)
    return x


def block(model: Size, layer: Tree, x: Array, positions: Array, window: int = 0) -> Array:
    """One layer: attention and experts, each behind a norm and added to its input."""
    layer = jax.tree_util.tree_map_with_path(lambda path, part: narrow(part, axes_of(path[-1].key, part.ndim)), layer)
    with stablecast.region("attention"):
        y = rms_norm(x, layer["attention_norm"])
        made = latent(model, layer, y, positions) if model.latent else grouped(layer, y, positions)
        mixed = checkpoint_name(causal(*made, window), "context")
        x = x + jnp.einsum("bthk,hkd->btd", mixed, layer["out"])
    with stablecast.region("mlp"):
        y = rms_norm(x, layer["mlp_norm"])
        if "router" in layer:
            x = x + routed(model, layer, y)
        if "shared" in layer:
            x = x + mlp(layer["shared"], y)
    return split(x)


def grouped(layer: Tree, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values, several query heads to a key head."""
    query = rope(jnp.einsum("btd,dhk->bthk", x, layer["query"]), positions)
    key = rope(jnp.einsum("btd,dhk->bthk", x, layer["key"]), positions)
    value = jnp.einsum("btd,dhk->bthk", x, layer["value"])
    key, value = (jnp.repeat(part, query.shape[2] // part.shape[2], axis=2) for part in (key, value))
    return query, key, value


def latent(model: Size, layer: Tree, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values of latent attention; the rotary part of a key is one for all heads."""
    narrowed = rms_norm(jnp.einsum("btd,dr->btr", x, layer["query_down"]), layer["query_norm"])
    query = jnp.einsum("btr,rhk->bthk", narrowed, layer["query_up"])
    down = jnp.einsum("btd,dr->btr", x, layer["key_down"])
    turned = rope(down[:, :, None, model.key_rank :], positions)
    both = jnp.einsum("btr,rhk->bthk", rms_norm(down[..., : model.key_rank], layer["key_norm"]), layer["key_up"])
    turned = jnp.broadcast_to(turned, (*both.shape[:3], model.rotary))
    key = jnp.concatenate([both[..., : model.head], turned], axis=-1)
    query = jnp.concatenate([query[..., : model.head], rope(query[..., model.head :], positions)], axis=-1)
    return query, key, both[..., model.head :]


def causal(query: Array, key: Array, value: Array, window: int = 0) -> Array:
    """Causal attention, to the last `window` positions unless that is 0.

    The barrier keeps the mask in the layer: a scan would make it once for all layers, as large as the scores.
    """
    scores = jnp.einsum("bthk,bshk->bhts", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
    at, _ = lax.optimization_barrier((jnp.arange(query.shape[1]), query))
    seen = at[:, None] >= at[None, :]
    if window:
        seen &= at[:, None] - at[None, :] < window
    hidden = (seen.astype(jnp.float32) - 1) * FAR
    weights = jax.nn.softmax(scores + hidden, axis=-1).astype(query.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights, value)


def routed(model: Size, layer: Tree, x: Array) -> Array:
    """Every token's best experts, each with its weight; each device sorts its own tokens."""
    scores = jnp.einsum("btd,de->bte", x, layer["router"])
    mesh = jax.typeof(x).sharding.mesh
    names = [name for name in EXPERT_PARTS if name in layer]
    parts = [layer[name] for name in names]
    if mesh.empty:
        return experts(model, names, 1, x, scores, *parts)
    split = PartitionSpec(DATA)
    over = PartitionSpec("expert") if mesh.shape["expert"] > 1 else PartitionSpec()
    body = partial(experts, model, names, mesh.shape["expert"])
    specs = (split, split, *[over] * len(parts))
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=split)(x, scores, *parts)


def experts(model: Size, names: list[str], spread: int, x: Array, scores: Array, *parts: Array) -> Array:
    """The experts' results for one device's tokens, from rows sorted by expert.

    `spread`: devices that have a part of the experts each; rows go to them and back, as many to each of them.
    """
    layer = dict(zip(names, parts, strict=True))
    best, chosen = lax.top_k(scores.astype(jnp.float32), model.top)
    weights = jax.nn.softmax(best, axis=-1)
    width, flat = x.shape[-1], chosen.reshape(-1)
    order = jnp.argsort(flat)
    copies = jnp.repeat(x.reshape(-1, width), model.top, axis=0)
    sent, expert = moved(copies, order, jnp.argsort(order)), flat[order]
    if spread > 1:
        expert = lax.all_to_all(expert, "expert", 0, 0, tiled=True) % (model.experts // spread)
        sent = lax.all_to_all(sent, "expert", 0, 0, tiled=True)
        own = jnp.argsort(expert)
        sent, expert = moved(sent, own, jnp.argsort(own)), expert[own]
    sizes = jnp.bincount(expert, length=model.experts // spread).astype(jnp.int32)
    gate, up = (
        lax.ragged_dot(sent, layer[name], sizes) + (layer[name + "_bias"][expert] if model.bias else 0)
        for name in ("wi_0", "wi_1")
    )
    done = lax.ragged_dot(activated(model, gate, up), layer["wo"], sizes)
    done = done + (layer["wo_bias"][expert] if model.bias else 0)
    if spread > 1:
        done = lax.all_to_all(moved(done, jnp.argsort(own), own), "expert", 0, 0, tiled=True)
    returned = moved(done, jnp.argsort(order), order).reshape(*chosen.shape, width).astype(jnp.float32)
    return jnp.sum(returned * weights[..., None], axis=2).astype(x.dtype)


def activated(model: Size, gate: Array, up: Array) -> Array:
    """SwiGLU; with biases as in GPT-OSS, which clips both sides."""
    if not model.bias:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


@jax.custom_vjp
def moved(rows: Array, order: Array, back: Array) -> Array:
    """Rows in `order`; `back` undoes it, which is also the gradient."""
    return rows[order]


def _moved(rows: Array, order: Array, back: Array) -> tuple[Array, tuple[Array, Array]]:
    return moved(rows, order, back), (order, back)


def _moved_back(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    order, back = kept
    return moved(gradient, back, order), None, None


moved.defvjp(_moved, _moved_back)


def mlp(layer: Tree, x: Array) -> Array:
    """SwiGLU."""
    gate = jnp.einsum("btd,df->btf", x, layer["wi_0"])
    up = jnp.einsum("btd,df->btf", x, layer["wi_1"])
    return jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, layer["wo"])


def axes_of(name: str, rank: int) -> tuple[Axes, ...]:
    """Mesh axes of the dimensions of one layer's weights; of the experts' where `name` is in `EXPERT_PARTS`."""
    if name in EXPERT_PARTS and rank == 3:
        return ("expert", "outer", "fsdp") if name == "wo" else ("expert", "fsdp", "outer")
    if name in EXPERT_PARTS and name.endswith("_bias"):
        return ("expert", None)
    if rank == 1:
        return ()
    if name in ("out", "wo"):
        return ("outer", *[None] * (rank - 2), WIDE)
    return (WIDE, "outer", *[None] * (rank - 2))


def narrow(weights: Array, axes: tuple[Axes, ...]) -> Array:
    """Weights as products take them: first narrower, then whole on every device, but for the experts' own axis."""
    made = weights.astype(jnp.bfloat16)
    mesh = jax.typeof(weights).sharding.mesh
    if mesh.empty:
        return made
    made = lax.with_sharding_constraint(made, NamedSharding(mesh, PartitionSpec(*axes)))
    kept = PartitionSpec("expert") if axes[:1] == ("expert",) else PartitionSpec()
    return lax.with_sharding_constraint(made, NamedSharding(mesh, kept))


def split(x: Array) -> Array:
    """Activations split over the batch."""
    mesh = jax.typeof(x).sharding.mesh
    return x if mesh.empty else lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(DATA)))


def _layer(leaf: Any, model: Size, depth: int, experts: int) -> Tree:
    """`depth` layers stacked; with no experts they have the dense mlp."""
    width, heads, head = model.width, model.heads, model.head
    into = (None, *axes_of("", 2))
    layer: Tree = {
        "attention_norm": leaf((depth, width)),
        "mlp_norm": leaf((depth, width)),
        "out": leaf((depth, heads, head, width), None, *axes_of("out", 3)),
    }
    if model.latent:
        layer |= {
            "query_down": leaf((depth, width, model.query_rank), *into),
            "query_norm": leaf((depth, model.query_rank)),
            "query_up": leaf((depth, model.query_rank, heads, head + model.rotary), *into),
            "key_down": leaf((depth, width, model.key_rank + model.rotary), *into),
            "key_norm": leaf((depth, model.key_rank)),
            "key_up": leaf((depth, model.key_rank, heads, 2 * head), *into),
        }
    else:
        layer["query"] = leaf((depth, width, heads, head), *into)
        layer |= {name: leaf((depth, width, model.groups, head), *into) for name in ("key", "value")}
    if not experts:
        return {**layer, "shared": _mlp(leaf, depth, width, model.dense_hidden)}
    if model.shared:
        layer["shared"] = _mlp(leaf, depth, width, model.shared)
    layer["router"] = leaf((depth, width, experts), *into)
    ends = {"wi_0": (width, model.hidden), "wi_1": (width, model.hidden), "wo": (model.hidden, width)}
    for name, sizes in ends.items():
        layer[name] = leaf((depth, experts, *sizes), None, *axes_of(name, 3))
        if model.bias:
            layer[name + "_bias"] = leaf((depth, experts, sizes[1]), None, *axes_of(name + "_bias", 2))
    return layer


def _mlp(leaf: Any, depth: int, width: int, hidden: int) -> Tree:
    into = {name: leaf((depth, width, hidden), None, *axes_of(name, 2)) for name in ("wi_0", "wi_1")}
    return {**into, "wo": leaf((depth, hidden, width), None, *axes_of("wo", 2))}


def _leaf(
    mesh: AbstractMesh | None, shape: tuple[int, ...], *axes: Any, dtype: Any = jnp.float32
) -> jax.ShapeDtypeStruct:
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def main() -> None:
    """Run tiny ones and print their losses."""
    SIZES["grouped"] = Size(64, 2, 4, 2, 16, 4, 2, 32, 128, window=8, bias=True)
    SIZES["latent"] = Size(
        *(64, 3, 4, 4, 16, 4, 2, 32, 96), latent=True, query_rank=24, key_rank=16, rotary=8, dense=1, dense_hidden=96
    )
    for size, vocab in (("grouped", 128), ("latent", 96)):
        shapes, tokens = make_args(size, batch=2, seq=32)
        text = jnp.arange(64, dtype=jnp.int32).reshape(2, 32) % vocab
        _, loss = train_step(init(shapes), dict.fromkeys(tokens, text))
        print(f"{size}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
