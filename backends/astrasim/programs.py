"""Traces as ASTRA-sim's feeder takes them: a rank's nodes by ascending id, what they occupy, who waits for whom.

Ranks of one program share most of their bytes, so every distinct message is decoded once and every distinct shape
of a trace is linked once.
"""

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

from stablecast.backends.astrasim.config import SystemConfig
from stablecast.ir.chakra import (
    CollectiveType,
    MalformedMessage,
    Node,
    NodeDecoder,
    NodeType,
    TraceReader,
    ValueKind,
    node_type_name,
)
from stablecast.ir.chakra.files import is_gzip
from stablecast.ir.chakra.schema import INTEGER_KINDS
from stablecast.ir.errors import InputError

COLLECTIVE_KINDS: Final[Mapping[int, str]] = {
    CollectiveType.ALL_REDUCE: "all_reduce",
    CollectiveType.ALL_GATHER: "all_gather",
    CollectiveType.ALL_TO_ALL: "all_to_all",
    CollectiveType.REDUCE_SCATTER: "reduce_scatter",
}

SKIPPED: Final = -1
"""Time of a node that ASTRA-sim passes over (roofline mode, tensor_size 0); nothing may wait for it."""


class Slot(IntEnum):
    """What a node occupies on its rank; a receive needs nothing."""

    CPU = 0
    COMPUTE = 1
    COMM = 2
    NONE = 3


class Act(IntEnum):
    """What a node does: last for a while, load or store remotely, or communicate."""

    WAIT = 0
    MEMORY = 1
    COLLECTIVE = 2
    SEND = 3
    RECV = 4


@dataclass(frozen=True, slots=True)
class Step:
    """A node. `time_ns`: of a `WAIT`. `kind`: of a collective. `peer`: of a send or receive, -1 else.

    `shape`: equal for nodes that differ in group, peer or tag only.
    """

    id: int
    name: str
    type: int
    act: Act
    slot: Slot
    deps: tuple[int, ...]
    time_ns: int = 0
    nbytes: int = 0
    kind: str = ""
    group: int = 0
    involved: tuple[bool, ...] | None = None
    peer: int = -1
    tag: int = 0
    shape: int = -1

    def __str__(self) -> str:
        kind = f" {self.kind}" if self.kind else ""
        return f"node {self.id} ({node_type_name(self.type)}{kind})"


@dataclass(frozen=True, slots=True)
class Shape:
    """What ranks with the same program share; nodes are numbered by ascending id.

    `order`: place in the file of each. `children`: nodes that wait for it. `waits`: how many each waits for.
    `comms`: the collectives, sends and receives.
    """

    order: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    waits: tuple[int, ...]
    slots: tuple[int, ...]
    comms: tuple[int, ...]
    compute_ns: int


@dataclass(frozen=True, slots=True)
class RankProgram:
    """One rank's trace."""

    shape: Shape
    steps: tuple[Step, ...]


def _integer(node: Node, name: str, default: int | None = None) -> int:
    attribute = node.attribute(name)
    if attribute is None:
        if default is None:
            raise InputError(f"attribute {name} is missing")
        return default
    value = attribute.value
    if attribute.kind not in INTEGER_KINDS or not isinstance(value, int):
        raise InputError(f"attribute {name} is of type {attribute.kind.field}, not an integer")
    return value


def _flag(node: Node, name: str) -> bool:
    value = node.value(name)
    if value is None or isinstance(value, int):
        return bool(value)
    raise InputError(f"attribute {name} is no truth value")


def _involved(node: Node) -> tuple[bool, ...] | None:
    attribute = node.attribute("involved_dim")
    if attribute is None:
        return None
    if attribute.kind is not ValueKind.BOOL_LIST or not isinstance(attribute.value, tuple):
        raise InputError("attribute involved_dim is no bool_list")
    return tuple(map(bool, attribute.value))


def _group(node: Node) -> int:
    attribute = node.attribute("pg_name")
    if attribute is None:
        return 0
    value = attribute.value
    if not isinstance(value, str) or (value and not (value.isascii() and value.isdigit())):
        raise InputError(f"attribute pg_name is {value!r}, not the text of a positive integer")
    return int(value or 0)


def compute_ns(num_ops: int, tensor_size: int, system: SystemConfig) -> int:
    """ASTRA-sim's roofline: num_ops / min(peak, rate of local memory x num_ops / tensor_size), whole ns."""
    rate = min(system.local_mem_gbps * 1e9 * (float(num_ops) / float(tensor_size)), system.peak_tflops * 1e12)
    return int(float(num_ops) / rate * 1e9)


