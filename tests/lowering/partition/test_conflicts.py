"""Which operand of a product is resharded where an axis splits it in another way than the result."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import Array, lax

from stablecast.lowering.partition import partition
from stablecast.lowering.partition.conflicts import Roles, decide
from stablecast.lowering.partition.tally import tally

BATCHED = Roles([(0, 0)], [(2, 1)], (3, 3))
"""b t d, b d f -> b t f"""
PLAIN = Roles([], [(1, 0)], (2, 2))
"""t d, d f -> t f"""


@pytest.mark.parametrize(
    ("roles", "lhs", "rhs", "result", "expected"),
    [
        pytest.param(PLAIN, "x|", "|", "x|", "x| |", id="nothing to settle"),
        pytest.param(PLAIN, "x|", "x|", "x|", "x| |", id="FSDP: the other operand is gathered"),
        pytest.param(PLAIN, "|x", "x|", "|", "|x x|", id="a sum over both stays"),
        pytest.param(PLAIN, "|x", "x|", "x|", "|x x|", id="a sum of which a part is kept stays"),
        pytest.param(PLAIN, "|x", "|", "x|", "x| |", id="the axis moves where the other operand is whole"),
        pytest.param(PLAIN, "|x", "|", "|", "| |", id="contracted on one side only: gathered"),
        pytest.param(PLAIN, "x|", "x|", "|", "| |", id="free here and contracted there, whole result: both gathered"),
        pytest.param(BATCHED, "|x|", "x||", "x||", "x|| x||", id="the batch of result and one operand"),
        pytest.param(BATCHED, "|x|", "||x", "x||", None, id="the batch of the result alone: left alone"),
        pytest.param(PLAIN, "y|x", "x|", "y|", "y|x x|", id="each axis on its own"),
    ],
)
def test_decisions(roles: Roles, lhs: str, rhs: str, result: str, expected: str | None) -> None:
    def dims(text: str) -> list[list[str]]:
        return [list(part) for part in text.split("|")]

    found = decide(dims(lhs), dims(rhs), dims(result), roles)
    assert (None if found is None else list(found)) == (None if expected is None else list(map(dims, expected.split())))


def traffic(data: bytes) -> list[tuple[str, str, int]]:
    return [(line.kind, line.axes, line.operand_bytes) for line in tally(partition(data)).traffic]


def test_scores_move_to_the_heads_of_the_keys(on: Callable[..., Any]) -> None:
    """Scores split over positions, keys and the result over heads: XLA moves the scores, which are larger."""
    mesh = on(c=4)

    def product(scores: Array, keys: Array) -> Array:
        found = jnp.einsum("bhts,bshk->bhtk", scores, keys)
        return lax.with_sharding_constraint(found, mesh.sharding(None, "c"))

    args = mesh.shape(2, 8, 64, 64, axes=(None, None, "c")), mesh.shape(2, 64, 8, 16, axes=(None, None, "c"))
    assert traffic(mesh.module(product, *args)) == [("all_to_all", "c", 2 * 8 * 16 * 64 * 4)]


def test_elementwise_ops_follow_their_result(on: Callable[..., Any]) -> None:
    mesh = on(c=4)

    def add(x: Array, y: Array) -> Array:
        return lax.with_sharding_constraint(jnp.tanh(x) + y, mesh.sharding(None, None))

    args = mesh.shape(64, 16, axes=("c",)), mesh.shape(64, 16)
    assert traffic(mesh.module(add, *args)) == [("all_gather", "c", 16 * 16 * 4)]


def test_constants_are_made_and_not_gathered(on: Callable[..., Any]) -> None:
    mesh = on(c=8)

    def forward(weights: Array, x: Array, sizes: Array) -> Array:
        return jnp.sum(lax.ragged_dot(x, weights, sizes))

    args = mesh.shape(16, 32, 64, axes=("c",)), mesh.shape(128, 32), mesh.shape(16, dtype="int32")
    found = traffic(mesh.module(forward, *args))
    assert ("all_gather", "c", 2 * 4) in found, "the sizes of the groups"
    assert min(nbytes for kind, _, nbytes in found if kind == "all_gather") > 4
