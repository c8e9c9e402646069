"""A block as a flat graph: calls inlined, ops that move nothing removed, dead ops dropped."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stablecast.ir.accounting.context import Context
from stablecast.ir.accounting.values import OpWork
from stablecast.ir.attributes import Dense
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups
from stablecast.ir.program import Block, Op, Program
from stablecast.ir.reader.decode import SMALL
from stablecast.ir.reader.locations import join_scopes
from stablecast.ir.scopes import parse_scope
from stablecast.ir.types import Location, ValueType
from stablecast.lowering.categories import Category, category

EXTERNAL = -1
MAX_CALL_DEPTH = 200


@dataclass(frozen=True, slots=True)
class Unit:
    """A composite whose body was inlined: the op, and its operands and results as values of the graph."""

    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


_TRANSPOSE = "stablehlo.transpose"
_COMPOSITES = frozenset({"stablehlo.composite"})
_SIDE_EFFECTS = frozenset({"stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send", "stablehlo.recv"})


@dataclass(slots=True)
class Graph:
    """Nodes in program order over numbered values.

    `ops[i]`, `inputs[i]`, `outputs[i]`, `categories[i]`, `works[i]`, `scopes[i]`: of node i. `types[v]`,
    `producer[v]` (a node, or `EXTERNAL`) and `weightless[v]` (a literal that costs no traffic): of value v.
    `consumers[v]`: nodes that read v, in order. `arguments`, `returns`: values. `bodies[i]`: graphs of the regions of
    control-flow node i, `captured[i]` the outer values that they read. `fusion_of[i]`: number of the ready-made fusion
    that holds node i, -1 if none does, `fusions` these fusions by number. `unit_of[i]`: number (in `units`) of the
    outermost composite that node i comes from, -1 if it comes from none. `place[i]`: place among the block's own ops of
    the one that node i comes from. `live[i]`: whether anything needs node i. `near`: values in memory on chip, which no
    kernel reads from or writes to device memory. `literals`: the whole numbers that constants are. `positions`: values
    from around a region that an iota there made.
    """

    ops: list[Op] = field(default_factory=list[Op])
    inputs: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    outputs: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    categories: list[Category] = field(default_factory=list[Category])
    works: list[OpWork] = field(default_factory=list[OpWork])
    scopes: list[str] = field(default_factory=list[str])
    types: list[ValueType] = field(default_factory=list[ValueType])
    producer: list[int] = field(default_factory=list[int])
    weightless: list[bool] = field(default_factory=list[bool])
    consumers: list[list[int]] = field(default_factory=list[list[int]])
    arguments: tuple[int, ...] = ()
    returns: tuple[int, ...] = ()
    bodies: dict[int, tuple["Graph", ...]] = field(default_factory=dict[int, tuple["Graph", ...]])
    captured: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    fusion_of: list[int] = field(default_factory=list[int])
    fusions: list[Op] = field(default_factory=list[Op])
    units: list[Unit] = field(default_factory=list[Unit])
    unit_of: list[int] = field(default_factory=list[int])
    place: list[int] = field(default_factory=list[int])
    live: list[bool] = field(default_factory=list[bool])
    near: set[int] = field(default_factory=set[int])
    literals: dict[int, int] = field(default_factory=dict[int, int])
    positions: set[int] = field(default_factory=set[int])

    def new_value(self, kind: ValueType, producer: int, weightless: bool = False) -> int:
        self.types.append(kind)
        self.producer.append(producer)
        self.weightless.append(weightless)
        return len(self.types) - 1

    def consumers_of(self, node: int) -> list[int]:
        """Nodes that read a result of `node`, in order."""
        outputs = self.outputs[node]
        if len(outputs) == 1:
            return self.consumers[outputs[0]]
        return sorted({consumer for value in outputs for consumer in self.consumers[value]})

    def location(self, node: int) -> Location:
        return self.ops[node].location


IOTA: Final = "stablehlo.iota"
Env = dict[int, int | tuple[int, ...]]
"""Value ids of a block -> values of the graph; a tuple value -> those of its parts."""


def build_graph(program: Program, block: Block, context: Context, *, keep_dead: bool = False) -> Graph:
    """The graph of `block`, a block of `program`; `context` gives the work of each op.

    `keep_dead`: ops whose results nobody reads stay live, as where an eager run launches them all the same.
    """
    return _Builder(program, context, keep_dead).root(block)


def post_order(graph: Graph) -> dict[int, int]:
    """Place of every node in a depth-first walk from the results, first operands first, each after what it reads.

    XLA's `MakeInstructionPostOrder`; nodes that no result needs come last, in program order.
    """
    place: dict[int, int] = {}
    opened: set[int] = set()
    for value in (*graph.returns, *(value for node in range(len(graph.ops)) for value in graph.outputs[node][:1])):
        stack = [graph.producer[value]]
        while stack:
            node = stack[-1]
            if node == EXTERNAL or node in place:
                stack.pop()
            elif node in opened:
                place[node] = len(place)
                stack.pop()
            else:
                opened.add(node)
                read = (*graph.inputs[node], *graph.captured.get(node, ()))
                stack += [graph.producer[held] for held in reversed(read)]
    return place


class _Builder:
    def __init__(self, program: Program, context: Context, keep_dead: bool = False) -> None:
        self._program = program
        self._context = context
        self._keep_dead = keep_dead
        self._graph = Graph()
        self._place = 0
        self._unit = -1
        self._share = not keep_dead
        self._transposes: dict[tuple[int, int, bool], int] = {}
        self._depth = 0
        self._fusions = -1
        self._fusion_number = -1

    def root(self, block: Block) -> Graph:
        env: Env = {}
        graph = self._graph
        graph.arguments = self._bind_arguments(block, env)
        self._append(block, env, "")
        graph.returns = tuple(value for result in block.returns for value in _parts(env[result]))
        self._finish()
        return graph

    def _bind_arguments(self, block: Block, env: Env) -> tuple[int, ...]:
        for arg, kind in zip(block.args, block.arg_types, strict=True):
            env[arg] = self._graph.new_value(kind, EXTERNAL)
        self._note_near(block.args, env)
        return tuple(value for arg in block.args for value in _parts(env[arg]))

    def _append(self, block: Block, env: Env, scope: str) -> None:
        outermost = not self._depth
        for place, op in enumerate(block.ops):
            if outermost:
                self._place = place
            kind = category(op)
            if kind is Category.CALL and op.name in _COMPOSITES and self._context.has_own_rule(op):
                kind = Category.HERO
            elif kind is Category.COLLECTIVE and _alone(op):
                kind = Category.FREE
            if kind is Category.FREE:
                self._free(op, env)
            elif kind is Category.CONSTANT:
                self._constant(op, env)
            elif kind is Category.FUSION:
                self._fusion(op, env, scope)
            elif kind is Category.CALL:
                self._call(op, env, scope)
            elif kind is Category.CONTROL:
                self._control(op, env, scope)
            elif op.name == _TRANSPOSE:
                self._transposed(op, env, scope, kind)
            else:
                self._node(op, env, scope, kind)

    def _free(self, op: Op, env: Env) -> None:
        if op.name.endswith("get_tuple_element"):
            held = env[op.operands[0]]
            env[op.result] = held[op.attrs["index"]] if isinstance(held, tuple) else held
        elif op.name.endswith(".tuple"):
            env[op.result] = tuple(value for operand in op.operands for value in _parts(env[operand]))
        elif op.operands:
            for result, operand in zip(op.results, op.operands, strict=False):
                env[result] = env[operand]

    def _constant(self, op: Op, env: Env) -> None:
        held = op.attrs.get("value")
        for result, kind in zip(op.results, op.result_types, strict=True):
            weightless = _is_literal(held) if held is None or isinstance(held, Dense) else kind.elements <= SMALL
            env[result] = value = self._graph.new_value(kind, EXTERNAL, weightless)
            scalar = held.scalar if isinstance(held, Dense) else None
            if isinstance(scalar, int):
                self._graph.literals[value] = scalar

    def _call(self, op: Op, env: Env, scope: str) -> None:
        outer = join_scopes(scope, op.location.scope)
        if op.regions:
            block = op.regions[0]
        else:
            function = self._program.functions.get(op.callee)
            if function is None:
                raise InputError(f"the program calls @{op.callee}, which it does not define")
            block = function.body
        if self._depth >= MAX_CALL_DEPTH:
            raise InputError(
                f"calls are nested more than {MAX_CALL_DEPTH} deep at @{op.callee}", "a function that calls itself?"
            )
        inner: Env = dict(env) if op.regions else {}
        inner.update({arg: env[operand] for arg, operand in zip(block.args, op.operands, strict=True)})
        opens = op.name in _COMPOSITES and self._unit < 0
        if opens:
            self._unit = len(self._graph.units)
            self._graph.units.append(Unit(op, self._values(op.operands, env), ()))
        self._depth += 1
        self._append(block, inner, outer)
        self._depth -= 1
        for result, returned in zip(op.results, block.returns, strict=True):
            env[result] = inner[returned]
        if opens:
            unit = self._graph.units[self._unit]
            self._graph.units[self._unit] = replace(unit, outputs=self._values(op.results, env))
            self._unit = -1

    def _fusion(self, op: Op, env: Env, scope: str) -> None:
        """A fusion that the producer made: its ops carry one number and stay together."""
        outermost = self._fusion_number < 0
        if outermost:
            self._fusion_number = self._fusions = self._fusions + 1
            self._graph.fusions.append(op)
        self._call(op, env, scope)
        if outermost:
            self._fusion_number = -1
            self._note_near(op.results, env)

    def _note_near(self, values: Sequence[int], env: Env) -> None:
        """Mark those of `values` of the program that lie on chip."""
        near = self._program.near
        if near:
            self._graph.near.update(held for value in values if value in near for held in _parts(env[value]))

    def _node(self, op: Op, env: Env, scope: str, kind: Category) -> int:
        graph = self._graph
        node = len(graph.ops)
        graph.ops.append(op)
        graph.categories.append(kind)
        graph.works.append(self._context.work(op))
        graph.scopes.append(join_scopes(scope, op.location.scope) if scope else op.location.scope)
        graph.fusion_of.append(self._fusion_number)
        self._mark(graph)
        graph.inputs.append(self._values(op.operands, env))
        outputs: list[int] = []
        for result, result_type in zip(op.results, op.result_types, strict=True):
            value = graph.new_value(result_type, node)
            env[result] = value
            outputs.append(value)
        graph.outputs.append(tuple(outputs))
        if self._fusion_number < 0:
            self._note_near(op.results, env)
        return node

    def _transposed(self, op: Op, env: Env, scope: str, kind: Category) -> None:
        """A transpose; the same one of the same value is made once, as compilers find out."""
        again = parse_scope(join_scopes(scope, op.location.scope)).recomputed
        key = (op.signature, self._values(op.operands, env)[0], again)
        known = self._transposes.get(key) if op.signature >= 0 and self._fusion_number < 0 and self._share else None
        back = self._turned_back(op, key[1]) if self._share and self._fusion_number < 0 else EXTERNAL
        if back != EXTERNAL:
            env[op.result] = back
        elif known is None:
            node = self._node(op, env, scope, kind)
            self._transposes[key] = self._graph.outputs[node][0]
        else:
            env[op.result] = known

    def _turned_back(self, op: Op, value: int) -> int:
        """What `value` is the transpose of, where `op` undoes that; `EXTERNAL` if it does not."""
        graph = self._graph
        producer = graph.producer[value]
        if producer == EXTERNAL or graph.ops[producer].name != _TRANSPOSE:
            return EXTERNAL
        if graph.ops[producer].result_type != op.operand_types[0]:
            return EXTERNAL  # the same elements in another shape
        first = graph.ops[producer].attrs["permutation"]
        restored = [first[dim] for dim in op.attrs["permutation"]]
        return graph.inputs[producer][0] if restored == sorted(restored) else EXTERNAL

    def _mark(self, graph: Graph) -> None:
        graph.unit_of.append(self._unit)
        graph.place.append(self._place)

    def _values(self, operands: Sequence[int], env: Env) -> tuple[int, ...]:
        values: list[int] = []
        for operand in operands:
            held = env[operand]
            if isinstance(held, tuple):
                values.extend(held)
            else:
                values.append(held)
        return tuple(values)

    def _control(self, op: Op, env: Env, scope: str) -> None:
        graph = self._graph
        node = len(graph.ops)
        graph.ops.append(op)
        graph.categories.append(Category.CONTROL)
        graph.works.append(OpWork())
        graph.fusion_of.append(-1)
        self._mark(graph)
        graph.scopes.append(join_scopes(scope, op.location.scope))
        captured: dict[int, None] = {}
        carried = op.operands if op.name.endswith(".while") else ()
        graph.bodies[node] = tuple(
            self._region(region, env, graph.scopes[node], captured, carried) for region in op.regions
        )
        graph.captured[node] = tuple(captured)
        graph.inputs.append((*self._values(op.operands, env), *captured))
        outputs: list[int] = []
        for result, result_type in zip(op.results, op.result_types, strict=True):
            env[result] = graph.new_value(result_type, node)
            outputs.extend(_parts(env[result]))
        graph.outputs.append(tuple(outputs))
        self._note_near(op.results, env)

    def _region(
        self, block: Block, env: Env, scope: str, captured: dict[int, None], operands: Sequence[int] = ()
    ) -> Graph:
        """The graph of a region; outer values that it reads become externals of its own.

        `operands`: what its arguments are at first; those that it hands on as they came are that for good.
        """
        inner = _Builder(self._program, self._context, self._keep_dead)
        inner._depth = self._depth
        graph = inner._graph
        mapping = _Captures(env, graph, self._graph, captured)
        graph.arguments = inner._bind_arguments(block, mapping)
        for arg, operand, returned in zip(block.args, operands, block.returns, strict=False):
            held, own = env[operand], mapping[arg]
            if arg == returned and isinstance(held, int) and isinstance(own, int):
                _pass_on(self._graph, held, graph, own)
        inner._append(block, mapping, scope)
        graph.returns = tuple(value for result in block.returns for value in _parts(mapping[result]))
        inner._finish()
        return graph

    def _finish(self) -> None:
        graph = self._graph
        needed = set(graph.returns)
        graph.live = live = [False] * len(graph.ops)
        consumers: list[list[int]] = [[] for _ in graph.types]
        graph.consumers = consumers
        for node in range(len(graph.ops) - 1, -1, -1):
            outputs = graph.outputs[node]
            if self._keep_dead or not needed.isdisjoint(outputs) or _must_run(graph.ops[node]):
                live[node] = True
                inputs = dict.fromkeys(graph.inputs[node])
                needed.update(inputs)
                for value in inputs:
                    consumers[value].append(node)
        for nodes in consumers:
            nodes.reverse()


class _Captures(Env):
    """The values of a region: its own, and on demand those of the blocks around it."""

    def __init__(self, outer: Env, graph: Graph, outer_graph: Graph, captured: dict[int, None]) -> None:
        super().__init__()
        self._outer, self._graph, self._outer_graph, self._captured = outer, graph, outer_graph, captured
        self._copies: dict[int, int] = {}

    def __missing__(self, key: int) -> int | tuple[int, ...]:
        held = self._outer[key]
        copied = tuple(map(self._copy, held)) if isinstance(held, tuple) else self._copy(held)
        self[key] = copied
        return copied

    def _copy(self, value: int) -> int:
        if value not in self._copies:
            outer = self._outer_graph
            if not outer.weightless[value]:
                self._captured[value] = None
            copied = self._graph.new_value(outer.types[value], EXTERNAL, outer.weightless[value])
            self._copies[value] = copied
            if value in outer.near:
                self._graph.near.add(copied)
            _pass_on(outer, value, self._graph, copied)
        return self._copies[value]


def _pass_on(outer: Graph, value: int, graph: Graph, copied: int) -> None:
    """What is known of a value of `outer` holds for its copy in the graph of a region."""
    producer = outer.producer[value]
    if value in outer.positions or (producer != EXTERNAL and outer.ops[producer].name == IOTA):
        graph.positions.add(copied)
    if value in outer.literals:
        graph.literals[copied] = outer.literals[value]


def _is_literal(held: Dense | None) -> bool:
    """Whether a constant is so simple that compilers put it into the kernel's code."""
    return held is None or held.splat or held.values is not None


def _alone(op: Op) -> bool:
    """Whether every device of a collective has a group of its own."""
    groups = op.attrs.get("replica_groups")
    return isinstance(groups, Groups) and groups.size == 1 and len(op.operands) == len(op.results)


def _must_run(op: Op) -> bool:
    return op.name in _SIDE_EFFECTS or (op.name == "stablehlo.custom_call" and bool(op.attrs.get("has_side_effect")))


def _parts(held: int | tuple[int, ...]) -> tuple[int, ...]:
    return held if isinstance(held, tuple) else (held,)
