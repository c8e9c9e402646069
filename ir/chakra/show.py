"""A rank's trace for people: a table, a graph in DOT, one JSON document."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from stablecast.ir.chakra.files import TraceReader, find_traces
from stablecast.ir.chakra.jsonform import json_lines
from stablecast.ir.chakra.schema import Node, NodeType, collective_name
from stablecast.ir.errors import InputError

_COLOURS = {
    NodeType.COMP: "#cfe2f3",
    NodeType.COMM_COLL: "#f9cb9c",
    NodeType.COMM_SEND: "#d9ead3",
    NodeType.COMM_RECV: "#d9ead3",
    NodeType.MEM_LOAD: "#ead1dc",
    NodeType.MEM_STORE: "#ead1dc",
}


def colour_of(node: Node) -> str:
    """The colour that pictures give a node of its type."""
    return _COLOURS.get(node.type, "#eeeeee") if isinstance(node.type, NodeType) else "#eeeeee"


def open_rank(source: str | Path, rank: int | None = None) -> TraceReader:
    """The reader of one rank of a prefix, of its lowest rank where none is named. Raises `InputError`."""
    files = find_traces(source)
    wanted = min(files.ranks) if rank is None else rank
    if wanted not in files.ranks:
        ranks = sorted(files.ranks)
        raise InputError(f"{source}: no file of rank {wanted}", f"ranks {ranks[0]} to {ranks[-1]} are there")
    return TraceReader(files.ranks[wanted])


def trace_json(source: str | Path, rank: int | None = None) -> Iterator[str]:
    """The lines of one JSON document with a rank's metadata and nodes; the reader takes it back."""
    reader = open_rank(source, rank)
    return json_lines(reader.metadata, reader)


def trace_table(source: str | Path, rank: int | None = None, *, start: int = 0, limit: int | None = 50) -> str:
    """A rank's nodes as a table: nodes `start` to `start + limit` in file order, all from `start` where None."""
    reader = iter(open_rank(source, rank))
    stop = None if limit is None else start + limit
    rows: list[tuple[str, ...]] = [("id", "type", "name", "deps", "us", "what")]
    rows += (_row(node) for node in islice(reader, start, stop))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    right = (0, 4)
    lines = [_line(row, widths, right) for row in rows]
    rest = sum(1 for _ in reader)
    return "\n".join([*lines, f"... {rest:,} more nodes"] if rest else lines)


def _line(row: tuple[str, ...], widths: list[int], right: tuple[int, ...]) -> str:
    cells = [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=False))
    ]
    return "  ".join([*cells, row[-1]]).rstrip()


def shorten(text: str, width: int) -> str:
    """`text` cut to `width` signs."""
    return text if len(text) <= width else text[: width - 3] + "..."


def _row(node: Node) -> tuple[str, ...]:
    deps = ",".join(map(str, node.data_deps))
    if node.ctrl_deps:
        deps += " ctrl " + ",".join(map(str, node.ctrl_deps))
    kind = node.type_name.removesuffix("_NODE")
    time = str(node.duration_micros or "")
    return str(node.id), kind, shorten(node.name, 48), shorten(deps, 24), time, summary_of(node)


def summary_of(node: Node) -> str:
    """What a node does, in a few words."""
    if node.type == NodeType.COMM_COLL:
        group = node.value("pg_name")
        text = f"{collective_name(node.value('comm_type'))} {node.value('comm_size')} B"
        return f"{text} group {group}" if group else text
    if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
        way, peer = ("to", "comm_dst") if node.type == NodeType.COMM_SEND else ("from", "comm_src")
        return f"{way} {node.value(peer)} tag {node.value('comm_tag')} {node.value('comm_size')} B"
    parts = [
        f"{node.value(name)} {unit}"
        for name, unit in (("num_ops", "ops"), ("tensor_size", "B"))
        if node.attribute(name)
    ]
    return ", ".join(parts)


def trace_dot(source: str | Path, rank: int | None = None, *, limit: int | None = 500) -> str:
    """A rank's graph in DOT: full edges are data dependencies, dashed ones control dependencies.

    Only the first `limit` nodes are drawn (all where None), and edges between them.
    """
    reader = iter(open_rank(source, rank))
    nodes = list(islice(reader, limit))
    shown = {node.id for node in nodes}
    lines = ["digraph trace {", '  node [shape=box, style=filled, fontname="sans-serif", fontsize=10];']
    for node in nodes:
        colour = colour_of(node)
        label = "\\n".join(_quote(part) for part in (f"{node.id} {shorten(node.name, 60)}", summary_of(node)) if part)
        lines.append(f'  n{node.id} [label="{label}", fillcolor="{colour}"];')
    for node in nodes:
        lines += (f"  n{dep} -> n{node.id};" for dep in node.data_deps if dep in shown)
        only = [dep for dep in node.ctrl_deps if dep in shown and dep not in node.data_deps]
        lines += (f"  n{dep} -> n{node.id} [style=dashed, arrowhead=tee];" for dep in only)
    rest = sum(1 for _ in reader)
    if rest:
        lines.append(f'  rest [label="{rest:,} more nodes", shape=plaintext, style=""];')
    return "\n".join([*lines, "}"])


def _quote(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
