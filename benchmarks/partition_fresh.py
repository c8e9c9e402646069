"""A second list of program families for the comparison with XLA's partitioner, in the forms in which people write them.

`FRESH` was fixed, with sizes and expected misses, before anything of it was compared. `partition_golden.py --fresh`
makes the golden files and compares.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from partition_families import Family, On

P = PartitionSpec
Tree = Any


def _norm(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def _sgd(loss: Callable[..., Array], params: Tree, *batch: Any) -> Tree:
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return value, jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def _attend(q: Array, k: Array, v: Array, *, causal: bool = True) -> Array:
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    if causal:
        t = lax.broadcasted_iota(jnp.int32, scores.shape[2:], 0)
        s = lax.broadcasted_iota(jnp.int32, scores.shape[2:], 1)
        scores = jnp.where(s <= t, scores, -1e30)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)


def _embedding_both_ways(on: On) -> Any:
    """A table split over rows (model) and width (data), looked up by a gather, tied to the logits."""

    def loss(table: Array, tokens: Array, targets: Array) -> Array:
        x = on.constrain(table[tokens], "data", None, None)
        logits = on.constrain(jnp.einsum("btd,vd->btv", jnp.tanh(x), table), "data", None, "model")
        hot = jax.nn.one_hot(targets, logits.shape[-1])
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * hot, -1))

    tokens = on.shape(16, 64, axes=("data",), dtype=jnp.int32)
    return partial(_sgd, loss), (on.shape(2048, 256, axes=("model", "data")), tokens, tokens)


def _gqa_params(on: On, d: int, heads: int, kv: int, width: int) -> Tree:
    return {
        "norm": on.shape(d),
        "q": on.shape(d, heads, width, axes=("data", "model", None)),
        "k": on.shape(d, kv, width, axes=("data", None, None)),
        "v": on.shape(d, kv, width, axes=("data", None, None)),
        "o": on.shape(heads, width, d, axes=("model", None, "data")),
        "up": on.shape(d, 4 * d, axes=("data", "model")),
        "down": on.shape(4 * d, d, axes=("model", "data")),
    }


def _gqa_block(on: On, x: Array, layer: Tree) -> Array:
    """Grouped-query attention: query heads split over model, fewer key and value heads than it has devices."""
    h = _norm(x, layer["norm"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, layer[name]) for name in ("q", "k", "v"))
    b, t, heads, width = q.shape
    q = q.reshape(b, t, k.shape[2], heads // k.shape[2], width)
    scores = jax.nn.softmax(jnp.einsum("btgrk,bsgk->bgrts", q, k) / width**0.5)
    mixed = jnp.einsum("bgrts,bsgk->btgrk", scores, v).reshape(b, t, heads, width)
    x = on.constrain(x + jnp.einsum("bthk,hkd->btd", mixed, layer["o"]), "data", None, None)
    return on.constrain(x + jax.nn.silu(x @ layer["up"]) @ layer["down"], "data", None, None)


def _gqa_unrolled(on: On) -> Any:
    """Two layers, 16 query heads, 2 key and value heads, 8 devices along model."""

    def loss(layers: Tree, x: Array) -> Array:
        for layer in layers:
            x = _gqa_block(on, x, layer)
        return jnp.mean(jnp.square(x))

    return partial(_sgd, loss), ([_gqa_params(on, 256, 16, 2, 32)] * 2, on.shape(16, 128, 256, axes=("data",)))


def _moe_top2(on: On) -> Any:
    """Top-2 routing with capacity: both choices share the slots of an expert, dispatch by one-hot products."""
    experts, capacity, k = 8, 64, 2

    def loss(params: Tree, x: Array) -> Array:
        gates = jax.nn.softmax(x @ params["router"])
        values, chosen = lax.top_k(gates, k)
        hot = jax.nn.one_hot(chosen, experts)
        flat = hot.transpose(1, 0, 2).reshape(-1, experts)
        place = (jnp.cumsum(flat, axis=0) - 1).reshape(k, -1, experts).transpose(1, 0, 2)
        slots = jax.nn.one_hot(place.astype(jnp.int32), capacity) * hot[..., None]
        dispatch = jnp.sum(slots, axis=1)
        combine = jnp.einsum("tk,tkec->tec", values, slots)
        inputs = on.constrain(jnp.einsum("tec,td->ecd", dispatch, x), "expert", None, None)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, params["up"]))
        outputs = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
        return jnp.mean(jnp.square(x + jnp.einsum("tec,ecd->td", combine, outputs)))

    params = {
        "router": on.shape(256, experts),
        "up": on.shape(experts, 256, 512, axes=("expert",)),
        "down": on.shape(experts, 512, 256, axes=("expert",)),
    }
    return partial(_sgd, loss), (params, on.shape(1024, 256, axes=("expert",)))


def _ulysses(on: On) -> Any:
    """Attention that swaps a split of positions for one of heads and back."""

    def loss(params: Tree, x: Array) -> Array:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in ("q", "k", "v"))
        q, k, v = (on.constrain(part, "data", None, "context", None) for part in (q, k, v))
        mixed = on.constrain(_attend(q, k, v), "data", "context", None, None)
        return jnp.mean(jnp.square(x + jnp.einsum("bthk,hkd->btd", mixed, params["o"])))

    params = {name: on.shape(256, 16, 16) for name in ("q", "k", "v")} | {"o": on.shape(16, 16, 256)}
    return partial(_sgd, loss), (params, on.shape(8, 256, 256, axes=("data", "context")))


def _sequence_parallel_attention(on: On) -> Any:
    """A Megatron block with its backward pass: norms split over the sequence, heads and hidden width over model."""

    def loss(layers: Tree, x: Array) -> Array:
        for layer in layers:
            x = on.constrain(x, "data", "model", None)
            h = on.constrain(_norm(x, layer["norm1"]), "data", None, None)
            q, k, v = (jnp.einsum("btd,dhk->bthk", h, layer[name]) for name in ("q", "k", "v"))
            mixed = jnp.einsum("bthk,hkd->btd", _attend(q, k, v), layer["o"])
            x = x + on.constrain(mixed, "data", "model", None)
            h = on.constrain(_norm(x, layer["norm2"]), "data", None, None)
            x = x + on.constrain(jax.nn.gelu(h @ layer["up"]) @ layer["down"], "data", "model", None)
        return jnp.mean(jnp.square(x))

    heads = (None, "model", None)
    layer = {
        **{name: on.shape(256) for name in ("norm1", "norm2")},
        **{name: on.shape(256, 16, 16, axes=heads) for name in ("q", "k", "v")},
        "o": on.shape(16, 16, 256, axes=("model", None, None)),
        "up": on.shape(256, 1024, axes=(None, "model")),
        "down": on.shape(1024, 256, axes=("model", None)),
    }
    return partial(_sgd, loss), ([layer] * 2, on.shape(16, 128, 256, axes=("data", "model")))


def _three_axes(on: On) -> Any:
    """Replicas, FSDP and tensor parallelism; the batch split over the first two."""
    rows = ("replica", "fsdp")

    def loss(layers: Tree, x: Array) -> Array:
        for layer in layers:
            x = on.constrain(x, rows, None, None)
            q, k, v = (jnp.einsum("btd,dhk->bthk", _norm(x, layer["norm"]), layer[name]) for name in ("q", "k", "v"))
            x = x + jnp.einsum("bthk,hkd->btd", _attend(q, k, v), layer["o"])
            x = on.constrain(x + jax.nn.silu(x @ layer["up"]) @ layer["down"], rows, None, None)
        return jnp.mean(jnp.square(x))

    layer = {
        "norm": on.shape(256),
        **{name: on.shape(256, 8, 32, axes=("fsdp", "tensor", None)) for name in ("q", "k", "v")},
        "o": on.shape(8, 32, 256, axes=("tensor", None, "fsdp")),
        "up": on.shape(256, 1024, axes=("fsdp", "tensor")),
        "down": on.shape(1024, 256, axes=("tensor", "fsdp")),
    }
    return partial(_sgd, loss), ([layer] * 2, on.shape(32, 64, 256, axes=(rows,)))


def _zero2(on: On) -> Any:
    """Gradients of four micro-batches accumulated in shards, Adam in shards, parameters whole."""

    def loss(params: Tree, x: Array) -> Array:
        for up, down in params:
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.mean(jnp.square(x))

    def step(params: Tree, moments: Tree, batches: Array) -> Tree:
        split = lambda tree: jax.tree.map(lambda g: on.constrain(g, "data", None), tree)  # noqa: E731

        def micro(total: Tree, x: Array) -> tuple[Tree, None]:
            grads = split(jax.grad(loss)(params, x))
            return jax.tree.map(jnp.add, total, grads), None

        zeros = split(jax.tree.map(jnp.zeros_like, params))
        grads, _ = lax.scan(micro, zeros, batches)
        moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
        new = jax.tree.map(lambda p, m: on.constrain(p - 0.01 * m, None, None), params, moments)
        return new, moments

    def both(axes: tuple[Any, ...]) -> Tree:
        return [(on.shape(256, 1024, axes=axes), on.shape(1024, 256, axes=axes))] * 2

    return step, (both(()), both(("data", None)), on.shape(4, 512, 256, axes=(None, "data")))


def _label_smoothing(on: On) -> Any:
    """Logits split over the vocabulary; the target's logit taken by a gather; smoothed labels and a z-loss."""

    def loss(params: Tree, x: Array, targets: Array) -> Array:
        logits = jnp.einsum("btd,dv->btv", _norm(x, params["norm"]), params["logits"])
        logits = on.constrain(logits, "data", None, "model")
        total = jax.nn.logsumexp(logits, axis=-1)
        hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        smooth = 0.9 * (total - hit) + 0.1 * (total - jnp.mean(logits, axis=-1))
        return jnp.mean(smooth + 1e-4 * jnp.square(total))

    params = {"norm": on.shape(256), "logits": on.shape(256, 4096, axes=(None, "model"))}
    x = on.shape(16, 64, 256, axes=("data",))
    return partial(_sgd, loss), (params, x, on.shape(16, 64, axes=("data",), dtype=jnp.int32))


