"""Shares that causal and banded masks leave of products, by --causal exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from stablecast.ir.accounting import Conventions
from stablecast.ir.accounting.planes import Plane, inverted, share

EXACT = Conventions(causal="exact")
S, H, D = 64, 12, 64
PRODUCT = 2 * H * S * S * D
CAUSAL = (S + 1) / (2 * S)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


QKV = (array(1, S, H, D),) * 3


def attention(masked):
    def run(query, key, value):
        scores = jnp.einsum("bthd,bshd->bhts", query, key) / 8.0
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(masked(scores), axis=-1), value)

    return run


def tril(scores):
    return jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1e9)


def added(scores):
    rows, columns = jnp.arange(S)[:, None], jnp.arange(S)[None]
    return scores + jnp.where(rows >= columns, 0.0, -1e9)


def swapped(scores):
    rows, columns = jnp.arange(S)[:, None], jnp.arange(S)[None]
    return jnp.where(columns > rows, -1e9, scores)


def banded(scores):
    rows, columns = jnp.arange(S)[:, None], jnp.arange(S)[None]
    return jnp.where((columns <= rows) & (rows - columns < 16), scores, -1e9)


def with_segments(scores):
    rows, columns = jnp.arange(S)[:, None], jnp.arange(S)[None]
    segments = scores[0, 0, 0] > 0
    return jnp.where((columns <= rows) & segments, scores, -1e9)


BANDED = sum(min(i + 1, 16) for i in range(S)) / S**2


@pytest.mark.parametrize(
    ("masked", "left"),
    [(tril, CAUSAL), (added, CAUSAL), (swapped, CAUSAL), (with_segments, CAUSAL), (banded, BANDED), (lambda x: x, 1)],
    ids=["tril", "added", "swapped", "with_segments", "banded", "none"],
)
def test_forward(account_of, masked, left):
    found = account_of(attention(masked), *QKV, conventions=EXACT)
    assert found.work.matmul_flops == pytest.approx(2 * PRODUCT * left)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_gradient(account_of, wrap):
    def loss(*qkv):
        return (wrap(attention(tril))(*qkv) ** 2).sum()

    full = account_of(jax.grad(loss, argnums=(0, 1, 2)), *QKV)
    exact = account_of(jax.grad(loss, argnums=(0, 1, 2)), *QKV, conventions=EXACT)
    assert full.work.matmul_flops >= 6 * PRODUCT
    assert exact.work.matmul_flops == pytest.approx(full.work.matmul_flops * CAUSAL)


def test_in_a_loop(account_of):
    def run(query, key, value):
        return lax.scan(lambda carry, _: (attention(tril)(carry, key, value), None), query, None, length=3)[0]

    assert account_of(run, *QKV, conventions=EXACT).work.matmul_flops == pytest.approx(6 * PRODUCT * CAUSAL)


def test_mask_made_outside_of_the_loop(account_of):
    def run(query, key, value):
        mask = jnp.tril(jnp.ones((S, S), bool))

        def step(carry, _):
            return attention(lambda scores: jnp.where(mask, scores, -1e9))(carry, key, value), None

        return lax.scan(step, query, None, length=3)[0]

    assert account_of(run, *QKV, conventions=EXACT).work.matmul_flops == pytest.approx(6 * PRODUCT * CAUSAL)


def test_other_products_stay_whole(account_of):
    def run(query, key, value):
        return jnp.einsum("bthd,hde->bte", attention(tril)(query, key, value), jnp.ones((H, D, 32)))

    projection = 2 * S * H * D * 32
    found = account_of(run, *QKV, conventions=EXACT)
    assert found.work.matmul_flops == pytest.approx(2 * PRODUCT * CAUSAL + projection)


planes = st.builds(Plane, st.tuples(st.just(0), st.integers(-3, 3), st.integers(-3, 3)), st.integers(-9, 9))


@settings(deadline=None)
@given(st.lists(planes, max_size=3), st.integers(1, 8), st.integers(1, 8))
def test_share_counts_points(conditions, rows, columns):
    i, j = np.indices((rows, columns))
    inside = np.ones((rows, columns), bool)
    for plane in conditions:
        inside &= plane.coefficients[1] * i + plane.coefficients[2] * j + plane.constant >= 0
    assert share(tuple(conditions), (5, rows, columns)) == pytest.approx(inside.mean())


@settings(deadline=None)
@given(planes)
def test_inverted_is_the_complement(plane):
    flipped = inverted((plane,))
    assert flipped is not None
    assert share((plane,), (1, 6, 7)) + share(flipped, (1, 6, 7)) == pytest.approx(1)
