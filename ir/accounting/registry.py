"""Which rule gives the work of which op: keyed by the op's full name, and by target for custom calls and composites."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op

if TYPE_CHECKING:
    from stablecast.ir.accounting.context import Context

Rule = Callable[[Op, "Context"], OpWork]
"""Gives the work of one op; a custom-call rule may leave `reads` and `writes` empty: the boundary then counts."""


class Kind(StrEnum):
    """What the registry knows of an op: a `rule` for its work, a `structure` whose regions or callee hold the work,
    an op that is part of another (`part`), or one that is `refused`."""

    RULE = "rule"
    STRUCTURE = "structure"
    PART = "part"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of the op `name`.

    `control`: on rank-0 integers or booleans the op is loop and address control, which is no work. `in_place`: it may
    write into the buffer of its first operand. `notes`: the formula, or why it is refused.
    """

    name: str
    kind: Kind
    rule: Rule | None = None
    klass: KernelClass | None = None
    basis: Basis = Basis.EXACT
    notes: str = ""
    control: bool = False
    in_place: bool = False


class Registry:
    """Entries by name; a name that is registered twice is an error."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._entries: dict[str, Entry] = {}

    def add(self, entry: Entry) -> None:
        """Register `entry`; raises `InputError` where its name is taken."""
        if entry.name in self._entries:
            raise InputError(f"{self._what} '{entry.name}' already has a work rule")
        self._entries[entry.name] = entry

    def remove(self, name: str) -> None:
        """Forget `name`, if it is known."""
        self._entries.pop(name, None)

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


OPS = Registry("op")
"""Every op that is known, by full name."""

TARGETS = Registry("target")
"""Every custom-call target and composite name that is known."""


def hlo(*names: str) -> tuple[str, ...]:
    """These ops in the `stablehlo` and the `mhlo` dialect."""
    return tuple(f"{dialect}.{name}" for dialect in ("stablehlo", "mhlo") for name in names)


def rule(
    *names: str,
    klass: KernelClass = KernelClass.ELEMENTWISE,
    basis: Basis = Basis.EXACT,
    notes: str = "",
    control: bool = False,
    in_place: bool = False,
) -> Callable[[Rule], Rule]:
    """Register the decorated function as the work rule of the ops `names` (full names)."""

    def register(function: Rule) -> Rule:
        for name in names:
            OPS.add(Entry(name, Kind.RULE, function, klass, basis, notes, control, in_place))
        return function

    return register


def structure(*names: str, notes: str) -> None:
    """Register ops whose regions or callee hold the work."""
    for name in names:
        OPS.add(Entry(name, Kind.STRUCTURE, notes=notes))


def part(*names: str, notes: str) -> None:
    """Register ops that never stand alone, such as terminators."""
    for name in names:
        OPS.add(Entry(name, Kind.PART, notes=notes))


def refused(*names: str, reason: str) -> None:
    """Register ops that no work is given for: they are opaque, with the reason."""
    for name in names:
        OPS.add(Entry(name, Kind.REFUSED, basis=Basis.OPAQUE, notes=reason))


def register_work(
    target: str,
    *more: str,
    klass: KernelClass = KernelClass.CUSTOM,
    basis: Basis = Basis.EXACT,
    notes: str = "",
) -> Callable[[Rule], Rule]:
    """Register the decorated function as the work rule of custom calls to `target` and composites of that name.

    The function takes the op and a `Context` and returns an `OpWork`; where it leaves `reads` and `writes` empty, the
    op's operands and results count once each. Raises `InputError` where the target has a rule already.
    """

    def register(function: Rule) -> Rule:
        for name in (target, *more):
            TARGETS.add(Entry(name, Kind.RULE, function, klass, basis, notes))
        return function

    return register
