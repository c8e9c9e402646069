"""Chakra traces of other tools: ranks to roles, nodes to kernels, collectives and transfers."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stablecast.frontends.chakra_rows import Compute, RowBook
from stablecast.ir.chakra import (
    CollectiveType,
    Node,
    NodeDecoder,
    NodeType,
    TraceFiles,
    TraceMetadata,
    TraceReader,
    find_surroundings,
)
from stablecast.ir.device_program import P2P, Collective, DeviceProgram, Kernel
from stablecast.ir.device_program import Node as ProgramNode
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups, all_devices, from_lists
from stablecast.ir.kernels import FloatArray
from stablecast.ir.program import Mesh
from stablecast.ir.work import SymbolicWork, total

_KINDS: Mapping[int, str] = {
    CollectiveType.ALL_REDUCE: "all_reduce",
    CollectiveType.REDUCE: "all_reduce",
    CollectiveType.ALL_GATHER: "all_gather",
    CollectiveType.GATHER: "all_gather",
    CollectiveType.SCATTER: "reduce_scatter",
    CollectiveType.BROADCAST: "collective_broadcast",
    CollectiveType.ALL_TO_ALL: "all_to_all",
    CollectiveType.REDUCE_SCATTER: "reduce_scatter",
    CollectiveType.REDUCE_SCATTER_BLOCK: "reduce_scatter",
}
_RANK_FIELDS = frozenset({"pg_name", "comm_src", "comm_dst", "comm_tag"})
_MESH = "ranks"
AXIS = "rank"


@dataclass(frozen=True, slots=True)
class ForeignRole:
    """Ranks whose nodes agree, their program, and seconds of each row of its table where the trace times it."""

    name: str
    program: DeviceProgram
    durations_s: FloatArray | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Rank:
    """Nodes of a rank in an order in which they can run; of the k-th its group and message, where it has them."""

    rank: int
    nodes: tuple[Node, ...]
    metadata: TraceMetadata | None
    groups: Mapping[int, tuple[int, ...] | None]
    messages: Mapping[int, tuple[int, int]]


def read_foreign(files: TraceFiles, group_file: Path | None, ranks: int | None) -> list[ForeignRole]:
    """The roles of a trace that stablecast did not write. Raises `InputError` where it cannot be read."""
    around = find_surroundings(files, group_file)
    members: Mapping[str, tuple[int, ...]] = around.groups.members if around.groups else {}
    number = max(len(files.ranks), max(files.ranks) + 1 if not files.single else 1, ranks or 0)
    decoder = NodeDecoder()
    by_role: dict[object, list[_Rank]] = {}
    for rank, path in files.ranks.items():
        read = _read_rank(rank, path, decoder, members, number)
        by_role.setdefault(_signature(read, number), []).append(read)
    if not any(read.nodes for held in by_role.values() for read in held):
        raise InputError(f"{files.prefix}: the trace has no nodes")
    return [_RoleMaker(f"role{index}", held, number, files).run() for index, held in enumerate(by_role.values())]


def _read_rank(
    rank: int, path: Path, decoder: NodeDecoder, members: Mapping[str, tuple[int, ...]], number: int
) -> _Rank:
    reader = TraceReader(path, decoder)
    nodes = _ordered(tuple(reader), path)
    groups: dict[int, tuple[int, ...] | None] = {}
    messages: dict[int, tuple[int, int]] = {}
    channels: dict[tuple[bool, int], list[tuple[int, int]]] = {}
    for at, node in enumerate(nodes):
        if node.type == NodeType.COMM_COLL:
            name = node.value("pg_name")
            named = isinstance(name, str) and name.strip("0") != ""
            groups[at] = members.get(str(name)) if named else None
            if named and groups[at] is None:
                raise InputError(f"{path}: no group file names group {name} of node {node.id}", "give the group file")
        elif node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            sends = node.type == NodeType.COMM_SEND
            peer, tag = node.value("comm_dst" if sends else "comm_src"), node.value("comm_tag")
            if not isinstance(peer, int) or not isinstance(tag, int):
                raise InputError(f"{path}: node {node.id} lacks peer or tag")
            if not 0 <= peer < number:
                raise InputError(f"{path}: node {node.id} names rank {peer} of {number}")
            channels.setdefault((sends, peer), []).append((tag, at))
    for (_, peer), held in channels.items():
        for index, (_, at) in enumerate(sorted(held)):
            messages[at] = (peer, index)
    return _Rank(rank, nodes, reader.metadata, groups, messages)


def _ordered(nodes: tuple[Node, ...], path: Path) -> tuple[Node, ...]:
    """Nodes so that each stands behind those it waits for, by ascending id among those that may run.

    Of real runs the call tree in the control dependencies may contradict the order of calls; it is then left out.
    """
    found = _by_waiting(nodes, with_control=True) or _by_waiting(nodes, with_control=False)
    if found is None:
        raise InputError(f"{path}: its nodes wait for each other", "see stablecast chakra check")
    return found


def _waits(node: Node, with_control: bool) -> set[int]:
    return {*node.data_deps, *(node.ctrl_deps if with_control else ())} - {node.id}


def _by_waiting(nodes: tuple[Node, ...], with_control: bool) -> tuple[Node, ...] | None:
    known = {node.id: node for node in nodes}
    waits = {node.id: _waits(node, with_control).intersection(known) for node in nodes}
    followers: dict[int, list[int]] = {}
    for node_id, deps in waits.items():
        for dep in deps:
            followers.setdefault(dep, []).append(node_id)
    missing = {node_id: len(deps) for node_id, deps in waits.items()}
    ready = [node_id for node_id, count in missing.items() if not count]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node_id = heapq.heappop(ready)
        order.append(known[node_id])
        for follower in followers.get(node_id, ()):
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, follower)
    return tuple(order) if len(order) == len(known) else None


def _signature(read: _Rank, number: int) -> object:
    """Equal for ranks that run one program: nodes without group names, peers and tags, which are put in relation."""
    place = {node.id: at for at, node in enumerate(read.nodes)}
    slots: dict[tuple[int, ...] | None, int] = {}
    parts: list[object] = []
    for at, node in enumerate(read.nodes):
        kept = tuple((a.name, a.kind, a.value) for a in node.attributes if a.name not in _RANK_FIELDS)
        deps = tuple(sorted(place.get(dep, -1) for dep in {*node.data_deps, *node.ctrl_deps}))
        relation: object = None
        if at in read.messages:
            peer, index = read.messages[at]
            relation = ((peer - read.rank) % number, index)
        elif at in read.groups:
            group = read.groups[at]
            relation = (slots.setdefault(group, len(slots)), len(group) if group else 0)
        parts.append((node.name, int(node.type), deps, node.duration_micros, kept, relation))
    return tuple(parts)


class _RoleMaker:
    def __init__(self, name: str, held: Sequence[_Rank], number: int, files: TraceFiles) -> None:
        self._name, self._held, self._number, self._files = name, held, number, files
        self._read = held[0]
        metadata = self._read.metadata
        schema = next((a.value for a in metadata.attributes if a.name == "schema"), "") if metadata else ""
        self._book = RowBook(str(schema))
        self._groups: dict[int, Groups] = {}
        self._notes: list[str] = []
        self._dropped: dict[str, int] = {}

    def run(self) -> ForeignRole:
        body = self._body()
        table, durations, unmodelled = self._book.table()
        moved = [row.work * float(count) for row, count in zip(table.rows, table.count, strict=True)]
        for what, count in sorted(self._dropped.items()):
            self._notes.append(f"{count} {what} left out, their order kept")
        ranks = tuple(read.rank for read in self._held)
        program = DeviceProgram(
            name=f"{self._files.prefix.name} {self._name}" if len(ranks) < self._number else self._files.prefix.name,
            body=tuple(body),
            table=table,
            work=SymbolicWork({(): total(moved)}),
            num_devices=self._number,
            meshes=(Mesh(_MESH, ((AXIS, self._number),)),),
            exec_model="as-written",
            unmodelled=unmodelled,
            complete=not unmodelled,
            notes=(*dict.fromkeys([*self._notes, *self._book.notes]),),
        )
        return ForeignRole(self._name, program, durations, ranks)

    def _body(self) -> list[ProgramNode]:
        nodes = self._read.nodes
        on_host = self._host_nodes(nodes)
        body: list[ProgramNode] = []
        ends: dict[int, tuple[int, ...]] = {}
        last_on: dict[int, int] = {}
        for at, node in enumerate(nodes):
            deps = tuple(sorted({end for dep in (*node.data_deps, *node.ctrl_deps) for end in ends.get(dep, ())}))
            made = None if node.id in on_host else self._made(at, node)
            if made is None:
                ends[node.id] = deps
                continue
            stream = node.value("tid")
            after: tuple[int, ...] = ()
            if on_host and isinstance(stream, int):
                after = (last_on[stream],) if stream in last_on else ()
                last_on[stream] = len(body)
            body.append(replace(made, deps=deps, after=after))
            ends[node.id] = (len(body) - 1,)
        return body

    def _host_nodes(self, nodes: Sequence[Node]) -> set[int]:
        """Nodes of the host; of a trace of the host alone, those that hold other operators."""
        host = {node.id for node in nodes if node.value("is_cpu_op")}
        if len(host) < sum(node.type != NodeType.METADATA for node in nodes):
            if host:
                self._notes.append("kernels of one stream follow each other in the order of their ids")
                self._dropped["nodes of the host"] = len(host)
            return host
        self._notes.append("the trace shows the host alone: every innermost operator counts as one kernel")
        return {dep for node in nodes for dep in node.ctrl_deps}

    def _made(self, at: int, node: Node) -> Kernel | Collective | P2P | None:
        if node.type == NodeType.COMM_COLL:
            return self._collective(at, node)
        if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            return self._message(at, node)
        if node.type == NodeType.COMP:
            return self._kernel(self._book.compute(node), node)
        if node.type in (NodeType.MEM_LOAD, NodeType.MEM_STORE):
            return self._kernel(self._book.memory(node), node)
        self._dropped[f"{node.type_name} nodes"] = self._dropped.get(f"{node.type_name} nodes", 0) + 1
        return None

    def _kernel(self, compute: Compute, node: Node) -> Kernel:
        return Kernel(self._book.row(compute, node.duration_micros), scope=compute.scope)

    def _message(self, at: int, node: Node) -> P2P:
        peer, index = self._read.messages[at]
        shift = (peer - self._read.rank) % self._number
        shift = shift - self._number if shift > self._number // 2 else shift
        direction = "send" if node.type == NodeType.COMM_SEND else "recv"
        size = node.value("comm_size")
        return P2P(direction, AXIS, shift, index, int(size) if isinstance(size, int) else 0, scope=node.name)

    def _collective(self, at: int, node: Node) -> Collective | None:
        number, size = node.value("comm_type"), node.value("comm_size")
        kind = _KINDS.get(number) if isinstance(number, int) else None
        if kind is None or not isinstance(size, int) or size <= 0:
            what = f"collectives of no bytes or kind (such as {node.name[:40]})"
            self._dropped[what] = self._dropped.get(what, 0) + 1
            return None
        if number in (CollectiveType.REDUCE, CollectiveType.GATHER, CollectiveType.SCATTER):
            self._notes.append(f"collectives of type {CollectiveType(number).name} are taken as {kind}")
        groups = self._groups_at(at)
        if groups.size < 2:
            self._notes.append("collectives over one rank take no time; say how many ranks there are")
        result = size * groups.size if kind == "all_gather" else size
        result = size // groups.size if kind == "reduce_scatter" else result
        return Collective(kind, groups, size, result, scope=node.name)

    def _groups_at(self, at: int) -> Groups:
        """The groups of all ranks of the role at that node."""
        group = self._read.groups[at]
        if group is None:
            return all_devices(self._number)
        if at not in self._groups:
            rows = dict.fromkeys(read.groups[at] or () for read in self._held)
            self._groups[at] = _as_groups(tuple(rows), self._number)
        return self._groups[at]


def _as_groups(rows: tuple[tuple[int, ...], ...], number: int) -> Groups:
    if sum(map(len, rows)) == number and len(set(map(len, rows))) == 1:
        return from_lists(np.array(sorted(rows)))
    return Groups(len(rows), max(map(len, rows)), ragged=rows)
