"""The global program with explicit Shardy collectives as the program of one device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stablecast.ir.groups import Groups
from stablecast.ir.program import Argument, Axis, Block, Function, Op, Program, Sharding, Stage
from stablecast.ir.reader.locations import join_scopes
from stablecast.ir.types import UNKNOWN_LOCATION, Location, ValueType
from stablecast.lowering.partition.build import Builder
from stablecast.lowering.partition.layout import REPLICATED, Layout
from stablecast.lowering.partition.missing import MODELS
from stablecast.lowering.partition.permute import with_groups
from stablecast.lowering.partition.ragged import restored
from stablecast.lowering.partition.reshards import RESHARDS
from stablecast.lowering.partition.rules import PREFIX, STANDS_FOR
from stablecast.lowering.partition.site import Site
from stablecast.lowering.partition.sizes import local_attributes

_TRANSPARENT = frozenset(
    {
        "sdy.sharding_constraint",
        "sdy.propagation_barrier",
        "sdy.data_flow_edge",
        "sdy.func_data_flow_edge",
        "sdy.replicated_to_unreduced",
        "sdy.reshard",
    }
)
_RENAMED = {
    "sdy.constant": "stablehlo.constant",
    **{f"mhlo.{name}": f"chlo.{name}" for name in ["acos", "acosh", "asin", "asinh", "atanh", "cosh", "erf", "sinh"]},
}
"""Ops under the names that they had before Shardy and XLA's import."""
_INLINED = frozenset({"sdy.manual_computation", "sdy.named_computation"})
_CONTROL = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if", "stablehlo.optimization_barrier"})
_NETWORK = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"),
        "collective_broadcast",
    )
)


