"""One training step of large mixtures of experts as MaxText trains them on TPUs: GPT-OSS 120B and DeepSeek-V3.

    stablecast predict examples/moe_tpu.py:train_step --set fsdp=64 --set outer=2 --on tpu-v7x:128 --attention flash
    python examples/moe_tpu.py

Tokens of a sequence are sorted by expert, and every expert takes equally many of them (a balanced router; none are
dropped), so that experts are products over whole groups of tokens. Parameters and AdamW's moments are float32 and split
over all devices; products run in bfloat16. Layers are looped over and keep their
input only. Biases, attention sinks, the multi-token head and the balance loss are left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from llama import adamw, cross_entropy, init, one_hot, rms_norm, rope

import stablecast

Tree = Any
RATE = 3e-5
DATA = ("fsdp", "outer")


class Size(NamedTuple):
    """A model. `window`: positions that every other layer looks back on, 0 for all in all layers.

    With `latent`, queries and keys come from `query_rank` and `key_rank` dimensions and have `rotary` positional ones
    beside `head` others. `dense`: leading layers with one mlp of `dense_hidden`; `shared`: hidden width of an expert
    that all tokens take.
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
    latent: bool = False
    query_rank: int = 0
    key_rank: int = 0
    rotary: int = 0
    dense: int = 0
    dense_hidden: int = 0
    shared: int = 0


