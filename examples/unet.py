"""One training step of a latent diffusion U-Net, in plain JAX.

    stablecast predict examples/unet.py:train_step --on h100-sxm
    stablecast predict examples/unet.py:train_step --set batch=16 --set channels=192 --on a100-sxm-80gb
    python examples/unet.py

The network of Stable Diffusion's first versions: four resolutions with two residual blocks each on the way down and
three on the way up; all but the coarsest attend to their own pixels and to a text. It predicts the noise in a latent.
Latents are NHWC. Parameters and AdamW's moments are float32, products and convolutions run in bfloat16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import stablecast

Tree = Any

WIDENING = (1, 2, 4, 4)
LATENT, HEADS, NORM_GROUPS, NORM_EPS = 4, 8, 32, 1e-5
RATE, BETA1, BETA2, ADAM_EPS, WEIGHT_DECAY = 1e-4, 0.9, 0.999, 1e-8, 0.01


def make_args(
    channels: int = 320, latent: int = 64, batch: int = 8, tokens: int = 77, text: int = 768, blocks: int = 2
) -> tuple[Tree, Tree]:
    """The arguments of `train_step` as shapes: `(state, batch)`; nothing is allocated.

    Args:
        channels: features at the finest resolution; a multiple of 32.
        latent: height and width of a latent; a multiple of 8.
        tokens, text: tokens of a text and features of each.
        blocks: residual blocks in a resolution on the way down; one more on the way up.

    Raises:
        ValueError: channels that the groups of the norms, or a latent that the resolutions do not divide.
    """
    if channels % NORM_GROUPS or latent % 2 ** (len(WIDENING) - 1):
        raise ValueError(f"{channels} channels must be a multiple of {NORM_GROUPS}, a latent of {latent} one of 8")
    params = _params(channels, text, blocks)
    state = {"step": jax.ShapeDtypeStruct((), jnp.int32), "params": params, "mu": params, "nu": params}
    latents = jax.ShapeDtypeStruct((batch, latent, latent, LATENT), jnp.bfloat16)
    inputs = {
        "noised": latents,
        "noise": latents,
        "times": _f32(batch),
        "text": jax.ShapeDtypeStruct((batch, tokens, text), jnp.bfloat16),
    }
    return state, inputs


@stablecast.workload(args=make_args)
@partial(jax.jit, donate_argnums=0)
def train_step(state: Tree, batch: Tree) -> tuple[Tree, Array]:
    """The next state and the loss before it: forward, backward and AdamW."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    with stablecast.region("optimizer"):
        return adamw(state, grads), loss


def loss_fn(params: Tree, batch: Tree) -> Array:
    """Mean squared error of the predicted noise."""
    found = network(params, batch["noised"], batch["times"], batch["text"])
    with stablecast.region("loss"):
        return jnp.mean(jnp.square((found - batch["noise"]).astype(jnp.float32)))


def network(params: Tree, x: Array, times: Array, text: Array) -> Array:
    """The noise in `x`."""
    with stablecast.region("time"):
        time = embed_time(params["time"], times, params["first"]["kernel"].shape[-1]).astype(x.dtype)
    x = conv(params["first"], x)
    skips = [x]
    for i, level in enumerate(params["down"]):
        with stablecast.region(f"down{i}"):
            for block in level["blocks"]:
                x = stage(block, x, time, text)
                skips.append(x)
            if "shrink" in level:
                x = conv(level["shrink"], x, stride=2)
                skips.append(x)
    with stablecast.region("middle"):
        x = stage(params["middle"][0], x, time, text)
        x = stage(params["middle"][1], x, time, text)
    for i, level in enumerate(params["up"]):
        with stablecast.region(f"up{i}"):
            for block in level["blocks"]:
                x = stage(block, jnp.concatenate([x, skips.pop()], axis=-1), time, text)
            if "grow" in level:
                x = conv(level["grow"], x.repeat(2, axis=1).repeat(2, axis=2))
    with stablecast.region("last"):
        return conv(params["last"], jax.nn.silu(group_norm(x, params["last_norm"])))


