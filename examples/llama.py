"""One training step of a Llama-3-style decoder, in plain JAX.

    stablecast predict examples/llama.py:train_step --set size=100m --on h100-sxm
    stablecast chakra examples/llama.py:step --set layers=80 --set d_model=8192 --mesh dp=64,tp=8,pp=4 -o traces/step
    python examples/llama.py

The sizes 100m to 3b are names, not parameter counts: heads are 128 wide and there is one for every 64 features, so
attention works at twice the model width. The embedding is a one-hot product, attention writes its scores to memory,
parameters and AdamW's moments share one dtype, and each layer keeps the outputs of its weight products only, so that
the two attention products run again in the backward pass.

Everything the step must know is in the shapes and the structure of its arguments. A batch with a leading dimension of
micro-batches goes through a pipeline of stages (GPipe): all micro-batches forward, then all backward.
"""

from __future__ import annotations

import math
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

SIZES = {  # name: (model width, layers)
    "100m": (576, 7),
    "200m": (832, 10),
    "500m": (1280, 16),
    "1b": (1792, 22),
    "2b": (2240, 28),
    "3b": (2624, 32),
}
DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
HEAD_DIM = 128
ROPE_BASE = 5e5
NORM_EPS = 1e-5

PEAK_RATE, FINAL_FRACTION = 3e-5, 0.1
WARMUP_STEPS, TOTAL_STEPS = 3, 30
BETA1, BETA2, ADAM_EPS, WEIGHT_DECAY = 0.9, 0.95, 1e-8, 0.1

NORMS = ("attention_norm", "mlp_norm", "final_norm")
BATCH_AXES = ("data", "fsdp")
STAGES = "pipeline"


