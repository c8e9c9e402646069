"""Node by node from the graph of a step to one StableHLO module."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from stablecast.frontends.torch.emit import registry
from stablecast.frontends.torch.emit.builder import Builder, Val
from stablecast.frontends.torch.graph import VIEWS, Graph, Group, Node, Place, Ref, Spec, replace_refs

Decomposer = Callable[[Node, Sequence[Spec]], Graph | str | None]
"""(node, specs of its operands in order) -> the same in simpler ops; a text that says why not; or None."""

RNG_STATE = Spec((2,), "ui64")


class RuleFault(RuntimeWarning):
    """A rule of this package failed on an op that it is there for: a fault of ours, not of the program."""


@dataclass(slots=True)
class Unlowered:
    """Ops that became custom calls: how often, why, and whether a rule of ours failed (`fault`)."""

    count: int = 0
    reason: str = ""
    fault: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What emission must know beside the graph.

    `axes`: mesh axes, major to minor; empty for one device. `rank`: whose program it is. `highest`: f32 products ask
    for full precision (torch's default); `highest_convolutions`: f32 convolutions do (torch's default is TF32).
    `decomposer`: for ops without an emitter.
    """

    name: str = "step"
    axes: tuple[tuple[str, int], ...] = ()
    rank: int = 0
    highest: bool = True
    highest_convolutions: bool = False
    decomposer: Decomposer | None = None


@dataclass(slots=True)
class Emitted:
    """A finished module. `rng`: it takes random state. `faults`: ops whose rule failed.

    `ops_of`: launch -> first and last (exclusive) of its ops, as places in the entry function. `views_of`: launch ->
    those of its ops that stand for views.
    """

    module: Any
    ops_of: dict[int, tuple[int, int]]
    views_of: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    unlowered: dict[str, Unlowered] = field(default_factory=dict[str, Unlowered])
    faults: dict[str, Unlowered] = field(default_factory=dict[str, Unlowered])
    rng: bool = False
    ops: int = 0


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


