"""Kernels and their traffic, counted by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.kernels import KernelClass

Lower = Callable[..., DeviceProgram]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def classes(program: DeviceProgram) -> list[str]:
    rows = program.table.rows
    return [rows[node.row].klass for node in program.body]  # type: ignore[union-attr]


def moved(program: DeviceProgram) -> float:
    return program.work.evaluate()[0].nbytes


def test_a_chain_of_sums_is_one_kernel(lowered: Lower) -> None:
    """x+y+z+w of 1000² f32: 4 reads and 1 write of 4 MB; unfused 3 x 3."""
    args = [f32(1000, 1000)] * 4
    program = lowered(lambda x, y, z, w: x + y + z + w, *args)
    assert classes(program) == ["elementwise"]
    assert moved(program) == 20_000_000
    assert program.work.evaluate()[0].vector_flops == 3_000_000
    assert moved(lowered(lambda x, y, z, w: x + y + z + w, *args, fused=False)) == 36_000_000


def test_exact_gelu_is_one_memory_bound_kernel(lowered: Lower) -> None:
    program = lowered(lambda x: jax.nn.gelu(x, approximate=False), f32(4096, 4096))
    assert classes(program) == ["elementwise"]
    assert moved(program) == 134_217_728


def test_broadcasts_and_constants_move_nothing(lowered: Lower) -> None:
    program = lowered(lambda x, b: (x + b) * 2.0 + 1.0, f32(1024, 512), f32(512))
    assert classes(program) == ["elementwise"]
    assert moved(program) == 2 * 1024 * 512 * 4 + 512 * 4


def test_producers_go_into_the_reduction(lowered: Lower) -> None:
    program = lowered(lambda x: jnp.sum(jnp.exp(x) * 2.0, axis=1), f32(1024, 512))
    assert classes(program) == ["reduction"]
    row = program.table.rows[0]
    assert (row.elems, row.reduced) == (1024 * 512, 512)
    assert moved(program) == 1024 * 512 * 4 + 1024 * 4


def test_two_reductions_of_one_tensor_read_it_once(lowered: Lower) -> None:
    program = lowered(lambda x: (jnp.sum(x, axis=0), jnp.sum(x * x, axis=0)), f32(4096, 256))
    assert classes(program) == ["reduction"]
    assert moved(program) == 4096 * 256 * 4 + 2 * 256 * 4


def test_a_result_that_is_kept_and_reduced_leaves_one_kernel(lowered: Lower) -> None:
    """z = x + y is written once and summed by the kernel that makes it."""

    def step(x: Any, y: Any) -> Any:
        z = x + y
        return z, jnp.sum(z, axis=1)

    program = lowered(step, f32(2048, 512), f32(2048, 512))
    assert len(program.body) == 1
    assert moved(program) == 3 * 2048 * 512 * 4 + 2048 * 4


def test_a_cheap_convert_is_computed_again_rather_than_stored(lowered: Lower) -> None:
    """Batch norm statistics and normalisation both read the bf16 input, never an f32 copy of it."""

    def norm(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return ((wide - wide.mean(axis=1, keepdims=True)) * 2.0).astype(jnp.bfloat16)

    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    program = lowered(norm, x)
    assert classes(program) == ["reduction", "elementwise"]
    size = 4096 * 1024 * 2
    assert moved(program) == pytest.approx(3 * size, rel=0.01)


def test_epilogue_of_a_product(lowered: Lower) -> None:
    def layer(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(x @ w + b)

    program = lowered(layer, f32(128, 256), f32(256, 512), f32(512))
    assert classes(program) == ["matmul"]
    row = program.table.rows[0]
    assert (row.batch, row.m, row.n, row.k) == (1, 128, 512, 256)
    assert row.matmul_flops == 2 * 128 * 512 * 256
    assert moved(program) == (128 * 256 + 256 * 512 + 512 + 128 * 512) * 4


def test_a_product_that_two_kernels_read_is_stored(lowered: Lower) -> None:
    def step(x: Any, w: Any) -> Any:
        y = x @ w
        return jnp.tanh(y), jnp.sum(y * y, axis=0)

    program = lowered(step, f32(256, 256), f32(256, 256))
    assert classes(program)[0] == "matmul"
    assert program.table.rows[0].bytes_written == 256 * 256 * 4
    assert program.work.evaluate()[0].matmul_flops == 2 * 256**3


def test_transposed_operands_are_part_of_the_product(lowered: Lower) -> None:
    program = lowered(lambda x, w: lax.dot(x.T, w), f32(256, 128), f32(256, 512))
    assert classes(program) == ["matmul"]


def test_an_opaque_call_stands_alone(lowered: Lower) -> None:
    def call(x: Any) -> Any:
        return jnp.cos(jax.ffi.ffi_call("my_kernel", f32(128, 128))(jnp.sin(x)))

    program = lowered(call, f32(128, 128))
    assert classes(program) == ["elementwise", "custom", "elementwise"]
    assert not program.complete
    (entry,) = program.unmodelled
    assert entry.op == "stablehlo.custom_call @my_kernel"
    assert entry.nbytes == 131_072
    assert 0 < entry.share < 1


def test_updates_happen_in_place_only_where_the_buffer_may_go(lowered: Lower) -> None:
    """A row of a donated (4096,4096) f32 is 16 kB read and written; without donation the whole is copied too."""

    def update(table: Any, row: Any) -> Any:
        return lax.dynamic_update_slice(table, row, (7, 0))

    table, row = f32(4096, 4096), f32(1, 4096)
    assert moved(lowered(update, table, row, donate=(0,))) == pytest.approx(32_772, abs=64)
    assert moved(lowered(update, table, row)) == pytest.approx(32_772 + 134_217_728, abs=64)


def test_a_slice_of_a_sum_adds_only_the_slice(lowered: Lower) -> None:
    program = lowered(lambda x, y: (x + y)[:256], f32(1024, 64), f32(1024, 64))
    assert moved(program) == 3 * 256 * 64 * 4


def test_dead_code_is_not_launched(lowered: Lower) -> None:
    def step(x: Any) -> Any:
        jnp.sum(x @ x)
        return x + 1

    assert classes(lowered(step, f32(64, 64))) == ["elementwise"]


def test_equal_kernels_share_a_row(lowered: Lower) -> None:
    def layers(x: Any, w: Any) -> Any:
        for _ in range(6):
            x = jax.nn.relu(x @ w)
        return x

    program = lowered(layers, f32(256, 256), f32(256, 256))
    assert len(program.table) == 1
    assert program.table.count.tolist() == [6.0]
    assert len(program.table.body(0)) > 1


def test_fused_never_moves_more_than_unfused(lowered: Lower) -> None:
    def step(x: Any, w: Any) -> Any:
        h = jax.nn.softmax(x @ w)
        return jnp.sum(h * jnp.log(h + 1e-6))

    args = f32(512, 256), f32(256, 1024)
    gradient = jax.grad(step, argnums=1)
    assert moved(lowered(gradient, *args)) < moved(lowered(gradient, *args, fused=False))
    assert lowered(gradient, *args).work.evaluate()[0].matmul_flops == 3 * 2 * 512 * 256 * 1024 - 2 * 512 * 256 * 1024
    assert all(klass in set(KernelClass) for klass in classes(lowered(gradient, *args)))