SIZES = {
    "gpt-oss-120b": Size(2880, 36, 64, 8, 64, 128, 4, 2880, 201088, window=128),
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
    size: str = "gpt-oss-120b", batch: int | None = None, seq: int = 8192, fsdp: int = 1, outer: int = 1
) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`.

    Args:
        size: one of `SIZES`.
        batch: sequences over all devices; one a device unless given.
        fsdp, outer: devices that everything is split over, one dimension of a matrix by each; with one device nothing
            carries a sharding.
    """
    model = SIZES[size]
    mesh = AbstractMesh((fsdp, outer), DATA) if fsdp * outer > 1 else None
    leaf = partial(_leaf, mesh)
    stacks = {"layers": _layer(leaf, model, model.layers - model.dense, model.experts)}
    if model.dense:
        stacks["dense"] = _layer(leaf, model, model.dense, 0)
    params = {
        "embedding": leaf((model.vocab, model.width), "fsdp", "outer"),
        "final_norm": leaf((model.width,)),
        "logits": leaf((model.width, model.vocab), "outer", "fsdp"),
        **stacks,
    }
    state = {"params": params, "adam": {"count": leaf((), dtype=jnp.int32), "mu": params, "nu": params}}
    tokens = leaf((fsdp * outer if batch is None else batch, seq), DATA, dtype=jnp.int32)
    return state, {"inputs": tokens, "targets": tokens}


@stablecast.workload(args=make_args)
@partial(jax.jit, donate_argnums=0)
def train_step(state: Tree, batch: Tree) -> tuple[Tree, Array]:
    """The next state and the loss: forward, backward and AdamW."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    with stablecast.region("optimizer"):
        params, adam = adamw(state["params"], grads, state["adam"], jnp.float32(RATE))
    return {"params": params, "adam": adam}, loss


def loss_fn(params: Tree, batch: Tree) -> Array:
    """Mean cross entropy in nats."""
    model = _model(params)
    tokens = batch["inputs"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with stablecast.region("embed"):
        hot = one_hot(tokens, params["embedding"].shape[0], jnp.bfloat16)
        x = jnp.einsum("btv,vd->btd", hot, narrow(params["embedding"], ("fsdp", "outer")))
    with stablecast.region("layers"):
        x = _looped(partial(block, model), split(x), params["dense"], positions) if model.dense else split(x)
        if model.window:
            params = {**params, "layers": jax.tree.map(_in_pairs, params["layers"])}
        x = _looped(partial(pair if model.window else block, model), x, params["layers"], positions)
    with stablecast.region("logits"):
        table = narrow(params["logits"], ("outer", "fsdp"))
        logits = jnp.einsum("btd,dv->btv", rms_norm(x, narrow(params["final_norm"], ())), table)
    with stablecast.region("loss"):
        return cross_entropy(logits, batch["targets"], jnp.ones(tokens.shape, bool))


def _model(params: Tree) -> Size:
    """The size that `params` have."""
    vocab, width = params["embedding"].shape
    return next(size for size in SIZES.values() if (size.vocab, size.width) == (vocab, width))


def _looped(body: Any, x: Array, layers: Tree, positions: Array) -> Array:
    layer = jax.checkpoint(body, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
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
        mixed = windowed(*made, window) if window else causal(*made)
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


def causal(query: Array, key: Array, value: Array) -> Array:
    """Causal attention."""
    scores = jnp.einsum("bthk,bshk->bhts", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(scores.shape[2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(query.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights, value)


def windowed(query: Array, key: Array, value: Array, window: int) -> Array:
    """Causal attention to the last `window` positions: blocks of queries see their own keys and those before."""
    batch, seq, heads, size = query.shape
    blocks = (batch * seq // window, window, heads, size)
    before = [jnp.pad(part, ((0, 0), (window, 0), (0, 0), (0, 0)))[:, :seq].reshape(blocks) for part in (key, value)]
    query, key, value = (part.reshape(blocks) for part in (query, key, value))
    key, value = (jnp.concatenate([old, own], axis=1) for old, own in zip(before, (key, value), strict=True))
    scores = jnp.einsum("bthk,bshk->bhts", query, key).astype(jnp.float32) / size**0.5
    ahead = jnp.arange(2 * window)[None, :] - jnp.arange(window)[:, None]
    first = jnp.arange(blocks[0]) % (seq // window) == 0
    own = jnp.arange(2 * window) >= window
    mask = ((ahead > 0) & (ahead <= window)) & (own | ~first[:, None])[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(query.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights, value).reshape(batch, seq, heads, size)


def routed(model: Size, layer: Tree, x: Array) -> Array:
    """Every token's best experts, each with its weight."""
    batch, seq, width = x.shape
    scores = jnp.einsum("btd,de->bte", x, layer["router"]).astype(jnp.float32)
    chosen = jnp.argsort(lax.stop_gradient(-scores), axis=-1)[..., : model.top]
    weights = jax.nn.softmax(jnp.take_along_axis(scores, chosen, axis=-1), axis=-1).astype(x.dtype)
    order = jnp.argsort(chosen.reshape(batch, seq * model.top), axis=-1)
    back = jnp.argsort(order, axis=-1)
    copies = jnp.broadcast_to(x[:, :, None], (batch, seq, model.top, width)).reshape(batch, seq * model.top, width)
    sent = moved(copies, order, back).reshape(batch, model.experts, -1, width)
    gate = jnp.einsum("becd,edf->becf", sent, layer["wi_0"])
    up = jnp.einsum("becd,edf->becf", sent, layer["wi_1"])
    done = jnp.einsum("becf,efd->becd", jax.nn.silu(gate) * up, layer["wo"])
    returned = moved(done.reshape(batch, seq * model.top, width), back, order).reshape(batch, seq, model.top, width)
    return jnp.sum(returned * weights[..., None], axis=2)


@jax.custom_vjp
def moved(rows: Array, order: Array, back: Array) -> Array:
    """Rows of every sequence in `order`; `back` undoes it, which is also the gradient."""
    return jnp.take_along_axis(rows, order[..., None], axis=1)


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


def axes_of(name: str, rank: int) -> tuple[str | None, ...]:
    """Mesh axes of the dimensions of one layer's weights."""
    if rank == 1:
        return ()
    if name == "out" or (name == "wo" and rank == 2):
        return ("outer", *[None] * (rank - 2), "fsdp")
    return ("fsdp", "outer", *[None] * (rank - 2))


def narrow(weights: Array, axes: tuple[str | None, ...]) -> Array:
    """Weights as products take them: first narrower, then whole on every device."""
    made = weights.astype(jnp.bfloat16)
    mesh = jax.typeof(weights).sharding.mesh
    if mesh.empty:
        return made
    made = lax.with_sharding_constraint(made, NamedSharding(mesh, PartitionSpec(*axes)))
    return lax.with_sharding_constraint(made, NamedSharding(mesh, PartitionSpec()))


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
    return layer | {
        "router": leaf((depth, width, experts), *into),
        "wi_0": leaf((depth, experts, width, model.hidden), *into),
        "wi_1": leaf((depth, experts, width, model.hidden), *into),
        "wo": leaf((depth, experts, model.hidden, width), *into),
    }


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
    SIZES["grouped"] = Size(64, 2, 4, 2, 16, 4, 2, 32, 128, window=8)
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
