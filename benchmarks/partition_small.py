"""Single ops on a sharded dimension: what Shardy leaves out, one program each."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from partition_families import Family, On

NHWC = ("NHWC", "HWIO", "NHWC")


def _rows(function: Callable[[Array], Array]) -> Family:
    """`function` of 64 x 16 numbers cut into eight along the rows, and its result cut likewise."""

    def make(on: On) -> Any:
        return lambda x: on.constrain(function(x), "x"), (on.shape(64, 16, axes=("x",)),)

    return Family({"x": 8}, make)


def _columns(function: Callable[[Array], Array]) -> Family:
    """As `_rows` on three dimensions, of which the middle one is cut."""

    def make(on: On) -> Any:
        return lambda x: on.constrain(function(x), None, "x"), (on.shape(4, 64, 6, axes=(None, "x")),)

    return Family({"x": 8}, make)


def _convolution(stride: int, size: int, *, grad: bool = False, dilation: int = 1) -> Family:
    def conv(kernel: Array, images: Array) -> Array:
        return lax.conv_general_dilated(
            images, kernel, (stride, stride), "SAME", rhs_dilation=(dilation, dilation), dimension_numbers=NHWC
        )

    def make(on: On) -> Any:
        kernel, images = on.shape(size, size, 8, 8), on.shape(4, 64, 64, 8, axes=(None, "x"))
        if not grad:
            return lambda k, x: on.constrain(conv(k, x), None, "x"), (kernel, images)
        loss: Callable[[Array, Array], Array] = lambda k, x: jnp.sum(jnp.square(conv(k, x)))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1)), (kernel, images)

    return Family({"x": 8}, make)


def _pool(size: int, stride: int) -> Callable[[Array], Array]:
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (size, 1), (stride, 1), "SAME")


SMALL: Mapping[str, Family] = {
    "slice_half": _rows(lambda x: x[:32]),
    "slice_stride": _rows(lambda x: x[::2]),
    "slice_second_half": _rows(lambda x: x[32:]),
    "pad_double": _rows(lambda x: jnp.pad(x, ((0, 64), (0, 0)))),
    "pad_shift": _rows(lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:64]),
    "concat": _rows(lambda x: jnp.concatenate([x, x * 2])),
    "concat_no_room": _columns(lambda x: jnp.concatenate([x, x * 2], axis=1)),
    "roll": _rows(lambda x: jnp.roll(x, 1, axis=0)),
    "reverse": _rows(lambda x: x[::-1]),
    "cumsum": _rows(lambda x: jnp.cumsum(x, axis=0)),
    "cummax": _rows(lambda x: lax.cummax(x, axis=0)),
    "sort": _rows(lambda x: jnp.sort(x, axis=0)),
    "pool": _rows(_pool(3, 1)),
    "pool_stride": _rows(_pool(3, 2)),
    "pool_grad": _rows(jax.grad(lambda x: jnp.sum(_pool(2, 2)(x)))),
    "pool_grad_overlap": _rows(jax.grad(lambda x: jnp.sum(_pool(3, 2)(x)))),
    "conv_3": _convolution(1, 3),
    "conv_5": _convolution(1, 5),
    "conv_3_stride": _convolution(2, 3),
    "conv_3_dilated": _convolution(1, 3, dilation=2),
    "conv_3_grad": _convolution(1, 3, grad=True),
    "conv_3_stride_grad": _convolution(2, 3, grad=True),
    "dynamic_slice": _rows(lambda x: lax.dynamic_slice(x, (8, 0), (16, 16))),
    "dynamic_update": _rows(lambda x: lax.dynamic_update_slice(x, x[:8] * 2, (8, 0))),
    "argmax": _rows(lambda x: x * jnp.argmax(x, axis=0)),
    "top_k": _rows(lambda x: lax.top_k(x.T, 4)[0].sum() * x),
    "fft": _rows(lambda x: jnp.abs(jnp.fft.fft(x, axis=0))),
    "gather_rows": _rows(lambda x: jnp.take(x, jnp.argsort(x[:, 0]), axis=0)),
    "scatter_rows": _rows(lambda x: x.at[jnp.array([1, 9, 17, 63])].add(1.0)),
    "flip_transpose": _rows(lambda x: (x.T @ x)[:, None, :].repeat(64, 1)[0][:, :].repeat(4, 0)),
}
"""By name; compared one by one, each with what is known to differ in `docs/partition.md`."""
