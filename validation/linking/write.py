"""The linked graphs of all ranks as Chakra traces that consumers run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from stablecast.frontends.traces.pytorch_et import EtOp, read_et
from stablecast.frontends.traces.read import read_trace
from stablecast.ir.chakra import (
    Attribute,
    IOInfo,
    Node,
    NodeType,
    PrefixWriter,
    TraceMetadata,
    bool_attr,
    collective_node,
    comp_node,
    double_attr,
    int32_attr,
    int64_attr,
    string_attr,
)
from stablecast.ir.errors import InputError
from stablecast.ir.text import table
from stablecast.lowering.chakra import COMM_TYPES
from stablecast.validation.collectives import MeasuredCollective
from stablecast.validation.linking.graph import Item, RankGraph, rank_graph
from stablecast.validation.linking.tensors import moved_bytes, operations

_METADATA: Final = TraceMetadata("0.0.4")
_ALSO: Final[Mapping[str, str]] = {"reduce": "all_reduce", "gather": "all_gather", "scatter": "reduce_scatter"}
"""Kinds that no consumer runs, and what they are written as."""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What was written: files, nodes, and how well the two traces of each rank fit.

    `graphs`: of the ranks that were read. `copied`: ranks that are copies of the one that was read. `notes`: what was
    changed for the sake of consumers.
    """

    prefix: str
    ranks: int
    nodes: int
    graphs: tuple[RankGraph, ...]
    copied: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "prefix": self.prefix,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "copied": self.copied,
            "linked": [
                {
                    "rank": graph.rank,
                    "nodes": len(graph.items),
                    "operators_found": graph.op_share,
                    "device_work_linked": graph.work_share,
                    "measured_s": graph.span_s,
                    "dependencies": dict(graph.edges),
                    "contradicted": graph.contradicted,
                }
                for graph in self.graphs
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows = [["rank", "nodes", "host", "device", "collectives", "ops found", "work linked", "measured"]]
        for graph in self.graphs:
            host = sum(item.on_host for item in graph.items)
            talk = sum(item.collective is not None for item in graph.items)
            rows.append(
                [
                    str(graph.rank),
                    str(len(graph.items)),
                    str(host),
                    str(len(graph.items) - host - talk),
                    str(talk),
                    f"{graph.op_share:.1%}",
                    f"{graph.work_share:.1%}",
                    f"{graph.span_s * 1e3:.3f} ms",
                ]
            )
        kinds = dict.fromkeys(kind for graph in self.graphs for kind in graph.edges)
        edges = ", ".join(f"{sum(graph.edges.get(kind, 0) for graph in self.graphs)} {kind}" for kind in kinds)
        lines = [
            f"{self.prefix}: {self.ranks} rank(s), {self.nodes:,} nodes",
            *table(rows, right=range(1, 8), indent="  "),
        ]
        lines.append(f"  dependencies: {edges}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def link_traces(
    pairs: Sequence[tuple[Path, Path]],
    out: str | Path,
    *,
    ranks: int | None = None,
    overwrite: bool = False,
    files: Mapping[str, bytes] | None = None,
) -> LinkReport:
    """Link (host execution trace, Kineto trace) of each rank and write `<out>.<rank>.et`, groups and a manifest.

    With one pair of a run of several ranks, every rank gets that one's graph. `ranks`: how many there are, by default
    as the traces say. `files`: further files to put beside them. Raises `InputError` where traces are of different
    runs, ranks are missing or doubled, or their collectives do not fit each other; then nothing is written.
    """
    graphs = sorted((rank_graph(read_et(host), read_trace(kineto)) for host, kineto in pairs), key=lambda g: g.rank)
    world = ranks or max(max(graph.world for graph in graphs), len(graphs))
    _check_ranks(graphs, world)
    book = _Book(world)
    sizes = _agreed_sizes(graphs, book)
    with PrefixWriter(out, overwrite=overwrite) as sink:
        for rank in range(world):
            graph = graphs[rank if len(graphs) > 1 else 0]
            sink.write_nodes(rank, tuple(_Nodes(graph, sizes, book).run()), _METADATA)
        if book.members():
            sink.write_groups(book.members())
        for name, data in (files or {}).items():
            sink.write_file(name, data)
        copied = world - len(graphs)
        if copied:
            book.notes[f"{copied} rank(s) are copies of rank {graphs[0].rank}, the only one given"] = None
        report = LinkReport(str(out), world, sink.nodes, tuple(graphs), copied, tuple(book.notes))
        sink.notes.update(report.to_dict())
    return report


def _check_ranks(graphs: Sequence[RankGraph], world: int) -> None:
    for before, after in pairwise(graphs):
        if before.rank == after.rank:
            raise InputError(f"two traces are of rank {before.rank}")
    if len(graphs) > 1 and [graph.rank for graph in graphs] != list(range(world)):
        have = ", ".join(str(graph.rank) for graph in graphs)
        raise InputError(f"the run has {world} ranks, traces are given of {have}", "give those of all ranks, or of one")


@dataclass(slots=True)
class _Book:
    """Groups by their members, numbered from 1 as they are met; and what was noted."""

    world: int
    notes: dict[str, None] = field(default_factory=dict[str, None])
    _numbers: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])

    def name(self, talk: MeasuredCollective) -> str:
        """The key of the collective's group in the group file, empty for all ranks."""
        if talk.group_size in (0, self.world) or len(talk.ranks) == self.world:
            return ""
        if not talk.ranks:
            raise InputError(
                f"a {talk.kind} of {talk.group_size} of {self.world} ranks does not say which they are",
                "profile with a PyTorch that writes process groups (2.2 or later)",
            )
        return str(self._numbers.setdefault(tuple(sorted(talk.ranks)), len(self._numbers) + 1))

    def members(self) -> dict[str, list[int]]:
        """Group key -> ranks."""
        return {str(number): list(ranks) for ranks, number in self._numbers.items()}


