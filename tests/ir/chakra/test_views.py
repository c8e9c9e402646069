import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stablecast.ir.chakra import (
    CollectiveType,
    Node,
    NodeType,
    TraceMetadata,
    collective_node,
    comp_node,
    diff_traces,
    encode_trace,
    load_trace,
    memory_node,
    recv_node,
    send_node,
    trace_dot,
    trace_json,
    trace_stats,
    trace_table,
)
from stablecast.ir.errors import InputError

NODES = [
    comp_node(0, 'COMP_NODE_"q"', 100, 64, duration_micros=7),
    collective_node(1, "COMM_COLL_NODE_ar", CollectiveType.ALL_REDUCE, 32, "1", (0,)),
    send_node(2, "COMM_SEND_NODE", 1, 9, 16, (1,)),
    recv_node(3, "COMM_RECV_NODE", 1, 8, 16),
    memory_node(4, "MEM_LOAD_NODE", NodeType.MEM_LOAD, 5, (3,)),
    Node(5, "odd", 42, ctrl_deps=(4,)),
]


def write(folder: Path, ranks: Sequence[Sequence[Node]], metadata: TraceMetadata | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, nodes in enumerate(ranks):
        (folder / f"w.{rank}.et").write_bytes(encode_trace(nodes, metadata))
    (folder / "comm_group.json").write_text('{"1": [0, 1]}')
    return folder / "w"


def test_stats(tmp_path: Path) -> None:
    stats = trace_stats(write(tmp_path, [NODES, NODES[:2]]))
    assert (stats.ranks, stats.nodes, stats.nodes_low, stats.nodes_high) == (2, 8, 2, 6)
    assert (stats.num_ops, stats.tensor_bytes, stats.duration_micros) == (200, 128, 14)
    assert (stats.messages, stats.message_bytes) == (1, 16)
    (row,) = stats.collectives
    assert (row.kind, row.group_size, row.count, row.bytes) == ("ALL_REDUCE", 2, 2, 64)
    assert stats.by_type["COMP_NODE"] == 2
    assert stats.by_type["42"] == 1
    assert json.loads(json.dumps(stats.to_json()))["collectives"][0]["group_size"] == 2
    assert "groups of 2" in str(stats)


def test_table(tmp_path: Path) -> None:
    prefix = write(tmp_path, [NODES])
    lines = trace_table(prefix).splitlines()
    assert len(lines) == 7
    assert lines[2].split() == ["1", "COMM_COLL", "COMM_COLL_NODE_ar", "0", "ALL_REDUCE", "32", "B", "group", "1"]
    assert trace_table(prefix, start=1, limit=2).splitlines()[-1] == "... 3 more nodes"
    with pytest.raises(InputError, match="no file of rank 7"):
        trace_table(prefix, 7)


def test_dot(tmp_path: Path) -> None:
    text = trace_dot(write(tmp_path, [NODES]))
    assert "  n0 -> n1;" in text
    assert "  n4 -> n5 [style=dashed, arrowhead=tee];" in text
    assert '\\"q\\"' in text
    assert "4 more nodes" in trace_dot(tmp_path / "w", limit=2)


def test_json_document_is_read_back(tmp_path: Path) -> None:
    prefix = write(tmp_path, [NODES])
    (tmp_path / "out.json").write_text("\n".join(trace_json(prefix, 0)))
    assert list(load_trace(tmp_path / "out.json").nodes) == NODES
    assert diff_traces(prefix.with_name("w.0.et"), tmp_path / "out.json").same


def test_diff(tmp_path: Path) -> None:
    left = write(tmp_path / "a", [NODES, NODES, NODES])
    assert str(diff_traces(left, write(tmp_path / "b", [NODES, NODES, NODES]))) == "the same: 3 ranks"
    changed = [
        replace(NODES[0], duration_micros=8),
        collective_node(1, "x", CollectiveType.ALL_GATHER, 32),
        *NODES[2:5],
    ]
    right = write(tmp_path / "c", [NODES, [*changed, comp_node(9, "new", 1, 1)]])
    diff = diff_traces(left, right)
    found = [(one.rank, one.node, one.what) for one in diff.differences]
    assert found == [
        (1, 0, "duration_micros"),
        (1, 1, "name"),
        (1, 1, "data_deps"),
        (1, 1, "attribute comm_type"),
        (1, 1, "attribute pg_name"),
        (1, 5, "node"),
        (1, 9, "node"),
        (2, None, "rank"),
    ]
    assert (diff.same, diff.differing_ranks, diff.nodes, diff.count) == (False, 2, 4, 8)
    assert "rank 1 node 0: duration_micros: 7 | 8" in str(diff)
    assert json.loads(json.dumps(diff.to_json()))["count"] == 8
    assert str(diff_traces(left, right, limit=2)).endswith("... 6 more")
    head = diff_traces(left, write(tmp_path / "d", [NODES] * 3, TraceMetadata("1"))).differences[0]
    assert (head.what, head.node) == ("metadata", None)
    swapped = replace(NODES[0], attributes=NODES[0].attributes[::-1])
    (one,) = diff_traces(left, write(tmp_path / "e", [NODES, NODES, [swapped, *NODES[1:]]])).differences
    assert one.what == "order of attributes"
