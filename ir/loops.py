"""Trip counts of `while` loops, read from the program.

A counted loop compares a carried integer against a bound that the loop does not change, and its body adds a
constant to that integer. Start, step, bound and comparison may be any; bound and start may be literals, values
computed from literals, or loop-invariant carries.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stablecast.ir.attributes import Dense
from stablecast.ir.program import Block, Op

_TRANSPARENT = frozenset(
    {
        "stablehlo.convert",
        "stablehlo.reshape",
        "stablehlo.broadcast_in_dim",
        "stablehlo.optimization_barrier",
        "stablehlo.copy",
        "mhlo.copy",
        "mhlo.bitcast",
        "sdy.sharding_constraint",
    }
)
_FOLDS: Mapping[str, Callable[[int, int], int]] = {
    "stablehlo.add": operator.add,
    "stablehlo.subtract": operator.sub,
    "stablehlo.multiply": operator.mul,
    "stablehlo.maximum": max,
    "stablehlo.minimum": min,
    "stablehlo.divide": lambda a, b: int(a / b) if b else 0,
}
_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
Definitions = Mapping[int, Op]


@dataclass(frozen=True, slots=True)
class Unknown:
    """A trip count that the program does not fix; `bound` is the value that decides it, -1 if none was found.

    `counts_to_bound`: the loop runs exactly `bound` times (from 0 by 1).
    """

    bound: int = -1
    counts_to_bound: bool = False


def constant(value: int, definitions: Definitions) -> int | None:
    """The integer that value id `value` holds if it follows from literals, else None."""
    op = definitions.get(value)
    if op is None:
        return None
    if op.name in ("stablehlo.constant", "mhlo.constant", "arith.constant", "sdy.constant"):
        held = op.attrs.get("value")
        number = held.scalar if isinstance(held, Dense) else held
        return int(number) if isinstance(number, (int, bool)) else None
    if op.name in _TRANSPARENT:
        return constant(op.operands[0], definitions)
    fold = _FOLDS.get(op.name)
    if fold is None:
        return None
    left, right = (constant(operand, definitions) for operand in op.operands)
    return None if left is None or right is None else fold(left, right)


def source_of(value: int, definitions: Definitions) -> int:
    """`value` seen through ops that only pass a scalar on."""
    op = definitions.get(value)
    while op is not None and op.name in _TRANSPARENT:
        value = op.operands[0]
        op = definitions.get(value)
    return value


def trip_count(operands: tuple[int, ...], cond: Block, body: Block, definitions: Definitions) -> int | Unknown:
    """How often a `while` with these operands and regions runs its body.

    `definitions`: the op of every value defined so far, those of both regions included.
    """
    compare = definitions.get(source_of(cond.returns[0], definitions)) if cond.returns else None
    if compare is None:
        decided = constant(cond.returns[0], definitions) if cond.returns else None
        return 0 if decided == 0 else Unknown()
    if compare.name != "stablehlo.compare":
        return 0 if constant(compare.result, definitions) == 0 else Unknown()
    loop = _Loop(operands, cond, body, definitions)
    direction = compare.attrs["comparison_direction"]
    left, right = compare.operands
    counted = loop.count(left, right, direction)
    if isinstance(counted, Unknown) and counted.bound < 0:
        return loop.count(right, left, _SWAPPED[direction])
    return counted


@dataclass(frozen=True, slots=True)
class _Loop:
    operands: tuple[int, ...]
    cond: Block
    body: Block
    definitions: Definitions

    def count(self, counter: int, bound: int, direction: str) -> int | Unknown:
        index = self._carried(self._with_offset(counter)[0], self.cond)
        if index is None:
            return Unknown()
        step = self._step(index)
        if step is None:
            return Unknown()
        start = constant(self.operands[index], self.definitions)
        offset = self._with_offset(counter)[1]
        limit_id = self._invariant(bound)
        limit = None if limit_id is None else constant(limit_id, self.definitions)
        if start is None or limit is None:
            bound_id = -1 if limit_id is None else source_of(limit_id, self.definitions)
            return Unknown(bound_id, start == 0 and step == 1 and offset == 0 and direction == "LT")
        return _trips(start + offset, step, limit, direction)

    def _carried(self, value: int, block: Block) -> int | None:
        value = source_of(value, self.definitions)
        return block.args.index(value) if value in block.args else None

    def _with_offset(self, value: int) -> tuple[int, int]:
        """`value` as another value plus a constant."""
        value = source_of(value, self.definitions)
        op = self.definitions.get(value)
        if op is None or op.name not in ("stablehlo.add", "stablehlo.subtract"):
            return value, 0
        sign = 1 if op.name == "stablehlo.add" else -1
        left, right = op.operands
        amount = self._fixed(right)
        if amount is not None:
            return source_of(left, self.definitions), sign * amount
        amount = self._fixed(left) if sign == 1 else None
        return (value, 0) if amount is None else (source_of(right, self.definitions), amount)

    def _step(self, index: int) -> int | None:
        base, step = self._with_offset(self.body.returns[index])
        return step if self._carried(base, self.body) == index and step else None

    def _fixed(self, value: int) -> int | None:
        outer = self._invariant(value)
        return None if outer is None else constant(outer, self.definitions)

    def _invariant(self, value: int) -> int | None:
        """The value outside the loop that `value` always equals, None if the loop changes it."""
        value = source_of(value, self.definitions)
        for block in (self.cond, self.body):
            if value in block.args:
                index = block.args.index(value)
                passed_on = source_of(self.body.returns[index], self.definitions)
                return self.operands[index] if passed_on == self.body.args[index] else None
        return value


def _trips(start: int, step: int, limit: int, direction: str) -> int | Unknown:
    distance = limit - start
    if direction in ("GT", "GE"):
        distance, step, direction = -distance, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "EQ":
        return 0 if distance else 1
    if direction == "NE":
        exact = distance % step == 0 and distance // step >= 0
        return distance // step if exact else Unknown()
    if direction == "LE":
        distance += 1
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else Unknown()
