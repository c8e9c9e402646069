"""Rewrites of a partitioned block that compilers make too: shared reshards, and sums that are scattered at once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from stablecast.ir.groups import Groups, from_lists
from stablecast.ir.program import Axis, Block, Op, Program
from stablecast.ir.types import as_tensor
from stablecast.lowering.partition.layout import Layout

_SHARED = frozenset({"stablehlo.all_gather", "stablehlo.all_to_all", "stablehlo.all_reduce"})
_LAYOUTS = frozenset({"stablehlo.transpose", "stablehlo.reshape", "stablehlo.copy", "mhlo.copy"})
_VIEWS = frozenset({"stablehlo.reshape", "stablehlo.copy", "mhlo.copy", "stablehlo.bitcast", "mhlo.bitcast"})


def share_reshards(block: Block) -> Block:
    """`block` with each gather, all-to-all and all-reduce that repeats an earlier one on the same operand taken out."""
    return _share(block, {}, _SHARED)


def _share(block: Block, names: dict[int, int], kinds: frozenset[str]) -> Block:
    known: dict[Any, int] = {}
    ops: list[Op] = []
    for op in block.ops:
        operands = tuple([names.get(value, value) for value in op.operands])
        if op.name in kinds and len(op.results) == 1:
            key = (op.signature, operands)
            first = known.setdefault(key, op.result)
            if first != op.result:
                names[op.result] = first
                continue
        regions = op.regions
        if regions and op.name in _CONTROL:
            regions = tuple(_share(region, names, kinds) for region in regions)
        if operands != op.operands or regions is not op.regions:
            op = replace(op, operands=operands, regions=regions)
        ops.append(op)
    return Block(block.args, block.arg_types, tuple(ops), tuple(names.get(value, value) for value in block.returns))


_CONTROL = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})


def to_reduce_scatter(block: Block, layout: Layout | None = None, *, scatter: bool = True) -> Block:
    """`block` with every all-reduce of which each device only keeps its own part made a reduce-scatter.

    The part is what a slice of the result's only use leaves: one over the size of the group, along one dimension. With
    a `layout`, a part along some of the axes makes a reduce-scatter over these and an all-reduce of what is left over
    the others. Without `scatter` only the latter are taken apart, and sums stay whole.
    """
    numbers = count(1 + max((value for op in block.walk() for value in op.results), default=0))
    return _Scatter(_uses(block), layout, scatter, numbers).block(block)


def _uses(block: Block) -> dict[int, list[Op | None]]:
    uses: dict[int, list[Op | None]] = {}

    def visit(inner: Block) -> None:
        for op in inner.ops:
            for value in dict.fromkeys(op.operands):
                uses.setdefault(value, []).append(op)
            for region in op.regions:
                visit(region)
        for value in inner.returns:
            uses.setdefault(value, []).append(None)

    visit(block)
    return uses


@dataclass(frozen=True, slots=True)
class _Scatter:
    uses: Mapping[int, list[Op | None]]
    layout: Layout | None
    scatter: bool
    numbers: Iterator[int]

    def block(self, block: Block) -> Block:
        dropped: set[int] = set()
        ops: list[Op] = []
        for op in block.ops:
            if op.results and op.results[0] in dropped:
                continue
            last = self._part(op) if op.name == "stablehlo.all_reduce" and len(op.results) == 1 else None
            made = self._scattered(op, last) if last is not None else None
            if last is not None and made is not None:
                dropped.update(self._chain(op, last))
                ops += made
                continue
            if op.regions and op.name in _CONTROL:
                op = replace(op, regions=tuple(self.block(region) for region in op.regions))
            ops.append(op)
        return Block(block.args, block.arg_types, tuple(ops), block.returns)

    def _part(self, op: Op) -> Op | None:
        """The slice that alone uses the result of an all-reduce."""
        user = self._only_use(op)
        while user is not None and user.name in _VIEWS:
            user = self._only_use(user)
        own = user is not None and (user.name == "stablehlo.dynamic_slice" or "own_part" in user.attrs)
        return user if own else None

    def _scattered(self, op: Op, last: Op) -> list[Op] | None:
        groups = op.attrs.get("replica_groups")
        before, after = as_tensor(last.operand_types[0]).shape, as_tensor(last.result_type).shape
        cut = [dim for dim, (full, part) in enumerate(zip(before, after, strict=True)) if full != part]
        if len(cut) != 1 or not isinstance(groups, Groups) or groups.size == 1:
            return None
        over: Groups = last.attrs.get("own_part", groups)
        if -(-before[cut[0]] // over.size) != after[cut[0]]:
            return None
        scattered = replace(
            op,
            name="stablehlo.reduce_scatter",
            results=last.results,
            result_types=last.result_types,
            attrs={**op.attrs, "replica_groups": over, "scatter_dimension": cut[0]},
            signature=-1,
        )
        if over != groups:
            return self._and_the_rest(op, last, scattered, groups, over)
        return [scattered] if self.scatter else None

    def _and_the_rest(self, op: Op, last: Op, scattered: Op, groups: Groups, over: Groups) -> list[Op] | None:
        if self.layout is None or groups.mesh != over.mesh or not set(over.axes) < set(groups.axes):
            return None
        known = {axis for axis, _ in self.layout.mesh(groups.mesh).axes}
        if not known.issuperset(groups.axes) or (not self.scatter and last.operands != op.results):
            return None
        rest = self.layout.groups(groups.mesh, [Axis(axis) for axis in groups.axes if axis not in over.axes])
        kinds = scattered.result_types
        if self.scatter:
            first = [replace(scattered, results=op.results)]
        else:
            whole = replace(op, attrs={**op.attrs, "replica_groups": over}, signature=-1)
            first = [whole, replace(last, operands=op.results, operand_types=op.result_types, results=self.fresh())]
        summed = replace(
            op,
            operands=first[-1].results,
            results=scattered.results,
            operand_types=kinds,
            result_types=kinds,
            attrs={**op.attrs, "replica_groups": rest},
            signature=-1,
        )
        return [*first, summed]

    def fresh(self) -> tuple[int, ...]:
        return (next(self.numbers),)

    def _only_use(self, op: Op) -> Op | None:
        users = self.uses.get(op.results[0], [])
        return users[0] if len(users) == 1 else None

    def _chain(self, op: Op, last: Op) -> list[int]:
        values: list[int] = []
        user = self._only_use(op)
        while user is not None:
            values.append(user.results[0])
            if user is last:
                break
            user = self._only_use(user)
        return values


def drop_dead(block: Block) -> Block:
    """`block` without ops that nothing needs."""
    needed = set(block.returns)
    kept: list[Op] = []
    for op in reversed(block.ops):
        if needed.isdisjoint(op.results) and op.name not in _EFFECTS and not op.attrs.get("has_side_effect"):
            continue
        if op.regions and op.name in _CONTROL:
            op = replace(op, regions=tuple(drop_dead(region) for region in op.regions))
        needed.update(op.operands)
        for region in op.regions:
            needed.update(_reads(region))
        kept.append(op)
    return Block(block.args, block.arg_types, tuple(reversed(kept)), block.returns)


def count_ops(block: Block, name: str) -> int:
    """Ops called `name` in `block` and in its regions."""
    return sum(op.name == name for op in block.walk())


_EFFECTS = frozenset({"stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send", "stablehlo.recv"})


def _reads(block: Block) -> set[int]:
    found = set(block.returns)
    for op in block.ops:
        found.update(op.operands)
        for region in op.regions:
            found |= _reads(region)
    return found


def two_rewrites(program: Program) -> Program:
    """`program` with gathers counted once and sliced sums scattered: the rewrites under which partitions are compared.

    A gather repeats another where it gathers the same operand, also through transposes and reshapes, over the same
    axes. What it returns is for counting: users of a gather taken out may see it in another layout.
    """
    main = program.main
    body = to_reduce_scatter(_count_gathers_once(drop_dead(main.body), {}))
    return replace(program, functions={**program.functions, program.entry: replace(main, body=body)})


def _count_gathers_once(block: Block, names: dict[int, int]) -> Block:
    known: dict[Any, int] = {}
    roots: dict[int, int] = {}
    ops: list[Op] = []
    for op in block.ops:
        operands = tuple([names.get(value, value) for value in op.operands])
        if op.name in _LAYOUTS:
            roots[op.result] = roots.get(operands[0], operands[0])
        elif op.name == "stablehlo.all_gather" and len(op.results) == 1:
            groups = op.attrs.get("replica_groups")
            key = (roots.get(operands[0], operands[0]), _spelt(groups), op.result_type.nbytes)
            first = known.setdefault(key, op.result)
            if first != op.result:
                names[op.result] = first
                continue
        regions = op.regions
        if regions and op.name in _CONTROL:
            regions = tuple(_count_gathers_once(region, names) for region in regions)
        ops.append(replace(op, operands=operands, regions=regions))
    return Block(block.args, block.arg_types, tuple(ops), tuple(names.get(value, value) for value in block.returns))


def _spelt(groups: Any) -> str:
    """Groups in one spelling: the same devices may be written over meshes of different axes."""
    return str(from_lists(list(groups)) if isinstance(groups, Groups) and not groups.ragged else groups)


def with_calls_inlined(program: Program) -> Program:
    """`program` with every call in its entry replaced by the callee's ops under fresh values."""
    main = program.main
    inliner = _Inliner(program)
    return replace(program, functions={program.entry: replace(main, body=inliner.block(main.body, {}))})


class _Inliner:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._next = 0

    def _fresh(self, values: tuple[int, ...], names: dict[int, int]) -> tuple[int, ...]:
        for value in values:
            names[value] = self._next
            self._next += 1
        return tuple(names[value] for value in values)

    def block(self, block: Block, outer: dict[int, int]) -> Block:
        names = dict(outer)
        args = self._fresh(block.args, names)
        ops: list[Op] = []
        self._append(block, names, ops)
        return Block(args, block.arg_types, tuple(ops), tuple(names[value] for value in block.returns))

    def _append(self, block: Block, names: dict[int, int], ops: list[Op]) -> None:
        for op in block.ops:
            callee = self._program.functions.get(op.callee) if not op.regions else None
            if callee is not None:
                inner = dict(zip(callee.body.args, (names[value] for value in op.operands), strict=True))
                self._append(callee.body, inner, ops)
                names.update(zip(op.results, (inner[value] for value in callee.body.returns), strict=True))
                continue
            operands = tuple(names[value] for value in op.operands)
            regions = tuple(self.block(region, names) for region in op.regions)
            ops.append(replace(op, operands=operands, regions=regions, results=self._fresh(op.results, names)))
