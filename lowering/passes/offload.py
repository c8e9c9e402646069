"""Arguments of a step that live in a memory tier: loaded before they are read, stored after they are overwritten."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stablecast.ir.device_program import P2P, ArgumentBuffer, Body, DeviceProgram, Kernel, Node
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelClass, KernelRow
from stablecast.lowering.passes.body import with_body

BUFFERED = 4
"""Arguments that are on the device at once: two in use (of one update), while the next come or the last go."""
LOAD_STREAM, STORE_STREAM = 2, 3


class Offload:
    """Arguments whose names match live in a memory tier (=PATTERN:TIER, as *adam*:host), copied beside kernels."""

    def __init__(self, value: str = "") -> None:
        self._pattern, colon, self._tier = value.rpartition(":")
        if not colon or not self._pattern or not self._tier:
            raise InputError(f"pass 'offload' takes PATTERN:TIER, not '{value}'", "write 'offload=*adam*:host'")

    def __call__(self, program: DeviceProgram) -> DeviceProgram:
        if not program.arguments:
            raise InputError(f"{program.name}: its arguments are not known, so none can be offloaded")
        chosen = {
            number
            for number, argument in enumerate(program.arguments)
            if argument.nbytes and fnmatch.fnmatchcase(argument.name, self._pattern)
        }
        if not chosen:
            names = ", ".join(argument.name for argument in program.arguments[:3])
            raise InputError(f"no argument is called '{self._pattern}'", f"names are {names}, ...")
        uses = _uses(program, chosen)
        body = _with_moves(program.body, uses, self._tier)
        arguments = [program.arguments[use.number] for use in uses]
        there = program.offloaded.get(self._tier, 0) + sum(argument.nbytes for argument in arguments)
        made = _resident(program, body, arguments, uses)
        return replace(made, offloaded={**program.offloaded, self._tier: there})


@dataclass(frozen=True, slots=True)
class _Use:
    """An offloaded argument: the nodes that read it, the bytes that must come, and those that go back."""

    number: int
    readers: tuple[int, ...]
    load_bytes: int
    store_bytes: int


def _uses(program: DeviceProgram, chosen: set[int]) -> list[_Use]:
    """In the order of their first readers; those that nothing reads stay where they are."""
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(program.body):
        for number in () if isinstance(node, P2P) else node.arguments:
            if number in chosen:
                readers.setdefault(number, []).append(index)
    rows = program.table.rows
    found: list[_Use] = []
    for number, nodes in sorted(readers.items(), key=lambda item: item[1][0]):
        argument = program.arguments[number]
        needed = max(_bytes_read(program.body[index], argument, rows) for index in nodes)
        found.append(_Use(number, tuple(nodes), needed, needed if argument.overwritten else 0))
    return found


def _bytes_read(node: Node, argument: ArgumentBuffer, rows: Sequence[KernelRow]) -> int:
    """Of a table that is gathered from, the rows that are looked up; of all else, everything."""
    if isinstance(node, Kernel) and rows[node.row].klass in (KernelClass.GATHER, KernelClass.SCATTER):
        return min(argument.nbytes, round(rows[node.row].bytes_read))
    return argument.nbytes


def _with_moves(body: Body, uses: Sequence[_Use], tier: str) -> Body:
    """`body` with a load in front of the first reader of each and a store behind the last.

    A load waits until the argument `BUFFERED` before it has gone.
    """
    before: dict[int, list[int]] = {}
    behind: dict[int, list[int]] = {}
    for turn, use in enumerate(uses):
        before.setdefault(use.readers[0], []).append(turn)
        behind.setdefault(use.readers[-1], []).append(turn)
    nodes: list[Node] = []
    place: dict[int, int] = {}
    loads: dict[int, int] = {}
    gone: dict[int, int] = {}
    for index, node in enumerate(body):
        for turn in before.get(index, ()):
            use = uses[turn]
            waits = (gone[turn - BUFFERED],) if turn - BUFFERED in gone else ()
            loads[turn] = len(nodes)
            nodes.append(P2P("load", tier, 0, use.number, use.load_bytes, LOAD_STREAM, node.scope, after=waits))
        own = {loads[turn] for turn, use in enumerate(uses) if index in use.readers and turn in loads}
        deps = tuple(sorted({*(place[dep] for dep in node.deps), *own}))
        place[index] = len(nodes)
        nodes.append(replace(node, deps=deps, after=tuple(place[dep] for dep in node.after)))
        for turn in behind.get(index, ()):
            use = uses[turn]
            gone[turn] = place[index]
            if use.store_bytes:
                gone[turn] = len(nodes)
                nodes.append(
                    P2P("store", tier, 0, use.number, use.store_bytes, STORE_STREAM, node.scope, deps=(place[index],))
                )
    return tuple(nodes)


def _resident(
    program: DeviceProgram, body: Body, arguments: Sequence[ArgumentBuffer], uses: Sequence[_Use]
) -> DeviceProgram:
    """`program` without the offloaded arguments in device memory, but for those that are on the device at once."""
    changed = with_body(program, body)
    buffers = changed.buffers
    if buffers is None:
        return changed
    away = sum(argument.nbytes for argument in arguments)
    returned = sum(argument.nbytes for argument in arguments if argument.overwritten)
    there = sum(sorted((use.load_bytes for use in uses), reverse=True)[:BUFFERED])
    return replace(
        changed,
        allocations=None,
        buffers=replace(
            buffers,
            argument_bytes=buffers.argument_bytes - away,
            output_bytes=buffers.output_bytes - min(returned, buffers.output_bytes),
            alias_bytes=max(buffers.alias_bytes - returned, 0),
            temp_bytes=buffers.temp_bytes + there,
        ),
    )
