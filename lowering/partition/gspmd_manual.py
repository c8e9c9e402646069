"""What lies between `@SPMDFullToShardShape` and `@SPMDShardToFullShape` as Shardy's manual computations.

JAX before Shardy wrote `shard_map` so: the annotation on the full value gives its tiles, the one on the shard says
along which axes shapes are one device's (`manual`) and along which the partitioner still decides (`replicated`).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stablecast.ir import mlir
from stablecast.ir.errors import InputError
from stablecast.lowering.partition import gspmd
from stablecast.lowering.partition.gspmd import DeviceAxes, Tiling

TO_SHARD, TO_FULL = "SPMDFullToShardShape", "SPMDShardToFullShape"
_SHARDING = "mhlo.sharding"
_HINT = "export the program with Shardy"


def has_manual(module: Any) -> bool:
    """Whether part of the module is written in one device's shapes."""
    return any(_target(op) == TO_SHARD for op in mlir.walk(module, "stablehlo.custom_call"))


def to_manual_computations(
    module: Any, tilings: dict[str, Tiling], mesh: DeviceAxes, sharding: Callable[[str, Any, Sequence[int]], Any]
) -> None:
    """Replaces all such parts of `module`, whose calls are inlined, in place.

    `tilings`: by their text. `sharding(text, type, open_dims)`: the Shardy attribute for one. Raises `InputError` for a
    part that reads values of the whole mesh other than through the annotation.
    """
    while True:
        block = next((op.block for op in mlir.walk(module, "stablehlo.custom_call") if _target(op) == TO_SHARD), None)
        if block is None:
            return
        for part in _parts(block):
            _Builder(part, tilings, mesh, sharding).run()


def open_dims(op: Any) -> tuple[int, ...]:
    """Dimensions that an annotation leaves to the partitioner."""
    found = re.search(r"unspecified_dims=\[([\d,]+)\]", str(op.attributes.get("backend_config", None)))
    return tuple(map(int, found[1].split(","))) if found else ()


@dataclass(slots=True)
class _Part:
    """A manual computation to be: annotations that enter, ops inside, annotations that leave, in their order."""

    entering: list[Any] = field(default_factory=list[Any])
    inside: list[Any] = field(default_factory=list[Any])
    leaving: list[Any] = field(default_factory=list[Any])

    def take(self, other: "_Part") -> None:
        self.entering += other.entering
        self.inside += other.inside
        self.leaving += other.leaving


def _target(op: Any) -> str:
    return op.attributes["call_target_name"].value if op.name == "stablehlo.custom_call" else ""


def _reads(op: Any) -> Iterable[Any]:
    """Operands of `op` and of everything in its regions."""
    if not len(op.regions):
        return list(op.operands)
    return [value for inner in mlir.walk(op) for value in inner.operands]


def _parts(block: Any) -> list[_Part]:
    """The outermost parts of `block`, each the ops that values which enter together flow through."""
    owner: dict[Any, tuple[_Part, int]] = {}
    parts: list[_Part] = []
    for view in block.operations:
        op = view.operation
        met = [owner[value] for value in _reads(op) if value in owner]
        depth = max((level for _, level in met), default=0) + {TO_SHARD: 1, TO_FULL: -1}.get(_target(op), 0)
        if not met:
            if _target(op) == TO_SHARD:
                parts.append(_Part(entering=[op]))
                owner[op.results[0]] = parts[-1], depth
            continue
        part = met[0][0]
        for other in {id(one): one for one, _ in met if one is not part}.values():
            part.take(other)
            parts = [one for one in parts if one is not other]
            owner = {value: (part if held[0] is other else held[0], held[1]) for value, held in owner.items()}
        if depth:
            part.inside.append(op)
            owner |= dict.fromkeys(op.results, (part, depth))
        else:
            part.leaving.append(op)
    return parts


