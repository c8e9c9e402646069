"""Loops, branches, collectives and memory of the device program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stablecast.ir.accounting.values import Conventions
from stablecast.ir.attributes import Shift
from stablecast.ir.device_program import Branch, Collective, DeviceProgram, Kernel, Loop
from stablecast.ir.errors import InputError
from stablecast.ir.groups import all_devices
from stablecast.ir.kernels import COMPILED
from stablecast.ir.reader import read
from stablecast.lowering.combine import plan_buckets
from stablecast.lowering.device import Target, lower

Lower = Callable[..., DeviceProgram]
SQUARE = jax.ShapeDtypeStruct((128, 128), jnp.float32)
N = jax.ShapeDtypeStruct((), jnp.int32)
DOT = 2 * 128**3


def test_a_loop_is_its_trip_count_times_its_body(lowered: Lower) -> None:
    def scan(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=10)[0]

    program = lowered(scan, SQUARE)
    loops = [node for node in program.body if isinstance(node, Loop)]
    assert [loop.count for loop in loops] == [10]
    assert program.work.evaluate()[0].matmul_flops == 10 * DOT
    matmuls = program.table.klass == "matmul"
    assert program.table.count[matmuls].tolist() == [10.0]


def test_an_open_count_is_a_lower_bound_until_it_is_set(lowered: Lower) -> None:
    def loop(x: Any, n: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, c: c @ c, x)

    program = lowered(loop, SQUARE, N)
    assert not program.complete
    assert [symbol.name for symbol in program.work.symbols] == ["n"]
    assert program.work.evaluate({"n": 7})[0].matmul_flops == 7 * DOT
    known = lowered(loop, SQUARE, N, conventions=Conventions(loops={"n": 7}))
    assert known.complete
    assert known.work.evaluate()[0].matmul_flops == 7 * DOT


def test_branches_take_the_larger_or_the_mean(lowered: Lower) -> None:
    def branch(p: Any, x: Any) -> Any:
        return lax.cond(p, lambda a: a @ a, lambda a: a + a, x)

    args = jax.ShapeDtypeStruct((), jnp.bool_), SQUARE
    program = lowered(branch, *args)
    assert any(isinstance(node, Branch) for node in program.body)
    assert program.work.evaluate()[0].matmul_flops == DOT
    least = lowered(branch, *args, conventions=Conventions(branch="min"))
    assert least.work.evaluate()[0].matmul_flops == 0
    half = lowered(branch, *args, conventions=Conventions(branch=0.5))
    assert half.work.evaluate()[0].matmul_flops == DOT / 2


def test_private_functions_count_at_every_call(lowered: Lower) -> None:
    inner = jax.jit(lambda a: a @ a)
    program = lowered(lambda x: inner(x) + inner(x + 1) + inner(x * 2), SQUARE)
    assert program.work.evaluate()[0].matmul_flops == 3 * DOT


def test_kernels_of_a_compiler_are_marked(lowered: Lower) -> None:
    """What was measured of a framework's own kernels does not hold for them."""
    program = lowered(lambda x: jnp.sum(x, 0), SQUARE)
    assert (program.table.library.tolist(), program.table.klass.tolist()) == ([COMPILED], ["reduction"])


def test_dependencies_point_backwards(lowered: Lower) -> None:
    def step(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w))

    program = lowered(jax.grad(step, argnums=1), SQUARE, SQUARE)
    for index, node in enumerate(program.body):
        assert all(dep < index for dep in node.deps)
    assert any(node.deps for node in program.body)


def _all_reduce(name: str, operand: str, size: int) -> str:
    return f"""
 %{name} = "stablehlo.all_reduce"(%{operand}) <{{replica_groups = dense<[[0,1,2,3]]> : tensor<1x4xi64>}}> ({{
 ^bb0(%p: tensor<f32>, %q: tensor<f32>):
   %s = stablehlo.add %p, %q : tensor<f32>
   stablehlo.return %s : tensor<f32> }}) : (tensor<{size}xf32>) -> tensor<{size}xf32>"""


def test_collectives_and_groups_of_one() -> None:
    text = f"""module attributes {{mhlo.num_replicas = 4 : i32}} {{
 func.func @main(%a: tensor<1000xf32>) -> tensor<1000xf32> {{ {_all_reduce("0", "a", 1000)}
 return %0 : tensor<1000xf32> }} }}"""
    (node,) = lower(read(text.encode()), Target()).body
    assert isinstance(node, Collective)
    assert (node.kind, node.groups, node.operand_bytes, node.reduce_op) == ("all_reduce", all_devices(4), 4000, "add")
    alone = text.replace("[[0,1,2,3]]", "[[0],[1],[2],[3]]").replace("1x4xi64", "4x1xi64")
    assert lower(read(alone.encode()), Target()).body == ()


def test_independent_collectives_are_combined_and_dependent_ones_are_not() -> None:
    parts = "".join(_all_reduce(f"r{i}", f"a{i}", 100) for i in range(3)) + _all_reduce("chained", "r0", 100)
    arguments = ", ".join(f"%a{i}: tensor<100xf32>" for i in range(3))
    text = f"""module attributes {{mhlo.num_replicas = 4 : i32}} {{
 func.func @main({arguments}) -> (tensor<100xf32>, tensor<100xf32>, tensor<100xf32>) {{ {parts}
 return %chained, %r1, %r2 : tensor<100xf32>, tensor<100xf32>, tensor<100xf32> }} }}"""
    nodes = lower(read(text.encode()), Target()).body
    merged = sorted((node.merged, node.operand_bytes) for node in nodes if isinstance(node, Collective))
    assert merged == [(1, 400), (3, 1200)]