_Key = tuple[str, int]


def _spoken(graph: RankGraph, book: _Book) -> Iterator[tuple[int, _Key, MeasuredCollective]]:
    """(item, (group, place in the group's order), collective) of those that are written as collectives."""
    issued: dict[str, int] = {}
    for at, item in enumerate(graph.items):
        talk = item.collective
        if talk is None or _written_kind(talk.kind) is None or 1 in (talk.group_size, book.world):
            continue
        group = book.name(talk)
        place = issued[group] = issued.get(group, -1) + 1
        yield at, (group, place), talk


def _written_kind(kind: str) -> str | None:
    known = _ALSO.get(kind, kind)
    return known if known in COMM_TYPES else None


def _agreed_sizes(graphs: Sequence[RankGraph], book: _Book) -> dict[_Key, int]:
    """Bytes of each collective of each group: the most that any member has, as consumers want them equal."""
    sizes: dict[_Key, int] = {}
    kinds: dict[_Key, str] = {}
    counts: dict[str, dict[int, int]] = {}
    for graph in graphs:
        for _, key, talk in _spoken(graph, book):
            size = _contributed(talk, book.world)
            if kinds.setdefault(key, talk.kind) != talk.kind:
                raise InputError(
                    f"collective {key[1]} of group {key[0] or 'of all ranks'} is {kinds[key]} on one rank and "
                    f"{talk.kind} on rank {graph.rank}",
                    "give traces of the same step of one run",
                )
            if sizes.get(key, size) != size:
                book.notes["collectives of unequal shares have those of the rank with most, on all ranks"] = None
            sizes[key] = max(sizes.get(key, 0), size)
            counts.setdefault(key[0], {})[graph.rank] = key[1] + 1
    for group, held in counts.items():
        if len(set(held.values())) > 1:
            shown = ", ".join(f"rank {rank}: {count}" for rank, count in held.items())
            raise InputError(f"ranks have different numbers of collectives in group {group or 'of all ranks'}: {shown}")
    return sizes


def _contributed(talk: MeasuredCollective, world: int) -> int:
    """Bytes in Chakra's convention: an all-gather's own share, all others' operand."""
    size = talk.group_size or world
    nbytes = talk.nbytes / size if talk.kind == "all_gather" else talk.nbytes
    return max(int(nbytes), 4)


class _Nodes:
    """Items of a rank to nodes; positions are ids."""

    def __init__(self, graph: RankGraph, sizes: Mapping[_Key, int], book: _Book) -> None:
        self._graph, self._sizes, self._book = graph, sizes, book
        self._keys = {at: key for at, key, _ in _spoken(graph, book)}
        self._owed = 0.0

    def run(self) -> Iterator[Node]:
        last_in: dict[str, int] = {}
        origin = min(item.start_s for item in self._graph.items)
        for at, item in enumerate(self._graph.items):
            deps = item.deps
            key = self._keys.get(at)
            if key is not None:
                deps = tuple(sorted({*deps, last_in[key[0]]})) if key[0] in last_in else deps
                last_in[key[0]] = at
            node = self._node(at, item, deps, key)
            yield replace(node, start_time_micros=int((item.start_s - origin) * 1e6))

    def _node(self, at: int, item: Item, deps: tuple[int, ...], key: _Key | None) -> Node:
        if item.on_host:
            return self._host(at, item, deps)
        nanos = (double_attr("duration_nanos", item.duration_s * 1e9), int32_attr("tid", item.stream))
        micros = max(1, round(item.duration_s * 1e6))
        talk = item.collective
        if talk is None or key is None:
            if talk is not None:
                self._book.notes[f"{talk.kind or 'communication of unknown kind'} is written as compute"] = None
            op = item.op
            flops = operations(op) if op is not None else 1
            moved = moved_bytes(op) if op is not None else 0
            made = comp_node(at, item.name, max(flops, 1), max(moved, int(item.nbytes), 1), deps, micros, nanos)
            return _with_tensors(made, op)
        kind = _written_kind(talk.kind) or ""
        extra = (*nanos, *((string_attr("stands_for", talk.kind),) if kind != talk.kind else ()))
        named = f"COMM_COLL_NODE_{talk.kind}_{at}"
        return collective_node(at, named, COMM_TYPES[kind], self._sizes[key], key[0], deps, micros, extra)

    def _host(self, at: int, item: Item, deps: tuple[int, ...]) -> Node:
        """Whole microseconds, one at least; what that adds is taken from those that follow."""
        self._owed += item.duration_s * 1e6
        micros = max(1, round(self._owed))
        self._owed -= micros
        extra: tuple[Attribute, ...] = (bool_attr("is_cpu_op", True), int32_attr("tid", item.stream % (1 << 31)))
        op = item.op
        if op is not None:
            extra = (*extra, int64_attr("rf_id", op.record), string_attr("op_schema", op.schema))
        made = Node(at, item.name, NodeType.COMP, deps, duration_micros=micros, attributes=extra)
        return _with_tensors(made, op)


def _with_tensors(node: Node, op: EtOp | None) -> Node:
    if op is None:
        return node
    inputs = IOInfo(str(list(op.values)), str(list(op.shapes)), str(list(op.types)))
    outputs = IOInfo(str(list(op.out_values)), str(list(op.out_shapes)), str(list(op.out_types)))
    return replace(node, inputs=inputs, outputs=outputs)