def _conv_channels(on: On) -> Any:
    """Residual convolutions, channels split in pairs as in tensor parallelism, batch norm over the whole batch."""
    layout = ("NHWC", "HWIO", "NHWC")

    def conv(x: Array, kernel: Array, stride: int = 1) -> Array:
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=layout)

    def normal(x: Array, scale: Array) -> Array:
        mean = jnp.mean(x, axis=(0, 1, 2), keepdims=True)
        return (x - mean) * lax.rsqrt(jnp.var(x, axis=(0, 1, 2), keepdims=True) + 1e-5) * scale

    def loss(params: Tree, x: Array) -> Array:
        for stride, block in zip((1, 2), params["blocks"], strict=True):
            h = jax.nn.relu(normal(conv(x, block["in"], stride), block["scale1"]))
            h = normal(conv(h, block["out"]), block["scale2"])
            x = jax.nn.relu(on.constrain(h + conv(x, block["skip"], stride), "data", None, None, None))
        return jnp.mean(jnp.square(jnp.mean(x, axis=(1, 2)) @ params["head"]))

    def block(inputs: int, outputs: int) -> Tree:
        return {
            "in": on.shape(3, 3, inputs, outputs, axes=(None, None, None, "model")),
            "out": on.shape(3, 3, outputs, outputs, axes=(None, None, "model", None)),
            "skip": on.shape(1, 1, inputs, outputs),
            "scale1": on.shape(outputs, axes=("model",)),
            "scale2": on.shape(outputs),
        }

    params = {"blocks": [block(32, 64), block(64, 128)], "head": on.shape(128, 100)}
    return partial(_sgd, loss), (params, on.shape(32, 32, 32, 32, axes=("data",)))


