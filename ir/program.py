"""The typed program: what the StableHLO reader returns and every lowering pass rewrites."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from stablecast.ir.errors import InputError
from stablecast.ir.types import UNKNOWN_LOCATION, Count, Location, Symbol, ValueType


class Stage(StrEnum):
    """How far a program has been partitioned.

    `global_*`: shapes are those of the whole mesh, with Shardy or GSPMD annotations. `per_device`: shapes and
    collectives are one device's. `scheduled`: one device's, fused and ordered by a compiler. Only the global ones may
    be divided by the mesh.
    """

    GLOBAL_SDY = "global_sdy"
    GLOBAL_GSPMD = "global_gspmd"
    PER_DEVICE = "per_device"
    SCHEDULED = "scheduled"

    @property
    def is_global(self) -> bool:
        return self in (Stage.GLOBAL_SDY, Stage.GLOBAL_GSPMD)


@dataclass(frozen=True, slots=True)
class Mesh:
    """A logical device mesh: `axes` are (name, size), major to minor; `device_ids` only where they are not 0..N-1."""

    name: str
    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of devices."""
        product = 1
        for _, size in self.axes:
            product *= size
        return product

    def axis_size(self, name: str) -> int:
        """Devices along axis `name`; raises `InputError` for an unknown one."""
        for axis, size in self.axes:
            if axis == name:
                return size
        raise InputError(f"mesh '{self.name}' has no axis '{name}'", f"its axes are {dict(self.axes)}")


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis, or the part of it that `sub` = (pre_size, size) names, as Shardy's `"x":(1)2`."""

    name: str
    sub: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.name if self.sub is None else f"{self.name}:({self.sub[0]}){self.sub[1]}"


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is laid over a mesh.

    `dims`: for each dimension the axes that split it, major to minor. `open_dims`: dimensions that propagation may
    split further. `replicated`, `unreduced`: axes with these states. `gspmd`: the text of an old-style sharding,
    which then stands alone.
    """

    mesh: str = ""
    dims: tuple[tuple[Axis, ...], ...] = ()
    open_dims: tuple[int, ...] = ()
    replicated: tuple[Axis, ...] = ()
    unreduced: tuple[Axis, ...] = ()
    gspmd: str = ""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every axis that splits some dimension."""
        return tuple(axis for dim in self.dims for axis in dim)


NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
NO_LAUNCH: Final = "stablecast.no_launch"
"""Attribute of ops that a compiled program runs without starting anything."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    `name`: dialect and op, `stablehlo.add`. `operands`, `results`: value ids, unique within the function.
    `attrs`: decoded attributes: plain Python values, or the dataclasses of `ir.attributes`. `regions`: one block
    each. `count`: trips of a `while`, 1 for all else. `callee`: function name of calls, composites and fusions.
    `shardings`: one a result, where annotated. `signature` numbers ops that are equal but for their values and
    location: work and kernels are worked out once for each.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    operand_types: tuple[ValueType, ...]
    result_types: tuple[ValueType, ...]
    attrs: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRIBUTES)
    regions: tuple["Block", ...] = ()
    count: Count = 1
    callee: str = ""
    shardings: tuple[Sharding, ...] = ()
    location: Location = UNKNOWN_LOCATION
    signature: int = -1

    @property
    def result(self) -> int:
        return self.results[0]

    @property
    def result_type(self) -> ValueType:
        return self.result_types[0]


@dataclass(frozen=True, slots=True)
class Block:
    """Arguments (value ids and types) and ops in program order; `returns`: the ids its terminator passes on."""

    args: tuple[int, ...]
    arg_types: tuple[ValueType, ...]
    ops: tuple[Op, ...]
    returns: tuple[int, ...]

    def walk(self) -> Iterator[Op]:
        """Every op, those of nested regions after the op that holds them."""
        for op in self.ops:
            yield op
            for region in op.regions:
                yield from region.walk()


class ArgumentKind(StrEnum):
    """What an argument of a step is."""

    PARAM = "param"
    OPT_STATE = "opt_state"
    BATCH = "batch"
    KV_CACHE = "kv_cache"
    RNG = "rng"
    CONST = "const"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of the entry function.

    `kept_index`: its place among the arguments that the user's function has (frontends drop unused ones).
    `aliases_output`: index of the result that takes over its buffer (donation), None if none does.
    """

    name: str
    type: ValueType
    sharding: Sharding | None = None
    kind: ArgumentKind = ArgumentKind.UNKNOWN
    kept_index: int = -1
    aliases_output: int | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """A function: its block and, for the entry, its arguments and result names and shardings."""

    name: str
    body: Block
    arguments: tuple[Argument, ...] = ()
    result_names: tuple[str, ...] = ()
    result_shardings: tuple[Sharding | None, ...] = ()

    @property
    def result_types(self) -> tuple[ValueType, ...]:
        """Types of the values that it returns."""
        known = dict(zip(self.body.args, self.body.arg_types, strict=True))
        for op in self.body.ops:
            known.update(zip(op.results, op.result_types, strict=True))
        return tuple(known[value] for value in self.body.returns)


@dataclass(frozen=True, slots=True)
class Program:
    """A whole module.

    `functions` by name, `entry` among them. `stage`, `num_replicas`, `num_partitions`, `meshes`: see `Stage`.
    `symbols`: unknown trip counts. `platform`: what it was lowered for (`cuda`, `rocm`, `tpu`, `cpu`), empty if the
    module does not say. `num_ops`: ops read, nested ones included. `prefused`: it holds compiler-made fusions.
    `notes`: what passes assumed or modelled. `near`: values that the compiler keeps in memory on chip.
    """

    name: str
    functions: Mapping[str, Function]
    entry: str
    stage: Stage = Stage.PER_DEVICE
    num_replicas: int = 1
    num_partitions: int = 1
    meshes: tuple[Mesh, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    platform: str = ""
    num_ops: int = 0
    prefused: bool = False
    notes: tuple[str, ...] = ()
    near: frozenset[int] = frozenset()

    @property
    def main(self) -> Function:
        return self.functions[self.entry]

    @property
    def num_devices(self) -> int:
        """Devices that run it: replicas times partitions."""
        return self.num_replicas * self.num_partitions

    def walk(self) -> Iterator[Op]:
        """Every op of every function, in the order of the module."""
        for function in self.functions.values():
            yield from function.body.walk()
