"""The validator: reads all ranks of a prefix and says what a consumer would choke on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from stablecast.ir.chakra.check_comm import CollectiveLedger, MessageLedger, highest_member
from stablecast.ir.chakra.check_graph import GraphFacts, Structure, graph_facts
from stablecast.ir.chakra.check_node import MISSING, ZERO, NodeFacts, node_facts
from stablecast.ir.chakra.files import TraceError, TraceFiles, TraceReader, find_traces, is_gzip, read_messages
from stablecast.ir.chakra.report import CheckReport, FaultLog
from stablecast.ir.chakra.schema import Node
from stablecast.ir.chakra.surroundings import Surroundings, find_surroundings
from stablecast.ir.chakra.wire import MalformedMessage, NodeDecoder, is_metadata
from stablecast.ir.errors import InputError

_CACHED_BYTES = 32 << 20
_CACHED_GRAPH_NODES = 500_000
_LISTED_ABSENT = 1000


def check(
    source: str | Path,
    *,
    group_file: str | Path | None = None,
    ranks: int | None = None,
    roofline: bool | None = None,
    npus_count: Sequence[int] | None = None,
    keep: int = 100,
) -> CheckReport:
    """Read every rank of a prefix, one at a time, and report what a consumer would choke on.

    What is not given is taken from the files beside the trace: groups from `comm_group.json` or `<prefix>.json`,
    `roofline` (compute timed by `num_ops` and `tensor_size`) from `system.json`, `npus_count` (ranks of each network
    dimension) from `network.yml`, the number of `ranks` from the manifest, the network, or the highest rank that a
    file, group or message names. Where nothing says whether roofline is on, compute must carry both attributes, so
    that any consumer takes the trace. `keep`: findings kept of each kind. Memory grows with the largest rank, the
    number of groups and the messages that are still open, not with the number of ranks times nodes. Raises
    `InputError` where there is no trace or an option makes no sense.
    """
    if ranks is not None and ranks < 1:
        raise InputError(f"{ranks} ranks cannot be checked", "give a positive number of ranks")
    files = find_traces(source)
    around = find_surroundings(files, None if group_file is None else Path(group_file))
    if roofline is not None:
        around = replace(around, roofline=roofline)
    if npus_count is not None:
        around = replace(around, npus_count=tuple(npus_count))
    if ranks is not None:
        around = replace(around, ranks=ranks)
    return _Check(files, around, FaultLog(keep), FaultLog(keep)).run()


@dataclass(slots=True)
class _Check:
    files: TraceFiles
    around: Surroundings
    faults: FaultLog
    warnings: FaultLog
    nodes: int = 0
    _decoder: NodeDecoder = field(default_factory=NodeDecoder)
    _facts: dict[bytes, NodeFacts] = field(default_factory=dict[bytes, NodeFacts])
    _facts_bytes: int = 0
    _graphs: dict[tuple[Structure, ...], GraphFacts] = field(default_factory=dict[tuple[Structure, ...], GraphFacts])
    _graph_nodes: int = 0

    def run(self) -> CheckReport:
        groups = self.around.groups
        for problem in groups.problems if groups else ():
            self.faults.add(None, None, "group file", f"{groups.path.name if groups else ''}: {problem}")
        collectives = CollectiveLedger(self.faults, groups, self.around.npus_count)
        messages = MessageLedger(self.faults, self.warnings)
        readable: set[int] = set()
        for rank, path in self.files.ranks.items():
            facts = self._read_rank(rank, path)
            if facts is None:
                continue
            readable.add(rank)
            graph = self._graph(facts)
            self._judge_rank(rank, facts, graph)
            ordered = [facts[at] for at in graph.order]
            collectives.add(rank, [(one.id, one.collective) for one in ordered if one.collective])
            messages.add(rank, [(one.id, one.message) for one in ordered if one.message])
        if not self.files.single:
            self._missing_ranks(max(highest_member(groups.members) if groups else -1, messages.highest_peer))
        collectives.finish(readable)
        messages.finish(readable)
        return CheckReport(
            not self.faults.found,
            len(self.files.ranks),
            self.nodes,
            tuple(self.faults.found),
            tuple(self.warnings.found),
            dict(self.faults.counts),
            dict(self.warnings.counts),
        )

    def _missing_ranks(self, named: int) -> None:
        """Note the ranks without a file. `named`: the highest rank that a group or a message names."""
        present = self.files.ranks
        expected = self.around.ranks or max(max(present), named) + 1
        for rank in islice((rank for rank in range(expected) if rank not in present), _LISTED_ABSENT):
            self.faults.add(rank, None, "missing rank file", f"{self.files.prefix.name}.{rank}.et does not exist")

    def _read_rank(self, rank: int, path: Path) -> list[NodeFacts] | None:
        """Facts of the nodes of a rank, None where the file cannot be read to its end."""
        try:
            if path.name.endswith((".json", ".json.gz")):
                self.warnings.add(
                    rank, None, "not a binary trace", f"{path.name} is JSON, which simulators do not read"
                )
                facts = [self._judge_node(node) for node in TraceReader(path)]
            else:
                self._judge_file(rank, path)
                facts = list(self._stream(rank, path))
        except TraceError as error:
            self.faults.add(rank, None, error.kind, error.message)
            return None
        self.nodes += len(facts)
        if not facts:
            self.faults.add(rank, None, "rank without nodes", f"{path.name} holds no node")
        return facts

    def _judge_file(self, rank: int, path: Path) -> None:
        if is_gzip(path):
            self.faults.add(rank, None, "compressed file", f"{path.name} is compressed, which simulators do not read")
        size = (self.around.sizes or {}).get(path.name)
        if size is not None and size != path.stat().st_size:
            text = f"{path.name} has {path.stat().st_size} bytes, the manifest says {size}"
            self.faults.add(rank, None, "truncated file", text)

    def _stream(self, rank: int, path: Path) -> Iterator[NodeFacts]:
        known = self._facts.get
        messages = read_messages(path)
        first = next(messages, None)
        if first is None:
            return
        if not is_metadata(first):
            text = f"{path.name} does not begin with GlobalMetadata: its first node is lost"
            self.faults.add(rank, None, "no metadata record", text)
            yield self._decode(first, path)
        for message in messages:
            yield known(message) or self._decode(message, path)

    def _decode(self, message: bytes, path: Path) -> NodeFacts:
        try:
            node = self._decoder.decode(message)
        except MalformedMessage as error:
            raise TraceError("malformed message", f"{path}: {error}") from None
        if self._facts_bytes > _CACHED_BYTES:
            self._facts.clear()
            self._facts_bytes = 0
        facts = self._facts[message] = self._judge_node(node)
        self._facts_bytes += len(message) + 500
        return facts

    def _judge_node(self, node: Node) -> NodeFacts:
        return node_facts(node, self.around.roofline, len(self.around.npus_count))

    def _graph(self, facts: Sequence[NodeFacts]) -> GraphFacts:
        key = tuple(one.structure for one in facts)
        graph = self._graphs.get(key)
        if graph is None:
            if self._graph_nodes > _CACHED_GRAPH_NODES:
                self._graphs.clear()
                self._graph_nodes = 0
            graph = self._graphs[key] = graph_facts(key)
            self._graph_nodes += len(key)
        return graph

    def _is_collective_graph(self, facts: Sequence[NodeFacts]) -> bool:
        """Whether a rank is the point-to-point graph of a collective, whose compute is always timed by duration."""
        return any(one.message for one in facts) and not any(one.collective for one in facts)

    def _judge_rank(self, rank: int, facts: Sequence[NodeFacts], graph: GraphFacts) -> None:
        for node, kind, message in graph.faults:
            self.faults.add(rank, node, kind, message)
        by_duration = self._is_collective_graph(facts)
        for one in facts:
            for kind, message in one.faults:
                self.faults.add(rank, one.id, kind, message)
            for kind, message in one.warnings:
                self.warnings.add(rank, one.id, kind, message)
            if one.uncosted and not by_duration:
                self.faults.add(rank, one.id, MISSING, one.uncosted)
            if one.skipped and one.id in graph.parents:
                self.faults.add(rank, one.id, ZERO, "tensor_size is 0: the node is skipped and its children never run")
            elif one.skipped:
                self.warnings.add(rank, one.id, ZERO, "tensor_size is 0: the node is skipped")