def _encoder_decoder(on: On) -> Any:
    """One encoder and one decoder layer with cross-attention, heads over model, batch over data."""

    def attention(layer: Tree, x: Array, y: Array, *, causal: bool) -> Array:
        q = jnp.einsum("btd,dhk->bthk", x, layer["q"])
        k, v = (jnp.einsum("bsd,dhk->bshk", y, layer[name]) for name in ("k", "v"))
        return jnp.einsum("bthk,hkd->btd", _attend(q, k, v, causal=causal), layer["o"])

    def mlp(layer: Tree, x: Array) -> Array:
        return jax.nn.gelu(x @ layer["up"]) @ layer["down"]

    def loss(params: Tree, source: Array, target: Array) -> Array:
        e, d = params["encoder"], params["decoder"]
        source = source + attention(e["self"], source, source, causal=False)
        source = on.constrain(source + mlp(e, source), "data", None, None)
        target = target + attention(d["self"], target, target, causal=True)
        target = target + attention(d["cross"], target, source, causal=False)
        target = on.constrain(target + mlp(d, target), "data", None, None)
        return jnp.mean(jnp.square(target @ params["head"]))

    def attending() -> Tree:
        heads = {name: on.shape(256, 16, 16, axes=(None, "model", None)) for name in ("q", "k", "v")}
        return heads | {"o": on.shape(16, 16, 256, axes=("model", None, None))}

    def wide() -> Tree:
        return {"up": on.shape(256, 1024, axes=(None, "model")), "down": on.shape(1024, 256, axes=("model", None))}

    params = {
        "encoder": {"self": attending(), **wide()},
        "decoder": {"self": attending(), "cross": attending(), **wide()},
        "head": on.shape(256, 512, axes=(None, "model")),
    }
    source, target = on.shape(16, 128, 256, axes=("data",)), on.shape(16, 64, 256, axes=("data",))
    return partial(_sgd, loss), (params, source, target)


