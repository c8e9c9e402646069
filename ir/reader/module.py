"""The reader: one memoising walk over an MLIR module to our typed program."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

from stablecast.ir import mlir
from stablecast.ir.attributes import Dense
from stablecast.ir.errors import InputError
from stablecast.ir.hlo import read_hlo
from stablecast.ir.loops import Unknown, constant, source_of, trip_count
from stablecast.ir.pause import paused_gc
from stablecast.ir.program import (
    NO_ATTRIBUTES,
    Argument,
    Block,
    Function,
    Mesh,
    Op,
    Program,
    Sharding,
    Stage,
)
from stablecast.ir.reader.decode import Decoder
from stablecast.ir.reader.locations import LocationReader
from stablecast.ir.types import Count, Symbol, ValueType

_TERMINATORS = frozenset({"stablehlo.return", "func.return", "sdy.return", "mhlo.return"})
_CALLEE_ATTRIBUTES = ("callee", "decomposition", "call_target", "fused_computation", "called_computation")
_SHARDING_ATTRIBUTES = ("sdy.sharding", "mhlo.sharding")
_MHLO_ONLY = frozenset(
    f"mhlo.{name}"
    for name in (
        "acos",
        "acosh",
        "add_dependency",
        "asin",
        "asinh",
        "async_update",
        "atanh",
        "bitcast",
        "copy",
        "cosh",
        "domain",
        "erf",
        "fusion",
        "minimum_broadcast_shapes",
        "mulhi",
        "ragged_dot",
        "scan",
        "sinh",
        "stochastic_convert",
        "topk",
        "trace",
        "xla.rng_get_and_update_state",
    )
)
"""Ops of the MHLO dialect that StableHLO has not; the others are read as the StableHLO op of the same name."""

_NOTHING: Mapping[int, int] = {}

CallConstants = Mapping[tuple[str, int], int]
"""Integers that every call of a function passes for an argument, by function and index."""


class _Decoded(NamedTuple):
    attrs: Any
    shardings: tuple[Sharding, ...]
    callee: str
    number: int


@lru_cache(maxsize=4)
def read(data: bytes, source: str = "module") -> Program:
    """The program in `data`: StableHLO as MLIR text, bytecode or portable artifact, or scheduled HLO text.

    `source` names it in messages. Raises `InputError` for text that is no module, an empty module, a module without
    an entry function, dynamic shapes and unsupported types.
    """
    if data.lstrip()[:9] == b"HloModule":
        return read_hlo(data, source)
    module = mlir.parse(data, source)
    constants: CallConstants = {}
    while True:
        reader = _ModuleReader(module, source, constants)
        with paused_gc():
            program = reader.program()
        found = reader.call_constants(program) if program.symbols else constants
        if found == constants:
            return program
        constants = found


class _ModuleReader:
    def __init__(self, module: Any, source: str, constants: CallConstants) -> None:
        self._module = module
        self._constants = constants
        self._source = source
        self._decoder = Decoder(source)
        self._locate = LocationReader(source)
        self._decoded: dict[Any, _Decoded] = {}
        self._signatures: dict[Any, int] = {}
        self._empty = _Decoded(NO_ATTRIBUTES, (), "", 0)
        self._ids: dict[Any, int] = {}
        self._types: list[ValueType] = []
        self._definitions: dict[int, Op] = {}
        self._argument_names: dict[int, str] = {}
        self._symbols: dict[str, Symbol] = {}
        self._num_ops = 0
        self._saw: set[str] = set()
        self._holds_regions: set[str] = set()
        self._annotated = {"sdy": False, "gspmd": False}

    def program(self) -> Program:
        functions: dict[str, Function] = {}
        meshes: list[Mesh] = []
        public: list[str] = []
        for view in self._module.body.operations:
            op = view.operation
            name = op.name
            if name == "func.func":
                function = self._function(op)
                functions[function.name] = function
                if "sym_visibility" not in op.attributes or op.attributes["sym_visibility"].value == "public":
                    public.append(function.name)
            elif name == "sdy.mesh":
                label = op.attributes["sym_name"].value
                meshes.append(self._decoder.mesh(op.attributes["mesh"], label))
        entry = self._entry(functions, public)
        if not functions[entry].body.ops and not functions[entry].body.returns:
            raise InputError(
                f"{self._source}: function @{entry} is empty", "give a module whose entry computes something"
            )
        return self._assemble(functions, entry, tuple(meshes))

    def _assemble(self, functions: dict[str, Function], entry: str, meshes: tuple[Mesh, ...]) -> Program:
        attributes = self._module.operation.attributes
        replicas = self._int_attribute(attributes, "mhlo.num_replicas", 1)
        partitions = self._int_attribute(attributes, "mhlo.num_partitions", 1)
        if partitions == 1 and meshes:
            partitions = max(mesh.size for mesh in meshes)
        return Program(
            name=attributes["sym_name"].value if "sym_name" in attributes else "module",
            functions=functions,
            entry=entry,
            stage=self._stage(partitions, meshes),
            num_replicas=replicas,
            num_partitions=partitions,
            meshes=meshes,
            symbols=tuple(self._symbols.values()),
            num_ops=self._num_ops,
            prefused="mhlo.fusion" in self._saw,
        )

    def _stage(self, partitions: int, meshes: tuple[Mesh, ...]) -> Stage:
        if partitions == 1:
            return Stage.PER_DEVICE
        if self._decoder.saw_mesh_groups and not self._annotated["sdy"]:
            return Stage.PER_DEVICE
        if meshes or self._annotated["sdy"]:
            return Stage.GLOBAL_SDY
        return Stage.GLOBAL_GSPMD if self._annotated["gspmd"] else Stage.PER_DEVICE

    def _entry(self, functions: dict[str, Function], public: list[str]) -> str:
        if not functions:
            raise InputError(f"{self._source} holds no function", "give a StableHLO module with a function @main")
        if "main" in functions:
            return "main"
        if len(public) == 1:
            return public[0]
        if len(functions) == 1:
            return next(iter(functions))
        names = ", ".join(f"@{name}" for name in public or functions)
        raise InputError(f"{self._source} has several functions and none is @main: {names}", "name one of them main")

    @staticmethod
    def _int_attribute(attributes: Any, name: str, default: int) -> int:
        return int(attributes[name].value) if name in attributes else default

    def _function(self, op: Any) -> Function:
        attributes = op.attributes
        name = attributes["sym_name"].value
        blocks = list(op.regions[0].blocks)
        if len(blocks) != 1:
            what = "is only declared" if not blocks else "has branches between blocks"
            raise InputError(
                f"{self._source}: function @{name} {what}", "export it as StableHLO with structured control flow"
            )
        arguments = self._arguments(blocks[0], attributes, name)
        results = self._dicts(attributes, "res_attrs")
        return Function(
            name,
            self._block(blocks[0]),
            arguments,
            tuple(str(entry.get("jax.result_info", "")) for entry in results),
            tuple(self._sharding_of(entry) for entry in results),
        )

    def _dicts(self, attributes: Any, name: str) -> list[dict[str, Any]]:
        if name not in attributes:
            return []
        return [
            {item.name: self._decoder.attribute(item.name, item.attr) for item in entry} for entry in attributes[name]
        ]

    def _arguments(self, block: Any, attributes: Any, function: str) -> tuple[Argument, ...]:
        entries = self._dicts(attributes, "arg_attrs")
        arguments: list[Argument] = []
        for index, value in enumerate(block.arguments):
            entry = entries[index] if entries else {}
            name = entry.get("jax.global_constant") or self._locate(value.location).scope or f"arg{index}"
            alias = entry.get("tf.aliasing_output")
            sharding = self._sharding_of(entry)
            arguments.append(
                Argument(name, self._decoder.type(value.type), sharding, kept_index=index, aliases_output=alias)
            )
            value_id = len(self._types) + index
            self._argument_names[value_id] = name
            if (function, index) in self._constants:
                held = Dense((self._constants[function, index],), splat=True)
                self._definitions[value_id] = Op("stablehlo.constant", (), (value_id,), (), (), {"value": held})
        return tuple(arguments)

    def _sharding_of(self, entry: dict[str, Any]) -> Sharding | None:
        if "sdy.sharding" in entry:
            self._annotated["sdy"] = True
            return entry["sdy.sharding"][0]
        if "mhlo.sharding" in entry:
            self._annotated["gspmd"] = True
            return Sharding(gspmd=entry["mhlo.sharding"])
        return None

    def _new_values(self, values: Any) -> tuple[int, ...]:
        ids, types, kind = self._ids, self._types, self._decoder.type
        first = len(types)
        for value in values:
            ids[value] = len(types)
            types.append(kind(value.type))
        return tuple(range(first, len(types)))

    def _block(self, block: Any, invariant: Mapping[int, int] = _NOTHING) -> Block:
        """`invariant`: index of an argument -> the outer value that it always equals."""
        args = self._new_values(block.arguments)
        for index, outer in invariant.items():
            self._definitions[args[index]] = Op("stablehlo.optimization_barrier", (outer,), (args[index],), (), ())
        arg_types = tuple(self._types[arg] for arg in args)
        ops: list[Op] = []
        returns: tuple[int, ...] = ()
        for view in block.operations:
            raw = view.operation
            name = raw.name
            if name.startswith("mhlo.") and name not in _MHLO_ONLY:
                name = "stable" + name[1:]
            if name in _TERMINATORS:
                returns = tuple([self._ids[value] for value in raw.operands])
            else:
                ops.append(self._op(raw, name))
        self._num_ops += len(ops)
        return Block(args, arg_types, tuple(ops), returns)

    def _op(self, raw: Any, name: str) -> Op:
        ids, types = self._ids, self._types
        operands = tuple([ids[value] for value in raw.operands])
        results = self._new_values(raw.results)
        operand_types = tuple([types[value] for value in operands])
        result_types = tuple([types[value] for value in results])
        decoded = self._attributes(name, raw.attributes)
        location = self._locate(raw.location)
        regions: tuple[Block, ...] = ()
        count: Count = 1
        if name in self._holds_regions or (name not in self._saw and self._note_regions(raw, name)):
            invariant = self._invariant(raw, operands) if name == "stablehlo.while" else _NOTHING
            regions = tuple([self._region(region, name, invariant) for region in raw.regions])
            if name == "stablehlo.while":
                count = self._count(operands, regions, location.scope)
        self._saw.add(name)
        shape = tuple([region_key(region) for region in regions]) if regions else ()
        key = (name, decoded.number, tuple(map(id, operand_types)), tuple(map(id, result_types)), shape, count)
        signature = self._signatures.setdefault(key, len(self._signatures))
        op = Op(
            name,
            operands,
            results,
            operand_types,
            result_types,
            decoded.attrs,
            regions,
            count,
            decoded.callee,
            decoded.shardings,
            location,
            signature,
        )
        for value in results:
            self._definitions[value] = op
        return op

    def _note_regions(self, raw: Any, name: str) -> bool:
        """Whether ops called `name` have regions: a property of the op, so the first one tells."""
        if not len(raw.regions):
            return False
        self._holds_regions.add(name)
        return True

    @staticmethod
    def _invariant(loop: Any, operands: tuple[int, ...]) -> Mapping[int, int]:
        """What a loop carries and never changes, so that bounds of loops inside it are seen."""
        body = loop.regions[1].blocks[0]
        returned = body.operations[len(body.operations) - 1].operation.operands
        pairs = enumerate(zip(body.arguments, returned, operands, strict=True))
        return {index: outer for index, (arg, value, outer) in pairs if value == arg}

    def _region(self, region: Any, name: str, invariant: Mapping[int, int]) -> Block:
        blocks = list(region.blocks)
        if len(blocks) > 1:
            raise InputError(f"{self._source}: a region of {name} has branches between blocks")
        return self._block(blocks[0], invariant) if blocks else Block((), (), (), ())

    def _attributes(self, name: str, attributes: Any) -> _Decoded:
        if not len(attributes):
            return self._empty
        try:
            pairs = tuple([(label, attributes[label]) for label in attributes])
        except TypeError:
            pairs = tuple([_readable(attributes, label) for label in attributes])
        found = self._decoded.get(pairs)
        if found is None:
            found = self._decoded[pairs] = self._decode_attributes(pairs)
        return found

    def _decode_attributes(self, pairs: tuple[tuple[str, Any], ...]) -> _Decoded:
        attrs = {label: self._decoder.attribute(label, attribute) for label, attribute in pairs}
        shardings: tuple[Sharding, ...] = ()
        for label in _SHARDING_ATTRIBUTES:
            if label in attrs:
                value: Any = attrs.pop(label)
                self._annotated["sdy" if label.startswith("sdy") else "gspmd"] = True
                known = isinstance(value, tuple)
                shardings = cast("tuple[Sharding, ...]", value) if known else (Sharding(gspmd=str(value)),)
        callee = next((attrs[label] for label in _CALLEE_ATTRIBUTES if isinstance(attrs.get(label), str)), "")
        return _Decoded(attrs, shardings, callee, len(self._decoded) + 1)

    def call_constants(self, program: Program) -> CallConstants:
        """Integers that every call of a function passes for the same argument."""
        passed: dict[tuple[str, int], set[int | None]] = {}
        for op in program.walk():
            if op.callee in program.functions:
                for index, value in enumerate(op.operands):
                    passed.setdefault((op.callee, index), set()).add(constant(value, self._definitions))
        single = {place: next(iter(values)) for place, values in passed.items() if len(values) == 1}
        return {place: value for place, value in single.items() if value is not None}

    def _count(self, operands: tuple[int, ...], regions: tuple[Block, ...], scope: str) -> Count:
        count = trip_count(operands, regions[0], regions[1], self._definitions)
        return self._symbol(count) if isinstance(count, Unknown) else count

    def _symbol(self, unknown: Unknown) -> Symbol:
        """A symbol for an unknown trip count, named after the argument that decides it where one does."""
        argument = self._argument_names.get(source_of(unknown.bound, self._definitions))
        base = argument if argument and unknown.counts_to_bound else f"{argument or 'while'}_trips"
        if argument and unknown.counts_to_bound and base in self._symbols:
            return self._symbols[base]
        name, number = base, 2
        while name in self._symbols:
            name, number = f"{base}{number}", number + 1
        self._symbols[name] = Symbol(name, low=1)
        return self._symbols[name]


def _readable(attributes: Any, label: str) -> tuple[str, Any]:
    """An attribute, or None where the bindings have no class for it, as for constants of complex numbers."""
    try:
        return label, attributes[label]
    except TypeError:
        return label, None


def region_key(block: Block) -> tuple[Any, ...]:
    """A block up to renaming of the values that it defines; outer values stand as they are."""
    local = {value: ("arg", index) for index, value in enumerate(block.args)}
    parts: list[Any] = []
    for index, op in enumerate(block.ops):
        parts.append((op.signature, tuple([local.get(value, value) for value in op.operands])))
        for number, value in enumerate(op.results):
            local[value] = (index, number)  # type: ignore[assignment]
    return (len(block.args), tuple(parts), tuple([local.get(value, value) for value in block.returns]))
