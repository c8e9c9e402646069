"""Steps of a role to Chakra nodes, with the places that differ between its ranks left open."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stablecast.ir.chakra import (
    Attribute,
    CollectiveType,
    Node,
    NodeType,
    collective_node,
    comp_node,
    double_attr,
    int32_attr,
    int64_attr,
    memory_node,
    recv_node,
    send_node,
    string_attr,
)
from stablecast.ir.chakra.algorithms import Action, AlgorithmStep, CollectiveAlgorithm
from stablecast.ir.device_program import P2P, Collective, DeviceProgram, Kernel
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import FloatArray, KernelRow
from stablecast.ir.scopes import parse_scope
from stablecast.lowering.chakra.layout import GroupBook, IntArray, Layout
from stablecast.lowering.chakra.options import EmitOptions, MemoryNodes, Order
from stablecast.lowering.chakra.unroll import Step, Unrolled

COMM_TYPES: Mapping[str, CollectiveType] = {
    "all_reduce": CollectiveType.ALL_REDUCE,
    "cross-replica-sum": CollectiveType.ALL_REDUCE,
    "all_gather": CollectiveType.ALL_GATHER,
    "reduce_scatter": CollectiveType.REDUCE_SCATTER,
    "all_to_all": CollectiveType.ALL_TO_ALL,
    "ragged_all_to_all": CollectiveType.ALL_TO_ALL,
    "collective_broadcast": CollectiveType.ALL_REDUCE,
}
"""What a collective is written as. No consumer runs a broadcast; its scatter and all-gather cost an all-reduce."""

MIN_GATHER_BYTES = 4
"""Consumers cut a message into 4 parts and never end an all-gather of fewer bytes."""

PLAIN_KINDS: Mapping[CollectiveType, str] = {
    CollectiveType.ALL_REDUCE: "all_reduce",
    CollectiveType.ALL_GATHER: "all_gather",
    CollectiveType.REDUCE_SCATTER: "reduce_scatter",
    CollectiveType.ALL_TO_ALL: "all_to_all",
}
_NAME_SIGNS = str.maketrans(dict.fromkeys(" ,=", "_"))
REMOTE_MEMORY = "remote_memory"
"""`KernelRow.library` of rows that stand for a transfer with remote memory, one way each."""


def usual_result_bytes(kind: str, operand_bytes: int, size: int) -> int:
    """Result bytes that follow from the kind; others are written down."""
    if kind == "all_gather":
        return operand_bytes * size
    return operand_bytes // size if kind == "reduce_scatter" else operand_bytes


@dataclass(slots=True)
class TagBook:
    """Tags that pair sends with receives over all roles: the k-th use of a channel has one tag at both its ends."""

    _tags: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])
    _next: int = 1

    def tag(self, *channel: object, count: int = 1) -> int:
        """The first of `count` tags of a channel."""
        found = self._tags.get(channel)
        if found is None:
            found = self._tags[channel] = self._next
            self._next += count
            if self._next >= 1 << 31:
                raise InputError("the program has more sends than there are tags", "keep loops compact: --max-unroll 1")
        return found


@dataclass(frozen=True, slots=True)
class RoleNodes:
    """Nodes of a role with their holes.

    `holes`: (node id, attribute) -> name of the value. `columns`: by that name, the value of each rank. `issued`: by
    partition, the collectives issued in it. `messages`: sends and receives as (sends, axis, shift, tag, bytes).
    `expanded`: collectives that became point-to-point graphs, in order. `trips`: runs that the nodes stand for.
    """

    nodes: tuple[Node, ...]
    holes: Mapping[tuple[int, str], str]
    columns: Mapping[str, Sequence[str] | IntArray]
    issued: Mapping[int, tuple[object, ...]]
    messages: tuple[tuple[bool, str, int, int, int], ...]
    expanded: tuple[Collective, ...]
    trips: int


def role_nodes(
    program: DeviceProgram,
    unrolled: Unrolled,
    durations_s: FloatArray | None,
    layout: Layout,
    book: GroupBook,
    tags: TagBook,
    options: EmitOptions,
    places: Mapping[int, int] | None = None,
    coords: Mapping[str, int] | None = None,
) -> RoleNodes:
    """The nodes of one role.

    `places`: by partition, the place in its group for which algorithms are expanded. `coords`: those of the role.
    """
    return _Maker(program, durations_s, layout, book, tags, options, places or {}, coords or {}).run(unrolled)


class _Maker:
    def __init__(
        self,
        program: DeviceProgram,
        durations_s: FloatArray | None,
        layout: Layout,
        book: GroupBook,
        tags: TagBook,
        options: EmitOptions,
        places: Mapping[int, int],
        coords: Mapping[str, int],
    ) -> None:
        self._program = program
        self._nanos = None if durations_s is None else np.round(durations_s * 1e9, 3).tolist()
        self._layout, self._book, self._tags = layout, book, tags
        self._options, self._places, self._coords = options, places, coords
        self._nodes: list[Node] = []
        self._holes: dict[tuple[int, str], str] = {}
        self._columns: dict[str, Sequence[str] | IntArray] = {}
        self._issued: dict[int, list[object]] = {}
        self._messages: list[tuple[bool, str, int, int, int]] = []
        self._expanded: list[Collective] = []
        self._uses: dict[tuple[object, ...], int] = {}
        self._last_in: dict[int, tuple[int, ...]] = {}
        self._last_on: dict[int, int] = {}
        self._attributes: dict[tuple[int, str], tuple[str, tuple[Attribute, ...]]] = {}
        self._extra: tuple[Attribute, ...] = ()
        self._trips = 0

    def run(self, unrolled: Unrolled) -> RoleNodes:
        start = self._load_arguments()
        ends: list[tuple[int, ...]] = []
        for step in unrolled.steps:
            deps = sorted({end for dep in step.deps for end in ends[dep]}) if step.deps else list(start)
            first = len(self._nodes)
            ends.append(self._step(step, deps))
            self._trips += (len(self._nodes) - first) * step.trips
        self._store_results()
        if not self._nodes:
            self._nodes.append(comp_node(0, "COMP_NODE_nothing", 1, 1, duration_micros=1))
        return RoleNodes(
            tuple(self._nodes),
            self._holes,
            self._columns,
            {number: tuple(issued) for number, issued in self._issued.items()},
            tuple(self._messages),
            tuple(self._expanded),
            self._trips,
        )

    def _step(self, step: Step, deps: list[int]) -> tuple[int, ...]:
        node = step.node
        self._extra = (int64_attr("trips", step.trips),) if step.trips > 1 else ()
        stream = node.stream
        if self._options.order is Order.STREAM and stream in self._last_on:
            deps = sorted({*deps, self._last_on[stream]})
        if isinstance(node, Kernel):
            ends = self._kernel(node, deps)
        elif isinstance(node, P2P):
            ends = self._p2p(node, deps)
        else:
            ends = self._collective(node, deps)
        if ends and self._nodes and ends[-1] == self._nodes[-1].id:
            self._last_on[stream] = ends[-1]
        return ends

    def _add(self, node: Node) -> int:
        self._nodes.append(node)
        return node.id

    @property
    def _id(self) -> int:
        return len(self._nodes)

    # Compute and memory

    def _load_arguments(self) -> tuple[int, ...]:
        buffers = self._program.buffers
        if self._options.memory is not MemoryNodes.STEP or not buffers or buffers.argument_bytes < 1:
            return ()
        return (self._add(memory_node(0, "MEM_LOAD_NODE_arguments", NodeType.MEM_LOAD, buffers.argument_bytes)),)

    def _store_results(self) -> None:
        buffers = self._program.buffers
        if self._options.memory is MemoryNodes.STEP and buffers and buffers.output_bytes > 0:
            waited = {dep for node in self._nodes for dep in node.data_deps}
            deps = [node.id for node in self._nodes if node.id not in waited]
            node = memory_node(self._id, "MEM_STORE_NODE_results", NodeType.MEM_STORE, buffers.output_bytes, deps)
            self._add(node)

    def _kernel(self, node: Kernel, deps: list[int]) -> tuple[int, ...]:
        row = self._program.table.rows[node.row]
        if row.library == REMOTE_MEMORY:
            return (self._remote(node, row, deps),)
        name, attributes = self._described(node, row)
        per_kernel = self._options.memory is MemoryNodes.KERNEL
        if per_kernel and row.bytes_read >= 1:
            load = memory_node(self._id, f"MEM_LOAD_NODE_{name}", NodeType.MEM_LOAD, int(row.bytes_read), deps)
            deps = [self._add(load)]
        micros = 0
        if self._nanos is not None:
            micros = max(1, int(self._nanos[node.row] / 1000 + 0.5))
        end = self._add(
            comp_node(
                self._id,
                f"COMP_NODE_{name}",
                max(1, int(row.work.flops)),
                max(1, int(row.bytes_read + row.bytes_written)),
                deps,
                micros,
                attributes + _stream_attr(node.stream, 0) + self._extra,
            )
        )
        if per_kernel and row.bytes_written >= 1:
            store = memory_node(self._id, f"MEM_STORE_NODE_{name}", NodeType.MEM_STORE, int(row.bytes_written), [end])
            end = self._add(store)
        return (end,)

    def _remote(self, node: Kernel, row: KernelRow, deps: list[int]) -> int:
        kind, size = (NodeType.MEM_LOAD, row.bytes_read) if row.bytes_read else (NodeType.MEM_STORE, row.bytes_written)
        extra = (*_scope_attr(node.scope), int32_attr("kernel", node.row), *_stream_attr(node.stream, 0), *self._extra)
        name = f"{kind.name}_NODE_{_plain(row.label)}"
        return self._add(memory_node(self._id, name, kind, max(1, int(size)), deps, extra))

    def _described(self, node: Kernel, row: KernelRow) -> tuple[str, tuple[Attribute, ...]]:
        key = (node.row, node.scope)
        if key not in self._attributes:
            op = row.label or parse_scope(node.scope).op or str(row.klass)
            found = [string_attr("op", op), string_attr("dtype", row.out_dtype or row.math)]
            found += [string_attr("scope", node.scope)] if node.scope else []
            found.append(int32_attr("kernel", node.row))
            if self._nanos is not None:
                found.append(double_attr("duration_nanos", self._nanos[node.row]))
            self._attributes[key] = (_plain(op), tuple(found))
        return self._attributes[key]

    # Communication

    def _hole(self, node: int, attribute: str, name: str) -> None:
        self._holes[node, attribute] = name

    def _occurrence(self, *channel: object) -> int:
        number = self._uses.get(channel, 0)
        self._uses[channel] = number + 1
        return number

    def _p2p(self, node: P2P, deps: list[int]) -> tuple[int, ...]:
        if node.direction in ("load", "store"):
            kind = NodeType.MEM_LOAD if node.direction == "load" else NodeType.MEM_STORE
            name = f"MEM_{node.direction.upper()}_NODE_{node.axis}_{self._id}"
            return (self._add(memory_node(self._id, name, kind, node.nbytes, deps)),)
        size = self._layout.size(node.axis)
        if node.direction not in ("send", "recv"):
            raise InputError(f"a transfer at {node.scope or 'the top'} is '{node.direction}', neither send nor recv")
        if node.shift % size == 0:
            return tuple(deps)
        sends = node.direction == "send"
        forward = (node.shift if sends else -node.shift) % size
        number = self._occurrence(sends, node.axis, forward, node.tag)
        tag = self._tags.tag("p2p", node.axis, forward, node.tag, number)
        hole = f"peer {node.axis} {node.shift % size}"
        if hole not in self._columns:
            self._columns[hole] = self._layout.peers(node.axis, node.shift)
        self._messages.append((sends, node.axis, forward, tag, node.nbytes))
        extra = (
            string_attr("axis", node.axis),
            int32_attr("shift", node.shift),
            int32_attr("channel_tag", node.tag),
            *_scope_attr(node.scope),
            *_stream_attr(node.stream, 1),
            *self._extra,
        )
        return (self._message(sends, hole, tag, node.nbytes, deps, extra),)

    def _message(
        self, sends: bool, hole: str, tag: int, nbytes: int, deps: Sequence[int], extra: Sequence[Attribute]
    ) -> int:
        make, name, peer = (
            (send_node, "COMM_SEND_NODE", "comm_dst") if sends else (recv_node, "COMM_RECV_NODE", "comm_src")
        )
        made = self._add(make(self._id, f"{name}_{self._id}", 0, tag, nbytes, deps, extra))
        self._hole(made, peer, hole)
        return made

    def _collective(self, node: Collective, deps: list[int]) -> tuple[int, ...]:
        where = f"{node.kind} at {node.scope}" if node.scope else node.kind
        number = self._book.number(node.groups, where)
        if node.kind == "collective_permute":
            return self._permute(node, number, deps)
        kind = COMM_TYPES.get(node.kind)
        if kind is None:
            known = ", ".join((*COMM_TYPES, "collective_permute"))
            raise InputError(f"{where} has no form in Chakra", f"known: {known}")
        if number in self._last_in:
            deps = sorted({*deps, *self._last_in[number]})
        size = max(node.operand_bytes, MIN_GATHER_BYTES) if kind is CollectiveType.ALL_GATHER else node.operand_bytes
        self._issued.setdefault(number, []).append((node.kind, size))
        algorithm = self._options.algorithms.get(node.kind)
        if algorithm is not None and algorithm.size == node.groups.size:
            ends = self._expand(node, number, algorithm, deps)
        else:
            ends = (self._plain_collective(node, number, kind, size, deps),)
        self._last_in[number] = ends
        return ends

    def _plain_collective(self, node: Collective, number: int, kind: CollectiveType, size: int, deps: list[int]) -> int:
        partition = self._book.partitions[number]
        group = "" if partition.everyone else "1"
        extra = (*_collective_attrs(node, kind), *self._extra)
        made = collective_node(
            self._id, f"COMM_COLL_NODE_{_plain(node.kind)}_{self._id}", kind, size, group, deps, extra=extra
        )
        self._add(made)
        if group:
            hole = f"group {number}"
            self._columns.setdefault(hole, partition.names)
            self._hole(made.id, "pg_name", hole)
        return made.id

    def _permute(self, node: Collective, number: int, deps: list[int]) -> tuple[int, ...]:
        """As far along the group as the program says, one place where it does not.

        The ends meet, but for a shift whose ends are apart where the role has a place along its axis.
        """
        partition = self._book.partitions[number]
        by = node.shift.by if node.shift else 1
        offsets = (by, -by)
        names = tuple(f"member {number} by {offset}" for offset in offsets)
        for name, offset in zip(names, offsets, strict=True):
            if name not in self._columns:
                self._columns[name] = partition.member(offset, relative=True)
        occurrence = self._occurrence("permute", number)
        self._issued.setdefault(number, []).append((node.kind, node.operand_bytes))
        tag = self._tags.tag("permute", number, occurrence)
        extra = (
            string_attr("stands_for", node.kind),
            int32_attr("partition", number),
            *_shift_attrs(node),
            *_collective_attrs(node, None),
            *self._extra,
        )
        ends = [
            self._message(sends, name, tag, node.operand_bytes, deps, extra)
            for sends, name in zip((True, False), names, strict=True)
            if self._has_peer(node, sends)
        ]
        return tuple(ends or deps)

    def _has_peer(self, node: Collective, sends: bool) -> bool:
        shift = node.shift
        if shift is None or shift.cyclic or shift.axis not in self._coords:
            return True
        peer = self._coords[shift.axis] + (shift.by if sends else -shift.by)
        return 0 <= peer < self._layout.size(shift.axis)

    def _expand(
        self, node: Collective, number: int, algorithm: CollectiveAlgorithm, deps: list[int]
    ) -> tuple[int, ...]:
        buffer = node.result_bytes if node.kind == "all_gather" else node.operand_bytes
        occurrence = self._occurrence("expand", number)
        first_tag = self._tags.tag("expand", number, occurrence, count=algorithm.tags)
        partition = self._book.partitions[number]
        extra = (int32_attr("expands", len(self._expanded)), *self._extra)
        self._expanded.append(node)
        made: list[int] = []
        waited: set[int] = set()
        for step in algorithm.members[self._places.get(number, 0)]:
            before = [made[dep] for dep in step.deps] or deps
            waited.update(step.deps)
            nbytes = algorithm.nbytes(step, buffer)
            if step.peer < 0:
                made.append(self._local(step, nbytes, before, extra))
                continue
            hole = f"member {number} at {step.peer}"
            if hole not in self._columns:
                self._columns[hole] = partition.member(step.peer, relative=False)
            made.append(self._message(step.action is Action.SEND, hole, first_tag + step.tag, nbytes, before, extra))
        return tuple(node_id for at, node_id in enumerate(made) if at not in waited) or tuple(deps)

    def _local(self, step: AlgorithmStep, nbytes: int, deps: Sequence[int], extra: Sequence[Attribute]) -> int:
        moved = nbytes * (3 if step.action is Action.REDUCE else 2)
        rate = self._options.reduce_bytes_per_s
        micros = max(1, round(moved / rate * 1e6)) if rate else 1
        name = f"COMP_NODE_{step.action.value}_{self._id}"
        return self._add(comp_node(self._id, name, max(1, nbytes // 2), moved, deps, micros, extra))


def _collective_attrs(node: Collective, kind: CollectiveType | None) -> tuple[Attribute, ...]:
    """What the reader needs beyond type, size and group; usual values are left out."""
    found = [string_attr("dtype", node.dtype)] if node.dtype else []
    found += _scope_attr(node.scope)
    if node.groups.axes:
        found.append(string_attr("axes", " ".join(node.groups.axes)))
    if node.reduce_op:
        found.append(string_attr("reduce_op", node.reduce_op))
    if kind is not None and PLAIN_KINDS[kind] != node.kind:
        found.append(string_attr("stands_for", node.kind))
    if kind is CollectiveType.ALL_GATHER and node.operand_bytes < MIN_GATHER_BYTES:
        found.append(int64_attr("operand_bytes", node.operand_bytes))
    if node.result_bytes != usual_result_bytes(node.kind, node.operand_bytes, node.groups.size):
        found.append(int64_attr("result_bytes", node.result_bytes))
    found += [int32_attr("channel", node.channel)] if node.channel else []
    found += [int32_attr("asynchronous", 1)] if node.asynchronous else []
    found += [int32_attr("merged", node.merged)] if node.merged != 1 else []
    return (*found, *_stream_attr(node.stream, 1))


def _shift_attrs(node: Collective) -> tuple[Attribute, ...]:
    shift = node.shift
    if shift is None:
        return ()
    cyclic = int32_attr("cyclic", int(shift.cyclic))
    axis = (string_attr("shift_axis", shift.axis),) if shift.axis else ()
    return (*axis, int32_attr("shift", shift.by), cyclic)


def _scope_attr(scope: str) -> tuple[Attribute, ...]:
    return (string_attr("scope", scope),) if scope else ()


def _stream_attr(stream: int, usual: int) -> tuple[Attribute, ...]:
    return (int32_attr("stream", stream),) if stream != usual else ()


def _plain(text: str) -> str:
    """`text` without the signs that Chakra's tools split names at."""
    return text.translate(_NAME_SIGNS)