def _mixed_precision(on: On) -> Any:
    """FSDP with f32 parameters that are cast to bf16 where they are used, scanned with rematerialisation."""

    def loss(layers: Tree, x: Array) -> Array:
        @jax.checkpoint
        def block(x: Array, layer: Tree) -> Array:
            up, down = (part.astype(jnp.bfloat16) for part in layer)
            return on.constrain(x + jax.nn.silu(on.constrain(x @ up, "data", None)) @ down, "data", None)

        x, _ = lax.scan(lambda x, layer: (block(x, layer), None), x.astype(jnp.bfloat16), layers)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    layers = (on.shape(4, 256, 1024, axes=(None, "data", None)), on.shape(4, 1024, 256, axes=(None, None, "data")))
    return partial(_sgd, loss), (layers, on.shape(512, 256, axes=("data",)))


def _decode(on: On) -> Any:
    """One token of every sequence: the cache updated in place, heads over model, the batch over data."""

    def step(params: Tree, cache: Tree, token: Array, place: Array) -> Tree:
        x = params["embedding"][token]
        written: list[Tree] = []
        for layer, (keys, values) in zip(params["layers"], cache, strict=True):
            q, k, v = (jnp.einsum("bd,dhk->bhk", x, layer[name]) for name in ("q", "k", "v"))
            keys = lax.dynamic_update_slice(keys, k[:, None], (0, place, 0, 0))
            values = lax.dynamic_update_slice(values, v[:, None], (0, place, 0, 0))
            scores = jnp.einsum("bhk,bshk->bhs", q, keys)
            scores = jnp.where(jnp.arange(keys.shape[1]) <= place, scores, -1e30)
            mixed = jnp.einsum("bhs,bshk->bhk", jax.nn.softmax(scores), values)
            x = x + jnp.einsum("bhk,hkd->bd", mixed, layer["o"])
            x = on.constrain(x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], "data", None)
            written.append((keys, values))
        logits = on.constrain(x @ params["head"], "data", "model")
        return written, jnp.argmax(logits, axis=-1)

    layer = {
        **{name: on.shape(256, 16, 16, axes=(None, "model", None)) for name in ("q", "k", "v")},
        "o": on.shape(16, 16, 256, axes=("model", None, None)),
        "up": on.shape(256, 1024, axes=(None, "model")),
        "down": on.shape(1024, 256, axes=("model", None)),
    }
    params = {
        "embedding": on.shape(2048, 256),
        "layers": [layer],
        "head": on.shape(256, 2048, axes=(None, "model")),
    }
    held = on.shape(32, 512, 16, 16, axes=("data", None, "model"))
    token = on.shape(32, axes=("data",), dtype=jnp.int32)
    return step, (params, [(held, held)], token, on.shape(dtype=jnp.int32))


def _split_cache(on: On) -> Any:
    """Decoding with the cache split over its positions: softmax and weighted sum over partial results."""

    def step(q: Array, keys: Array, values: Array, length: Array) -> Array:
        scores = jnp.einsum("bhk,bshk->bhs", q, keys)
        scores = jnp.where(jnp.arange(keys.shape[1]) < length, scores, -1e30)
        return jnp.einsum("bhs,bshk->bhk", jax.nn.softmax(scores), values)

    held = on.shape(8, 4096, 8, 64, axes=("data", "context"))
    return step, (on.shape(8, 8, 64, axes=("data",)), held, held, on.shape(dtype=jnp.int32))