class Programs:
    """Reads ranks of one prefix; keeps what they share."""

    def __init__(self, system: SystemConfig) -> None:
        self._system = system
        self._steps: dict[bytes, Step] = {}
        self._shape_numbers: dict[Step, int] = {}
        self._shapes: dict[tuple[int, ...], Shape] = {}
        self._decoder = NodeDecoder()

    def read(self, rank: int, path: Path) -> RankProgram:
        """The program of `rank`. Raises `InputError` naming rank and node where ASTRA-sim stops or errs silently."""
        steps: list[Step] = []
        if path.name.endswith((".json", ".json.gz")):
            reader = TraceReader(path)
            if reader.metadata is None:
                raise InputError(f"rank {rank}: {path} has no metadata record", "ASTRA-sim would lose the first node")
            steps = [self._step(node, rank) for node in reader]
        else:
            steps = self._from_messages(rank, path)
        if not steps:
            raise InputError(f"rank {rank}: {path} has no nodes")
        key = tuple([step.shape for step in steps])
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _link(steps, rank)
        return RankProgram(shape, tuple([steps[place] for place in shape.order]))

    def _from_messages(self, rank: int, path: Path) -> list[Step]:
        try:
            data = gzip.decompress(path.read_bytes()) if is_gzip(path) else path.read_bytes()
        except (OSError, EOFError) as error:
            raise InputError(f"rank {rank}: {path}: {error}") from None
        found: list[Step] = []
        known, at, end = self._steps, 0, len(data)
        first = True
        try:
            while at < end:
                length = data[at]
                at += 1
                if length > 127:
                    length, shift = length & 127, 7
                    while data[at] > 127:
                        length |= (data[at] & 127) << shift
                        at, shift = at + 1, shift + 7
                    length |= data[at] << shift
                    at += 1
                message = data[at : at + length]
                at += length
                if at > end:
                    raise IndexError
                step = known.get(message)
                if first:
                    first = False
                    _check_metadata(message, rank, path)
                    continue
                if step is None:
                    step = known[message] = self._step(self._decoder.decode(message), rank)
                found.append(step)
        except IndexError:
            raise InputError(f"rank {rank}: {path} is cut off at byte {min(at, end)}") from None
        except MalformedMessage as error:
            raise InputError(f"rank {rank}: {path}: {error}") from None
        return found

    def _step(self, node: Node, rank: int) -> Step:
        try:
            step = self._interpret(node)
        except InputError as error:
            raise InputError(f"rank {rank} node {node.id} ({node.type_name}): {error.message}", error.hint) from None
        plain = Step(
            step.id,
            "",
            step.type,
            step.act,
            step.slot,
            step.deps,
            step.time_ns,
            step.nbytes,
            step.kind,
            involved=step.involved,
        )
        number = self._shape_numbers.setdefault(plain, len(self._shape_numbers))
        return Step(
            step.id,
            step.name,
            step.type,
            step.act,
            step.slot,
            step.deps,
            step.time_ns,
            step.nbytes,
            step.kind,
            step.group,
            step.involved,
            step.peer,
            step.tag,
            number,
        )

    def _interpret(self, node: Node) -> Step:
        deps = tuple(dict.fromkeys((*node.data_deps, *node.ctrl_deps)))
        if node.id in deps:
            raise InputError("it waits for itself", "ASTRA-sim drops it silently")
        cpu = _flag(node, "is_cpu_op")
        base = (node.id, node.name, int(node.type))
        lasting = max(node.duration_micros * 1000, 1)
        communicates = node.type in (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV)
        if communicates and cpu:
            raise InputError("is_cpu_op is true on a communication node")
        if self._system.replay_only:
            slot = Slot.CPU if cpu else Slot.COMPUTE if node.type == NodeType.COMP else Slot.COMM
            return Step(*base, Act.WAIT, Slot.NONE if node.type == NodeType.COMM_RECV else slot, deps, lasting)
        if node.type == NodeType.COMP:
            slot = Slot.CPU if cpu else Slot.COMPUTE
            time = lasting if cpu or not self._system.roofline else self._roofline(node)
            if time == SKIPPED:
                return Step(*base, Act.WAIT, Slot.NONE, deps, SKIPPED)
            return Step(*base, Act.WAIT, slot, deps, time)
        if node.type in (NodeType.MEM_LOAD, NodeType.MEM_STORE):
            return Step(*base, Act.MEMORY, Slot.COMM, deps, nbytes=_integer(node, "tensor_size"))
        if node.type == NodeType.COMM_COLL:
            return self._collective(node, base, deps, lasting)
        if communicates:
            return _p2p(node, base, deps)
        raise InputError("ASTRA-sim takes no such node", "drop it and pass its dependencies on")

    def _roofline(self, node: Node) -> int:
        num_ops, tensor_size = _integer(node, "num_ops"), _integer(node, "tensor_size")
        if tensor_size < 1:
            return SKIPPED
        if num_ops < 1:
            raise InputError("num_ops is 0", "in roofline mode ASTRA-sim runs such a node for 2^63 cycles")
        system = self._system
        if not system.peak_tflops or not system.local_mem_gbps:
            raise InputError(f"{system.source}: roofline mode needs peak-perf and local-mem-bw")
        return compute_ns(num_ops, tensor_size, system)

    def _collective(self, node: Node, base: tuple[int, str, int], deps: tuple[int, ...], lasting: int) -> Step:
        number = _integer(node, "comm_type")
        if number == CollectiveType.BROADCAST:
            return Step(*base, Act.WAIT, Slot.COMM, deps, lasting)
        kind = COLLECTIVE_KINDS.get(number)
        if kind is None:
            raise InputError(f"ASTRA-sim takes no collective of comm_type {number}", "lower it to those that it takes")
        nbytes = _integer(node, "comm_size")
        return Step(
            *base,
            Act.COLLECTIVE,
            Slot.COMM,
            deps,
            nbytes=nbytes,
            kind=kind,
            group=_group(node),
            involved=_involved(node),
        )


