"""Scheduled HLO text as a typed program: fusions and collectives as the compiler left them, in its order."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stablecast.ir.errors import InputError
from stablecast.ir.hlo import decode, syntax
from stablecast.ir.hlo.contraction import as_product
from stablecast.ir.hlo.groups import expand_device_ids
from stablecast.ir.hlo.library import Product, product
from stablecast.ir.hlo.ops import COLLECTIVES, NEEDS_NOTHING, NEEDS_REGION, check_product, decoded, op_name
from stablecast.ir.hlo.syntax import Computation, Instruction
from stablecast.ir.hlo.tpu import NAMED_AGAIN, NOTHING, FusedCollective, Part, fused_collective
from stablecast.ir.loops import Unknown, trip_count
from stablecast.ir.pause import paused_gc
from stablecast.ir.program import NO_ATTRIBUTES, NO_LAUNCH, Argument, Block, Function, Op, Program, Stage
from stablecast.ir.types import UNKNOWN_LOCATION, Count, Location, Symbol, TensorType

Values = tuple[int, ...]
"""The values of an instruction: one, or those in its tuple in order."""

_SCOPE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_ALIAS = re.compile(r"\{([\d,\s]*)\}: \((\d+), \{([\d,\s]*)\}")
_ASYNC_KINDS = ("async", "fusion", "call", "custom-call")
MAX_DEPTH = 200


def is_scheduled(text: bytes) -> bool:
    """Whether `text` is HLO after the compiler's last pass, fused and in order."""
    return b"is_scheduled=true" in text.lstrip().split(b"\n", 1)[0]


