"""Chakra execution traces whose nodes carry durations, as protobuf or JSON.

Chakra keeps durations but mostly no start times: nodes are then laid out as their dependencies and streams allow.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from stablecast.frontends.traces.builder import EventBuilder
from stablecast.frontends.traces.json_scan import JsonScanner
from stablecast.frontends.traces.stream import Pieces, text_pieces
from stablecast.ir.chakra import CollectiveType, MalformedMessage, Node, NodeType, TraceReader
from stablecast.ir.chakra.files import TraceError
from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import Category, TraceEvents

_MICRO: Final = 1e-6
_COLLECTIVES: Final[Mapping[int, str]] = {
    CollectiveType.ALL_REDUCE: "allreduce",
    CollectiveType.ALL_GATHER: "allgather",
    CollectiveType.BROADCAST: "broadcast",
    CollectiveType.ALL_TO_ALL: "all_to_all",
    CollectiveType.REDUCE_SCATTER: "reduce_scatter",
    CollectiveType.REDUCE_SCATTER_BLOCK: "reduce_scatter",
    CollectiveType.BARRIER: "barrier",
    CollectiveType.REDUCE: "reduce",
    CollectiveType.GATHER: "gather",
    CollectiveType.SCATTER: "scatter",
}
_POINT_TO_POINT: Final = {NodeType.COMM_SEND: "send", NodeType.COMM_RECV: "recv"}


@dataclass(frozen=True, slots=True)
class _Step:
    """A node as the layout needs it; times in microseconds."""

    id: int
    name: str
    type: int
    duration: float
    start: float | None
    deps: tuple[int, ...]
    on_host: bool
    stream: int
    args: Mapping[str, Any]
    nbytes: float


def read_chakra(path: Path) -> TraceEvents:
    """The nodes of a Chakra trace with their durations. Raises `InputError` where no node was read."""
    builder = EventBuilder()
    nodes, damage = _collect(_from_json(path) if _is_json(path) else _from_codec(path))
    if not nodes:
        raise InputError(f"{path} holds no Chakra nodes" + (f": {damage}" if damage else ""))
    timed = any(node.start for node in nodes)
    starts = {node.id: float(node.start or 0) for node in nodes} if timed else _layout(nodes)
    for node in nodes:
        category = Category.OP if node.on_host else Category.KERNEL
        stream = builder.stream(("host" if node.on_host else "device", node.stream), "")
        builder.add(
            node.name,
            starts[node.id] * _MICRO,
            node.duration * _MICRO,
            stream,
            category,
            on_device=not node.on_host,
            device=-1 if node.on_host else 0,
            correlation=node.id,
            nbytes=node.nbytes,
            args=node.args,
        )
    builder.metadata.update(schema="chakra", start_times="recorded" if timed else "laid out from dependencies")
    return builder.build(source=str(path), damage=damage)


def _collect(nodes: Iterable["_Step | str"]) -> tuple[list[_Step], str]:
    found: list[_Step] = []
    damage = ""
    for node in nodes:
        if isinstance(node, str):
            damage = node
        else:
            found.append(node)
    return found, damage


def _from_codec(path: Path) -> Iterator[_Step | str]:
    read = 0
    try:
        for node in TraceReader(path):
            read += 1
            yield _step(node)
    except (TraceError, MalformedMessage) as error:
        yield f"after {read:,} nodes: {error}"


def _step(node: Node) -> _Step:
    host = node.value("is_cpu_op")
    stream = node.value("stream") if node.value("stream") is not None else node.value("tid")
    size = node.value("comm_size") or node.value("tensor_size")
    args: dict[str, Any] = {}
    kind = node.value("comm_type")
    if node.type == NodeType.COMM_COLL and isinstance(kind, int):
        args = {"Collective name": _COLLECTIVES.get(kind, str(kind)), "pg_name": node.value("pg_name")}
    elif isinstance(node.type, NodeType) and node.type in _POINT_TO_POINT:
        args = {"Collective name": _POINT_TO_POINT[node.type]}
    if node.inputs is not None and node.inputs.shapes:
        args["Input Dims"] = node.inputs.shapes
    return _Step(
        id=node.id,
        name=node.name,
        type=int(node.type),
        duration=float(node.duration_micros),
        start=node.start_time_micros or None,
        deps=(*node.data_deps, *node.ctrl_deps),
        on_host=bool(host),
        stream=int(stream) if isinstance(stream, int) else (0 if node.type == NodeType.COMP else 1),
        args={key: value for key, value in args.items() if value not in (None, "")},
        nbytes=float(size) if isinstance(size, (int, float)) else 0.0,
    )


def _from_json(path: Path) -> Iterator[_Step | str]:
    """JSON forms: a node an element of `workload_graph`, `nodes` or `node`, in either spelling of the fields."""
    pieces = Pieces(path)
    scanner = JsonScanner(text_pieces(pieces), ("workload_graph", "nodes", "node"))
    for key, value in scanner:
        if isinstance(value, dict) and key in ("workload_graph", "nodes", "node"):
            yield _json_step(cast("dict[str, Any]", value))
    damage = "; ".join(part for part in (scanner.damage, pieces.damage) if part)
    if damage:
        yield damage


def _json_step(node: Mapping[str, Any]) -> _Step:
    kind = int(node.get("NodeType", node.get("type", NodeType.COMP)) or 0)
    deps: list[Any] = node.get("data_deps") or node.get("dataDeps") or []
    control: Any = node.get("ctrlDeps") or node.get("ctrl_deps") or []
    held = cast("list[Any]", control) if isinstance(control, list) else [control]
    duration = node.get("runtime", node.get("durationMicros", node.get("duration_micros", 0)))
    return _Step(
        id=int(node.get("Id", node.get("id", 0))),
        name=str(node.get("Name", node.get("name", ""))),
        type=kind,
        duration=float(duration or 0),
        start=None,
        deps=tuple(int(dep) for dep in [*deps, *held]),
        on_host=bool(node.get("is_cpu_op", False)),
        stream=1 if kind in (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV) else 0,
        args={},
        nbytes=float(node.get("comm_size", 0) or 0),
    )


def _layout(nodes: list[_Step]) -> dict[int, float]:
    """Start of each node in microseconds: after its dependencies and after what its stream did before."""
    known = {node.id for node in nodes}
    ends: dict[int, float] = {}
    free: dict[tuple[bool, int], float] = {}
    starts: dict[int, float] = {}
    for node in nodes:
        lane = (node.on_host, node.stream)
        ready = max((ends.get(dep, 0.0) for dep in node.deps if dep in known), default=0.0)
        starts[node.id] = max(ready, free.get(lane, 0.0))
        ends[node.id] = free[lane] = starts[node.id] + node.duration
    return starts


def _is_json(path: Path) -> bool:
    return path.name.endswith((".json", ".json.gz"))


def looks_like(head: bytes) -> bool:
    """Whether a file that begins with `head` is a Chakra trace: its JSON form, or a framed metadata record."""
    text = head.lstrip()
    if text.startswith(b"{"):
        return b'"workload_graph"' in head
    return (len(head) > 3 and head[0] > 0 and head[1] in (0x0A, 0x12, 0x08) and b"schema" in head[:64]) or (
        head[1:2] == b"\x0a" and head[3:8] == b"0.0.4"
    )
