"""Collectives behind the ops that join them, as XLA's AllReduceReassociate has them."""

import pytest

from stablecast.ir.device_program import Collective, Kernel
from stablecast.ir.program import Block
from stablecast.ir.reader import read
from stablecast.lowering.device import Target, lower
from stablecast.lowering.reassociate import reassociated

ALL, HALVES = "dense<[[0,1,2,3]]> : tensor<1x4xi64>", "dense<[[0,1],[2,3]]> : tensor<2x2xi64>"


def reduced(name: str, operand: str, groups: str = ALL, kind: str = "add") -> str:
    return f"""
 %{name} = "stablehlo.all_reduce"(%{operand}) <{{replica_groups = {groups}}}> ({{
 ^bb0(%x: tensor<f32>, %y: tensor<f32>):
  %i = stablehlo.{kind} %x, %y : tensor<f32>
  stablehlo.return %i : tensor<f32> }}) : (tensor<1000xf32>) -> tensor<1000xf32>"""


def joined(name: str, one: str, two: str, kind: str = "add") -> str:
    return f"\n %{name} = stablehlo.{kind} %{one}, %{two} : tensor<1000xf32>"


def text(lines: str) -> bytes:
    arguments = ", ".join(f"%{name}: tensor<1000xf32>" for name in "abc")
    return f"""module @m attributes {{mhlo.num_replicas = 4 : i32}} {{
func.func @main({arguments}) -> tensor<1000xf32> {{ {lines}
 return %t : tensor<1000xf32> }} }}""".encode()


def names(block: Block) -> list[str]:
    return [op.name.removeprefix("stablehlo.") for op in block.ops]


P, Q, R = reduced("p", "a"), reduced("q", "b"), reduced("r", "c")
CHAIN = text(P + Q + R + joined("s", "p", "q") + joined("t", "s", "r"))


def test_a_chain_of_sums_is_reduced_once() -> None:
    block = reassociated(read(CHAIN).main.body)
    assert names(block) == ["add", "add", "all_reduce"]
    first, second, last = block.ops
    arguments = read(CHAIN).main.body.args
    assert (first.operands, set(second.operands)) == (tuple(arguments[:2]), {first.result, arguments[2]})
    assert (last.operands, block.returns) == ((second.result,), (last.result,))


def test_it_is_part_of_lowering_for_gpus() -> None:
    body = lower(read(CHAIN), Target("cuda")).body
    assert [type(node) for node in body] == [Kernel, Collective]
    apart = lower(read(CHAIN), Target("cuda", combine=False)).body
    assert sum(isinstance(node, Collective) for node in apart) == 3


@pytest.mark.parametrize(
    "lines",
    [
        P + Q + joined("s", "p", "q") + joined("t", "s", "q"),
        P + reduced("q", "b", HALVES) + joined("t", "p", "q"),
        P + reduced("q", "b", kind="maximum") + joined("t", "p", "q"),
        P + Q + joined("t", "p", "q", "multiply"),
        P + joined("t", "p", "p"),
    ],
    ids=["read-twice", "other-groups", "other-reductions", "other-op", "the-same"],
)
def test_what_xla_leaves_stays(lines: str) -> None:
    block = read(text(lines)).main.body
    assert names(reassociated(block)) == names(block)
