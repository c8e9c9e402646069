"""Trip counts of every form of loop that JAX gives, counted in products of 64x64 matrices."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stablecast.ir.accounting import Conventions, account
from stablecast.ir.reader import read

PRODUCT = 2 * 64**3
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def loop(x, n):
    return lax.fori_loop(0, n, lambda i, carry: carry @ x, x)


inner = jax.jit(loop)


def scan(step, x, length, **options):
    return lax.scan(lambda carry, _: (step(carry), None), x, None, length=length, **options)[0]


def tanh_product(x):
    return lambda carry: jnp.tanh(carry @ x)


def nested_remat(x):
    outer = jax.checkpoint(lambda carry: scan(jax.checkpoint(tanh_product(x)), carry, 4))
    return scan(outer, x, 5).sum()


def carried_bound(x):
    """The inner bound is carried by the outer loop, which does not change it."""
    body = lambda t: (t[0] + 1, lax.fori_loop(0, t[2], lambda j, y: y @ x, t[1]), t[2])  # noqa: E731
    return lax.while_loop(lambda t: t[0] < 3, body, (0, x, 5))[1]


def choosing(x):
    return lax.scan(lambda c, i: (lax.cond(i > 3, lambda y: y @ x, lambda y: y, c), None), x, jnp.arange(8))[0]


LOOPS = {
    "reverse scan": (lambda x: scan(lambda c: c @ x, x, 9, reverse=True), 9),
    "partly unrolled scan": (lambda x: scan(lambda c: c @ x, x, 10, unroll=3), 10),
    "unrolled scan": (lambda x: scan(lambda c: c @ x, x, 10, unroll=True), 10),
    "nested scan": (lambda x: scan(lambda c: scan(lambda d: d @ x, c, 4), x, 5), 20),
    "map": (lambda x: lax.map(lambda y: y @ y, jnp.broadcast_to(x, (6, 64, 64))), 6),
    "map in batches": (lambda x: lax.map(lambda y: y @ y, jnp.broadcast_to(x, (10, 64, 64)), batch_size=4), 10),
    "gradient of a scan": (jax.grad(lambda x: scan(tanh_product(x), x, 5).sum()), 15),
    "gradient of a fori_loop": (jax.grad(lambda x: lax.fori_loop(0, 5, lambda i, c: jnp.tanh(c @ x), x).sum()), 15),
    "nested remat": (jax.grad(nested_remat), 100),
    "vmapped loop": (lambda x: jax.vmap(lambda y: loop(y, 5))(jnp.broadcast_to(x, (3, 64, 64))), 15),
    "unsigned counter": (lambda x: lax.fori_loop(jnp.uint32(0), jnp.uint32(7), lambda i, c: c @ x, x), 7),
    "bound passed to a function": (lambda x: inner(x, 10), 10),
    "bound passed through two functions": (lambda x: jax.jit(lambda x, n: inner(x, n))(x, 6), 6),
    "function called in a loop": (lambda x: scan(lambda c: inner(c, 10), x, 3), 30),
    "bound made outside": (lambda x: (lambda n: scan(lambda c: loop(c, n), x, 3))(jnp.int32(4)), 12),
    "carried bound": (carried_bound, 15),
    "branch in a loop": (choosing, 8),
    "bound from a shape": (lambda x: loop(x, x.shape[0]), 64),
}


@pytest.mark.parametrize("name", LOOPS)
def test_counted_loops(account_of, name):
    function, products = LOOPS[name]
    found = account_of(function, X)
    assert found.work.matmul_flops == products * PRODUCT
    assert found.complete


UNKNOWN = {
    "norm": lambda x: lax.while_loop(lambda c: jnp.linalg.norm(c) > 1, lambda c: c @ x, x),
    "two conditions": lambda x: lax.while_loop(
        lambda t: (t[0] < 8) & (t[1][0, 0] > 0), lambda t: (t[0] + 1, t[1] @ x), (0, x)
    )[1],
    "called with two bounds": lambda x: inner(inner(x, 6), 7),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_loops_whose_count_is_data(account_of, name):
    found = account_of(UNKNOWN[name], X)
    assert not found.complete
    assert found.to_dict()["lower_bound"]
    (symbol,) = found.symbols
    given = account_of(UNKNOWN[name], X, conventions=Conventions(loops={symbol.name: 4}))
    assert given.work.matmul_flops % (4 * PRODUCT) == 0
    assert given.complete


def test_two_unknown_bounds_multiply(account_of):
    def run(x, n, m):
        return lax.fori_loop(0, n, lambda i, c: lax.fori_loop(0, m, lambda j, d: d @ x, c), x)

    count = jax.ShapeDtypeStruct((), jnp.int32)
    found = account_of(run, X, count, count, conventions=Conventions(loops={"n": 3, "m": 5}))
    assert [symbol.name for symbol in found.symbols] == ["m", "n"]
    assert found.work.matmul_flops == 15 * PRODUCT
    part = account_of(run, X, count, count, conventions=Conventions(loops={"n": 3}))
    assert not part.complete


def test_a_loop_in_the_mhlo_dialect():
    text = """func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
      %z = mhlo.constant dense<0> : tensor<i32>
      %0:2 = mhlo.while(%i = %z, %c = %x) : tensor<i32>, tensor<8x8xf32>
      cond {
        %n = mhlo.constant dense<7> : tensor<i32>
        %g = mhlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        mhlo.return %g : tensor<i1>
      } do {
        %o = mhlo.constant dense<1> : tensor<i32>
        %j = mhlo.add %i, %o : tensor<i32>
        %d = "mhlo.dot_general"(%c, %c) <{dot_dimension_numbers = #mhlo.dot<lhs_contracting_dimensions = [1],
          rhs_contracting_dimensions = [0]>}> : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
        mhlo.return %j, %d : tensor<i32>, tensor<8x8xf32>
      }
      return %0#1 : tensor<8x8xf32> }"""
    assert account(read(text.encode())).work.matmul_flops == 7 * 2 * 8**3


def test_complex_constants_are_read(account_of):
    found = account_of(lambda x: x * (1 + 2j), jax.ShapeDtypeStruct((4, 4), jnp.complex64))
    assert found.work.vector_flops == 6 * 16