def read_hlo(data: bytes, source: str = "module") -> Program:
    """The program in scheduled HLO text.

    Fusions become `mhlo.fusion`, libraries' custom calls the products that they are, an asynchronous pair the op at its
    start; tuples are taken apart. Order is kept. Raises `InputError` where the text is damaged or calls what it lacks.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise InputError(f"{source} is not text", "give HLO text, not a protocol buffer") from None
    with paused_gc():
        module = syntax.parse(expand_device_ids(text), source)
        return _Reader(module, source, platform_of(text)).program()


def platform_of(text: str) -> str:
    """The platform that scheduled HLO text was compiled for, by what only its compiler writes."""
    if re.search(r"\{[\d,]*:T\(\d", text):
        return "tpu"
    if "__hip" in text or "__rocblas" in text:
        return "rocm"
    if any(mark in text for mark in ('"operation_queue_id"', "__cublas", "__cudnn", "__triton")):
        return "cuda"
    return "cpu" if "xla_cpu" in text or '"outer_dimension_partitions"' in text else ""


class _Reader:
    def __init__(self, module: syntax.Module, source: str, platform: str) -> None:
        self._module = module
        self._platform = platform
        self._source = source
        self._types: list[TensorType] = []
        self._signatures: dict[Any, int] = {}
        self._functions: dict[str, Function] = {}
        self._regions: dict[str, Block] = {}
        self._definitions: dict[int, Op] = {}
        self._attrs: dict[str, dict[str, str]] = {}
        self._symbols: list[Symbol] = []
        self._near: set[int] = set()
        self._driven: dict[str, tuple[str, ...]] = {}
        self._beside = False
        self._num_ops = 0
        self._depth = 0

    def program(self) -> Program:
        module = self._module
        entry = self._computation(module.entry)
        parameters = _parameters(entry)
        block = self._block(entry, UNKNOWN_LOCATION)
        self._functions = {entry.name: self._entry(entry.name, block, parameters), **self._functions}
        return Program(
            name=module.name,
            functions=self._functions,
            entry=entry.name,
            stage=Stage.SCHEDULED,
            num_replicas=_header_int(module.header, "replica_count"),
            num_partitions=_header_int(module.header, "num_partitions"),
            symbols=tuple(self._symbols),
            platform=self._platform,
            num_ops=self._num_ops,
            prefused=True,
            near=frozenset(self._near),
        )

    def _entry(self, name: str, block: Block, parameters: Sequence[Instruction]) -> Function:
        aliases = _aliases(self._module.header, parameters)
        arguments: list[Argument] = []
        for number, parameter in enumerate(parameters):
            label = self._location(parameter).scope.replace("\\'", "'") or parameter.name
            for kind in decode.leaves(parameter.shape):
                place = len(arguments)
                arguments.append(Argument(label, kind, kept_index=number, aliases_output=aliases.get(place)))
        return Function(name, block, tuple(arguments))

    def _computation(self, name: str) -> Computation:
        name = name.lstrip("%")
        found = self._module.computations.get(name)
        if found is None:
            raise InputError(f"{self._source} has no computation %{name}, which it calls", "is the text cut off?")
        return found

    # Values and ops.

    def _new(self, kinds: Sequence[TensorType]) -> Values:
        first = len(self._types)
        self._types.extend(kinds)
        return tuple(range(first, len(self._types)))

    def _op(
        self,
        name: str,
        operands: Values,
        kinds: Sequence[TensorType],
        attrs: Mapping[str, Any] = NO_ATTRIBUTES,
        key: Any = "",
        location: Location = UNKNOWN_LOCATION,
        regions: tuple[Block, ...] = (),
        callee: str = "",
        count: Count = 1,
    ) -> Op:
        """An op with new results of `kinds`. `key`: what tells its attributes and regions from others'."""
        types = self._types
        results = self._new(kinds)
        operand_types = tuple([types[value] for value in operands])
        signed = (name, key, tuple(map(id, operand_types)), tuple(map(id, kinds)), callee)
        number = self._signatures.setdefault(signed, len(self._signatures))
        op = Op(
            name, operands, results, operand_types, tuple(kinds), attrs, regions, count, callee, (), location, number
        )
        for value in results:
            self._definitions[value] = op
        self._num_ops += 1
        return op

    def _location(self, held: Instruction, outer: Location = UNKNOWN_LOCATION) -> Location:
        if not held.metadata:
            return outer
        scope = _SCOPE.search(held.metadata)
        frame, file = _FRAME.search(held.metadata), _FILE.search(held.metadata)
        where = self._module.frames.get(int(frame[1]), ("", 0)) if frame else ("", 0)
        if file:
            where = (file[1], int(file[2]))
        return Location(scope[1], *where) if scope else outer

    def _attributes(self, held: Instruction) -> dict[str, str]:
        found = self._attrs.get(held.rest)
        if found is None:
            found = self._attrs[held.rest] = syntax.attributes(held.rest)
        return found

    # Computations.

    def _block(self, computation: Computation, outer: Location, bound: Sequence[Values] | None = None) -> Block:
        """The ops of a computation. `bound`: values that its parameters stand for, else they are arguments.

        `outer`: where what calls it came from, for instructions that do not say.
        """
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InputError(f"{self._source}: %{computation.name} calls itself")
        env: dict[str, Values] = {}
        args: list[int] = []
        for number, parameter in enumerate(_parameters(computation)):
            if bound is not None:
                env[parameter.name] = bound[number]
            else:
                env[parameter.name] = self._new(decode.leaves(parameter.shape))
                args.extend(env[parameter.name])
                self._place(parameter.shape, env[parameter.name])
        ops: list[Op] = []
        shapes = _Shapes(computation)
        for held in computation.instructions:
            if held.opcode == "parameter":
                continue
            try:
                self._instruction(held, env, ops, shapes, outer)
            except (ValueError, IndexError, KeyError) as error:
                raise InputError(f"{self._source}: %{held.name} ({held.opcode}) is damaged: {error}") from None
        self._depth -= 1
        kinds = tuple([self._types[arg] for arg in args])
        return Block(tuple(args), kinds, tuple(ops), env[computation.root.name])

    def _instruction(
        self, held: Instruction, env: dict[str, Values], ops: list[Op], shapes: "_Shapes", outer: Location
    ) -> None:
        opcode = held.opcode
        try:
            if opcode == "get-tuple-element":
                env[held.name] = self._element(held, env, shapes)
                return
            named = () if opcode in ("constant", "iota") else held.operands
            inputs = [env[name] for name in named]
        except KeyError as missing:
            raise InputError(f"{self._source}: %{held.name} reads {missing}, which is nowhere before it") from None
        if opcode in ("tuple", "after-all", "optimization-barrier", "opt-barrier"):
            env[held.name] = tuple(value for values in inputs for value in values)
            return
        if opcode.endswith(("-done", "-update")):
            env[held.name] = inputs[0]
            return
        if held.name in self._driven:
            env[held.name] = tuple(env[parameter][0] for parameter in self._driven[held.name])
            return
        flat = tuple(value for values in inputs for value in values)
        kinds = decode.leaves(shapes.result(held))
        location = self._location(held, outer)
        env[held.name] = self._made(held, flat, inputs, kinds, location, ops)
        self._place(shapes.result(held), env[held.name])

    def _place(self, shape: str, values: Values) -> None:
        """Remember which of `values`, laid out as `shape` says, lie on chip."""
        self._near.update(values[place] for place in decode.on_chip(shape) if place < len(values))

    def _element(self, held: Instruction, env: dict[str, Values], shapes: "_Shapes") -> Values:
        """The leaves of one part of a tuple."""
        index = int(self._attributes(held).get("index", "0"))
        parts = decode.parts(shapes.of(held.operands[0]))
        start = sum(len(decode.leaves(part)) for part in parts[:index])
        return env[held.operands[0]][start : start + len(decode.leaves(parts[index]))]

    def _made(
        self,
        held: Instruction,
        flat: Values,
        inputs: Sequence[Values],
        kinds: Sequence[TensorType],
        location: Location,
        ops: list[Op],
    ) -> Values:
        attrs = self._attributes(held)
        opcode = (
            held.opcode.removesuffix("-start") if held.opcode.removesuffix("-start") in _ASYNC_KINDS else held.opcode
        )
        inner = fused_collective(self._computation(attrs.get("calls", ""))) if opcode == "fusion" else None
        if inner is not None:
            return self._collective_fusion(inner, attrs, flat, kinds, location, ops)
        if opcode == "fusion":
            op = self._fusion(attrs, flat, kinds, location)
        elif opcode in ("call", "async"):
            op = self._call(attrs, flat, kinds, location, beside=held.opcode.endswith("-start"))
        elif opcode == "while":
            op = self._while(attrs, flat, kinds, location)
        elif opcode == "conditional":
            op = self._conditional(attrs, inputs, kinds, location)
        elif opcode == "custom-call":
            op = self._custom_call(attrs, flat, kinds, location)
        else:
            op = self._plain(held, attrs, flat, kinds, location)
        ops.append(op)
        return op.results

    def _plain(
        self, held: Instruction, attrs: dict[str, str], flat: Values, kinds: Sequence[TensorType], location: Location
    ) -> Op:
        name = op_name(held.opcode)
        inside = held.operands[0] if held.opcode == "constant" else ""
        rank = self._types[flat[0]].rank if flat else 0
        made = decoded(name, attrs, inside, kinds[0] if kinds else None, rank)
        operands = [self._types[value] for value in flat]
        check_product(name, made, operands)
        if name in COLLECTIVES:
            made = {**made, "asynchronous": self._beside or _is_asynchronous(held, attrs)}
        elif name == "stablehlo.convolution" and self._platform == "tpu":
            product = as_product(made, (operands[0], operands[1]), kinds[0])
            if product is not None:
                name = "stablehlo.dot_general"
                made = {"dot_dimension_numbers": product, "precision_config": made["precision_config"]}
        elif held.opcode.endswith("-start"):
            made = {**made, "asynchronous": True}
        elif self._platform == "tpu" and all(kind.elements == 1 for kind in (*operands, *kinds)):
            made = {**made, NO_LAUNCH: True}
        regions = tuple(self._region(attrs[key]) for key in ("select", "scatter", "to_apply") if key in attrs)
        if (name in NEEDS_REGION and not regions) or not (flat or name in NEEDS_NOTHING):
            raise ValueError("it has lost its operands or what it applies")
        if not kinds and held.shape != "()":
            raise ValueError(f"'{held.shape}' is no shape")
        return self._op(name, flat, kinds, made, (held.rest, inside), location, regions)

    def _region(self, name: str) -> Block:
        """The scalar body of a reduction, sort, map or scatter; one that several share is read once."""
        if name not in self._regions:
            self._regions[name] = self._block(self._computation(name), UNKNOWN_LOCATION)
        return self._regions[name]

    def _function(self, name: str, location: Location, flat: Values, kinds: Sequence[TensorType]) -> str:
        name = name.lstrip("%")
        if name not in self._functions:
            self._functions[name] = Function(name, self._block(self._computation(name), location))
        _fits(self._functions[name].body, flat, kinds)
        return name

    def _fusion(self, attrs: dict[str, str], flat: Values, kinds: Sequence[TensorType], location: Location) -> Op:
        config = decode.backend_config(attrs.get("backend_config", ""))
        made = {"fusion_kind": attrs.get("kind", ""), **_fusion_notes(attrs.get("kind", ""), config)}
        callee = self._function(attrs.get("calls", ""), location, flat, kinds)
        return self._op("mhlo.fusion", flat, kinds, made, callee, location, callee=callee)

    def _collective_fusion(
        self,
        inner: FusedCollective,
        attrs: dict[str, str],
        flat: Values,
        kinds: Sequence[TensorType],
        location: Location,
        ops: list[Op],
    ) -> Values:
        """A fusion that holds a collective: it starts, drives on, ends or is that."""
        results = decode.leaves(inner.instruction.shape)
        operands = tuple(flat[place] for place in inner.operands)
        first = inner.operands[-1] + 1
        if inner.part is Part.DONE:
            return flat[first : first + len(results)]
        if inner.part is Part.DRIVES:
            names = _parameters(self._computation(attrs.get("calls", "")))
            self._driven[inner.instruction.name] = tuple(held.name for held in names[first : first + len(results)])
            op = self._fusion(attrs, flat, kinds, location)
            ops.append(op)
            return op.results
        starts = inner.part is Part.START
        op = self._collective(inner.instruction, operands, results if starts else kinds, location, beside=starts)
        ops.append(op)
        if not starts:
            return op.results
        state = self._nothing(kinds[len(operands) + len(results) :])
        ops.append(state)
        return (*operands, *op.results, *state.results)

    def _collective(
        self, held: Instruction, operands: Values, kinds: Sequence[TensorType], location: Location, *, beside: bool
    ) -> Op:
        name = op_name(held.opcode)
        if name == "stablehlo.all_reduce" and any(
            self._types[value] != kind for value, kind in zip(operands, kinds, strict=False)
        ):
            name = "stablehlo.reduce_scatter"
        attrs = self._attributes(held)
        made = {**decoded(name, attrs, "", kinds[0], self._types[operands[0]].rank), "asynchronous": beside}
        regions = (self._region(attrs["to_apply"]),) if "to_apply" in attrs else ()
        return self._op(name, operands, kinds, made, held.rest, location, regions)

    def _nothing(self, kinds: Sequence[TensorType]) -> Op:
        """Values that hold nothing yet."""
        return self._op("stablehlo.create_token", (), kinds)

    def _call(
        self,
        attrs: dict[str, str],
        flat: Values,
        kinds: Sequence[TensorType],
        location: Location,
        *,
        beside: bool = False,
    ) -> Op:
        outer, self._beside = self._beside, self._beside or beside
        callee = self._function(attrs.get("to_apply", attrs.get("calls", "")), location, flat, kinds)
        self._beside = outer
        return self._op("func.call", flat, kinds, NO_ATTRIBUTES, callee, location, callee=callee)

    def _while(self, attrs: dict[str, str], flat: Values, kinds: Sequence[TensorType], location: Location) -> Op:
        cond = self._block(self._computation(attrs.get("condition", "")), location)
        body = self._block(self._computation(attrs.get("body", "")), location)
        _fits(body, flat, kinds)
        _fits(cond, flat, kinds[:1])
        count = self._trips(attrs, flat, cond, body)
        key = (attrs.get("body", ""), len(self._types))
        return self._op("stablehlo.while", flat, kinds, NO_ATTRIBUTES, key, location, (cond, body), count=count)

    def _trips(self, attrs: dict[str, str], flat: Values, cond: Block, body: Block) -> Count:
        """As the compiler found it, else as the loop's own ops tell, else a symbol."""
        known = decode.nested(decode.backend_config(attrs.get("backend_config", "")), "known_trip_count", "n")
        if known is not None:
            return int(known)
        found = trip_count(flat, cond, body, self._definitions)
        if not isinstance(found, Unknown):
            return found
        number = len(self._symbols) + 1
        self._symbols.append(Symbol("while_trips" if number == 1 else f"while_trips{number}", low=1))
        return self._symbols[-1]

    def _conditional(
        self, attrs: dict[str, str], inputs: Sequence[Values], kinds: Sequence[TensorType], location: Location
    ) -> Op:
        listed = attrs.get("branch_computations", "").strip("{}")
        names = listed.split(",") if listed else [attrs.get("true_computation", ""), attrs.get("false_computation", "")]
        regions = tuple(
            self._block(self._computation(name.strip()), location, [given])
            for name, given in zip(names, inputs[1:], strict=False)
        )
        for region in regions:
            _fits(region, (), kinds)
        name = "stablehlo.case" if listed else "stablehlo.if"
        return self._op(name, inputs[0], kinds, NO_ATTRIBUTES, len(self._types), location, regions)

    # Libraries.

    def _custom_call(self, attrs: dict[str, str], flat: Values, kinds: Sequence[TensorType], location: Location) -> Op:
        target = attrs.get("custom_call_target", "").strip('"')
        config = decode.backend_config(attrs.get("backend_config", ""))
        operands = [self._types[value] for value in flat]
        if target in NAMED_AGAIN:
            return self._op("stablehlo.concatenate", flat, kinds, {NO_LAUNCH: True}, target, location)
        if target in NOTHING:
            return self._nothing(kinds)
        found = product(target, attrs, config, operands, kinds[0]) if kinds and len(flat) > 1 else None
        if found is not None:
            return self._product(found, flat, kinds, location, (target, str(sorted(attrs.items()))))
        made = decoded("stablehlo.custom_call", attrs, "", None, 0)
        if "dim_labels" in attrs:
            made = {**made, "dimension_numbers": decode.conv_dims(attrs["dim_labels"])}
        return self._op("stablehlo.custom_call", flat, kinds, made, str(sorted(attrs.items())), location)

    def _product(self, found: Product, flat: Values, kinds: Sequence[TensorType], location: Location, key: Any) -> Op:
        """One launch of a library: the product, what is added to it, the activation, in one fusion."""
        args = self._new([self._types[value] for value in flat])
        head = self._op(found.name, args[:2], kinds[:1], found.attrs, (key, found.library), location)
        ops = [head]
        for place in found.adds:
            ops.append(self._op("stablehlo.add", (ops[-1].result, args[place]), kinds[:1], location=location))
        if found.activation:
            ops.append(self._op(f"stablehlo.{found.activation}", (ops[-1].result,), kinds[:1], location=location))
        rest = [self._op("stablehlo.constant", (), (kind,), location=location) for kind in kinds[1:]]
        returns = (ops[-1].result, *(op.result for op in rest))
        name = f"{found.library}.{len(self._functions)}"
        block = Block(args, tuple(self._types[arg] for arg in args), (*ops, *rest), returns)
        self._functions[name] = Function(name, block)
        made = {"fusion_kind": "library", "library": found.library}
        return self._op("mhlo.fusion", flat, kinds, made, name, location, callee=name)


