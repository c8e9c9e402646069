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


def _centred(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    return ((wide - wide.mean(axis=1, keepdims=True)) * 2.0).astype(jnp.bfloat16)


def test_a_cheap_convert_is_computed_again_rather_than_stored(lowered: Lower) -> None:
    """On a TPU, statistics and normalisation both read the bf16 input, never an f32 copy of it."""
    program = lowered(_centred, jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), platform="tpu")
    assert classes(program) == ["reduction", "elementwise"]
    assert moved(program) == pytest.approx(3 * 4096 * 1024 * 2, rel=0.01)


def test_a_gpu_normalises_rows_in_one_kernel(lowered: Lower) -> None:
    """The bf16 input of 4096 x 1024 is read once and the result written once."""
    program = lowered(_centred, jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16))
    assert classes(program) == ["reduction"]
    assert program.table.rows[0].reduced == 1024
    assert moved(program) == 2 * 4096 * 1024 * 2


def test_a_sum_that_a_mask_hands_out_ends_its_kernel(lowered: Lower) -> None:
    """The gradient of a row's maximum goes to where it is held: the row is read twice; without it, once."""

    def loss(x: jax.Array, v: jax.Array, peak: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return jnp.sum(v * jnp.exp(x - peak(jnp.max(x, axis=-1, keepdims=True))))

    shapes, size = (f32(512, 2048), f32(512, 2048)), 512 * 2048 * 4
    rows = 512 * 4
    stopped = lowered(jax.grad(lambda x, v: loss(x, v, lax.stop_gradient)), *shapes)
    whole = lowered(jax.grad(lambda x, v: loss(x, v, lambda m: m)), *shapes)
    assert (len(stopped.body), moved(stopped)) == (1, 3 * size)
    assert (len(whole.body), moved(whole)) == (2, 5 * size + 2 * rows)


def test_softmax_is_one_kernel_unless_its_sum_is_kept(lowered: Lower) -> None:
    size = 512 * 2048 * 4
    assert moved(lowered(jax.nn.softmax, f32(512, 2048))) == 2 * size

    def kept(x: Any) -> Any:
        weights = jnp.exp(x - x.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        return weights / total, total

    program = lowered(kept, f32(512, 2048))
    assert classes(program) == ["reduction", "reduction"]
    assert moved(program) == 3 * size + 2 * 512 * 4


def test_long_reductions_take_two_launches(lowered: Lower) -> None:
    """Rows beyond 16,384 and columns beyond 4,096; partial results, about the root of what is folded, go to memory."""
    for axis, shape, launches in ((1, (64, 16384), 1), (1, (64, 65536), 2), (0, (4096, 64), 1), (0, (65536, 64), 2)):
        (row,) = lowered(lambda x, axis=axis: jnp.sum(x, axis), f32(*shape)).table.rows
        assert row.launches == launches
        partial = 64 * 256 * 4 if launches == 2 else 0
        assert row.bytes_written == 64 * 4 + partial
        assert row.bytes_read == shape[0] * shape[1] * 4 + partial


def test_few_results_of_a_long_contraction_are_split(lowered: Lower) -> None:
    """128 x 1024 results are 8 blocks of 128 x 128: 8 parts leave 128 of k each, their f32 sums go to memory."""
    (row,) = lowered(lambda x, w: x @ w, f32(128, 1024), f32(1024, 1024)).table.rows
    assert (row.launches, row.matmul_flops) == (2, 2 * 128 * 1024 * 1024)
    assert row.bytes_written == 9 * 128 * 1024 * 4
    (row,) = lowered(lambda x, w: x @ w, f32(128, 1024), f32(1024, 1024), platform="tpu").table.rows
    assert row.launches == 1


def test_products_that_share_an_operand_become_one(lowered: Lower) -> None:
    def three(x: Any, q: Any, k: Any, v: Any) -> Any:
        return x @ q, x @ k, x @ v

    program = lowered(three, f32(2048, 512), *[f32(512, 512)] * 3)
    assert classes(program) == ["matmul"]
    row = program.table.rows[0]
    assert (row.m, row.n, row.k) == (2048, 1536, 512)

    def chained(x: Any, w: Any) -> Any:
        return x @ (w @ x)

    assert len(lowered(chained, f32(2048, 2048), f32(2048, 2048)).body) == 2


def test_an_operand_that_reads_no_more_is_computed_by_the_product(lowered: Lower) -> None:
    """tanh of one tensor is; a sum of two tensors is not, and neither is a narrowing convert that others need."""
    x, w = f32(2048, 512), f32(512, 2048)
    assert classes(lowered(lambda x, w: jnp.tanh(x) @ w, x, w)) == ["matmul"]
    assert classes(lowered(lambda x, y, w: (x + y) @ w, x, x, w)) == ["elementwise", "matmul"]


def test_epilogue_of_a_product(lowered: Lower) -> None:
    def layer(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(x @ w + b)

    program = lowered(layer, f32(2048, 256), f32(256, 2048), f32(2048))
    assert classes(program) == ["matmul"]
    row = program.table.rows[0]
    assert (row.batch, row.m, row.n, row.k) == (1, 2048, 2048, 256)
    assert row.matmul_flops == 2 * 2048 * 2048 * 256
    assert moved(program) == (2 * 2048 * 256 + 2048 + 2048 * 2048) * 4


def test_a_product_that_two_kernels_read_is_stored(lowered: Lower) -> None:
    def step(x: Any, w: Any) -> Any:
        y = x @ w
        return jnp.tanh(y), jnp.sum(y * y, axis=0)

    program = lowered(step, f32(2048, 2048), f32(2048, 2048))
    assert classes(program)[0] == "matmul"
    assert program.table.rows[0].bytes_written == 2048 * 2048 * 4
    assert program.work.evaluate()[0].matmul_flops == 2 * 2048**3


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

    program = lowered(layers, f32(2048, 2048), f32(2048, 2048))
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
