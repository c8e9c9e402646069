import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from stablecast.ir.chakra import (
    Attribute,
    CheckReport,
    CollectiveType,
    Node,
    NodeType,
    PrefixWriter,
    TraceTemplate,
    ValueKind,
    check,
    collective_node,
    comp_node,
    encode_trace,
    recv_node,
    send_node,
    trace_stats,
)
from stablecast.ir.chakra.check_graph import graph_facts
from stablecast.ir.errors import InputError

AR, AG = CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER


def write(folder: Path, ranks: Sequence[Sequence[Node]], groups: dict[str, list[int]] | None = None) -> Path:
    for rank, nodes in enumerate(ranks):
        (folder / f"w.{rank}.et").write_bytes(encode_trace(nodes))
    if groups:
        (folder / "comm_group.json").write_text(json.dumps(groups))
    return folder / "w"


def places(report: CheckReport) -> list[tuple[int | None, int | None, str]]:
    return [(fault.rank, fault.node, fault.kind) for fault in report.faults]


def test_truncated_and_missing_files_cause_no_other_faults(tmp_path: Path) -> None:
    nodes = [collective_node(0, "a", AR, 8), send_node(1, "s", 3, 0, 8, (0,))]
    other = [collective_node(0, "a", AR, 8), recv_node(1, "r", 2, 0, 8, (0,))]
    prefix = write(tmp_path, [nodes[:1], nodes[:1], nodes, other])
    data = (tmp_path / "w.2.et").read_bytes()
    (tmp_path / "w.2.et").write_bytes(data[:-3])
    assert places(check(prefix)) == [(2, None, "truncated file")]
    (tmp_path / "w.2.et").unlink()
    assert places(check(prefix)) == [(2, None, "missing rank file")]


def test_file_cut_between_messages_is_seen_by_the_manifest(tmp_path: Path) -> None:
    nodes = [comp_node(index, "c", 1, 1) for index in range(4)]
    with PrefixWriter(tmp_path / "w") as writer:
        writer.write_nodes(0, nodes)
        writer.write_nodes(1, nodes)
    (tmp_path / "w.1.et").write_bytes(encode_trace(nodes[:3]))
    assert places(check(tmp_path / "w")) == [(1, None, "truncated file")]
    (tmp_path / "w.1.et").unlink()
    assert places(check(tmp_path / "w")) == [(1, None, "missing rank file")]


def test_malformed_message(tmp_path: Path) -> None:
    prefix = write(tmp_path, [[comp_node(0, "c", 1, 1)]])
    (tmp_path / "w.0.et").write_bytes((tmp_path / "w.0.et").read_bytes() + b"\x02\x0a\x7f")
    assert places(check(prefix)) == [(0, None, "malformed message")]


def test_empty_file_has_no_nodes(tmp_path: Path) -> None:
    (tmp_path / "w.0.et").write_bytes(b"")
    assert places(check(tmp_path / "w")) == [(0, None, "rank without nodes")]


def test_zero_length_node_ends_some_readers(tmp_path: Path) -> None:
    prefix = write(tmp_path, [[comp_node(1, "c", 1, 1), Node(0)]])
    assert places(check(prefix)) == [(0, 0, "node type no consumer takes")]


def test_independent_collectives_are_issued_by_id(tmp_path: Path) -> None:
    first = [collective_node(0, "a", AR, 8), collective_node(1, "b", AG, 8)]
    second = [collective_node(1, "a", AR, 8), collective_node(0, "b", AG, 8)]
    report = check(write(tmp_path, [first, second]))
    assert places(report) == [(1, 0, "collective order differs")]
    chained = [collective_node(5, "a", AR, 8), collective_node(0, "b", AG, 8, deps=(5,))]
    assert check(write(tmp_path, [first, chained])).ok


def test_member_with_one_collective_less(tmp_path: Path) -> None:
    two = [collective_node(0, "a", AR, 8, "1"), collective_node(1, "b", AG, 16, "1", (0,))]
    report = check(write(tmp_path, [two[:1], two, two], {"1": [0, 1, 2]}))
    assert {fault.rank for fault in report.faults} == {0}
    assert "lacks ALL_GATHER of 16 bytes" in report.faults[0].message


def test_member_without_any(tmp_path: Path) -> None:
    ranks = [[collective_node(0, "a", AR, 8, "1")], [collective_node(0, "a", AR, 8, "1")], [comp_node(0, "c", 1, 1)]]
    report = check(write(tmp_path, ranks, {"1": [0, 1, 2], "2": [0, 2]}))
    assert places(report) == [(2, None, "collective missing on a member")]


def test_groups_in_use_need_a_group_file(tmp_path: Path) -> None:
    prefix = write(tmp_path, [[collective_node(0, "a", AR, 8, "7")]] * 2)
    report = check(prefix)
    assert [fault.kind for fault in report.faults] == ["group file"]
    (tmp_path / "comm_group.json").write_text("{")
    assert "cannot be read" in check(prefix).faults[0].message
    (tmp_path / "w.json").write_text('{"workload_graph": []}')
    (tmp_path / "comm_group.json").unlink()
    assert "no group file" in check(prefix).faults[0].message
    (tmp_path / "w.json").write_text('{"7": [0, 1]}')
    assert check(prefix).ok
    (tmp_path / "comm_group.json").write_text('{"7": [0, 0, 1]}')
    assert "twice" in check(prefix).faults[0].message


