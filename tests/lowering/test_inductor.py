"""What TorchInductor launches that the ops do not show, and what it does not launch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stablecast.ir.device_program import DeviceProgram, Kernel
from stablecast.lowering.target import Target

Lower = Callable[..., DeviceProgram]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def launches(program: DeviceProgram) -> int:
    return sum(node.launch for node in program.body if isinstance(node, Kernel))


def test_parts_of_a_concatenation_are_written_in_place_on_a_cpu(lowered: Lower) -> None:
    def join(*parts: Any) -> Any:
        return jnp.concatenate([jnp.sin(part) for part in parts])

    parts = [f32(64, 32)] * 3
    assert launches(lowered(join, *parts, platform="cpu", target=Target("cpu", exec="inductor"))) == 3
    assert launches(lowered(join, *parts, target=Target("cuda", exec="inductor"))) == 1
    assert launches(lowered(join, *[f32(64, 32)] * 9, target=Target("cuda", exec="inductor"))) == 9


@pytest.mark.parametrize(("given", "count"), [(False, 2), (True, 1)])
def test_zeros_that_a_scatter_adds_to_are_a_loop(lowered: Lower, given: bool, count: int) -> None:
    def add(table: Any, rows: Any, at: Any) -> Any:
        return (table if given else jnp.zeros((1000, 16))).at[at].add(rows, mode="promise_in_bounds")

    at = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    program = lowered(
        lambda t, r, i: add(t, r, i[:, 0]), f32(1000, 16), f32(8, 16), at, target=Target("cuda", exec="inductor")
    )
    kernels = [node for node in program.body if isinstance(node, Kernel)]
    scatter = next(node for node in kernels if program.table.rows[node.row].klass == "scatter")
    assert scatter.launch == count


def test_products_read_views(lowered: Lower) -> None:
    """A transpose undone, and a slice: neither is copied."""
    program = lowered(
        lambda x, w: (x.T @ w[:, :16]).T.T, f32(64, 32), f32(64, 48), target=Target("cuda", exec="inductor")
    )
    assert launches(program) == 1


def test_products_read_what_a_loop_has_stored(lowered: Lower) -> None:
    """One loop, read by a product through a transpose and by a sum: in neither is it computed again."""

    def step(x: Any, g: Any, w: Any) -> Any:
        kept = jnp.where(x > 0, g, 0.0)
        return kept.T @ w, kept.sum(0)

    program = lowered(step, f32(64, 32), f32(64, 32), f32(64, 48), target=Target("cuda", exec="inductor"))
    assert launches(program) == 3


@pytest.mark.parametrize("exec_model", ["inductor", "xla"])
def test_sums_over_rows_and_over_columns_stay_apart(lowered: Lower, exec_model: str) -> None:
    """Of a square matrix: both have as many results."""
    program = lowered(lambda x: (x.sum(0), x.sum(1)), f32(64, 64), target=Target("cuda", exec=exec_model))
    assert launches(program) == 2


def group_norm(x: Any) -> Any:
    rows = x.reshape(4, 8, -1)
    centred = rows - rows.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return (centred * scale).reshape(x.shape)


def test_groups_of_channels_are_no_rows_after_a_convolution(lowered: Lower) -> None:
    """Two copies into channels-last order, the convolution, two sums, and a loop that reads both.

    Without a convolution, one kernel.
    """
    target = Target("cpu", exec="inductor")
    alone = lowered(group_norm, f32(4, 64, 16, 16), platform="cpu", target=target)
    after = lowered(
        lambda x, w: group_norm(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")),
        f32(4, 64, 16, 16),
        f32(64, 64, 3, 3),
        platform="cpu",
        target=target,
    )
    assert launches(alone) == 1
    assert launches(after) == 3 + 2 + 1


def test_complex_numbers_have_no_loops(lowered: Lower) -> None:
    """Pairs are cast to float32 and written, turned by a kernel of PyTorch's own, and cast back."""

    def rotate(x: Any, turns: Any) -> Any:
        pairs = x.astype(jnp.float32).reshape(64, 16, 2)
        turned = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * turns
        return jnp.stack([turned.real, turned.imag], -1).reshape(64, 32).astype(jnp.bfloat16)

    x, turns = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((64, 16), jnp.complex64)
    program = lowered(rotate, x, turns, target=Target("cuda", exec="inductor"))
    rows = [program.table.rows[node.row] for node in program.body if isinstance(node, Kernel)]
    narrow, wide = 64 * 32 * 2, 64 * 32 * 4
    seen = [(row.bytes_read, row.bytes_written) for row in rows]
    assert seen == [(narrow, wide), (2 * wide, wide), (wide, narrow)]
