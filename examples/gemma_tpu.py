"""One training step of Gemma 4 31B and E2B as MaxText trains them on TPUs: windows, shared keys, per-layer embeddings.

    stablecast predict examples/gemma_tpu.py:train_step --set fsdp=128 --on tpu-v7x:128 --attention flash
    python examples/gemma_tpu.py

Sizes are those of MaxText 0.2.5 (`gemma4-31b.yml`, `gemma4-e2b.yml`). All layers but every sixth (fifth in E2B) look
back on a window. In 31B keys of the others are values too; in E2B the last twenty layers have the keys and values of an
earlier layer of their kind, an mlp twice as wide, and all layers read an embedding of their own. Parameters and AdamW's
moments are float32 and split over all devices; products run in bfloat16. Each layer keeps its input only, or also what
attention mixed. The images' part is left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh
from llama import adamw, cross_entropy, init, one_hot, rms_norm, rope
from llama_tpu import leaf_of, narrow, split

import stablecast

Tree = Any
RATE, FAR, SOFT_CAP = 3e-5, 1e30, 30.0


class Size(NamedTuple):
    """A model; `local` and `whole`: key heads and size of a head, of layers with and without a window.

    `period`: the last of so many layers has no window. `shared`: last layers without keys of their own; `own`: width of
    a layer's own embedding, 0 for none, in which case the layers are looped over. `same`: whether keys of layers
    without a window are values, too.
    """

    width: int
    layers: int
    heads: int
    local: tuple[int, int]
    whole: tuple[int, int]
    hidden: int
    window: int
    period: int
    vocab: int = 262144
    same: bool = False
    shared: int = 0
    own: int = 0


SIZES = {
    "31b": Size(5376, 60, 32, (16, 256), (4, 512), 21504, 1024, 6, same=True),
    "e2b": Size(1536, 35, 8, (1, 256), (1, 512), 6144, 512, 5, shared=20, own=256),
}


def make_args(size: str = "31b", batch: int | None = None, seq: int = 8192, fsdp: int = 1) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`.

    Args:
        size: one of `SIZES`.
        batch: sequences over all devices; one a device unless given.
        fsdp: devices that everything is split over; with one nothing carries a sharding.
    """
    model = SIZES[size]
    leaf = partial(leaf_of, AbstractMesh((fsdp,), ("fsdp",)) if fsdp > 1 else None)
    params = {"embedding": leaf((model.vocab, model.width), None, "fsdp"), "final_norm": leaf((model.width,))}
    if model.own:
        params |= {
            "own": leaf((model.vocab, model.layers * model.own), None, "fsdp"),
            "own_projection": leaf((model.width, model.layers * model.own), "fsdp"),
            "own_norm": leaf((model.own,)),
            "layers": [_layer(leaf, model, number) for number in range(model.layers)],
        }
    else:
        blocks = model.layers // model.period
        last = model.period - 1
        params["layers"] = {
            "local": _layer(leaf, model, 0, (blocks, last)),
            "whole": _layer(leaf, model, last, (blocks,)),
        }
    state = {"params": params, "adam": {"count": leaf((), dtype=jnp.int32), "mu": params, "nu": params}}
    tokens = leaf((fsdp if batch is None else batch, seq), "fsdp", dtype=jnp.int32)
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
    model, tokens = _model(params), batch["inputs"]
    table = narrow(params["embedding"])
    with stablecast.region("embed"):
        x = split(jnp.einsum("btv,vd->btd", one_hot(tokens, model.vocab, jnp.bfloat16), table) * model.width**0.5)
    with stablecast.region("layers"):
        x = unrolled(model, policy, params, x, tokens) if model.own else looped(model, policy, params["layers"], x)
    with stablecast.region("logits"):
        logits = jnp.einsum("btd,vd->btv", rms_norm(x, narrow(params["final_norm"])), table)
        logits = jnp.tanh(logits / SOFT_CAP) * SOFT_CAP
    with stablecast.region("loss"):
        return cross_entropy(logits, batch["targets"], jnp.ones(tokens.shape, bool))


def _model(params: Tree) -> Size:
    """The size that `params` have."""
    return next(size for size in SIZES.values() if (size.vocab, size.width) == params["embedding"].shape)


def looped(model: Size, policy: Any, layers: Tree, x: Array) -> Array:
    """Blocks of layers with a window and one without."""
    windowed, whole = (
        jax.checkpoint(partial(block, model, window), policy=policy, prevent_cse=False) for window in (model.window, 0)
    )

    def block_of(x: Array, weights: Tree) -> tuple[Array, None]:
        x, _ = lax.scan(lambda x, layer: (windowed(layer, x), None), x, weights["local"])
        return whole(weights["whole"], x), None

    return lax.scan(block_of, x, layers)[0]


def unrolled(model: Size, policy: Any, params: Tree, x: Array, tokens: Array) -> Array:
    """Layer by layer, each with an embedding of its own; the last ones read an earlier layer's keys and values."""
    with stablecast.region("embed"):
        own = split(params["own"].astype(jnp.bfloat16)[tokens] * model.own**0.5)
        own = own.reshape(*tokens.shape, model.layers, model.own)
        projected = jnp.einsum("btd,de->bte", x, narrow(params["own_projection"])) * model.width**-0.5
        own = (own + rms_norm(projected.reshape(own.shape), narrow(params["own_norm"]))) * 0.5**0.5
    held: dict[int, tuple[Array, Array]] = {}
    first = model.layers - model.shared
    for number, layer in enumerate(params["layers"]):
        window = 0 if number % model.period == model.period - 1 else model.window
        run = jax.checkpoint(partial(block, model, window), policy=policy, prevent_cse=False)
        if number < first:
            held[window] = keys_of(model, layer, x, window)
        x = run(layer, x, held[window] if number >= first else None, own[:, :, number])
    return x