def embed_time(weights: Tree, times: Array, width: int) -> Array:
    """Sines and cosines of the times, through two affine maps."""
    rates = jnp.exp(-np.log(1e4) * jnp.arange(width // 2) / (width // 2))
    angles = times[:, None] * rates
    x = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return dense(jax.nn.silu(dense(x, weights["first"])), weights["second"])


def stage(block: Tree, x: Array, time: Array, text: Array) -> Array:
    """A residual block, and a transformer after it where it has one."""
    with stablecast.region("residual"):
        y = conv(block["conv1"], jax.nn.silu(group_norm(x, block["norm1"])))
        y = y + dense(jax.nn.silu(time), block["time"])[:, None, None]
        y = conv(block["conv2"], jax.nn.silu(group_norm(y, block["norm2"])))
        x = y + (conv(block["skip"], x) if "skip" in block else x)
    return x + transformer(block["transformer"], x, text) if "transformer" in block else x


def transformer(weights: Tree, x: Array, text: Array) -> Array:
    """Pixels attend to each other, then to the text, then pass a gated network."""
    with stablecast.region("transformer"):
        y = dense(group_norm(x, weights["norm"]).reshape(len(x), -1, x.shape[-1]), weights["enter"])
        normed = layer_norm(y, weights["self_norm"])
        y = y + attention(weights["self"], normed, normed)
        y = y + attention(weights["cross"], layer_norm(y, weights["cross_norm"]), text)
        value, gate = jnp.split(dense(layer_norm(y, weights["mlp_norm"]), weights["up"]), 2, axis=-1)
        y = y + dense(value * jax.nn.gelu(gate), weights["down"])
        return dense(y, weights["leave"]).reshape(x.shape)


def attention(weights: Tree, x: Array, source: Array) -> Array:
    """The positions of `x` attend to those of `source`."""
    query = _heads(x @ weights["query"].astype(x.dtype))
    key, value = (_heads(source @ weights[name].astype(x.dtype)) for name in ("key", "value"))
    scores = jnp.einsum("bthk,bshk->bhts", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
    mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, axis=-1).astype(x.dtype), value)
    return dense(mixed.reshape(x.shape), weights["out"])


def conv(weights: Tree, x: Array, stride: int = 1) -> Array:
    """A convolution that keeps the extent, divided by `stride`."""
    kernel, pad = weights["kernel"].astype(x.dtype), weights["kernel"].shape[0] // 2
    dims = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=dims)
    return y + weights["bias"].astype(x.dtype)


def dense(x: Array, weights: Tree) -> Array:
    """An affine map in the dtype of `x`."""
    return x @ weights["kernel"].astype(x.dtype) + weights["bias"].astype(x.dtype)


def group_norm(x: Array, weights: Tree) -> Array:
    """Group norm in float32, returned in the dtype of `x`."""
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], NORM_GROUPS, -1)
    centred = grouped - jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=(1, 2, 4), keepdims=True)
    normed = (centred * lax.rsqrt(variance + NORM_EPS)).reshape(x.shape)
    return (normed * weights["scale"] + weights["bias"]).astype(x.dtype)


