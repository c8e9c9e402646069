"""Counts of a trace by class: compute, collectives by type and group size, messages, memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stablecast.ir.chakra.files import TraceReader, find_traces
from stablecast.ir.chakra.schema import Node, NodeType, collective_name
from stablecast.ir.chakra.surroundings import find_surroundings
from stablecast.ir.chakra.wire import NodeDecoder


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one type and group size over all ranks. `group_size` is None where it is not known."""

    kind: str
    group_size: int | None
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Totals over all ranks; `nodes_low`, `nodes_high` and the bytes likewise are those of single ranks."""

    ranks: int
    nodes: int
    nodes_low: int
    nodes_high: int
    file_bytes: int
    file_bytes_low: int
    file_bytes_high: int
    dependencies: int
    by_type: Mapping[str, int]
    num_ops: int
    tensor_bytes: int
    duration_micros: int
    collectives: tuple[CollectiveRow, ...]
    messages: int
    message_bytes: int

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("by_type", "collectives")}
        rows = [
            {"kind": row.kind, "group_size": row.group_size, "count": row.count, "bytes": row.bytes}
            for row in self.collectives
        ]
        return {**plain, "by_type": dict(self.by_type), "collectives": rows}

    def __str__(self) -> str:
        lines = [
            f"ranks         {self.ranks}",
            f"nodes         {self.nodes:,} ({self.nodes_low:,} to {self.nodes_high:,} a rank)",
            f"file bytes    {self.file_bytes:,} ({self.file_bytes_low:,} to {self.file_bytes_high:,} a rank)",
            f"dependencies  {self.dependencies:,}",
            *(f"  {name:<18}{count:>14,}" for name, count in self.by_type.items()),
            f"compute       {self.num_ops:,} operations, {self.tensor_bytes:,} bytes, {self.duration_micros:,} us",
        ]
        for row in self.collectives:
            size = "unknown size" if row.group_size is None else f"groups of {row.group_size}"
            lines.append(f"  {row.kind:<18}{row.count:>14,}  {row.bytes:,} bytes, {size}")
        if self.messages:
            lines.append(f"  sends             {self.messages:>14,}  {self.message_bytes:,} bytes")
        return "\n".join(lines)


@dataclass(slots=True)
class _Totals:
    sizes: Mapping[str, int]
    everyone: int | None
    by_type: dict[NodeType | int, int] = field(default_factory=dict[NodeType | int, int])
    collectives: dict[tuple[str, int | None], list[int]] = field(
        default_factory=dict[tuple[str, int | None], list[int]]
    )
    dependencies: int = 0
    num_ops: int = 0
    tensor_bytes: int = 0
    duration_micros: int = 0
    messages: int = 0
    message_bytes: int = 0

    def add(self, node: Node) -> None:
        self.by_type[node.type] = self.by_type.get(node.type, 0) + 1
        self.dependencies += len({*node.data_deps, *node.ctrl_deps})
        if node.type == NodeType.COMP:
            self.num_ops += _number(node, "num_ops")
            self.tensor_bytes += _number(node, "tensor_size")
            self.duration_micros += node.duration_micros
        elif node.type == NodeType.COMM_COLL:
            group = node.value("pg_name")
            named = isinstance(group, str) and group not in ("", "0")
            size = self.sizes.get(str(group)) if named else self.everyone
            if not named and node.attribute("involved_dim") is not None:
                size = None
            row = self.collectives.setdefault((collective_name(node.value("comm_type")), size), [0, 0])
            row[0] += 1
            row[1] += _number(node, "comm_size")
        elif node.type == NodeType.COMM_SEND:
            self.messages += 1
            self.message_bytes += _number(node, "comm_size")


def _number(node: Node, name: str) -> int:
    value = node.value(name)
    return int(value) if isinstance(value, int) else 0


def trace_stats(source: str | Path, *, group_file: str | Path | None = None) -> TraceStats:
    """Read all ranks of a prefix, a node at a time, and count. Raises `InputError` where they cannot be read."""
    files = find_traces(source)
    groups = find_surroundings(files, None if group_file is None else Path(group_file)).groups
    sizes = {key: len(ranks) for key, ranks in groups.members.items()} if groups else {}
    totals = _Totals(sizes, None if files.single else len(files.ranks))
    decoder = NodeDecoder()
    counts: list[int] = []
    for path in files.ranks.values():
        counts.append(0)
        for node in TraceReader(path, decoder):
            totals.add(node)
            counts[-1] += 1
    lengths = [path.stat().st_size for path in files.ranks.values()]
    rows = sorted(totals.collectives.items(), key=lambda item: (item[0][0], item[0][1] or 0))
    return TraceStats(
        ranks=len(counts),
        nodes=sum(counts),
        nodes_low=min(counts),
        nodes_high=max(counts),
        file_bytes=sum(lengths),
        file_bytes_low=min(lengths),
        file_bytes_high=max(lengths),
        dependencies=totals.dependencies,
        by_type={_type_name(kind): count for kind, count in sorted(totals.by_type.items())},
        num_ops=totals.num_ops,
        tensor_bytes=totals.tensor_bytes,
        duration_micros=totals.duration_micros,
        collectives=tuple(CollectiveRow(kind, size, count, total) for (kind, size), (count, total) in rows),
        messages=totals.messages,
        message_bytes=totals.message_bytes,
    )


def _type_name(kind: NodeType | int) -> str:
    return f"{kind.name}_NODE" if isinstance(kind, NodeType) else str(kind)