def block(
    model: Size, window: int, layer: Tree, x: Array, held: tuple[Array, Array] | None = None, own: Array | None = None
) -> Array:
    """One layer: attention and mlp, each between norms and added to its input. `held`: keys and values to use."""
    layer = jax.tree.map(narrow, layer)
    with stablecast.region("attention"):
        y = rms_norm(x, layer["attention_norm"])
        x = x + rms_norm(attention(model, layer, y, held, window), layer["after_attention"])
    with stablecast.region("mlp"):
        y = rms_norm(x, layer["mlp_norm"])
        gate = jax.nn.gelu(jnp.einsum("btd,df->btf", y, layer["wi_0"]))
        up = jnp.einsum("btd,df->btf", y, layer["wi_1"])
        x = x + rms_norm(jnp.einsum("btf,fd->btd", gate * up, layer["wo"]), layer["after_mlp"])
    if own is not None:
        with stablecast.region("own"):
            gate = jax.nn.gelu(jnp.einsum("btd,de->bte", x, layer["own_gate"]).astype(jnp.float32)).astype(x.dtype)
            y = jnp.einsum("bte,ed->btd", gate * own, layer["own_out"])
            x = x + rms_norm(y, layer["after_own"])
    return split(x * layer["scale"])


def keys_of(model: Size, layer: Tree, x: Array, window: int) -> tuple[Array, Array]:
    """Keys and values of a layer from its input."""
    taken = {name: narrow(layer[name]) for name in ("attention_norm", "key", "value", "key_norm")}
    return keys(taken, rms_norm(x, taken["attention_norm"]))


def keys(layer: Tree, x: Array) -> tuple[Array, Array]:
    """Keys, and values, which are the keys before their norm where the layer has none."""
    key = jnp.einsum("btd,dhk->bthk", x, layer["key"])
    value = jnp.einsum("btd,dhk->bthk", x, layer["value"]) if "value" in layer else key
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    unit = jnp.ones(value.shape[-1:], value.dtype)
    return rope(rms_norm(key, layer["key_norm"]), positions), rms_norm(value, unit)


def attention(model: Size, layer: Tree, x: Array, held: tuple[Array, Array] | None, window: int) -> Array:
    """Causal attention to the last `window` positions, to all where that is 0; several query heads to a key head.

    The barrier keeps the mask in the layer: a scan would make it once for all layers, as large as the scores.
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    query = rope(rms_norm(jnp.einsum("btd,dhk->bthk", x, layer["query"]), layer["query_norm"]), positions)
    key, value = keys(layer, x) if held is None else held
    at, _ = lax.optimization_barrier((jnp.arange(x.shape[1]), query))
    query = query.reshape(*query.shape[:2], key.shape[2], -1, key.shape[3])
    scores = jnp.einsum("btghk,bsgk->bghts", query, key).astype(jnp.float32)
    seen = at[:, None] >= at[None, :]
    if window:
        seen &= at[:, None] - at[None, :] < window
    weights = jax.nn.softmax(scores + (seen.astype(jnp.float32) - 1) * FAR, axis=-1).astype(x.dtype)
    mixed = checkpoint_name(jnp.einsum("bghts,bsgk->btghk", weights, value), "context")
    return jnp.einsum("bthk,hkd->btd", mixed.reshape(*x.shape[:2], model.heads, -1), layer["out"])


def _layer(leaf: Any, model: Size, number: int, depth: tuple[int, ...] = ()) -> Tree:
    """Layer `number`, or a stack of `depth` such."""
    whole = number % model.period == model.period - 1
    groups, head = model.whole if whole else model.local
    late = number >= model.layers - model.shared
    width, hidden = model.width, model.hidden * (2 if late else 1)
    before = (None,) * len(depth)
    norms = {"attention_norm", "after_attention", "mlp_norm", "after_mlp"} | ({"after_own"} if model.own else set())
    layer = {name: leaf((*depth, width)) for name in sorted(norms)}
    layer |= {"query_norm": leaf((*depth, head)), "scale": leaf((*depth, 1))}
    layer |= {
        "query": leaf((*depth, width, model.heads, head), *before, "fsdp"),
        "out": leaf((*depth, model.heads, head, width), *before, None, None, "fsdp"),
        "wi_0": leaf((*depth, width, hidden), *before, "fsdp"),
        "wi_1": leaf((*depth, width, hidden), *before, "fsdp"),
        "wo": leaf((*depth, hidden, width), *before, None, "fsdp"),
    }
    if not late:
        layer |= {"key": leaf((*depth, width, groups, head), *before, "fsdp"), "key_norm": leaf((*depth, head))}
        if not (whole and model.same):
            layer["value"] = leaf((*depth, width, groups, head), *before, "fsdp")
    if model.own:
        layer |= {"own_gate": leaf((width, model.own), "fsdp"), "own_out": leaf((model.own, width), None, "fsdp")}
    return layer


def main() -> None:
    """Run tiny ones and print their losses."""
    SIZES["looped"] = Size(64, 6, 4, (2, 16), (1, 32), 96, 8, 3, vocab=128, same=True)
    SIZES["unrolled"] = Size(48, 6, 4, (1, 16), (1, 32), 64, 8, 3, vocab=96, shared=3, own=8)
    for size in ("looped", "unrolled"):
        shapes, tokens = make_args(size, batch=2, seq=32)
        text = jnp.arange(64, dtype=jnp.int32).reshape(2, 32) % SIZES[size].vocab
        _, loss = train_step(init(shapes), dict.fromkeys(tokens, text))
        print(f"{size}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