def _recurrence(on: On) -> Any:
    """A gated linear recurrence by an associative scan over time, its channels split over model."""

    def loss(layers: Tree, x: Array) -> Array:
        for layer in layers:
            decay = jax.nn.sigmoid(x @ layer["decay"])
            fed = x @ layer["in"]
            _, held = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, fed), axis=1)
            x = on.constrain(x + (held * jax.nn.silu(x @ layer["gate"])) @ layer["out"], "data", None, None)
        return jnp.mean(jnp.square(x))

    layer = {name: on.shape(256, 512, axes=(None, "model")) for name in ("decay", "in", "gate")}
    layer["out"] = on.shape(512, 256, axes=("model", None))
    return partial(_sgd, loss), ([layer] * 2, on.shape(16, 64, 256, axes=("data",)))


def _expert_all_to_all(on: On) -> Any:
    """Experts in `shard_map`: tokens sent to their experts by all-to-all and back, with gradients."""

    def local(up: Array, down: Array, x: Array) -> Array:
        experts = on.mesh.shape["expert"]
        sent = x.reshape(experts, -1, x.shape[-1])
        got = lax.all_to_all(sent, "expert", split_axis=0, concat_axis=0, tiled=True)
        out = jax.nn.gelu(got.reshape(-1, x.shape[-1]) @ up[0]) @ down[0]
        back = lax.all_to_all(out.reshape(sent.shape), "expert", split_axis=0, concat_axis=0, tiled=True)
        return back.reshape(x.shape)

    mapped = jax.shard_map(
        local,
        mesh=on.mesh,
        in_specs=(P("expert"), P("expert"), P(("data", "expert"))),
        out_specs=P(("data", "expert")),
    )

    def loss(params: Tree, x: Array) -> Array:
        return jnp.mean(jnp.square(x + mapped(*params, x)))

    params = (on.shape(8, 256, 512, axes=("expert",)), on.shape(8, 512, 256, axes=("expert",)))
    return partial(_sgd, loss), (params, on.shape(2048, 256, axes=(("data", "expert"),)))


def _adapters(on: On) -> Any:
    """LoRA: frozen weights split over data (FSDP), gradients of the small factors only."""

    def loss(small: Tree, frozen: Tree, x: Array) -> Array:
        for (a, b), (up, down) in zip(small, frozen, strict=True):
            hidden = on.constrain(jax.nn.gelu(x @ up + (x @ a) @ b), "data", None)
            x = on.constrain(x + hidden @ down, "data", None)
        return jnp.mean(jnp.square(x))

    small = [(on.shape(256, 8), on.shape(8, 1024))] * 2
    frozen = [(on.shape(256, 1024, axes=("data", None)), on.shape(1024, 256, axes=(None, "data")))] * 2
    return partial(_sgd, loss), (small, frozen, on.shape(1024, 256, axes=("data",)))


_DP_TP = {"data": 4, "model": 8}
_BACKWARD = (
    "one axis splits different dimensions of operands and result in the backward products: Shardy and XLA may reshard "
    "another operand"
)

FRESH: Mapping[str, Family] = {
    "embedding_both_ways": Family(
        _DP_TP,
        _embedding_both_ways,
        "a gather from a table split over rows and width: XLA reshards indices and rows by steps of its own",
    ),
    "gqa_unrolled": Family(
        _DP_TP,
        _gqa_unrolled,
        "2 key and value heads, 8 devices: splitting the heads into groups needs parts of an axis, where XLA and "
        "Shardy choose differently",
    ),
    "moe_top2": Family(
        {"expert": 8}, _moe_top2, "the cumulative sum runs over both choices, a reshape of a split dimension"
    ),
    "ulysses": Family({"data": 2, "context": 8}, _ulysses, _BACKWARD),
    "sequence_parallel_attention": Family(_DP_TP, _sequence_parallel_attention, _BACKWARD),
    "three_axes": Family({"replica": 2, "fsdp": 4, "tensor": 4}, _three_axes),
    "zero2": Family({"data": 16}, _zero2),
    "label_smoothing": Family(
        _DP_TP, _label_smoothing, "a gather along the split vocabulary, and the scatter that is its gradient"
    ),
    "conv_channels": Family(_DP_TP, _conv_channels),
    "encoder_decoder": Family(_DP_TP, _encoder_decoder),
    "mixed_precision": Family({"data": 16}, _mixed_precision),
    "decode": Family(_DP_TP, _decode),
    "split_cache": Family({"data": 4, "context": 8}, _split_cache),
    "recurrence": Family(_DP_TP, _recurrence),
    "expert_all_to_all": Family({"data": 4, "expert": 8}, _expert_all_to_all),
    "adapters": Family({"data": 32}, _adapters),
}
"""The 16 families, by name."""