def make_args(
    size: str = "100m",
    batch: int | None = None,
    seq: int = 4096,
    layers: int | None = None,
    d_model: int | None = None,
    heads: int | None = None,
    vocab: int = 128256,
    scan: bool = False,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    microbatches: int | None = None,
    dtype: str = "bf16",
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`.

    Args:
        size: one of `SIZES`; `layers`, `d_model` and `heads` override what it says.
        batch: sequences over all devices; one per data-parallel device and micro-batch unless given.
        seq: tokens in a sequence.
        vocab: rows of the embedding and columns of the logits.
        scan: stack the layers' parameters and loop over them instead of unrolling.
        data, fsdp, tensor, pipeline: devices along each mesh axis. The batch is split over data and fsdp, every matrix
            over fsdp on its model width and over tensor on its heads, its mlp width or its vocabulary, and the layers,
            which are then stacked, over pipeline. With one device nothing carries a sharding.
        microbatches: parts of the batch that follow each other through the pipeline; two a stage unless given.
        dtype: `bf16` or `f32`, of parameters, moments and activations.
        dp, tp, pp: data, tensor and pipeline by their short names.

    Raises:
        ValueError: an unknown size or dtype, or a dimension that its mesh axes do not divide.
    """
    width, depth = _lookup("size", size, SIZES)
    width = width if d_model is None else d_model
    data, tensor, pipeline = dp or data, tp or tensor, pp or pipeline
    mesh = _mesh(data=data, fsdp=fsdp, tensor=tensor, pipeline=pipeline)
    params = _params(
        partial(_leaf, mesh, _lookup("dtype", dtype, DTYPES)),
        width=width,
        layers=depth if layers is None else layers,
        heads=max(1, width // 64) if heads is None else heads,
        vocab=vocab,
        stacked=scan or pipeline > 1,
    )
    count = _leaf(mesh, jnp.int32, ())
    state = {
        "step": count,
        "params": params,
        "adam": {"count": count, "mu": params, "nu": params},
        "schedule": {"count": count},
    }
    tokens = _tokens(mesh, batch, seq, microbatches)
    fields = ("inputs", "positions", "segments", "targets", "target_segments")
    return state, dict.fromkeys(fields, tokens)


@stablecast.workload(args=make_args)
@partial(jax.jit, donate_argnums=0)
def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, Array]]:
    """The next state and this step's metrics: forward, backward and AdamW."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    with stablecast.region("optimizer"):
        rate = learning_rate(state["schedule"]["count"])
        params, adam = adamw(state["params"], grads, state["adam"], rate)
    with stablecast.region("metrics"):
        metrics = {
            "loss": loss,
            "learning_rate": rate,
            "tokens": jnp.sum(batch["target_segments"] != 0),
            "grad_norm": global_norm(grads),
            "param_norm": global_norm(params),
        }
    schedule = {"count": state["schedule"]["count"] + 1}
    return {"step": state["step"] + 1, "params": params, "adam": adam, "schedule": schedule}, metrics


step = train_step


# The model. Letters in the products: b batch, t and s positions, d width, h heads, k head width, f mlp, v vocabulary.


def loss_fn(params: Tree, batch: Tree) -> Array:
    """Mean cross entropy in nats over the tokens whose target segment is not 0."""
    x = embed(params["embedding"], batch["inputs"])
    x = decoder(params["layers"], x, batch["positions"], batch["segments"])
    with stablecast.region("logits"):
        x = rms_norm(x, params["final_norm"])
        logits = jnp.einsum("...d,dv->...v", x, params["logits"])
    with stablecast.region("loss"):
        return cross_entropy(logits, batch["targets"], batch["target_segments"] != 0)


def embed(embedding: Array, tokens: Array) -> Array:
    """Rows of the embedding, looked up by a product with one-hot vectors."""
    with stablecast.region("embed"):
        x = jnp.einsum("...v,vd->...d", one_hot(tokens, embedding.shape[0], embedding.dtype), embedding)
        return _split_batch(x)


def decoder(layers: Tree, x: Array, positions: Array, segments: Array) -> Array:
    """All layers: unrolled when `layers` is a list, a loop when it is one layer with stacked parameters.

    Positions with a leading dimension of micro-batches go through a pipeline.
    """
    if positions.ndim == 3:
        return pipelined(layers, x, positions, segments)
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    if isinstance(layers, list):
        unrolled = jax.checkpoint(block, policy=policy)
        for i, layer in enumerate(layers):
            with stablecast.region(f"layer{i}"):
                x = unrolled(layer, x, positions, segments)
        return x

    looped = jax.checkpoint(block, policy=policy, prevent_cse=False)
    with stablecast.region("layers"):
        return lax.scan(lambda x, layer: (looped(layer, x, positions, segments), None), x, layers)[0]


def pipelined(layers: Tree, x: Array, positions: Array, segments: Array) -> Array:
    """`decoder` for micro-batches, the stacked layers split over the stages of the mesh that they carry.

    The data axis is written by hand as well, so that gradients are summed over it once and not for every micro-batch.
    """
    mesh = jax.typeof(x).sharding.mesh
    stages = mesh.shape[STAGES]
    stacked, split = PartitionSpec(STAGES), PartitionSpec(STAGES, "data")
    mapped = partial(jax.shard_map, mesh=mesh, axis_names={STAGES, "data"}, check_vma=False)

    @partial(mapped, in_specs=(stacked, split, split, split, stacked), out_specs=split)
    def run(layers: Tree, x: Array, positions: Array, segments: Array, stage: Array) -> Array:
        x, positions, segments = (lax.all_gather(part, STAGES, tiled=True) for part in (x, positions, segments))
        count = len(x)

        def tick(received: Array, time: Array) -> tuple[Array, Array]:
            own = jnp.clip(time - stage[0], 0, count - 1)
            entering = jnp.where(stage[0] == 0, x[own], received)
            left = decoder(layers, entering, positions[own], segments[own])
            with stablecast.region("next_stage"):
                return lax.ppermute(left, STAGES, [(i, i + 1) for i in range(stages - 1)]), left

        _, left = lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(count + stages - 1))
        done = jnp.where(stage[0] == stages - 1, left[stages - 1 :], 0)
        return lax.psum_scatter(done, STAGES, scatter_dimension=0, tiled=True)

    return run(layers, x, positions, segments, jnp.arange(stages))


def block(layer: Tree, x: Array, positions: Array, segments: Array) -> Array:
    """One layer: attention and mlp, each behind a norm and added to its input."""
    with stablecast.region("attention"):
        x = x + attention(layer, rms_norm(x, layer["attention_norm"]), positions, segments)
    with stablecast.region("mlp"):
        x = x + mlp(layer, rms_norm(x, layer["mlp_norm"]))
    return _split_batch(x)


def attention(layer: Tree, x: Array, positions: Array, segments: Array) -> Array:
    """Causal attention within segments; scores are not scaled by the head width.

    As in MaxText's dot-product attention, the gradient also flows through the maximum, where it adds up to nothing.
    """
    query = rope(jnp.einsum("btd,dhk->bthk", x, layer["query"]), positions)
    key = rope(jnp.einsum("btd,dhk->bthk", x, layer["key"]), positions)
    value = jnp.einsum("btd,dhk->bthk", x, layer["value"])

    scores = jnp.einsum("bthk,bshk->bhts", query, key)
    scores = jnp.where(attention_mask(segments), scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, dtype=jnp.float32).astype(weights.dtype)

    mixed = jnp.einsum("bhts,bshk->bthk", weights, value) / total.swapaxes(1, 2)[..., None]
    return jnp.einsum("bthk,hkd->btd", mixed, layer["out"])


def attention_mask(segments: Array) -> Array:
    """True where position t may look at position s, as bool[b, 1, t, s]."""
    t = lax.broadcasted_iota(jnp.int32, (segments.shape[1],) * 2, 0)
    s = lax.broadcasted_iota(jnp.int32, (segments.shape[1],) * 2, 1)
    same_segment = segments[:, :, None] == segments[:, None, :]
    return (same_segment & (s <= t))[:, None]


def rope(x: Array, positions: Array) -> Array:
    """Rotary embedding that pairs feature i with i + half; angles in float32."""
    half = x.shape[-1] // 2
    frequency = ROPE_BASE ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def mlp(layer: Tree, x: Array) -> Array:
    """SwiGLU."""
    gate = jnp.einsum("btd,df->btf", x, layer["wi_0"])
    up = jnp.einsum("btd,df->btf", x, layer["wi_1"])
    return jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, layer["wo"])


def rms_norm(x: Array, scale: Array) -> Array:
    """Root-mean-square norm, computed in float32, returned in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + NORM_EPS)).astype(x.dtype) * scale


def one_hot(indices: Array, classes: int, dtype: Any) -> Array:
    """`indices` compared with an iota."""
    iota = lax.broadcasted_iota(indices.dtype, (*indices.shape, classes), indices.ndim)
    return (indices[..., None] == iota).astype(dtype)


def cross_entropy(logits: Array, targets: Array, counted: Array) -> Array:
    """Mean of -log softmax(logits)[target] over the counted tokens, in float32."""
    logits = logits.astype(jnp.float32)
    shifted = logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    log_total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    nll = log_total - jnp.sum(shifted * one_hot(targets, logits.shape[-1], jnp.float32), axis=-1)
    return jnp.sum(nll * counted) / jnp.maximum(jnp.sum(counted), 1)


# The optimiser.


def learning_rate(count: Array) -> Array:
    """A linear warm-up to `PEAK_RATE`, then a cosine down to `FINAL_FRACTION` of it."""
    count = count.astype(jnp.float32)
    warmup = (count + 1) / WARMUP_STEPS
    progress = jnp.clip((count - WARMUP_STEPS) / (TOTAL_STEPS - WARMUP_STEPS), 0, 1)
    cosine = FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return PEAK_RATE * jnp.where(count < WARMUP_STEPS, warmup, cosine)


def adamw(params: Tree, grads: Tree, adam: Tree, rate: Array) -> tuple[Tree, Tree]:
    """One AdamW update; every array keeps its dtype."""
    count = adam["count"] + 1
    mu = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, adam["mu"], grads)
    nu = jax.tree.map(lambda n, g: BETA2 * n + (1 - BETA2) * jnp.square(g), adam["nu"], grads)
    mu_bias, nu_bias = 1 - BETA1**count, 1 - BETA2**count

    def update(param: Array, m: Array, n: Array) -> Array:
        m_hat, n_hat = m / mu_bias.astype(m.dtype), n / nu_bias.astype(n.dtype)
        direction = m_hat / (jnp.sqrt(n_hat) + ADAM_EPS) + WEIGHT_DECAY * param
        return param - rate.astype(param.dtype) * direction

    return jax.tree.map(update, params, mu, nu), {"count": count, "mu": mu, "nu": nu}


def global_norm(tree: Tree) -> Array:
    """Euclidean norm over all arrays of a tree, in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


# Shapes and shardings.


def _params(leaf: Leaf, width: int, layers: int, heads: int, vocab: int, stacked: bool) -> Tree:
    layer = _layer(partial(_stack, leaf, layers) if stacked else leaf, width, heads)
    return {
        "embedding": leaf((vocab, width), "tensor", "fsdp"),
        "layers": layer if stacked else [layer] * layers,
        "final_norm": leaf((width,)),
        "logits": leaf((width, vocab), "fsdp", "tensor"),
    }


def _layer(leaf: Leaf, width: int, heads: int) -> Tree:
    mlp_width = width * 7 // 2
    projection = leaf((width, heads, HEAD_DIM), "fsdp", "tensor")
    return {
        "attention_norm": leaf((width,)),
        "query": projection,
        "key": projection,
        "value": projection,
        "out": leaf((heads, HEAD_DIM, width), "tensor", None, "fsdp"),
        "mlp_norm": leaf((width,)),
        "wi_0": leaf((width, mlp_width), "fsdp", "tensor"),
        "wi_1": leaf((width, mlp_width), "fsdp", "tensor"),
        "wo": leaf((mlp_width, width), "tensor", "fsdp"),
    }


def _stack(leaf: Leaf, layers: int, shape: tuple[int, ...], *axes: Any) -> jax.ShapeDtypeStruct:
    return leaf((layers, *shape), STAGES, *axes)


def _leaf(mesh: AbstractMesh | None, dtype: Any, shape: tuple[int, ...], *axes: Any) -> jax.ShapeDtypeStruct:
    if mesh is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    sizes = dict(mesh.shape)
    for size, names in zip(shape, axes, strict=False):
        parts = math.prod(sizes[name] for name in ((names,) if isinstance(names, str) else names or ()))
        if size % parts:
            raise ValueError(f"mesh {sizes} does not divide shape {shape} split over {axes}: {size} by {parts}")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def _tokens(mesh: AbstractMesh | None, batch: int | None, seq: int, microbatches: int | None) -> jax.ShapeDtypeStruct:
    sizes = {} if mesh is None else dict(mesh.shape)
    stages, devices = sizes.get(STAGES, 1), sizes.get("data", 1) * sizes.get("fsdp", 1)
    if stages == 1:
        if microbatches not in (None, 1):
            raise ValueError(f"{microbatches} micro-batches need a pipeline of more than one stage")
        return _leaf(mesh, jnp.int32, (devices if batch is None else batch, seq), BATCH_AXES)
    count = 2 * stages if microbatches is None else microbatches
    sequences = devices * count if batch is None else batch
    if sequences % count or count % stages:
        raise ValueError(f"{stages} stages must divide {count} micro-batches, and these {sequences} sequences")
    return _leaf(mesh, jnp.int32, (count, sequences // count, seq), STAGES, BATCH_AXES)


def _mesh(**axes: int) -> AbstractMesh | None:
    if all(size == 1 for size in axes.values()):
        return None
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def _split_batch(x: Array) -> Array:
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return x
    free = tuple(axis for axis in BATCH_AXES if axis not in mesh.manual_axes)
    axes = (STAGES, free) if x.ndim == 4 else (free,)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def _lookup(what: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}: choose one of {', '.join(known)}")
    return known[name]


# Real values, for running the step.


def init(state: Tree, seed: int = 0) -> Tree:
    """A state to start from, shaped like the one of `make_args`: random matrices, norms of one, the rest zero."""
    random = np.random.default_rng(seed)

    def start(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        if path[-1].key in NORMS:
            return jnp.ones(leaf.shape, leaf.dtype)
        return jnp.asarray(0.02 * random.standard_normal(leaf.shape), leaf.dtype)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    return zeros | {"params": jax.tree_util.tree_map_with_path(start, state["params"])}


def random_batch(batch: Tree, vocab: int, seed: int = 0) -> Tree:
    """Random tokens, each sequence one segment, shaped like the batch of `make_args`."""
    *sequences, length = batch["inputs"].shape
    tokens = np.random.default_rng(seed).integers(vocab, size=(*sequences, length + 1))
    positions = np.broadcast_to(np.arange(length), (*sequences, length))
    segments = np.ones((*sequences, length))
    fields = {
        "inputs": tokens[..., :-1],
        "positions": positions,
        "segments": segments,
        "targets": tokens[..., 1:],
        "target_segments": segments,
    }
    return {name: jnp.asarray(values, jnp.int32) for name, values in fields.items()}


def main(steps: int = 2) -> None:
    """Run a tiny model for a few steps and print its loss."""
    vocab = 512
    state, batch = make_args(batch=2, seq=64, layers=2, d_model=128, vocab=vocab)
    state, batch = init(state), random_batch(batch, vocab)
    for i in range(steps):
        state, metrics = train_step(state, batch)
        print(f"step {i}: loss {metrics['loss']:.4f}, learning rate {metrics['learning_rate']:.1e}")


if __name__ == "__main__":
    main()
