"""The program families on which partitioning is compared with XLA's own partitioner.

`FAMILIES` was fixed, with sizes and expected misses, before anything was compared. Each family builds a function and
the shapes of its arguments on a mesh, abstract or real.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

P = PartitionSpec
Tree = Any


@dataclass(frozen=True, slots=True)
class Family:
    """`mesh`: axis sizes. `make(on)`: the function and its arguments. `expected_miss`: why it may differ from XLA."""

    mesh: Mapping[str, int]
    make: Callable[["On"], tuple[Callable[..., Any], tuple[Tree, ...]]]
    expected_miss: str = ""
    out: Callable[["On"], Any] | None = None
    donate: tuple[int, ...] = field(default_factory=tuple[int, ...])


@dataclass(frozen=True, slots=True)
class On:
    """A mesh and the ways to put shapes on it."""

    mesh: Any

    def shape(self, *sizes: int, axes: tuple[Any, ...] = (), dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=self.sharding(*axes))

    def sharding(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*axes))

    def constrain(self, x: Array, *axes: Any) -> Array:
        return lax.with_sharding_constraint(x, self.sharding(*axes))


def _mlp_loss(params: Tree, x: Array, constrain: Callable[[Array], Array] = lambda x: x) -> Array:
    for up, down in params:
        hidden = constrain(jax.nn.gelu(x @ up))
        x = x + hidden @ down
    return jnp.mean(jnp.square(x))


def _sgd(loss: Callable[..., Array], params: Tree, *batch: Any) -> Tree:
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return value, jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def _mlp_params(on: On, width: int, hidden: int, layers: int, up: tuple[Any, ...], down: tuple[Any, ...]) -> Tree:
    return [(on.shape(width, hidden, axes=up), on.shape(hidden, width, axes=down)) for _ in range(layers)]


def _data_parallel(on: On) -> Any:
    params = _mlp_params(on, 512, 2048, 3, (), ())
    return partial(_sgd, _mlp_loss), (params, on.shape(1024, 512, axes=("data",)))


def _tensor_parallel(on: On) -> Any:
    params = _mlp_params(on, 512, 2048, 3, (None, "model"), ("model", None))
    return partial(_sgd, _mlp_loss), (params, on.shape(256, 512))


def _dp_tp(on: On) -> Any:
    params = _mlp_params(on, 512, 2048, 3, (None, "model"), ("model", None))
    return partial(_sgd, _mlp_loss), (params, on.shape(1024, 512, axes=("data",)))


def _fsdp(on: On) -> Any:
    params = _mlp_params(on, 512, 2048, 3, ("data", None), (None, "data"))
    loss = partial(_mlp_loss, constrain=lambda h: on.constrain(h, "data", None))
    return partial(_sgd, loss), (params, on.shape(1024, 512, axes=("data",)))


def _block_params(on: On, stack: tuple[int, ...] = ()) -> Tree:
    """One transformer layer, FSDP over data and tensor parallel over model."""
    lead: tuple[Any, ...] = (None,) * len(stack)
    d, heads, width, hidden = 512, 16, 32, 2048
    return {
        "norm1": on.shape(*stack, d),
        "norm2": on.shape(*stack, d),
        "qkv": on.shape(*stack, 3, d, heads, width, axes=(*lead, None, "data", "model", None)),
        "out": on.shape(*stack, heads, width, d, axes=(*lead, "model", None, "data")),
        "up": on.shape(*stack, d, hidden, axes=(*lead, "data", "model")),
        "down": on.shape(*stack, hidden, d, axes=(*lead, "model", "data")),
    }


def _norm(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def _block(on: On, x: Array, layer: Tree) -> Array:
    x = on.constrain(x, "data", None, None)
    q, k, v = jnp.einsum("btd,cdhk->cbthk", _norm(x, layer["norm1"]), layer["qkv"])
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    mixed = jnp.einsum("bhts,bshk->bthk", weights, v)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, layer["out"])
    h = jax.nn.silu(_norm(x, layer["norm2"]) @ layer["up"])
    return on.constrain(x + h @ layer["down"], "data", None, None)


def _fsdp_tp_unrolled(on: On) -> Any:
    def loss(layers: Tree, x: Array) -> Array:
        for layer in layers:
            x = _block(on, x, layer)
        return jnp.mean(jnp.square(x))

    return partial(_sgd, loss), ([_block_params(on)] * 3, on.shape(64, 128, 512, axes=("data",)))


def _fsdp_tp_scan(on: On) -> Any:
    def loss(layers: Tree, x: Array) -> Array:
        step = jax.checkpoint(partial(_block, on))
        x, _ = lax.scan(lambda x, layer: (step(x, layer), None), x, layers)
        return jnp.mean(jnp.square(x))

    return partial(_sgd, loss), (_block_params(on, (4,)), on.shape(64, 128, 512, axes=("data",)))


def _sequence_parallel(on: On) -> Any:
    """Norms split over the sequence, products over the hidden width (Megatron)."""

    def loss(params: Tree, x: Array) -> Array:
        for scale, up, down in params:
            x = on.constrain(x, "data", "model", None)
            h = on.constrain(_norm(x, scale), "data", None, None)
            h = on.constrain(jax.nn.gelu(h @ up), "data", None, "model")
            x = x + on.constrain(h @ down, "data", "model", None)
        return jnp.mean(jnp.square(x))

    layer = (on.shape(512), on.shape(512, 2048, axes=(None, "model")), on.shape(2048, 512, axes=("model", None)))
    return partial(_sgd, loss), ([layer] * 2, on.shape(16, 256, 512, axes=("data", "model")))


def _context_parallel(on: On) -> Any:
    """Queries split over the sequence; keys and values are gathered."""

    def loss(weights: Tree, x: Array) -> Array:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in weights)
        q = on.constrain(q, "data", "context", None, None)
        scores = jnp.einsum("bthk,bshk->bhts", q, k)
        t = lax.broadcasted_iota(jnp.int32, scores.shape[2:], 0)
        s = lax.broadcasted_iota(jnp.int32, scores.shape[2:], 1)
        mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(s <= t, scores, -1e30)), v)
        return jnp.mean(jnp.square(on.constrain(mixed, "data", "context", None, None)))

    weights = [on.shape(256, 8, 32)] * 3
    return partial(_sgd, loss), (weights, on.shape(16, 512, 256, axes=("data", "context")))


def _moe_one_hot(on: On) -> Any:
    """Top-1 routing with capacity: positions by a cumulative sum over tokens, dispatch by one-hot products."""
    experts, capacity = 16, 64

    def loss(params: Tree, x: Array) -> Array:
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts)
        place = (jnp.cumsum(chosen, axis=0) - 1) * chosen
        slots = jax.nn.one_hot(place.astype(jnp.int32), capacity) * chosen[..., None]
        inputs = on.constrain(jnp.einsum("tec,td->ecd", slots, x), "expert", None, None)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, params["up"]))
        outputs = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
        combined = jnp.einsum("tec,ecd->td", slots * jnp.sum(gates * chosen, -1)[:, None, None], outputs)
        return jnp.mean(jnp.square(x + combined))

    params = {
        "router": on.shape(256, experts),
        "up": on.shape(experts, 256, 512, axes=("expert",)),
        "down": on.shape(experts, 512, 256, axes=("expert",)),
    }
    return partial(_sgd, loss), (params, on.shape(1024, 256, axes=("expert",)))


def _moe_ragged(on: On) -> Any:
    """Tokens sorted by expert, one ragged product against sharded experts."""

    def forward(weights: Array, x: Array, sizes: Array) -> Array:
        return jnp.mean(jnp.square(lax.ragged_dot(x, weights, sizes)))

    weights = on.shape(16, 256, 512, axes=("expert",))
    return forward, (weights, on.shape(1024, 256), on.shape(16, dtype=jnp.int32))


def _vocabulary(on: On) -> Any:
    """Embedding and logits split over the vocabulary, lookup by gather, cross entropy."""

    def loss(params: Tree, tokens: Array, targets: Array) -> Array:
        x = jnp.take(params["embedding"], tokens, axis=0, mode="clip")
        x = on.constrain(x, "data", None, None)
        logits = jnp.einsum("btd,dv->btv", x, params["logits"])
        total = jax.nn.logsumexp(logits, axis=-1)
        hot = jax.nn.one_hot(targets, logits.shape[-1])
        return jnp.mean(total - jnp.sum(logits * hot, axis=-1))

    params = {
        "embedding": on.shape(4096, 256, axes=("model", None)),
        "logits": on.shape(256, 4096, axes=(None, "model")),
    }
    tokens = on.shape(16, 128, axes=("data",), dtype=jnp.int32)
    return partial(_sgd, loss), (params, tokens, tokens)


def _spatial(on: On) -> Any:
    """Two 3x3 convolutions and a pooling on images split by rows."""

    def forward(kernels: Tree, images: Array) -> Array:
        x = images
        for kernel in kernels:
            x = jax.nn.relu(
                lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
            x = on.constrain(x, "data", "rows", None, None)
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    kernels = [on.shape(3, 3, 16, 32), on.shape(3, 3, 32, 32)]
    return forward, (kernels, on.shape(16, 64, 64, 16, axes=("data", "rows")))


def _cond(on: On) -> Any:
    def forward(up: Array, down: Array, x: Array, flag: Array) -> Array:
        def dense(x: Array) -> Array:
            return jax.nn.gelu(x @ up) @ down

        y = lax.cond(flag > 0, dense, lambda x: x * 2.0, x)
        return on.constrain(y, "data", None)

    return forward, (
        on.shape(512, 2048, axes=(None, "model")),
        on.shape(2048, 512, axes=("model", None)),
        on.shape(512, 512, axes=("data",)),
        on.shape(dtype=jnp.int32),
    )


def _nested_loops(on: On) -> Any:
    """A scan over layers whose body loops three times."""

    def forward(layers: Tree, x: Array) -> Array:
        def outer(x: Array, layer: Tree) -> tuple[Array, None]:
            up, down = layer
            body: Callable[[int, Array], Array] = lambda _, y: on.constrain(jnp.tanh(y @ up) @ down, "data", None)  # noqa: E731
            return lax.fori_loop(0, 3, body, x), None

        return lax.scan(outer, x, layers)[0]

    layers = (on.shape(4, 512, 1024, axes=(None, None, "model")), on.shape(4, 1024, 512, axes=(None, "model", None)))
    return forward, (layers, on.shape(512, 512, axes=("data",)))


def _shard_map_collectives(on: On) -> Any:
    """Every collective once."""

    def local(x: Array, w: Array) -> Array:
        size = on.mesh.shape["data"]
        y = lax.psum(x @ w, "model")
        gathered = lax.all_gather(y, "data", axis=0, tiled=True)
        scattered = lax.psum_scatter(gathered, "data", scatter_dimension=0, tiled=True)
        swapped = lax.all_to_all(scattered, "model", split_axis=0, concat_axis=1, tiled=True)
        shifted = lax.ppermute(swapped, "data", [(i, (i + 1) % size) for i in range(size)])
        return shifted + lax.pmax(shifted, ("data", "model"))

    mapped = jax.shard_map(
        local,
        mesh=on.mesh,
        in_specs=(P("data", "model"), P("model", None)),
        out_specs=P("data", "model"),
        check_vma=False,
    )
    return mapped, (on.shape(1024, 512, axes=("data", "model")), on.shape(512, 256, axes=("model", None)))


def _pipeline(on: On) -> Any:
    """Eight stages, sixteen microbatches, shifted by ppermute."""
    stages, micro = 8, 16

    def local(weights: Array, x: Array) -> Array:
        stage = lax.axis_index("stage")
        weights = weights[0]

        def step(state: Array, i: Array) -> tuple[Array, Array]:
            fed = jnp.where(stage == 0, x[jnp.minimum(i, micro - 1)], state)
            out = jnp.tanh(fed @ weights)
            return lax.ppermute(out, "stage", [(s, (s + 1) % stages) for s in range(stages)]), out

        _, outs = lax.scan(step, jnp.zeros_like(x[0]), jnp.arange(micro + stages - 1))
        last = jnp.where(stage == stages - 1, outs[stages - 1 :], 0.0)
        return lax.psum(last, "stage")

    mapped = jax.shard_map(
        local, mesh=on.mesh, in_specs=(P("stage"), P(None, "data")), out_specs=P(None, "data"), check_vma=False
    )
    return mapped, (on.shape(stages, 256, 256, axes=("stage",)), on.shape(micro, 64, 256, axes=(None, "data")))


def _zero1(on: On) -> Any:
    """Parameters whole on every device, Adam moments split over data (ZeRO-1)."""

    def step(params: Tree, moments: Tree, x: Array) -> Tree:
        grads = jax.grad(_mlp_loss)(params, x)

        def update(p: Array, m: Array, g: Array) -> tuple[Array, Array]:
            g = on.constrain(g, "data", None)
            m = 0.9 * m + 0.1 * g
            return on.constrain(p - 0.01 * m, None, None), on.constrain(m, "data", None)

        return jax.tree.map(update, params, moments, grads)

    params = _mlp_params(on, 512, 2048, 2, (), ())
    moments = _mlp_params(on, 512, 2048, 2, ("data", None), ("data", None))
    return step, (params, moments, on.shape(1024, 512, axes=("data",)))


_DP_TP = {"data": 4, "model": 16}

FAMILIES: Mapping[str, Family] = {
    "data_parallel": Family({"data": 64}, _data_parallel),
    "tensor_parallel": Family({"model": 16}, _tensor_parallel),
    "dp_tp": Family(_DP_TP, _dp_tp),
    "fsdp": Family({"data": 32}, _fsdp),
    "fsdp_tp_unrolled": Family(_DP_TP, _fsdp_tp_unrolled),
    "fsdp_tp_scan": Family(_DP_TP, _fsdp_tp_scan),
    "sequence_parallel": Family(_DP_TP, _sequence_parallel),
    "context_parallel": Family({"data": 4, "context": 8}, _context_parallel),
    "moe_one_hot": Family({"expert": 16}, _moe_one_hot),
    "moe_ragged": Family(
        {"expert": 8},
        _moe_ragged,
        "XLA on CPU expands a ragged product into a dense one over all experts; stablecast keeps it ragged",
    ),
    "vocabulary": Family(
        _DP_TP, _vocabulary, "XLA and Shardy choose between gathering rows and summing partial rows of the embedding"
    ),
    "spatial_convolution": Family({"data": 4, "rows": 8}, _spatial),
    "cond": Family(_DP_TP, _cond),
    "nested_loops": Family(_DP_TP, _nested_loops),
    "shard_map_collectives": Family(_DP_TP, _shard_map_collectives),
    "ppermute_pipeline": Family({"stage": 8, "data": 4}, _pipeline),
    "zero1": Family({"data": 16}, _zero1),
}
"""The 17 families, by name."""


def lowered(name: str, family: Family, mesh: Any) -> Any:
    """The family's program on `mesh` (abstract or of real devices), lowered for CPU with jax."""
    function, args = family.make(On(mesh))

    def entry(*given: Any) -> Any:
        return function(*given)

    entry.__name__ = name
    return jax.jit(entry).trace(*args).lower(lowering_platforms=("cpu",))