def _fits(block: Block, flat: Values, kinds: Sequence[TensorType]) -> None:
    """Raises `ValueError` where a computation does not take what it is given, or return what is expected."""
    if len(block.args) != len(flat) or len(block.returns) != len(kinds):
        raise ValueError(f"it passes {len(flat)} values for {len(block.args)}, or takes {len(kinds)} back")


class _Shapes:
    """The shapes of a computation's instructions; of one that starts something, that of what it will have done."""

    def __init__(self, computation: Computation) -> None:
        self._shape = {held.name: held.shape for held in computation.instructions}
        self._started: dict[str, str] = {}
        for held in reversed(computation.instructions):
            if held.operands and held.opcode.endswith("-done"):
                self._started[held.operands[0]] = held.shape
            elif held.operands and held.opcode.endswith("-update") and held.name in self._started:
                self._started[held.operands[0]] = self._started[held.name]

    def of(self, name: str) -> str:
        return self._started.get(name) or self._shape[name]

    def result(self, held: Instruction) -> str:
        return self.of(held.name)


def _is_asynchronous(held: Instruction, attrs: dict[str, str]) -> bool:
    """Whether the compiler lets it run beside other work; a pair that it marked as synchronous does not."""
    config = decode.backend_config(attrs.get("backend_config", ""))
    return held.opcode.endswith("-start") and not decode.nested(config, "collective_backend_config", "is_sync")