def _p2p(node: Node, base: tuple[int, str, int], deps: tuple[int, ...]) -> Step:
    sends = node.type == NodeType.COMM_SEND
    peer = _integer(node, "comm_dst" if sends else "comm_src")
    nbytes, tag = _integer(node, "comm_size"), _integer(node, "comm_tag")
    if nbytes < 1:
        raise InputError("comm_size is 0")
    return Step(
        *base,
        Act.SEND if sends else Act.RECV,
        Slot.COMM if sends else Slot.NONE,
        deps,
        nbytes=nbytes,
        peer=peer,
        tag=tag,
    )


def _check_metadata(message: bytes, rank: int, path: Path) -> None:
    from stablecast.ir.chakra.wire import is_metadata

    if not is_metadata(message):
        raise InputError(f"rank {rank}: {path} has no metadata record", "ASTRA-sim would lose the first node")


@dataclass(slots=True)
class _Links:
    children: list[list[int]] = field(default_factory=list[list[int]])
    waits: list[int] = field(default_factory=list[int])


def _link(steps: Sequence[Step], rank: int) -> Shape:
    order = sorted(range(len(steps)), key=lambda place: steps[place].id)
    ordered = [steps[place] for place in order]
    number = {step.id: index for index, step in enumerate(ordered)}
    if len(number) < len(ordered):
        twice = next(step for index, step in enumerate(ordered) if number[step.id] != index)
        raise InputError(f"rank {rank} {twice}: its id is used twice", "ASTRA-sim drops one of them silently")
    links = _Links([[] for _ in ordered], [len(step.deps) for step in ordered])
    for index, step in enumerate(ordered):
        for dep in step.deps:
            if dep not in number:
                raise InputError(f"rank {rank} {step}: it waits for node {dep}, which is not there")
            if ordered[number[dep]].time_ns == SKIPPED:
                raise InputError(
                    f"rank {rank} {ordered[number[dep]]}: its tensor_size is 0",
                    f"in roofline mode ASTRA-sim passes over it, and node {step.id}, which waits for it, never runs",
                )
            links.children[number[dep]].append(index)
    _check_cycles(ordered, links, rank)
    return Shape(
        tuple(order),
        tuple(map(tuple, links.children)),
        tuple(links.waits),
        tuple(int(step.slot) for step in ordered),
        tuple(index for index, step in enumerate(ordered) if step.act >= Act.COLLECTIVE),
        sum(step.time_ns for step in ordered if step.slot == Slot.COMPUTE),
    )


def _check_cycles(ordered: Sequence[Step], links: _Links, rank: int) -> None:
    waits = links.waits.copy()
    ready = [index for index, count in enumerate(waits) if count == 0]
    done = 0
    while ready:
        done += 1
        for child in links.children[ready.pop()]:
            waits[child] -= 1
            if waits[child] == 0:
                ready.append(child)
    if done < len(ordered):
        stuck = next(step for step, count in zip(ordered, waits, strict=True) if count)
        raise InputError(f"rank {rank} {stuck}: its dependencies form a circle", "ASTRA-sim drops its nodes silently")
