"""Kernels as XLA:TPU makes them, their bytes counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stablecast.ir.device_program import DeviceProgram, Kernel
from stablecast.ir.kernels import KernelRow
from stablecast.lowering.products import TPU_ARITHMETIC
from stablecast.lowering.target import Target

Lower = Callable[..., DeviceProgram]
M, N, K = 512, 256, 128
X, W, Y = 2 * M * K, 2 * K * N, 2 * M * N
"""Bytes of the operands and the result of a product in bf16."""


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def rows(lowered: Lower, step: Any, *args: Any) -> list[KernelRow]:
    made = lowered(step, *args, target=Target("tpu", TPU_ARITHMETIC))
    return [made.table.rows[node.row] for node in made.body if isinstance(node, Kernel)]


def sizes(made: list[KernelRow]) -> list[tuple[str, float, float]]:
    return [(str(row.klass), row.bytes_read, row.bytes_written) for row in made]


def test_a_product_takes_in_what_follows_it_and_the_sums_of_that(lowered: Lower) -> None:
    """A residual added to the result is stored once; the sum of its squares over rows costs nothing more."""

    def step(x: Any, w: Any, r: Any) -> Any:
        y = x @ w + r
        return y, jnp.sum(y.astype(jnp.float32) ** 2, axis=1)

    (row,) = rows(lowered, step, bf16(M, K), bf16(K, N), bf16(M, N))
    assert (row.klass, row.m, row.n, row.k) == ("matmul", M, N, K)
    assert (row.bytes_read, row.bytes_written) == (X + W + Y, Y + 4 * M)


def test_element_wise_operands_are_computed_in_each_product_that_reads_them(lowered: Lower) -> None:
    """Rows scaled by f32 statistics and a bf16 weight go into three products, and are never stored."""

    def step(x: Any, s: Any, g: Any, a: Any, b: Any, c: Any) -> Any:
        scaled = ((x.astype(jnp.float32) * s[:, None]).astype(jnp.bfloat16)) * g
        return scaled @ a, scaled @ b, scaled @ c

    made = rows(lowered, step, bf16(M, K), f32(M), bf16(K), bf16(K, N), bf16(K, N), bf16(K, N))
    assert sizes(made) == [("matmul", X + 4 * M + 2 * K + W, Y)] * 3


def test_a_row_selection_by_product_never_stores_its_ones(lowered: Lower) -> None:
    def step(tokens: Any, table: Any) -> Any:
        return jax.nn.one_hot(tokens, N, dtype=jnp.bfloat16) @ table

    made = rows(lowered, step, jax.ShapeDtypeStruct((M,), jnp.int32), bf16(N, K))
    assert sizes(made) == [("matmul", 4 * M + 2 * N * K, 2 * M * K)]


def test_a_gradient_is_applied_as_it_is_made(lowered: Lower) -> None:
    """The product, both moments, the parameter and the gradient's norm: one kernel with four results."""

    def step(x: Any, dy: Any, p: Any, mu: Any, nu: Any) -> Any:
        g = x.T @ dy
        mu, nu = 0.9 * mu + 0.1 * g, 0.95 * nu + 0.05 * g * g
        return p - mu / jnp.sqrt(nu), mu, nu, jnp.sum(g.astype(jnp.float32) ** 2)

    (row,) = rows(lowered, step, bf16(M, K), bf16(M, N), *[bf16(K, N)] * 3)
    assert (row.klass, row.m, row.n, row.k) == ("matmul", K, N, M)
    assert (row.bytes_read, row.bytes_written) == (X + Y + 3 * W, 3 * W + 4)


def test_scores_are_stored_once_and_exponentials_never(lowered: Lower) -> None:
    """The maximum comes with the scores, their sum reads them, and the last product computes its own exponentials."""

    def step(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.T
        weights = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
        return (weights @ v) / jnp.sum(weights.astype(jnp.float32), axis=1, keepdims=True).astype(jnp.bfloat16)

    made = rows(lowered, step, bf16(M, K), bf16(N, K), bf16(N, K))
    first, total, last = made
    assert sizes([first]) == [("matmul", X + W, Y + 2 * M)]
    assert (total.klass, total.bytes_read, total.bytes_written) == ("reduction", Y + 2 * M, 4 * M)
    assert (last.klass, last.bytes_read, last.bytes_written) == ("matmul", Y + 2 * M + W + 4 * M, X)
    assert [row.transcendentals for row in made] == [0, M * N, M * N]


def test_what_two_products_read_is_stored_by_the_product_before_them(lowered: Lower) -> None:
    def step(x: Any, w: Any, e: Any, a: Any, b: Any) -> Any:
        s = (x @ w) * e
        return s @ a, s.T @ b

    made = rows(lowered, step, bf16(M, K), bf16(K, N), bf16(M, N), bf16(N, K), bf16(M, K))
    assert sizes(made)[0] == ("matmul", X + W + Y, Y)
    assert [row.bytes_read for row in made[1:]] == [Y + W, Y + X]


def test_the_narrower_of_result_and_what_follows_is_stored(lowered: Lower) -> None:
    """Logits stay in bf16; both sums over them convert as they read."""

    def step(x: Any, w: Any) -> Any:
        logits = (x @ w).astype(jnp.float32)
        top = jnp.max(logits, axis=1, keepdims=True)
        return jnp.log(jnp.sum(jnp.exp(logits - top), axis=1)) + top[:, 0], jnp.tanh(logits) @ w.T.astype(jnp.float32)

    made = rows(lowered, step, bf16(M, K), bf16(K, N))
    assert made[0].klass == "matmul"
    assert made[0].bytes_written == Y + 4 * M
    assert all(row.bytes_read <= Y + W + 8 * M for row in made[1:])


def test_one_product_a_kernel(lowered: Lower) -> None:
    def step(x: Any, w: Any, v: Any) -> Any:
        return jnp.tanh(x @ w) @ v

    made = rows(lowered, step, bf16(M, K), bf16(K, N), bf16(N, K))
    assert sizes(made) == [("matmul", X + W, Y), ("matmul", Y + W, X)]


def test_gathered_rows_are_stored(lowered: Lower) -> None:
    def step(x: Any, order: Any, w: Any) -> Any:
        return jnp.tanh(x[order]) @ w

    made = rows(lowered, step, bf16(M, K), jax.ShapeDtypeStruct((M,), jnp.int32), bf16(K, N))
    assert [row.klass == "matmul" for row in made] == [False, True]
    assert [row.bytes_written for row in made] == [X, Y]
    assert made[0].bytes_read == pytest.approx(X, rel=0.1)
    assert made[1].bytes_read == X + W