def test_rows_of_a_network_may_differ(tmp_path: Path) -> None:
    def rank(size: int) -> list[Node]:
        flags = Attribute("involved_dim", ValueKind.BOOL_LIST, (True, False))
        return [collective_node(0, "a", AR, size, extra=(flags,))]

    prefix = write(tmp_path, [rank(8), rank(8), rank(16), rank(16)])
    assert check(prefix, npus_count=(2, 2)).ok
    assert check(prefix).ok
    prefix = write(tmp_path, [rank(8), rank(16), rank(16), rank(16)])
    assert places(check(prefix, npus_count=(2, 2))) == [(1, 0, "collective size differs")]


def test_messages_are_balanced(tmp_path: Path) -> None:
    sends = [send_node(index, "s", 1, 5, 64) for index in range(3)]
    receives = [recv_node(index, "r", 0, 5, 64) for index in range(3)]
    assert check(write(tmp_path, [sends, receives])).ok
    report = check(write(tmp_path, [sends[:2], receives]))
    assert places(report) == [(1, 2, "receive without send")] or report.counts == {"receive without send": 1}
    report = check(write(tmp_path, [sends, receives[:2]]))
    assert report.ok
    assert report.warning_counts == {"send without receive": 1}


def test_foreign_own_rank(tmp_path: Path) -> None:
    send = send_node(0, "s", 1, 5, 64, extra=(Attribute("comm_src", ValueKind.INT32, 1),))
    report = check(write(tmp_path, [[send], [recv_node(0, "r", 0, 5, 64)]]))
    assert places(report) == [(0, 0, "foreign rank in a message")]


def test_ranks_that_are_named_must_be_there(tmp_path: Path) -> None:
    prefix = write(tmp_path, [[comp_node(0, "c", 1, 1)]] * 2)
    assert check(prefix).ok
    assert places(check(prefix, ranks=4)) == [(2, None, "missing rank file"), (3, None, "missing rank file")]
    assert check(prefix.with_name("w.1.et")).ok
    with pytest.raises(InputError, match="0 ranks"):
        check(prefix, ranks=0)


def test_control_dependency_implied_by_data(tmp_path: Path) -> None:
    nodes = [comp_node(0, "c", 1, 1), comp_node(1, "c", 1, 1, (0,)), comp_node(2, "c", 1, 1, (1,))]
    nodes.append(Node(3, "c", NodeType.COMP, (2,), (0,), attributes=nodes[0].attributes))
    assert check(write(tmp_path, [nodes])).ok


def test_cycle_is_shown() -> None:
    nodes = [(0, (), ()), (1, (3, 0), ()), (2, (1,), ()), (3, (2,), ()), (4, (3,), ())]
    facts = graph_facts(nodes)
    assert facts.order == (0,)
    assert facts.faults == ((1, "dependency cycle", "1 <- 3 <- 2 <- 1; 4 nodes never run"),)


def test_long_chain_and_many_faults_stay_bounded(tmp_path: Path) -> None:
    nodes = [comp_node(index, "c", 1, 1, (index + 1,) if index < 20_000 else ()) for index in range(20_001)]
    assert graph_facts([(node.id, node.data_deps, ()) for node in nodes]).faults == ()
    report = check(write(tmp_path, [[comp_node(index, "c", 0, 1) for index in range(5000)]]), keep=10)
    assert len(report.faults) == 10
    assert report.counts == {"zero size or work": 5000}
    assert json.loads(json.dumps(report.to_json()))["ok"] is False
    assert "zero size or work (5000)" in str(report)


def test_memory_does_not_grow_with_ranks(tmp_path: Path) -> None:
    nodes = [comp_node(index, f"COMP_NODE_{index}", 10, 20, range(index)[-1:]) for index in range(300)]
    nodes.append(collective_node(300, "COMM_COLL_NODE", AR, 64, "1", (299,)))
    template = TraceTemplate.build(nodes, {(300, "pg_name"): "group"})
    peaks: list[int] = []
    for ranks in (16, 256):
        prefix = tmp_path / str(ranks) / "w"
        with PrefixWriter(prefix) as writer:
            for rank in range(ranks):
                writer.write_rank(rank, template.render({"group": str(1 + rank // 8)}), template.nodes)
            writer.write_groups({str(1 + first // 8): list(range(first, first + 8)) for first in range(0, ranks, 8)})
        tracemalloc.start()
        report = check(prefix)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (report.ok, report.ranks, report.nodes) == (True, ranks, 301 * ranks)
    assert peaks[1] < peaks[0] + 1_000_000
    assert trace_stats(tmp_path / "16" / "w").collectives[0].group_size == 8
