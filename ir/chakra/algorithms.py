"""Collective algorithms made elsewhere: MSCCL-style XML, and Chakra point-to-point graphs of one collective."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from math import ceil
from pathlib import Path

from stablecast.ir.chakra.files import TraceReader, find_traces
from stablecast.ir.chakra.schema import Node, NodeType
from stablecast.ir.errors import InputError

_KINDS: Mapping[str, str] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltonext": "collective_permute",
    "broadcast": "collective_broadcast",
}
_RECEIVES = frozenset({"r", "rcs", "rrc", "rrs", "rrcs"})
_REDUCES = frozenset({"rrc", "rrs", "rrcs", "re"})
_SENDS = frozenset({"s", "rcs", "rrs", "rrcs"})
_OTHER = frozenset({"nop", "cpy"})


class Action(StrEnum):
    """What a step of an algorithm does."""

    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class AlgorithmStep:
    """One step of a member.

    `peer`: place of the other member (-1 for local steps). `share`: bytes as a part of the whole buffer. `deps`:
    earlier steps of the same member. `tag` pairs a send with its receive.
    """

    action: Action
    share: Fraction
    peer: int = -1
    tag: int = 0
    deps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveAlgorithm:
    """`members[p]`: the steps of the member at place p of a group. `collective`: kind as in `Collective.kind`."""

    name: str
    collective: str
    members: tuple[tuple[AlgorithmStep, ...], ...]

    @property
    def size(self) -> int:
        """Members of a group that it is for."""
        return len(self.members)

    @property
    def tags(self) -> int:
        """Tags that one run needs."""
        return 1 + max((step.tag for steps in self.members for step in steps), default=0)

    def nbytes(self, step: AlgorithmStep, buffer_bytes: int) -> int:
        """Bytes of a step where the buffer has `buffer_bytes`, at least 1."""
        return max(1, ceil(step.share * buffer_bytes))


def read_algorithm(source: str | Path, collective: str) -> CollectiveAlgorithm:
    """The algorithm in `source` for collectives of kind `collective`.

    An XML file of MSCCL, or the prefix of a Chakra graph of sends and receives, `PREFIX@BYTES` where it does not
    itself say for what buffer it was made. Raises `InputError` where it is none of these or for another collective.
    """
    text = str(source)
    found = parse_msccl(_text(Path(text)), text) if Path(text).is_file() else _from_graph(text, collective)
    if found.collective != collective:
        raise InputError(f"{text} is an algorithm for {found.collective}, not for {collective}")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def parse_msccl(text: str, source: str = "") -> CollectiveAlgorithm:
    """An algorithm from MSCCL's XML: `algo` with `gpu`, `tb` (thread blocks) and `step`.

    Steps of a thread block follow each other and wait for what `depid` and `deps` name. The k-th send of a connection
    (two members and a channel) meets its k-th receive.
    """
    where = source or "the algorithm"
    if "<!ENTITY" in text or "<!DOCTYPE" in text:
        raise InputError(f"{where}: document types are not read")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise InputError(f"{where} is not XML: {error}") from None
    kind = _KINDS.get(root.get("coll", "").lower())
    if root.tag != "algo" or kind is None:
        raise InputError(f"{where} is not an MSCCL algorithm", "expected <algo coll=... ngpus=... nchunksperloop=...>")
    chunks = _number(root, "nchunksperloop", where)
    gpus = sorted(root.iter("gpu"), key=lambda gpu: _number(gpu, "id", where))
    if [_number(gpu, "id", where) for gpu in gpus] != list(range(_number(root, "ngpus", where))) or chunks < 1:
        raise InputError(f"{where}: GPUs are not numbered from 0 to ngpus - 1, or there are no chunks")
    channels: dict[tuple[int, int], int] = {}
    members = tuple(_Member(gpu, where, chunks, channels).steps() for gpu in gpus)
    algorithm = CollectiveAlgorithm(root.get("name") or where, kind, members)
    _check_pairs(algorithm, where)
    return algorithm


def _number(element: ElementTree.Element, name: str, where: str, default: int | None = None) -> int:
    value = element.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise InputError(f"{where}: <{element.tag}> has no number '{name}'") from None


@dataclass
class _Member:
    gpu: ElementTree.Element
    where: str
    chunks: int
    channels: dict[tuple[int, int], int]
    _out: list[AlgorithmStep] = field(default_factory=list[AlgorithmStep])
    _last: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict[tuple[int, int], tuple[int, ...]])

    def steps(self) -> tuple[AlgorithmStep, ...]:
        blocks = {_number(block, "id", self.where): block for block in self.gpu.iter("tb")}
        todo = {
            name: sorted(block.iter("step"), key=lambda step: _number(step, "s", self.where))
            for name, block in blocks.items()
        }
        counts: dict[tuple[bool, int, int], int] = {}
        while any(todo.values()):
            ready = [name for name, steps in todo.items() if steps and self._may_run(steps[0])]
            if not ready:
                raise InputError(f"{self.where}: the thread blocks of gpu {self.gpu.get('id')} wait for each other")
            for name in ready:
                self._step(name, blocks[name], todo[name].pop(0), counts)
        return tuple(self._out)

    def _wanted(self, step: ElementTree.Element) -> tuple[int, int] | None:
        block = _number(step, "depid", self.where, -1)
        return None if block < 0 else (block, _number(step, "deps", self.where, -1))

    def _may_run(self, step: ElementTree.Element) -> bool:
        wanted = self._wanted(step)
        return wanted is None or wanted in self._last

    def _step(
        self, name: int, block: ElementTree.Element, step: ElementTree.Element, counts: dict[tuple[bool, int, int], int]
    ) -> None:
        number = _number(step, "s", self.where)
        kind = step.get("type", "")
        if kind not in _RECEIVES | _REDUCES | _SENDS | _OTHER:
            raise InputError(f"{self.where}: unknown step type '{kind}'")
        wanted = self._wanted(step)
        before = [(name, number - 1)] + ([wanted] if wanted else [])
        deps = tuple(sorted({dep for key in before for dep in self._last.get(key, ())}))
        share = Fraction(_number(step, "cnt", self.where, 1), self.chunks)
        channel = _number(block, "chan", self.where, 0)
        own = _number(self.gpu, "id", self.where)
        for action in _actions(kind):
            peer, tag = -1, 0
            if action in (Action.SEND, Action.RECV):
                sends = action is Action.SEND
                peer = _number(block, "send" if sends else "recv", self.where)
                count = counts.get((sends, peer, channel), 0)
                counts[sends, peer, channel] = count + 1
                tag = self.channels.setdefault((channel, count), len(self.channels))
                if peer == own or peer < 0:
                    raise InputError(f"{self.where}: gpu {own} has no peer for step {number} of block {name}")
            self._out.append(AlgorithmStep(action, share, peer, tag, deps))
            deps = (len(self._out) - 1,)
        self._last[name, number] = deps


def _actions(kind: str) -> Sequence[Action]:
    parts: list[Action] = []
    if kind in _RECEIVES:
        parts.append(Action.RECV)
    if kind in _REDUCES:
        parts.append(Action.REDUCE)
    if kind == "cpy":
        parts.append(Action.COPY)
    if kind in _SENDS:
        parts.append(Action.SEND)
    return parts


def _check_pairs(algorithm: CollectiveAlgorithm, where: str) -> None:
    """Every send has its receive, of the same size, at a member that exists."""
    open_ends: dict[tuple[int, int, int, Fraction], int] = {}
    for own, steps in enumerate(algorithm.members):
        for step in steps:
            if step.peer >= algorithm.size:
                raise InputError(f"{where}: gpu {own} talks to {step.peer}, which is not there")
            if step.action is Action.SEND:
                key = (own, step.peer, step.tag, step.share)
                open_ends[key] = open_ends.get(key, 0) + 1
            elif step.action is Action.RECV:
                key = (step.peer, own, step.tag, step.share)
                open_ends[key] = open_ends.get(key, 0) - 1
    for (source, target, _, _), count in open_ends.items():
        if count:
            what = "sends what is not received" if count > 0 else "receives what is not sent"
            raise InputError(f"{where}: between {source} and {target} one side {what}, or sizes differ")


def _from_graph(text: str, collective: str) -> CollectiveAlgorithm:
    prefix, at, size = text.rpartition("@")
    if not at:
        prefix = text
    files = find_traces(prefix)
    if at and not (size.isdigit() and int(size) > 0):
        raise InputError(f"{text}: '{size}' is no number of bytes", "write PREFIX@BYTES")
    total = int(size) if at else _said_bytes(TraceReader(files.ranks[min(files.ranks)]))
    if total is None:
        raise InputError(f"{text} does not say for how many bytes it was made", "write PREFIX@BYTES")
    if sorted(files.ranks) != list(range(len(files.ranks))):
        raise InputError(f"{text}: ranks are missing")
    tags: dict[tuple[int, int], int] = {}
    members = tuple(_graph_steps(tuple(TraceReader(path)), total, tags, str(path)) for path in files.ranks.values())
    algorithm = CollectiveAlgorithm(Path(prefix).name, collective, members)
    _check_pairs(algorithm, text)
    return algorithm


def _said_bytes(reader: TraceReader) -> int | None:
    """Bytes of the buffer by the algorithm that the graph was made from, where its head holds it."""
    attributes = reader.metadata.attributes if reader.metadata else ()
    text = next((one.value for one in attributes if one.name == "input_file"), None)
    if not isinstance(text, str):
        return None
    try:
        share = next((step.share for step in parse_msccl(text).members[0] if step.action is Action.SEND), None)
    except InputError:
        return None
    size = next((node.value("comm_size") for node in reader if node.type == NodeType.COMM_SEND), None)
    return int(size / share) if share and isinstance(size, int) else None


def _graph_steps(
    nodes: Sequence[Node], total: int, tags: dict[tuple[int, int], int], where: str
) -> tuple[AlgorithmStep, ...]:
    place: dict[int, int] = {}
    counts: dict[tuple[bool, int, int], int] = {}
    steps: list[AlgorithmStep] = []
    last_share = Fraction(0)
    for node in nodes:
        deps = {*node.data_deps, *node.ctrl_deps}
        if not deps <= place.keys():
            raise InputError(f"{where}: node {node.id} stands before one that it waits for")
        before = tuple(sorted(place[dep] for dep in deps))
        sends = node.type == NodeType.COMM_SEND
        if sends or node.type == NodeType.COMM_RECV:
            peer, tag = node.value("comm_dst" if sends else "comm_src"), node.value("comm_tag")
            size = node.value("comm_size")
            if not (isinstance(peer, int) and isinstance(tag, int) and isinstance(size, int)):
                raise InputError(f"{where}: node {node.id} lacks peer, tag or size")
            number = counts.get((sends, peer, tag), 0)
            counts[sends, peer, tag] = number + 1
            last_share = Fraction(size, total)
            own_tag = tags.setdefault((tag, number), len(tags))
            steps.append(AlgorithmStep(Action.SEND if sends else Action.RECV, last_share, peer, own_tag, before))
        elif node.type == NodeType.COMP:
            steps.append(AlgorithmStep(Action.REDUCE, last_share, deps=before))
        else:
            raise InputError(f"{where}: node {node.id} is neither a message nor compute")
        place[node.id] = len(steps) - 1
    return tuple(steps)