class _Builder:
    def __init__(
        self,
        part: _Part,
        tilings: dict[str, Tiling],
        mesh: DeviceAxes,
        sharding: Callable[[str, Any, Sequence[int]], Any],
    ) -> None:
        self._ir = mlir.bindings()
        self._part = part
        self._tilings = tilings
        self._mesh = mesh
        self._sharding = sharding

    def run(self) -> None:
        from jaxlib.mlir.dialects import sdy

        ir, part = self._ir, self._part
        if not part.leaving:
            raise InputError("a part of the module in one device's shapes returns nothing to the whole mesh", _HINT)
        inside = self._inside()
        with part.entering[0].context, ir.Location.unknown(), ir.InsertionPoint(part.leaving[0]):
            made: Any = sdy.ManualComputationOp(
                [op.results[0].type for op in part.leaving],
                [op.operands[0] for op in part.entering],
                sdy.TensorShardingPerValueAttr.get([self._given(op) for op in part.entering]),
                sdy.TensorShardingPerValueAttr.get([self._result(op) for op in part.leaving]),
                sdy.ManualAxesAttr.get([ir.StringAttr.get(axis) for axis in self._axes()]),
            )
            block: Any = made.operation.regions[0].blocks.append(*[op.results[0].type for op in part.entering])
            with ir.InsertionPoint(block):
                end = sdy.ReturnOp([op.operands[0] for op in part.leaving]).operation
        for op in inside:
            op.move_before(end)
        for place, op in enumerate(part.entering):
            op.results[0].replace_all_uses_with(block.arguments[place])
            op.erase()
        for place, op in enumerate(part.leaving):
            op.results[0].replace_all_uses_with(made.operation.results[place])
            op.erase()

    def _axes(self) -> tuple[str, ...]:
        """Axes along which shapes become one device's here, and were not yet around it."""
        entering = self._part.entering
        found = {gspmd.manual_axes_of(self._tilings[_text(op)], self._mesh) for op in entering}
        if len(found) != 1:
            raise InputError("a part of the module in one device's shapes is so along different axes", _HINT)
        before = _manual_around(entering[0])
        return tuple(axis for axis in found.pop() if axis not in before)

    def _given(self, op: Any) -> Any:
        """The sharding of the whole value that enters: on the annotation that made it, or on the argument."""
        value = op.operands[0]
        ir = self._ir
        maker = value.owner if not isinstance(value, ir.BlockArgument) else None
        if maker is not None and _SHARDING in maker.attributes:
            return self._sharding(_text(maker), value.type, open_dims(maker))
        around = value.owner.owner.operation if maker is None else maker
        if around.name == "func.func":
            entries = around.attributes.get("arg_attrs", None)
            held: Any = entries[value.arg_number] if entries is not None else ()
            if _SHARDING in held:
                return self._sharding(held[_SHARDING].value, value.type, ())
        raise InputError("a value enters a part of the module in one device's shapes without a sharding", _HINT)

    def _result(self, op: Any) -> Any:
        return self._sharding(_text(op), op.results[0].type, open_dims(op))

    def _inside(self) -> list[Any]:
        """The ops of the part in order, copies of the constants that they read from outside among them."""
        ir = self._ir
        own = {op.results[0] for op in self._part.entering}
        inside: list[Any] = []
        for op in self._part.inside:
            for reader in mlir.walk(op) if len(op.regions) else [op]:
                for place, value in enumerate(reader.operands):
                    if value in own or not self._outside(value, op):
                        continue
                    if isinstance(value, ir.BlockArgument):
                        raise InputError("a part of the module in one device's shapes reads a value that is not", _HINT)
                    reader.operands[place] = self._copied(value, inside, op)
            inside.append(op)
            own.update(op.results)
        return inside

    def _outside(self, value: Any, op: Any) -> bool:
        """Whether `value`, read by `op` or in it, was made before it in its block or around that."""
        if isinstance(value, self._ir.BlockArgument):
            return not _within(value.owner.owner.operation, op)
        return not _within(value.owner, op)

    def _copied(self, value: Any, inside: list[Any], before: Any) -> Any:
        """A copy before `before` of the op that made `value`, and of those that it needs."""
        ir, maker = self._ir, value.owner
        if isinstance(value, ir.BlockArgument) or len(maker.regions):
            raise InputError("a part of the module in one device's shapes reads a value that is not", _HINT)
        operands = [self._copied(operand, inside, before) for operand in maker.operands]
        with ir.InsertionPoint(before):
            copy = maker.operation.clone()
        for place, operand in enumerate(operands):
            copy.operation.operands[place] = operand
        inside.append(copy.operation)
        return copy.operation.results[list(maker.results).index(value)]


def _manual_around(op: Any) -> set[str]:
    """Manual axes of the computations that `op` lies in."""
    from jaxlib.mlir.dialects import sdy

    axes: set[str] = set()
    step = op.parent
    while step is not None:
        if step.name == "sdy.manual_computation":
            held: Any = sdy.ManualAxesAttr(step.attributes["manual_axes"])
            axes.update(map(str, held))
        step = step.parent
    return axes


def _within(inner: Any, outer: Any) -> bool:
    """Whether `inner` is `outer` or lies in one of its regions."""
    step = inner
    while step is not None and step != outer:
        step = step.parent
    return step is not None


def _text(op: Any) -> str:
    return gspmd.split_tuple(op.attributes[_SHARDING].value)[0]