class Emitter(Builder):
    """Emits nodes; while a node is emitted, `outs` are the specs of its results."""

    def __init__(self, graph: Graph, settings: Settings) -> None:
        super().__init__()
        registry.register_all()
        self.graph = graph
        self.settings = settings
        self.highest, self.highest_convolutions = settings.highest, settings.highest_convolutions
        self.outs: tuple[Spec | None, ...] = ()
        self.op = ""
        self.unlowered: dict[str, Unlowered] = {}
        self.faults: dict[str, Unlowered] = {}
        self.channels = 0
        self._composites: dict[Any, tuple[str, list[Spec | None]]] = {}
        self._names: dict[str, int] = {}
        self._env: dict[int, Val] = {}
        self._state: Val | None = None
        self._rng_argument: Any = None
        self._block: Any = None
        self._module: Any = None
        self._place = Place("", "", 0)
        self.group_attributes: dict[str, Any] = {}
        self._depth = 0

    # what emitters use

    @property
    def out(self) -> Spec:
        """The spec of the first result."""
        spec = self.outs[0]
        assert spec is not None
        return spec

    def operand(self, x: Any, dtype: str | None = None, shape: Sequence[int] | None = None) -> Val:
        """A value or number in the element type and shape given, by default those of the result."""
        dtype = self.out.dtype if dtype is None else dtype
        shape = self.out.shape if shape is None else shape
        if not isinstance(x, Val):
            return self.splat(x, shape, dtype)
        return self.broadcast(self.convert(x, dtype), shape)

    def group(self, name: str) -> Group:
        return self.graph.groups[name]

    def random_bits(self, shape: Sequence[int], dtype: str = "ui32") -> Val:
        """Random bits, from a state that is an argument and a result of the step."""
        if self._state is None:
            self._rng_argument = self._block.add_argument(self.type(*RNG_STATE), self.ir.Location.name("rng_state"))
            self._state = Val(self._rng_argument, *RNG_STATE)
        hlo = self.hlo
        op = hlo.RngBitGeneratorOp(
            self.type(*RNG_STATE), self.type(shape, dtype), hlo.RngAlgorithmAttr.get("DEFAULT"), self._state.value
        )
        self.count += 1
        self._state = Val(op.results[0], *RNG_STATE)
        return Val(op.results[1], tuple(shape), dtype)

    # the walk

    def run(self, names: Sequence[str], aliases: Mapping[int, int], result_names: Sequence[str]) -> Emitted:
        """The module. `names`: of the inputs. `aliases`: input -> output that takes over its buffer."""
        ir = self.ir
        context = mlir_context()
        with context, ir.Location.unknown():
            module = self._module = ir.Module.create()
            module.operation.attributes["sym_name"] = ir.StringAttr.get(self.settings.name)
            self._device_counts(module)
            specs, graph = self.graph.specs, self.graph
            kinds = [self.type(*specs[ref]) for ref in graph.inputs]
            with ir.InsertionPoint(module.body):
                main = self.func.FuncOp("main", ir.FunctionType.get(kinds, []))
            block = self._block = main.regions[0].blocks.append(
                *kinds, arg_locs=[ir.Location.name(name) for name in names]
            )
            for ref, value in zip(graph.inputs, block.arguments, strict=True):
                self._env[ref] = Val(value, *specs[ref])
            ops_of, views_of = self._nodes(block)
            self._close(main, block, aliases, result_names)
        rng = self._rng_argument is not None
        return Emitted(module, ops_of, views_of, self.unlowered, self.faults, rng, self.count)

    def _device_counts(self, module: Any) -> None:
        devices = 1
        for _, size in self.settings.axes:
            devices *= size
        kind = self.ir.IntegerType.get_signless(32)
        module.operation.attributes["mhlo.num_partitions"] = self.ir.IntegerAttr.get(kind, devices)
        module.operation.attributes["mhlo.num_replicas"] = self.ir.IntegerAttr.get(kind, 1)

    def _nodes(self, block: Any) -> tuple[dict[int, tuple[int, int]], dict[int, list[int]]]:
        ops_of: dict[int, tuple[int, int]] = {}
        views_of: dict[int, list[int]] = {}
        locations: dict[int, Any] = {}
        with self.ir.InsertionPoint(block):
            for node in self.graph.live():
                place = locations.get(node.place)
                self._place = self.graph.places[node.place]
                if place is None:
                    place = locations[node.place] = self._location(self._place)
                first = self.count
                with place:
                    self._node(node, self._env)
                known = ops_of.get(node.launch)
                ops_of[node.launch] = (first if known is None else known[0], self.count)
                if node.op.startswith(VIEWS):
                    views_of.setdefault(node.launch, []).extend(range(first, self.count))
        return ops_of, views_of

    def _location(self, place: Place) -> Any:
        ir = self.ir
        inner = ir.Location.file(place.file, place.line, 0) if place.file else ir.Location.unknown()
        return ir.Location.name(place.scope, inner) if place.scope else inner

    def _close(self, main: Any, block: Any, aliases: Mapping[int, int], result_names: Sequence[str]) -> None:
        ir = self.ir
        values = [self._env[ref].value for ref in self.graph.outputs]
        names = list(result_names)
        arguments = [
            {"tf.aliasing_output": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), aliases[index])}
            if index in aliases
            else {}
            for index in range(len(self.graph.inputs))
        ]
        if self._state is not None:
            arguments.append({"tf.aliasing_output": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), len(values))})
            values.append(self._state.value)
            names.append("rng_state")
        with ir.InsertionPoint(block):
            self.func.ReturnOp(values)
        kinds = [argument.type for argument in block.arguments]
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(kinds, [value.type for value in values]))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in arguments])
        results = [ir.DictAttr.get({"jax.result_info": ir.StringAttr.get(name)}) for name in names]
        main.attributes["res_attrs"] = ir.ArrayAttr.get(results)

    def _node(self, node: Node, env: dict[int, Val]) -> None:
        args = [arg if not isinstance(arg, (Ref, list, tuple)) else replace_refs(arg, env) for arg in node.args]
        kwargs = {key: replace_refs(arg, env) for key, arg in node.kwargs.items()} if node.kwargs else {}
        found = registry.emitter_of(node.op)
        self.outs, self.op = self._specs(node), node.op
        if found is None:
            made = self._without_emitter(node, args, kwargs)
        else:
            made = self._with_emitter(found, node, args, kwargs)
        pairs = zip(node.outs, made, strict=False)
        env.update({out: value for out, value in pairs if out is not None and value is not None})

    def _specs(self, node: Node) -> tuple[Spec | None, ...]:
        specs = self.graph.specs
        return tuple([None if out is None else specs[out] for out in node.outs])

    def _with_emitter(self, found: Any, node: Node, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        name, function = found
        outs = self.outs
        try:
            if name in registry.COMPOSITES:
                return self._composite(name, function, args, kwargs)
            return self._fit(function(self, *args, **kwargs), outs)
        except NotImplementedError as error:
            self.outs = outs
            return self._without_emitter(node, args, kwargs, str(error))
        except (TypeError, ValueError, LookupError, ArithmeticError, AssertionError, self.ir.MLIRError) as error:
            self.outs = outs
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            self.faults.setdefault(node.op, Unlowered(reason=reason, fault=True)).count += 1
            return self._without_emitter(node, args, kwargs, reason, fault=True)

    def _fit(self, made: Any, outs: tuple[Spec | None, ...]) -> list[Any]:
        """Results in the element types that torch gives them."""
        values = [made] if isinstance(made, Val) or made is None else list(made)
        for index, (value, spec) in enumerate(zip(values, outs, strict=False)):
            if value is None or spec is None:
                continue
            if value.shape != spec.shape:
                raise ValueError(f"emitted shape {value.shape} where torch has {spec.shape}")
            if value.dtype != spec.dtype:
                values[index] = self.convert(value, spec.dtype)
        if len(values) < len([spec for spec in outs if spec is not None]):
            raise ValueError(f"{len(values)} results emitted where torch has {len(outs)}")
        return values

    # ops without an emitter

    def _without_emitter(
        self, node: Node, args: list[Any], kwargs: dict[str, Any], reason: str = "", fault: bool = False
    ) -> list[Any]:
        if self.settings.decomposer is not None and self._depth < 8:
            operands = operands_of((args, kwargs))
            specs = [Spec(value.shape, value.dtype) for value in operands]
            graph = self.settings.decomposer(plain_node(node, args, kwargs), specs)
            if isinstance(graph, Graph):
                return self._inline(graph, operands)
            reason = reason or graph or ""
        self.without_form(node.op, reason or "no StableHLO form is known", fault)
        return self.custom_call(node.op.rpartition(".")[0] or node.op, operands_of((args, kwargs)), node.keep)

    def _inline(self, graph: Graph, operands: Sequence[Val]) -> list[Any]:
        env: dict[int, Val] = dict(zip(graph.inputs, operands, strict=True))
        outs = self.outs
        held, self.graph = self.graph, graph
        self._depth += 1
        try:
            for node in graph.live():
                self._node(node, env)
        finally:
            self.graph = held
            self._depth -= 1
        results = iter([env[ref] for ref in graph.outputs])
        return self._fit([None if spec is None else next(results) for spec in outs], outs)

    def without_form(self, op: str, reason: str, fault: bool = False) -> None:
        """Note an op that becomes a custom call."""
        self.unlowered.setdefault(op, Unlowered(reason=reason, fault=fault)).count += 1

    def custom_call(self, target: str, operands: Sequence[Val], side_effect: bool = False) -> list[Any]:
        """A custom call whose results are those of the node at hand."""
        ir = self.ir
        specs = [spec for spec in self.outs if spec is not None]
        op = self.hlo.CustomCallOp(
            [self.type(*spec) for spec in specs],
            [value.value for value in operands],
            call_target_name=ir.StringAttr.get(target),
            has_side_effect=ir.BoolAttr.get(side_effect or not specs),
        )
        self.count += 1
        made = iter([Val(value, *spec) for value, spec in zip(op.results, specs, strict=True)])
        return [None if spec is None else next(made) for spec in self.outs]

    # composites

    def _composite(self, name: str, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """One `stablehlo.composite`; equal ones share a decomposition."""
        operands = operands_of((args, kwargs))
        key = (name, frozen((args, kwargs)), self.outs)
        found = self._composites.get(key)
        if found is None:
            found = self._composites[key] = self._decomposition(name, function, args, kwargs, operands)
        symbol, specs = found
        ir = self.ir
        op = self.hlo.CompositeOp(
            [self.type(*spec) for spec in specs if spec is not None],
            [value.value for value in operands],
            name=ir.StringAttr.get(name),
            decomposition=ir.FlatSymbolRefAttr.get(symbol),
            composite_attributes=self._attributes(registry.COMPOSITES[name], function, args, kwargs),
            version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1),
        )
        self.count += 1
        made = iter(
            [Val(value, *spec) for value, spec in zip(op.results, [s for s in specs if s is not None], strict=True)]
        )
        return [None if spec is None else next(made) for spec in specs]

    def _attributes(
        self, names: tuple[str, ...], function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        ir = self.ir
        given = {**dict(zip(_parameters(function), args, strict=False)), **kwargs}
        found: dict[str, Any] = {}
        for name in names:
            value = given.get(name)
            if isinstance(value, bool):
                found[name] = ir.BoolAttr.get(value)
            elif isinstance(value, int):
                found[name] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
            elif isinstance(value, float):
                found[name] = ir.FloatAttr.get(ir.F64Type.get(), value)
            elif isinstance(value, str):
                found[name] = ir.StringAttr.get(value)
        return ir.DictAttr.get(found)

    def _decomposition(
        self, name: str, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], operands: Sequence[Val]
    ) -> tuple[str, list[Spec | None]]:
        """Its ops have no scope of their own: they are where each call is."""
        ir = self.ir
        number = self._names[name] = self._names.get(name, 0) + 1
        symbol = f"{name}.{number}"
        kinds = [self.type(value.shape, value.dtype) for value in operands]
        with ir.InsertionPoint(self._module.body):
            op = self.func.FuncOp(symbol, ir.FunctionType.get(kinds, []), visibility="private")
        block = op.regions[0].blocks.append(*kinds)
        held, count, outs = self.constants, self.count, self.outs
        self.constants = {}
        inner = iter([Val(value, x.shape, x.dtype) for value, x in zip(block.arguments, operands, strict=True)])
        try:
            with ir.InsertionPoint(block), self._location(self._place._replace(scope="")):
                made = self._fit(
                    function(self, *_swap(args, inner), **{k: _swap(v, inner) for k, v in kwargs.items()}), outs
                )
                values = [value for value in made if value is not None]
                self.func.ReturnOp([value.value for value in values])
        except Exception:
            op.operation.erase()
            raise
        finally:
            self.constants, self.count, self.outs = held, count, outs
        op.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(kinds, [value.value.type for value in values])
        )
        return symbol, [None if value is None else Spec(value.shape, value.dtype) for value in made]


