"""What JAX emits: scopes, source lines, trip counts, dimension numbers, signatures."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stablecast.ir import mlir
from stablecast.ir.attributes import ConvDims, GatherDims, ScatterDims
from stablecast.ir.program import Op, Program
from stablecast.ir.reader import read
from stablecast.ir.types import Symbol

SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
N = jax.ShapeDtypeStruct((), jnp.int32)


def lower(function: Callable[..., Any], *args: Any, platform: str = "cuda") -> Program:
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
    return read(mlir.write_bytecode(lowered.compiler_ir("stablehlo")), "jax")


def only(program: Program, name: str) -> Op:
    found = [op for op in program.walk() if op.name == name]
    assert len(found) == 1
    return found[0]


def matmul_loop(start: int, stop: int, step: int) -> Callable[[Any], Any]:
    def cond(carry: Any) -> Any:
        return carry[0] < stop if step > 0 else carry[0] > stop

    def loop(x: Any) -> Any:
        return lax.while_loop(cond, lambda c: (c[0] + step, c[1] @ c[1]), (start, x))[1]

    return loop


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=10)[0], 10),
        (lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=10, reverse=True)[0], 10),
        (lambda x: lax.fori_loop(3, 17, lambda i, c: c @ c, x), 14),
        (lambda x: lax.map(lambda row: row * 2, x), 64),
        (matmul_loop(0, 1, 2), 1),
        (matmul_loop(0, 7, 2), 4),
        (matmul_loop(10, 0, -3), 4),
        (matmul_loop(5, 5, 1), 0),
        (matmul_loop(9, 5, 1), 0),
    ],
)
def test_trip_counts(function: Callable[..., Any], count: int) -> None:
    assert only(lower(function, SQUARE), "stablehlo.while").count == count


def test_comparisons_that_include_the_bound() -> None:
    def loop(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] <= 6, lambda c: (c[0] + 2, c[1] @ c[1]), (0, x))[1]

    def until(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] != 6, lambda c: (c[0] + 2, c[1] @ c[1]), (0, x))[1]

    assert only(lower(loop, SQUARE), "stablehlo.while").count == 4
    assert only(lower(until, SQUARE), "stablehlo.while").count == 3


def test_a_traced_bound_is_a_symbol_named_after_its_argument() -> None:
    program = lower(lambda x, n: lax.fori_loop(0, n, lambda i, c: c @ c, x), SQUARE, N)
    assert only(program, "stablehlo.while").count == Symbol("n", low=1)
    assert program.symbols == (Symbol("n", low=1),)


def test_a_count_that_depends_on_data_is_a_symbol() -> None:
    program = lower(lambda x: lax.while_loop(lambda c: c.sum() < 3, lambda c: c * 2, x), SQUARE)
    count = only(program, "stablehlo.while").count
    assert isinstance(count, Symbol)
    assert count.name == "while_trips"


def test_nested_loops_have_a_count_each() -> None:
    def nested(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, c: lax.fori_loop(0, 5, lambda j, d: d @ d, c), x)

    counts = [op.count for op in lower(nested, SQUARE).walk() if op.name == "stablehlo.while"]
    assert sorted(counts) == [3, 5]  # type: ignore[type-var]


def test_scope_and_source_line() -> None:
    def step(x: Any) -> Any:
        with jax.named_scope("attention"):
            return x @ x

    location = only(lower(step, SQUARE), "stablehlo.dot_general").location
    assert location.scope == "jit(step)/attention/dot_general"
    assert location.file == __file__
    assert location.line == step.__code__.co_firstlineno + 2


def test_dimension_numbers() -> None:
    image = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 3, 16), jnp.float32)

    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    op = only(lower(conv, image, kernel), "stablehlo.convolution")
    assert op.attrs["dimension_numbers"] == ConvDims(0, 3, (1, 2), 2, 3, (0, 1), 0, 3, (1, 2))
    assert op.attrs["window_strides"] == (2, 2)
    assert op.attrs["padding"] == ((0, 1), (0, 1))

    rows = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    table = jax.ShapeDtypeStruct((100, 16), jnp.float32)
    dims = lax.GatherDimensionNumbers((1,), (0,), (0,))

    def gather(t: Any, i: Any) -> Any:
        return lax.gather(t, i, dims, (1, 16), mode="promise_in_bounds")

    op = only(lower(gather, table, rows), "stablehlo.gather")
    assert op.attrs["dimension_numbers"] == GatherDims((1,), (0,), (), (), (0,), 1)
    assert op.attrs["slice_sizes"] == (1, 16)

    op = only(lower(lambda t, i: t.at[i[:, 0]].add(1.0), table, rows), "stablehlo.scatter")
    scatter = op.attrs["scatter_dimension_numbers"]
    assert isinstance(scatter, ScatterDims)
    assert scatter.scatter_dims_to_operand_dims == (0,)
    assert op.attrs["unique_indices"] is False


def test_equal_ops_share_a_signature_and_others_do_not() -> None:
    def layers(x: Any, y: Any) -> Any:
        return jnp.sum(x @ x) + jnp.sum(y @ y) + jnp.max(x) + jnp.sum(x.T @ y)

    program = lower(layers, SQUARE, SQUARE)
    dots = [op.signature for op in program.walk() if op.name == "stablehlo.dot_general"]
    reduces = [op.signature for op in program.walk() if op.name == "stablehlo.reduce"]
    assert len(dots) == 3
    assert len(set(dots)) <= 2
    assert len(reduces) == 4
    assert len(set(reduces)) == 2


def test_arguments_carry_name_and_donation() -> None:
    def step(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch.sum()}

    lowered = jax.jit(step, donate_argnums=0).trace({"w": SQUARE}, SQUARE).lower(lowering_platforms=("tpu",))
    program = read(mlir.write_bytecode(lowered.compiler_ir("stablehlo")), "jax")
    state, batch = program.main.arguments
    assert (state.name, state.aliases_output) == ("state['w']", 0)
    assert (batch.name, batch.aliases_output) == ("batch", None)
    assert program.main.result_names == ("result['w']",)


def test_regions_of_sort_map_and_cond_are_read() -> None:
    def branches(x: Any, n: Any) -> Any:
        return lax.cond(n > 3, lambda a: a @ a, lambda a: a + 1, lax.sort(x))

    program = lower(branches, SQUARE, N)
    case = only(program, "stablehlo.case")
    inner = [[op.name for op in region.walk()] for region in case.regions]
    assert len(inner) == 2
    assert ["stablehlo.dot_general" in region for region in inner] == [False, True]
    assert only(program, "stablehlo.sort").regions[0].ops[-1].name == "stablehlo.compare"


def test_the_line_is_the_users_own_where_a_library_calls_the_op() -> None:
    location = only(lower(lambda x: jax.nn.softmax(x @ x), SQUARE), "stablehlo.exponential").location
    assert location.file == __file__
