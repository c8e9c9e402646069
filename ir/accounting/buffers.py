"""Whether an op may write into the buffer of its operand: liveness within a block."""

from stablecast.ir.program import Block, Op, Program

_VIEWS = frozenset(
    {
        "stablehlo.reshape",
        "stablehlo.bitcast_convert",
        "stablehlo.optimization_barrier",
        "mhlo.reshape",
        "mhlo.bitcast",
        "mhlo.optimization_barrier",
        "sdy.sharding_constraint",
    }
)
_CONSTANTS = frozenset({"stablehlo.constant", "mhlo.constant", "arith.constant"})
_UPDATES = frozenset(
    {"stablehlo.dynamic_update_slice", "stablehlo.scatter", "mhlo.dynamic_update_slice", "mhlo.scatter"}
)


class Buffers:
    """The buffers of the values of one block; worked out when first asked."""

    __slots__ = ("_block", "_last_use", "_owned", "_roots")

    def __init__(self, block: Block, owned: set[int]) -> None:
        self._block = block
        self._owned = owned
        self._roots: dict[int, int] | None = None
        self._last_use: dict[int, int] = {}

    def may_reuse(self, value: int, position: int) -> bool:
        """Whether op `position` may overwrite the buffer of `value`: it is ours, and nothing needs it afterwards."""
        roots = self._roots or self._work_out()
        root = roots.get(value, value)
        return root in self._owned and self._last_use.get(root, -1) <= position

    def dead_after(self, position: int) -> set[int]:
        """Values whose buffers whatever runs at `position` may overwrite."""
        roots = self._roots or self._work_out()
        known = {*roots, *self._owned}
        return {value for value in known if self.may_reuse(value, position)}

    def _work_out(self) -> dict[int, int]:
        roots: dict[int, int] = {}
        owned = set(self._owned)
        last = self._last_use
        for position, op in enumerate(self._block.ops):
            for value in _uses(op):
                last[roots.get(value, value)] = position
            if op.name in _VIEWS:
                for result, operand in zip(op.results, op.operands, strict=False):
                    roots[result] = roots.get(operand, operand)
                continue
            if op.name not in _CONSTANTS:
                owned.update(op.results)
            roots.update(zip(op.results, op.results, strict=True))
        for value in self._block.returns:
            last[roots.get(value, value)] = len(self._block.ops)
        self._owned = owned
        self._roots = roots
        return roots


def _uses(op: Op) -> set[int]:
    """Operands and what the regions of `op` take from outside."""
    used = set(op.operands)
    for region in op.regions:
        for inner in region.walk():
            used.update(inner.operands)
        used.update(region.returns)
    return used


def updating_functions(program: Program) -> frozenset[str]:
    """Functions that, or whose callees, may update a buffer in place."""
    updates: set[str] = set()
    calls: dict[str, set[str]] = {}
    for name, function in program.functions.items():
        calls[name] = set()
        for op in function.body.walk():
            if op.name in _UPDATES:
                updates.add(name)
            elif op.callee:
                calls[name].add(op.callee)
    grown = True
    while grown:
        more = {name for name, callees in calls.items() if name not in updates and callees & updates}
        updates |= more
        grown = bool(more)
    return frozenset(updates)