class Localiser:
    """Rewrites the entry of one program; `notes` collects what the rules assumed.

    `scatter`: whether sums of which each device keeps its part become reduce-scatters.
    """

    def __init__(self, program: Program, *, scatter: bool = True) -> None:
        self._program = program
        self._scatter = scatter
        self._layout = Layout(program.meshes)
        self._builder = Builder(_first_free(program))
        self._notes: dict[str, int] = {}
        self._shardings: dict[int, Sharding] = {}
        self._local: dict[int, ValueType] = {}
        self._names: dict[int, int] = {}
        self._producers: dict[int, Op] = {}
        self._plain: dict[Any, tuple[str, Mapping[str, Any], int]] = {}
        self._locations: dict[Location, Location] = {}
        self._stood_for: dict[int, Op] = {}
        self._scope = ""
        self.num_ops = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What the rules assumed, each with the number of ops that it was assumed for."""
        return tuple(f"{text} ({count} ops)" if count > 1 else text for text, count in self._notes.items())

    def run(self) -> Program:
        """The program of one device."""
        function = self._function(self._program.main)
        functions = {**self._program.functions, function.name: function}
        return replace(
            self._program,
            functions=functions,
            stage=Stage.PER_DEVICE,
            num_ops=self.num_ops,
            notes=(*self._program.notes, *self.notes),
        )

    def _note(self, text: str) -> None:
        self._notes[text] = self._notes.get(text, 0) + 1

    def _function(self, function: Function) -> Function:
        arguments: list[Argument] = []
        shardings = [argument.sharding or REPLICATED for argument in function.arguments]
        for argument, sharding in zip(function.arguments, shardings, strict=True):
            arguments.append(replace(argument, type=self._layout.local(argument.type, sharding)))
        return replace(function, body=self._block(function.body, shardings), arguments=tuple(arguments))

    def _block(self, block: Block, shardings: Sequence[Sharding]) -> Block:
        for arg, kind, sharding in zip(block.args, block.arg_types, shardings, strict=True):
            self._define(arg, self._layout.local(kind, sharding), sharding)
        types = tuple(self._local[arg] for arg in block.args)
        ops = self._ops(block)
        names = self._names
        return Block(block.args, types, tuple(ops), tuple(names.get(value, value) for value in block.returns))

    def _define(self, value: int, kind: ValueType, sharding: Sharding) -> None:
        self._local[value] = kind
        self._shardings[value] = sharding

    def _ops(self, block: Block) -> list[Op]:
        out: list[Op] = []
        before = len(out)
        for op in block.ops:
            self._op(op, out)
        self.num_ops += len(out) - before
        return out

    def _op(self, op: Op, out: list[Op]) -> None:
        name = op.name
        if name in _TRANSPARENT or (name == "stablehlo.custom_call" and op.attrs.get("call_target_name") == "Sharding"):
            self._pass_on(op)
            return
        if name in _INLINED and op.regions:
            self._inline(op, out)
            return
        if STANDS_FOR in op.attrs or (
            name == "stablehlo.custom_call" and str(op.attrs.get("call_target_name", "")).startswith(PREFIX)
        ):
            op = self._restored(op)
            name = op.name
        shardings = self._result_shardings(op)
        local = self._layout.local
        types = tuple([local(kind, sharding) for kind, sharding in zip(op.result_types, shardings, strict=True)])
        for value, kind, sharding in zip(op.results, types, shardings, strict=True):
            self._define(value, kind, sharding)
            self._producers[value] = op
        if name in _CONTROL:
            out.append(self._control(op, types, shardings))
            return
        rule = RESHARDS.get(name)
        if rule is not None:
            made = rule(self._site(op, types, shardings))
            out.extend(made)
            return
        model = MODELS.get(name)
        if model is not None:
            modelled = model(self._site(op, types, shardings))
            if modelled is not None:
                out.extend(modelled)
                return
        out.append(self._network(op, types) if name in _NETWORK else self._ordinary(op, types))

    def _restored(self, op: Op) -> Op:
        """The op that stood behind a custom call; equal calls share their attributes and signature."""
        held = self._stood_for.get(op.signature)
        if held is None:
            held = self._stood_for[op.signature] = restored(op, PREFIX)
        return replace(op, name=held.name, attrs=held.attrs)

    def _result_shardings(self, op: Op) -> tuple[Sharding, ...]:
        held = op.shardings or op.attrs.get("out_sharding") or ()
        if len(held) == len(op.results):
            return held
        return (REPLICATED,) * len(op.results)

    def _site(self, op: Op, types: tuple[ValueType, ...], shardings: tuple[Sharding, ...]) -> Site:
        return Site(
            replace(op, location=self._place(op.location)),
            self._operands(op),
            tuple(self._local[value] for value in op.operands),
            tuple(self._shardings[value] for value in op.operands),
            types,
            shardings,
            self._layout,
            self._builder,
            self._note,
            self._producers.get,
            self._shardings.__getitem__,
            lambda value: self._names.get(value, value),
            self._scatter,
        )

    def _operands(self, op: Op) -> tuple[int, ...]:
        names = self._names
        return tuple([names.get(value, value) for value in op.operands])

    def _pass_on(self, op: Op) -> None:
        """The result is the operand."""
        value = op.operands[0]
        kind, sharding = self._local[value], self._shardings[value]
        for result in op.results:
            self._names[result] = self._names.get(value, value)
            self._define(result, kind, sharding)

    def _inline(self, op: Op, out: list[Op]) -> None:
        """The body of a manual computation, whose shapes are local along its manual axes already."""
        block = op.regions[0]
        manual = frozenset(op.attrs.get("manual_axes", ()))
        given = op.attrs.get("in_shardings") or (REPLICATED,) * len(op.operands)
        for arg, kind, operand, sharding in zip(block.args, block.arg_types, op.operands, given, strict=True):
            inner = _without(sharding, manual)
            self._names[arg] = self._names.get(operand, operand)
            self._define(arg, self._layout.local(kind, inner), inner)
        outer, self._scope = self._scope, join_scopes(self._scope, op.location.scope)
        for inner_op in block.ops:
            self._op(inner_op, out)
        self._scope = outer
        results = op.attrs.get("out_shardings") or (REPLICATED,) * len(op.results)
        for result, value, sharding in zip(op.results, block.returns, results, strict=True):
            self._names[result] = self._names.get(value, value)
            self._define(result, self._local[value], sharding)

    def _control(self, op: Op, types: tuple[ValueType, ...], shardings: tuple[Sharding, ...]) -> Op:
        carried = shardings if op.name == "stablehlo.while" else ()
        regions = tuple(self._block(region, carried) for region in op.regions)
        operand_types = tuple([self._local[value] for value in op.operands])
        signature = self._builder.signature(op.name, op.attrs, operand_types, types, regions, op.count, op.callee)
        return Op(
            op.name,
            self._operands(op),
            op.results,
            operand_types,
            types,
            op.attrs,
            regions,
            op.count,
            op.callee,
            location=self._place(op.location),
            signature=signature,
        )

    def _ordinary(self, op: Op, types: tuple[ValueType, ...]) -> Op:
        local = self._local
        operand_types = tuple([local[value] for value in op.operands])
        key = (op.signature, tuple(map(id, operand_types)), tuple(map(id, types)))
        held = self._plain.get(key)
        if held is None:
            held = self._plain[key] = self._make_plain(op, operand_types, types)
        name, attrs, signature = held
        names = self._names
        return Op(
            name,
            tuple([names.get(value, value) for value in op.operands]),
            op.results,
            operand_types,
            types,
            attrs,
            op.regions,
            op.count,
            op.callee,
            (),
            self._place(op.location),
            signature,
        )

    def _make_plain(
        self, op: Op, operand_types: tuple[ValueType, ...], types: tuple[ValueType, ...]
    ) -> tuple[str, Mapping[str, Any], int]:
        name = _RENAMED.get(op.name, op.name)
        attrs = local_attributes(op, operand_types, types)
        signature = self._builder.signature(name, attrs, operand_types, types, op.regions, op.count, op.callee)
        return name, attrs, signature

    def _network(self, op: Op, types: tuple[ValueType, ...]) -> Op:
        """A collective that the program wrote itself: its groups get the names of mesh axes."""
        attrs = with_groups(op.attrs, self._layout, self._program.meshes, self._program.num_devices)
        groups = attrs.get("replica_groups")
        if not isinstance(groups, Groups):
            attrs = {name: value for name, value in attrs.items() if name != "replica_groups"}
        operand_types = tuple(self._local[value] for value in op.operands)
        return self._builder.op(
            op.name,
            self._operands(op),
            operand_types,
            types,
            attrs,
            results=op.results,
            regions=op.regions,
            location=self._place(op.location),
        )

    def _place(self, location: Location) -> Location:
        if not self._scope and location.file != "-":
            return location
        found = self._locations.get(location) if not self._scope else None
        if found is None:
            known = location if location.file != "-" else replace(UNKNOWN_LOCATION, scope=location.scope)
            found = replace(known, scope=join_scopes(self._scope, known.scope)) if self._scope else known
            if not self._scope:
                self._locations[location] = found
        return found


def _without(sharding: Sharding, manual: frozenset[str]) -> Sharding:
    if not any(axis.name in manual for axis in sharding.axes):
        return sharding
    dims: list[tuple[Axis, ...]] = [tuple(axis for axis in dim if axis.name not in manual) for dim in sharding.dims]
    return Sharding(sharding.mesh, tuple(dims))


def _first_free(program: Program) -> int:
    highest = -1
    for function in program.functions.values():
        highest = max(highest, *function.body.args, -1) if function.body.args else highest
        for op in function.body.walk():
            if op.results:
                highest = max(highest, op.results[-1])
            for region in op.regions:
                if region.args:
                    highest = max(highest, region.args[-1])
    return highest + 1


Rule = Callable[[Site], list[Op] | None]