def _fusion_notes(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Who generates a fusion, its tiling, and the cycles that the compiler estimates, where it says so."""
    made: dict[str, Any] = {}
    held = decode.nested(config, "fusion_backend_config")
    name = str(decode.nested(config, "fusion_backend_config", "kind") or "")
    if "triton" in name:
        made["library"] = "triton"
    elif "cudnn" in name:
        made["library"] = "cudnn"
    tiles: Any = decode.nested(held or {}, "block_level_fusion_config", "output_tiles")
    if tiles:
        made["tiles"] = "x".join(str(size) for size in tiles[0].get("sizes", ()))
    cycles = decode.nested(config, "window_config", "estimated_cycles") or config.get("estimated_cycles")
    if cycles:
        made["estimated_cycles"] = float(cycles)
    return made


def _parameters(computation: Computation) -> list[Instruction]:
    found = [held for held in computation.instructions if held.opcode == "parameter"]
    return sorted(found, key=lambda held: int(held.operands[0]) if held.operands[0].isdigit() else 0)


def _header_int(header: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", header)
    return int(found[1]) if found else 1


def _aliases(header: str, parameters: Sequence[Instruction]) -> dict[int, int]:
    """Argument -> result that takes over its buffer, both counted over the leaves of tuples."""
    start = header.find("input_output_alias={")
    if start < 0:
        return {}
    offsets: list[int] = []
    total = 0
    for parameter in parameters:
        offsets.append(total)
        total += len(decode.leaves(parameter.shape))
    aliases: dict[int, int] = {}
    for output, number, inside in _ALIAS.findall(header[start:]):
        place = offsets[int(number)] + sum(decode.ints(inside)[:1])
        aliases[place] = sum(decode.ints(output)[:1])
    return aliases


__all__ = ["is_scheduled", "platform_of", "read_hlo"]
