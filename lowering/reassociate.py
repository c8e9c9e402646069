"""Sums of reduced tensors become one collective: op(all-reduce(x), all-reduce(y)) is all-reduce(op(x, y)).

XLA's `AllReduceReassociate` and `ReduceScatterReassociate`, which run before collectives are combined: both reduce with
the op that joins them, over the same devices, and nothing else uses either. Chains fold from their start, so that
partial sums of any number of products are reduced once.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from stablecast.ir.program import Block, Op

_KINDS = frozenset({"stablehlo.all_reduce", "stablehlo.reduce_scatter"})
_JOINS = frozenset({"add", "multiply", "minimum", "maximum", "and", "or", "xor"})
_CONTROL = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})


def reassociated(block: Block) -> Block:
    """`block` with collectives brought behind the ops that join them, within each body of a loop or branch."""
    numbers = count(1 + max((value for op in block.walk() for value in op.results), default=0))
    return _reassociated(block, numbers)


def _reassociated(block: Block, numbers: Iterator[int]) -> Block:
    uses = _uses(block)
    reduced: dict[int, Op] = {}
    gone: set[int] = set()
    ops: list[Op] = []
    for op in block.ops:
        if op.regions and op.name in _CONTROL:
            ops.append(replace(op, regions=tuple(_reassociated(region, numbers) for region in op.regions)))
            continue
        pair = [reduced[value] for value in op.operands if uses[value] == 1 and value in reduced]
        if len(pair) == 2 == len(op.operands) and _joins(op, *pair):
            gone.update(op.operands)
            inner, moved = _behind(op, pair, next(numbers))
            reduced[op.result] = moved
            ops += [inner, moved]
            continue
        if op.name in _KINDS and len(op.results) == 1:
            reduced[op.result] = op
        ops.append(op)
    kept = tuple(op for op in ops if not (op.name in _KINDS and gone.intersection(op.results)))
    return Block(block.args, block.arg_types, kept, block.returns) if gone or kept != block.ops else block


def _uses(block: Block) -> Counter[int]:
    """How often each value is read, inside of regions too."""
    uses = Counter(value for op in block.walk() for value in op.operands)
    uses.update(block.returns)
    for op in block.walk():
        for region in op.regions:
            uses.update(region.returns)
    return uses


def _joins(op: Op, one: Op, two: Op) -> bool:
    """Whether `op` does to both results what made them."""
    name = op.name.removeprefix("stablehlo.")
    return name in _JOINS and _key(one) == _key(two) and _reducer(one) == name and one.result != two.result


def _key(op: Op) -> tuple[Any, ...]:
    attrs = op.attrs
    groups, dim = attrs.get("replica_groups"), attrs.get("scatter_dimension")
    return op.name, groups, dim, attrs.get("use_global_device_ids"), _reducer(op), op.operand_types, op.result_types


def _reducer(op: Op) -> str:
    """The op that a collective reduces with, empty where it is not a single one."""
    ops = op.regions[0].ops if op.regions else ()
    inner = [held.name.removeprefix("stablehlo.") for held in ops if held.name != "stablehlo.return"]
    return inner[0] if len(inner) == 1 else ""


def _behind(op: Op, pair: list[Op], number: int) -> tuple[Op, Op]:
    """`op` on what the two collectives reduce, and one collective of its result."""
    first = pair[0]
    inner = replace(
        op,
        operands=(first.operands[0], pair[1].operands[0]),
        operand_types=first.operand_types * 2,
        results=(number,),
        result_types=first.operand_types,
        signature=-1,
    )
    return inner, replace(first, operands=inner.results, results=op.results)