def test_a_bucket_does_not_grow_past_its_threshold() -> None:
    nodes = {index: Collective("all_reduce", all_devices(4), 600, 600) for index in range(5)}
    rank = {index: index for index in nodes}
    assert plan_buckets(nodes, [()] * 5, rank, {"all_reduce": 1300}) == [[0, 1], [2, 3]]


def test_buckets_are_measured_by_results_and_fill_in_post_order() -> None:
    nodes = {index: Collective("reduce_scatter", all_devices(4), 2400, 600) for index in range(4)}
    rank = {0: 3, 1: 1, 2: 2, 3: 0}
    assert plan_buckets(nodes, [()] * 4, rank, {"reduce_scatter": 1300}) == [[1, 3], [0, 2]]


def test_buckets_do_not_wait_for_each_other() -> None:
    """0 -> 2 and 1 -> 3: with 0 and 3 together, 2 (after 0) and 1 (before 3) must stay apart."""
    nodes = {index: Collective("all_reduce", all_devices(4), 600, 600) for index in range(4)}
    rank = {0: 0, 3: 1, 1: 2, 2: 3}
    assert plan_buckets(nodes, [(), (), (0,), (1,)], rank, {"all_reduce": 1300}) == [[0, 3]]


def test_operands_of_a_combined_collective_live_until_it_starts() -> None:
    """Two products of 16 MiB each wait for one reduce-scatter; apart, the first is gone when the second is made."""
    size = 2048 * 2048 * 4
    square, part = "tensor<2048x2048xf32>", "tensor<512x2048xf32>"
    body = "".join(
        f"""
 %p{place} = stablehlo.dot_general %{left}, %{right}, contracting_dims = [1] x [0] : ({square}, {square}) -> {square}
 %r{place} = "stablehlo.reduce_scatter"(%p{place}) <{{scatter_dimension = 0 : i64,
  replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}}> ({{
 ^bb0(%x: tensor<f32>, %y: tensor<f32>): %s = stablehlo.add %x, %y : tensor<f32> stablehlo.return %s : tensor<f32>
 }}) : ({square}) -> {part}"""
        for place, (left, right) in enumerate(("ab", "ba"))
    )
    text = f"""module attributes {{mhlo.num_replicas = 4 : i32}} {{
 func.func @main(%a: {square}, %b: {square}) -> ({part}, {part}) {{ {body}
 return %r0, %r1 : {part}, {part} }} }}"""
    together, apart = (lower(read(text.encode()), Target(combine=combine)) for combine in (True, False))
    merged = [[node.merged for node in one.body if isinstance(node, Collective)] for one in (together, apart)]
    assert merged == [[2], [1, 1]]
    assert together.buffers is not None
    assert apart.buffers is not None
    assert (together.buffers.temp_bytes, apart.buffers.temp_bytes) == (2 * size, size)


def test_memory_of_a_chain(lowered: Lower) -> None:
    """Three products: the argument stays, two intermediates live at once, the result is counted apart."""
    size = 128 * 128 * 4

    def chain(x: Any) -> Any:
        return ((x @ x) @ x) @ x

    buffers = lowered(chain, SQUARE).buffers
    assert buffers is not None
    assert (buffers.argument_bytes, buffers.output_bytes, buffers.alias_bytes) == (size, size, 0)
    assert buffers.temp_bytes == 2 * size
    donated = lowered(lambda x: x + 1, SQUARE, donate=(0,)).buffers
    assert donated is not None
    assert donated.peak_bytes == size


def test_a_global_program_is_refused_before_partitioning() -> None:
    text = b"""module attributes {mhlo.num_partitions = 8 : i32} { sdy.mesh @mesh = <["data"=8]>
 func.func public @main(%a: tensor<8xf32>) -> tensor<8xf32> { %0 = stablehlo.negate %a : tensor<8xf32>
 return %0 : tensor<8xf32> } }"""
    with pytest.raises(InputError, match="mesh of 8 devices and not partitioned"):
        lower(read(text), Target())


def test_kernels_know_where_they_came_from(lowered: Lower) -> None:
    def step(x: Any) -> Any:
        with jax.named_scope("attention"):
            return x @ x

    (node,) = lowered(step, SQUARE).body
    assert isinstance(node, Kernel)
    assert node.scope == "jit(step)/attention/dot_general"
    assert node.location.file == __file__


@pytest.mark.parametrize(
    ("pairs", "shift"),
    [
        ([[0, 1], [1, 2], [2, 3], [3, 0]], Shift("", 1, True)),
        ([[1, 0], [2, 1], [3, 2]], Shift("", -1, False)),
        ([[0, 2], [1, 3], [2, 0], [3, 1]], Shift("", 2, True)),
        ([[0, 3], [1, 2]], None),
    ],
)
def test_a_permutation_that_moves_all_equally_far_is_a_shift(pairs: list[list[int]], shift: Shift | None) -> None:
    text = f"""module attributes {{mhlo.num_partitions = 4 : i32}} {{
 func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {{
 %0 = "stablehlo.collective_permute"(%a) {{source_target_pairs = dense<{pairs}> : tensor<{len(pairs)}x2xi64>}}
   : (tensor<8xf32>) -> tensor<8xf32>
 return %0 : tensor<8xf32> }} }}"""
    (node,) = lower(read(text.encode()), Target()).body
    assert isinstance(node, Collective)
    assert node.shift == shift