def mlir_context() -> Any:
    from stablecast.ir import mlir

    return mlir.make_context()


def operands_of(arg: Any) -> list[Val]:
    """Every value in a nest of arguments, in order."""
    if isinstance(arg, Val):
        return [arg]
    if isinstance(arg, Mapping):
        return [value for item in arg.values() for value in operands_of(item)]
    if isinstance(arg, (list, tuple)):
        return [value for item in arg for value in operands_of(item)]
    return []


def _swap(arg: Any, values: Any) -> Any:
    if isinstance(arg, Val):
        return next(values)
    if isinstance(arg, (list, tuple)):
        return [_swap(item, values) for item in arg]
    return arg


def frozen(arg: Any) -> Any:
    """A nest of arguments as a key: values by their type."""
    if isinstance(arg, Val):
        return (arg.shape, arg.dtype)
    if isinstance(arg, Mapping):
        return tuple((key, frozen(item)) for key, item in arg.items())
    if isinstance(arg, (list, tuple)):
        return tuple(frozen(item) for item in arg)
    return arg


def plain_node(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Node:
    """The node with its operands numbered from 0, in order."""
    numbers = iter(range(1 << 30))

    def number(arg: Any) -> Any:
        if isinstance(arg, Val):
            return Ref(next(numbers))
        if isinstance(arg, (list, tuple)):
            return [number(item) for item in arg]
        return arg

    return Node(node.op, tuple(map(number, args)), {key: number(arg) for key, arg in kwargs.items()}, node.outs)