def layer_norm(x: Array, weights: Tree) -> Array:
    """Layer norm in float32, returned in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * lax.rsqrt(variance + NORM_EPS) * weights["scale"] + weights["bias"]).astype(x.dtype)


def adamw(state: Tree, grads: Tree) -> Tree:
    """The state after one AdamW update."""
    step = state["step"] + 1
    mu = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["mu"], grads)
    nu = jax.tree.map(lambda n, g: BETA2 * n + (1 - BETA2) * jnp.square(g), state["nu"], grads)
    mu_scale, nu_scale = 1 / (1 - BETA1**step), 1 / (1 - BETA2**step)

    def update(param: Array, m: Array, n: Array) -> Array:
        return param - RATE * (m * mu_scale / (jnp.sqrt(n * nu_scale) + ADAM_EPS) + WEIGHT_DECAY * param)

    return {"step": step, "params": jax.tree.map(update, state["params"], mu, nu), "mu": mu, "nu": nu}


def _heads(x: Array) -> Array:
    return x.reshape(*x.shape[:-1], HEADS, -1)


# Shapes.


def _params(channels: int, text: int, blocks: int) -> Tree:
    widths, time = [channels * factor for factor in WIDENING], 4 * channels
    coarsest = len(widths) - 1
    inside, skips, down, up = channels, [channels], [], []
    for i, width in enumerate(widths):
        attends = text if i < coarsest else 0
        level: Tree = {"blocks": [_block(inside if j == 0 else width, width, time, attends) for j in range(blocks)]}
        if i < coarsest:
            level["shrink"] = _conv(3, width, width)
        skips += [width] * (blocks + ("shrink" in level))
        inside = width
        down.append(level)
    middle = [_block(inside, inside, time, text), _block(inside, inside, time, 0)]
    for i, width in reversed(list(enumerate(widths))):
        level = {"blocks": []}
        for _ in range(blocks + 1):
            level["blocks"].append(_block(inside + skips.pop(), width, time, text if i < coarsest else 0))
            inside = width
        if i > 0:
            level["grow"] = _conv(3, width, width)
        up.append(level)
    return {
        "time": {"first": _dense(channels, time), "second": _dense(time, time)},
        "first": _conv(3, LATENT, channels),
        "down": down,
        "middle": middle,
        "up": up,
        "last_norm": _norm(channels),
        "last": _conv(3, channels, LATENT),
    }


def _block(inside: int, width: int, time: int, text: int) -> Tree:
    block = {
        "norm1": _norm(inside),
        "conv1": _conv(3, inside, width),
        "time": _dense(time, width),
        "norm2": _norm(width),
        "conv2": _conv(3, width, width),
    }
    if inside != width:
        block["skip"] = _conv(1, inside, width)
    if text:
        block["transformer"] = {
            "norm": _norm(width),
            "enter": _dense(width, width),
            "self_norm": _norm(width),
            "self": _attention(width, width),
            "cross_norm": _norm(width),
            "cross": _attention(width, text),
            "mlp_norm": _norm(width),
            "up": _dense(width, 8 * width),
            "down": _dense(4 * width, width),
            "leave": _dense(width, width),
        }
    return block


def _attention(width: int, source: int) -> Tree:
    products = {"query": _f32(width, width), "key": _f32(source, width), "value": _f32(source, width)}
    return products | {"out": _dense(width, width)}


def _conv(size: int, inside: int, out: int) -> Tree:
    return {"kernel": _f32(size, size, inside, out), "bias": _f32(out)}


def _dense(inside: int, out: int) -> Tree:
    return {"kernel": _f32(inside, out), "bias": _f32(out)}


def _norm(width: int) -> Tree:
    return {"scale": _f32(width), "bias": _f32(width)}


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def init(state: Tree, seed: int = 0) -> Tree:
    """A state to start from: random weights, norms of one, the rest zero."""
    random = np.random.default_rng(seed)

    def start(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        if path[-1].key == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        spread = 0.0 if path[-1].key == "bias" else 1 / np.sqrt(np.prod(leaf.shape[:-1]))
        return jnp.asarray(spread * random.standard_normal(leaf.shape), leaf.dtype)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    return zeros | {"params": jax.tree_util.tree_map_with_path(start, state["params"])}


def main(steps: int = 3) -> None:
    """Train a tiny one on noise and print the loss."""
    shapes, batch = make_args(channels=32, latent=16, batch=2, tokens=4, text=16, blocks=1)
    random = np.random.default_rng(1)
    values = jax.tree.map(lambda leaf: jnp.asarray(random.standard_normal(leaf.shape), leaf.dtype), batch)
    state = init(shapes)
    for i in range(steps):
        state, loss = train_step(state, values)
        print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
