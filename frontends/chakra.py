"""Chakra traces as device programs, one a role: stablecast's own, and those that other tools wrote."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stablecast.frontends.chakra_foreign import read_foreign
from stablecast.frontends.chakra_loops import Item, gather_loops
from stablecast.ir.attributes import Shift
from stablecast.ir.chakra import CollectiveType, Node, NodeType, TraceFiles, TraceReader, find_traces
from stablecast.ir.chakra.program_file import (
    collective_of_json,
    groups_of_json,
    program_of_json,
    program_path,
    read_program_file,
)
from stablecast.ir.device_program import P2P, Collective, DeviceProgram, Kernel
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups, all_devices
from stablecast.ir.kernels import FloatArray, KernelRow

_KINDS = {
    CollectiveType.ALL_REDUCE: "all_reduce",
    CollectiveType.ALL_GATHER: "all_gather",
    CollectiveType.REDUCE_SCATTER: "reduce_scatter",
    CollectiveType.ALL_TO_ALL: "all_to_all",
}


@dataclass(frozen=True, slots=True)
class TraceRole:
    """Ranks of a trace that run one program.

    `durations_s`: seconds of each row of the program's table as the trace gives them, None where it gives none.
    `coords`: mesh coordinates that the role holds; `ranks`: its ranks where they do not follow from these. `count`:
    how many there are.
    """

    name: str
    program: DeviceProgram
    durations_s: FloatArray | None = None
    coords: Mapping[str, int] = field(default_factory=dict[str, int])
    ranks: tuple[int, ...] = ()
    count: int = 1
    speed: float = 1.0


class TracePrograms(Mapping[str, DeviceProgram]):
    """The programs of a trace by role name. `roles` has what else is known of each; `source`: where they are from."""

    def __init__(self, source: str, roles: Sequence[TraceRole]) -> None:
        self.source = source
        self.roles: Mapping[str, TraceRole] = {role.name: role for role in roles}

    @staticmethod
    def of(program: DeviceProgram) -> "TracePrograms":
        """One program that all devices run."""
        return TracePrograms(program.name, [TraceRole(program.name, program, count=program.num_devices)])

    def __getitem__(self, name: str) -> DeviceProgram:
        return self.roles[name].program

    def __iter__(self) -> Iterator[str]:
        return iter(self.roles)

    def __len__(self) -> int:
        return len(self.roles)

    @property
    def num_devices(self) -> int:
        """Ranks of the trace."""
        return next(iter(self.values())).num_devices

    def __repr__(self) -> str:
        parts = ", ".join(f"{role.name}: {role.count} rank(s)" for role in self.roles.values())
        return f"TracePrograms({self.source}: {parts})"


def is_chakra(source: str | Path) -> bool:
    """Whether `source` names Chakra traces: a `.et` file, or a prefix or folder with rank files."""
    path = Path(source)
    if path.is_file():
        return path.name.endswith((".et", ".et.gz"))
    try:
        find_traces(path)
    except InputError:
        return False
    return True


def read_chakra(source: str | Path, *, group_file: str | Path | None = None, ranks: int | None = None) -> TracePrograms:
    """The device program of every role of a Chakra trace.

    `source`: a prefix, a folder with one prefix, or a single file. stablecast's own traces come back with everything
    that emission knew (`<prefix>.program.json`); of others, ranks whose nodes agree up to groups and peers are one
    role, and compute has the work that the nodes state. `group_file`: groups, where they do not lie beside the trace.
    `ranks`: number of ranks of a trace of which only one file is there. Raises `InputError` where it cannot be read.
    """
    files = find_traces(source)
    own = program_path(files.prefix)
    if own.is_file() and not files.single:
        return TracePrograms(str(source), _read_own(files, own))
    parts = read_foreign(files, None if group_file is None else Path(group_file), ranks)
    roles = [TraceRole(part.name, part.program, part.durations_s, {}, part.ranks, len(part.ranks)) for part in parts]
    return TracePrograms(str(source), roles)


def _read_own(files: TraceFiles, path: Path) -> list[TraceRole]:
    content = read_program_file(path)
    try:
        partitions = [(int(held["base"]), groups_of_json(held)) for held in content["partitions"]]
        return [_own_role(files, role, partitions, str(path)) for role in content["roles"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a program file of this version ({error})") from None


def _own_role(
    files: TraceFiles, held: Mapping[str, Any], partitions: Sequence[tuple[int, Groups]], where: str
) -> TraceRole:
    rank = int(held["first_rank"])
    if rank not in files.ranks:
        raise InputError(f"{files.prefix}.{rank}.et is missing", "every role's first rank is needed")
    bare = program_of_json(held["program"], (), where)
    reader = _OwnReader(bare, partitions, held["expanded"], files.ranks[rank])
    body = gather_loops(reader.items())
    durations = reader.durations_s if held["timed"] else None
    if durations is not None:
        durations = durations * float(held["speed"])
    program = replace(bare, body=body)
    return TraceRole(held["name"], program, durations, held["coords"], (), int(held["ranks"]), float(held["speed"]))


class _OwnReader:
    """Nodes of a rank of one of stablecast's traces to the nodes of a body."""

    def __init__(
        self,
        program: DeviceProgram,
        partitions: Sequence[tuple[int, Groups]],
        expanded: Sequence[Mapping[str, Any]],
        path: Path,
    ) -> None:
        self._rows: tuple[KernelRow, ...] = program.table.rows
        whole = all_devices(program.num_devices)
        self._everyone = next((groups for base, groups in partitions if not base), whole)
        self._groups = [groups for _, groups in partitions]
        named = sorted((base, number) for number, (base, _) in enumerate(partitions) if base)
        self._bases, self._numbers = [base for base, _ in named], [number for _, number in named]
        self._expanded = [collective_of_json(one, self._groups[int(one["partition"])]) for one in expanded]
        self._path = path
        self._nanos: dict[int, float] = {}

    @property
    def durations_s(self) -> FloatArray:
        """Seconds of each row that the trace timed, 0 for the others."""
        return np.array([self._nanos.get(row, 0.0) for row in range(len(self._rows))]) / 1e9

    def items(self) -> list[Item]:
        """The nodes of the body, each with its trips and group."""
        items: list[Item] = []
        place: dict[int, tuple[int, ...]] = {}
        merged: dict[int, int] = {}
        pending: tuple[int, object] | None = None
        for node in TraceReader(self._path):
            try:
                deps = sorted({at for dep in node.data_deps for at in place[dep]})
            except KeyError as error:
                raise InputError(f"{self._path}: node {node.id} waits for {error}, not before it") from None
            expands = node.value("expands")
            if isinstance(expands, int):
                at = merged.setdefault(expands, len(items))
                if at == len(items):
                    items.append(self._item(self._expanded[expands], node, deps))
                place[node.id] = (at,)
                continue
            if pending is not None and node.type == NodeType.COMM_RECV and node.value("comm_tag") == pending[1]:
                place[node.id], pending = (pending[0],), None
                continue
            made = self._made(node)
            if made is None:
                place[node.id] = tuple(deps)
                continue
            items.append(self._item(made, node, deps))
            place[node.id] = (len(items) - 1,)
            pending = None
            if isinstance(made, Collective) and node.type == NodeType.COMM_SEND:
                pending = len(items) - 1, node.value("comm_tag")
        return items

    def _item(self, made: Kernel | Collective | P2P, node: Node, deps: Sequence[int]) -> Item:
        trips = node.value("trips")
        return Item(made, tuple(deps), trips if isinstance(trips, int) else 1)

    def _made(self, node: Node) -> Kernel | Collective | P2P | None:
        if node.type == NodeType.COMM_COLL:
            kind = CollectiveType(_number(node, "comm_type"))
            return self._collective(node, _text(node, "stands_for") or _KINDS[kind], self._groups_of(node))
        if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            kind = _text(node, "stands_for")
            if kind:
                return self._collective(node, kind, self._groups[_number(node, "partition")])
            direction = "send" if node.type == NodeType.COMM_SEND else "recv"
            return P2P(
                direction,
                _text(node, "axis"),
                _number(node, "shift"),
                _number(node, "channel_tag"),
                _number(node, "comm_size"),
                _number(node, "stream", 1),
                _text(node, "scope"),
            )
        row = node.value("kernel")
        if not isinstance(row, int):
            return None
        nanos = node.value("duration_nanos")
        if isinstance(nanos, float):
            self._nanos[row] = nanos
        return Kernel(row, (), self._rows[row].launches, _text(node, "scope"), stream=_number(node, "stream", 0))

    def _groups_of(self, node: Node) -> Groups:
        name = _text(node, "pg_name")
        if not name:
            return self._everyone
        return self._groups[self._numbers[bisect_right(self._bases, int(name)) - 1]]

    def _collective(self, node: Node, kind: str, groups: Groups) -> Collective:
        operand = _number(node, "operand_bytes", _number(node, "comm_size"))
        usual = operand * groups.size if kind == "all_gather" else operand
        usual = operand // groups.size if kind == "reduce_scatter" else usual
        return Collective(
            kind,
            groups,
            operand,
            _number(node, "result_bytes", usual),
            _text(node, "reduce_op"),
            _text(node, "dtype"),
            _number(node, "channel", 0),
            bool(_number(node, "asynchronous", 0)),
            _number(node, "stream", 1),
            _text(node, "scope"),
            merged=_number(node, "merged", 1),
            shift=_shift(node) if kind == "collective_permute" else None,
        )


def _shift(node: Node) -> Shift | None:
    by = node.value("shift")
    return Shift(_text(node, "shift_axis"), by, bool(_number(node, "cyclic", 1))) if isinstance(by, int) else None


def _number(node: Node, name: str, absent: int | None = None) -> int:
    value = node.value(name)
    if isinstance(value, int):
        return value
    if absent is None:
        raise InputError(f"node {node.id} ({node.name}) lacks the number {name}")
    return absent


def _text(node: Node, name: str) -> str:
    value = node.value(name)
    return value if isinstance(value, str) else ""
