"""Start here: a small classifier, trained by one annotated step.

    stablecast predict examples/mlp.py:train_step --on h100-sxm
    stablecast predict examples/mlp.py:train_step --set batch=4096 --on h100-sxm
    python examples/mlp.py

Two additions to an ordinary JAX script are all it takes: `make_args` gives the shapes of the step's arguments, and the
decorator ties it to the step. Regions are optional; they name the parts of the step in the report.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import stablecast

Params = list[dict[str, Any]]

PIXELS, CLASSES = 784, 10
LEARNING_RATE = 0.1


def make_args(batch: int = 128, hidden: int = 1024) -> tuple[Params, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The arguments of `train_step` as shapes; nothing is allocated."""
    widths = [PIXELS, hidden, hidden, CLASSES]
    params = [
        {
            "weight": jax.ShapeDtypeStruct((inputs, outputs), jnp.float32),
            "bias": jax.ShapeDtypeStruct((outputs,), jnp.float32),
        }
        for inputs, outputs in pairwise(widths)
    ]
    images = jax.ShapeDtypeStruct((batch, PIXELS), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return params, images, labels


@stablecast.workload(args=make_args)
@jax.jit
def train_step(params: Params, images: Array, labels: Array) -> tuple[Params, Array]:
    """The parameters after one step of gradient descent, and the loss before it."""
    loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
    with stablecast.region("optimizer"):
        params = jax.tree.map(lambda param, grad: param - LEARNING_RATE * grad, params, grads)
    return params, loss


def loss_fn(params: Params, images: Array, labels: Array) -> Array:
    """Mean cross entropy."""
    logits = classify(params, images)
    with stablecast.region("loss"):
        picked = jax.nn.one_hot(labels, CLASSES) * jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.sum(picked, axis=-1))


def classify(params: Params, x: Array) -> Array:
    """Logits of a batch of images."""
    for i, layer in enumerate(params):
        with stablecast.region(f"layer{i}"):
            x = x @ layer["weight"] + layer["bias"]
            if i < len(params) - 1:
                x = jax.nn.relu(x)
    return x


def init(shapes: Params, seed: int = 0) -> Params:
    """Random weights and zero biases, shaped like the parameters of `make_args`."""
    random = np.random.default_rng(seed)
    return [
        {
            "weight": jnp.asarray(random.standard_normal(layer["weight"].shape) * 0.03, jnp.float32),
            "bias": jnp.zeros(layer["bias"].shape, jnp.float32),
        }
        for layer in shapes
    ]


def main(steps: int = 5) -> None:
    """Train on random images and print the loss."""
    shapes, images, labels = make_args()
    random = np.random.default_rng(1)
    params = init(shapes)
    x = jnp.asarray(random.standard_normal(images.shape), jnp.float32)
    y = jnp.asarray(random.integers(CLASSES, size=labels.shape), jnp.int32)
    for i in range(steps):
        params, loss = train_step(params, x, y)
        print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
