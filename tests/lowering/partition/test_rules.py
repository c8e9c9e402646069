"""Ops that Shardy has no rule for: split as their neighbours, resharded where these disagree."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import Array, lax

from stablecast.ir.program import Op, Program
from stablecast.lowering.partition import partition
from stablecast.lowering.partition.tally import tally

ONE: dict[str, Callable[[Array], Array]] = {
    "acos": lambda x: lax.acos(x),
    "erf": lambda x: lax.erf(x),
    "erf_inv": lambda x: lax.erf_inv(x),
    "lgamma": lambda x: lax.lgamma(x),
    "digamma": lambda x: lax.digamma(x),
    "sinh": lambda x: lax.sinh(x),
}


def ops(program: Program, name: str) -> list[Op]:
    return [op for op in program.main.body.walk() if op.name.endswith(name)]


@pytest.mark.parametrize("name", ONE)
def test_elementwise_ops_are_split(on: Callable[..., Any], name: str) -> None:
    mesh = on(d=4)
    program = partition(mesh.module(ONE[name], mesh.shape(8, 16, axes=("d",))), route="direct")
    (op,) = ops(program, f"chlo.{name}")
    assert [str(kind) for kind in (*op.operand_types, *op.result_types)] == ["f32[2,16]"] * 2
    assert tally(program).traffic == ()


def test_binary_and_truth_valued_ops_are_split(on: Callable[..., Any]) -> None:
    mesh = on(d=4)

    def function(x: Array) -> tuple[Array, Array]:
        return lax.zeta(x, x), jnp.isinf(x)

    program = partition(mesh.module(function, mesh.shape(8, 16, axes=("d",))), route="direct")
    (op,) = ops(program, "chlo.zeta")
    assert str(op.result_type) == "f32[2,16]"
    assert [str(kind) for kind in program.main.result_types] == ["f32[2,16]", "i1[2,16]"]


def test_squares_are_products(on: Callable[..., Any]) -> None:
    mesh = on(d=4)
    program = partition(mesh.module(jnp.square, mesh.shape(8, 16, axes=("d",))), route="direct")
    assert [(op.name, str(op.result_type)) for op in program.main.body.ops] == [("stablehlo.multiply", "f32[2,16]")]


@pytest.mark.parametrize("route", ["auto", "direct"])
def test_scalars_are_whole(on: Callable[..., Any], route: str) -> None:
    mesh = on(d=4)
    program = partition(mesh.module(lambda x: lax.erf(jnp.sum(x)), mesh.shape(8, axes=("d",))), route=route)
    (op,) = ops(program, "erf")
    assert str(op.result_type) == "f32[]"


@pytest.mark.parametrize("route", ["auto", "direct"])
def test_operands_are_resharded(on: Callable[..., Any], route: str) -> None:
    """An exact GELU between two splits: the all-to-all that any elementwise op gets."""
    mesh = on(d=4)

    def function(x: Array) -> Array:
        return lax.with_sharding_constraint(lax.erf(x), mesh.sharding(None, "d"))

    program = partition(mesh.module(function, mesh.shape(8, 16, axes=("d",))), route=route)
    (line,) = tally(program).traffic
    assert (line.kind, line.count, line.operand_bytes) == ("all_to_all", 1, 2 * 16 * 4)


def test_top_k_works_on_all_rows_and_keeps_its_own(on: Callable[..., Any]) -> None:
    mesh = on(d=4)

    def function(x: Array) -> Array:
        return lax.top_k(x, 2)[0]

    program = partition(mesh.module(function, mesh.shape(8, 16, axes=("d",))), route="direct")
    (op,) = ops(program, "top_k")
    assert [str(kind) for kind in (*op.operand_types, *op.result_types)] == ["f32[8,16]", "f32[8,2]", "i32[8,2]"]
    assert str(program.main.result_types[0]) == "f32[2,2]"
    assert [(line.kind, line.result_bytes) for line in tally(program).traffic] == [("all_gather", 8 * 16 * 4)]
