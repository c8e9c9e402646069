"""One training step of a recommendation model (DLRM), in plain JAX.

    stablecast predict examples/dlrm.py:train_step --on h100-sxm
    stablecast predict examples/dlrm.py:train_step --set tables=26 --set rows=100000 --on a100-sxm-80gb
    python examples/dlrm.py

Dense features go through the bottom network, each categorical feature looks up a row of its table, and the pairwise
products of all these vectors go through the top network. Gradients are taken with respect to the rows that were looked
up, so that the tables are updated in place and no gradient of a whole table exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import stablecast

Tree = Any

FEATURES = 13
RATE = 0.1


def make_args(
    batch: int = 8192,
    tables: int = 26,
    rows: int = 1_000_000,
    width: int = 64,
    bottom: tuple[int, ...] = (512, 256),
    top: tuple[int, ...] = (1024, 1024, 512, 256),
) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`; nothing is allocated.

    Args:
        batch: samples.
        tables, rows, width: embedding tables, rows of each, and features of a row.
        bottom, top: hidden widths of the two networks.
    """
    vectors = tables + 1
    state = {
        "tables": [_f32(rows, width)] * tables,
        "bottom": _network((FEATURES, *bottom, width)),
        "top": _network((width + vectors * (vectors - 1) // 2, *top, 1)),
    }
    inputs = {
        "dense": _f32(batch, FEATURES),
        "indices": jax.ShapeDtypeStruct((tables, batch), jnp.int32),
        "clicks": _f32(batch),
    }
    return state, inputs


@stablecast.workload(args=make_args)
@partial(jax.jit, donate_argnums=0)
def train_step(state: Tree, batch: Tree) -> tuple[Tree, Array]:
    """The next state and the loss before it: forward, backward and gradient descent."""
    networks = {name: state[name] for name in ("bottom", "top")}
    with stablecast.region("lookup"):
        found = [table[index] for table, index in zip(state["tables"], batch["indices"], strict=True)]
    loss, (grads, row_grads) = jax.value_and_grad(loss_fn, argnums=(0, 1))(networks, found, batch)
    with stablecast.region("optimizer"):
        networks = jax.tree.map(lambda param, grad: param - RATE * grad, networks, grads)
        updates = zip(state["tables"], batch["indices"], row_grads, strict=True)
        tables = [table.at[index].add(-RATE * grad) for table, index, grad in updates]
    return {"tables": tables, **networks}, loss


def loss_fn(networks: Tree, found: Sequence[Array], batch: Tree) -> Array:
    """Mean binary cross entropy of the clicks."""
    with stablecast.region("bottom"):
        dense = jax.nn.relu(mlp(networks["bottom"], batch["dense"]))
    with stablecast.region("interaction"):
        mixed = interact(dense, found)
    with stablecast.region("top"):
        score = mlp(networks["top"], mixed)[:, 0]
    with stablecast.region("loss"):
        return jnp.mean(jax.nn.softplus(score) - score * batch["clicks"])


def mlp(layers: Sequence[Tree], x: Array) -> Array:
    """Affine maps with relu between them."""
    for i, layer in enumerate(layers):
        x = (jax.nn.relu(x) if i else x) @ layer["kernel"] + layer["bias"]
    return x


def interact(dense: Array, found: Sequence[Array]) -> Array:
    """The dense vector beside the products of every two of all vectors."""
    vectors = jnp.stack([dense, *found], axis=1)
    products = jnp.einsum("bif,bjf->bij", vectors, vectors)
    row, column = np.tril_indices(vectors.shape[1], -1)
    return jnp.concatenate([dense, products[:, row, column]], axis=1)


def _network(widths: Sequence[int]) -> list[Tree]:
    return [{"kernel": _f32(a, b), "bias": _f32(b)} for a, b in pairwise(widths)]


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def init(state: Tree, seed: int = 0) -> Tree:
    """Random weights and tables."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.1 * random.standard_normal(leaf.shape), leaf.dtype), state)


def main(steps: int = 3) -> None:
    """Train a tiny one on random clicks and print the loss."""
    shapes, batch = make_args(batch=64, tables=4, rows=100, width=8, bottom=(16,), top=(32,))
    random = np.random.default_rng(1)
    values = {
        "dense": jnp.asarray(random.standard_normal(batch["dense"].shape), jnp.float32),
        "indices": jnp.asarray(random.integers(100, size=batch["indices"].shape), jnp.int32),
        "clicks": jnp.asarray(random.integers(2, size=64), jnp.float32),
    }
    state = init(shapes)
    for i in range(steps):
        state, loss = train_step(state, values)
        print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
