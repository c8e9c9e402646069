"""Traces made elsewhere: all are read, re-written to the same bytes, and judged rightly."""

import json
from pathlib import Path

import pytest

from stablecast.ir.chakra import (
    NodeType,
    TraceReader,
    check,
    encode_metadata,
    encode_node,
    find_traces,
    json_lines,
    load_trace,
    nodes_of_json,
    read_messages,
    trace_stats,
)

STAGE = {"d8": (8, 1136), "fsdp8": (8, 1200), "m64": (64, 3136), "moe": (16, 5824)}


def _same_when_rewritten(path: Path) -> None:
    trace = load_trace(path)
    assert trace.metadata is not None
    written = [encode_metadata(trace.metadata), *map(encode_node, trace.nodes)]
    assert written == list(read_messages(path))
    text = "".join(json_lines(trace.metadata, trace.nodes))
    assert nodes_of_json(text.encode(), path.name) == (trace.metadata, list(trace.nodes))


def test_golden_workloads(shared_data: Path) -> None:
    folders = sorted((shared_data / "astrasim_golden" / "workloads").iterdir())
    assert len(folders) == 10
    for folder in folders:
        report = check(folder / folder.name)
        assert (report.ok, report.faults, report.warnings) == (True, (), ())
        for path in find_traces(folder / folder.name).ranks.values():
            _same_when_rewritten(path)


@pytest.mark.parametrize("name", STAGE)
def test_stage_traces(unpacked: Path, name: str) -> None:
    prefix = unpacked / "stage" / name / "w"
    report = check(prefix)
    assert (report.ok, report.ranks, report.nodes) == (True, *STAGE[name])
    assert report.faults == report.warnings == ()
    _same_when_rewritten(find_traces(prefix).ranks[0])
    stats = trace_stats(prefix)
    assert (stats.ranks, stats.nodes) == STAGE[name]
    assert all(row.group_size and row.group_size > 1 for row in stats.collectives)


def test_stage_trace_with_a_group_too_few(unpacked: Path, tmp_path: Path) -> None:
    prefix = unpacked / "stage" / "m64" / "w"
    groups = json.loads((prefix.parent / "w.json").read_text())
    groups["1"] = groups["1"][:-1]
    del groups["2"]
    (tmp_path / "g.json").write_text(json.dumps(groups))
    report = check(prefix, group_file=tmp_path / "g.json")
    assert set(report.counts) == {"rank outside its group", "group file"}


def test_example_runs(shared_data: Path, unpacked: Path) -> None:
    runs = json.loads((shared_data / "astrasim_golden" / "examples" / "examples.json").read_text())
    assert len(runs) == 26
    for run in runs:
        prefix = unpacked / "examples" / "workload" / "microbenchmarks" / run["workload"]
        report = check(prefix)
        assert (report.ok, report.ranks) == (True, len(run["cycles"])), str(report)
        for path in find_traces(prefix).ranks.values():
            _same_when_rewritten(path)


def test_custom_collective_graph(unpacked: Path) -> None:
    (folder,) = (unpacked / "examples" / "system" / "custom_collectives").iterdir()
    report = check(folder / "custom_allreduce")
    assert (report.ok, report.ranks, report.nodes) == (True, 8, 280)


def test_trace_of_a_real_run(shared_data: Path) -> None:
    path = shared_data / "traces" / "chakra" / "chakra_rank0.et.gz"
    _same_when_rewritten(path)
    reader = TraceReader(path)
    nodes = list(reader)
    assert len(nodes) == 3664
    assert sum(node.value("is_cpu_op") is False for node in nodes) == 1216
    report = check(path)
    assert report.counts["compressed file"] == 1
    assert report.counts["cpu flag on communication"] == 14
    ids = {node.id for node in nodes}
    dangling = sum(len({*node.data_deps, *node.ctrl_deps} - ids) for node in nodes)
    assert report.counts["dangling dependency"] == dangling
    assert len(report.faults) < 500
    without_roofline = check(path, roofline=False)
    assert "missing attribute" not in without_roofline.counts


def test_json_of_a_real_run(shared_data: Path) -> None:
    folder = shared_data / "traces" / "chakra"
    binary = {node.id: node for node in TraceReader(folder / "chakra_rank0.et.gz")}
    nodes = load_trace(folder / "chakra_rank0.json.gz").nodes
    assert len(nodes) == len(binary) == 3664
    assert all(node.type == binary[node.id].type for node in nodes)
    assert all(node.duration_micros == binary[node.id].duration_micros for node in nodes)
    small = load_trace(folder / "chakra_small_rank0.json").nodes
    assert [node.ctrl_deps for node in small[:3]] == [(3,), (3,), (429,)]


def test_host_trace_of_pytorch(shared_data: Path) -> None:
    trace = load_trace(shared_data / "traces" / "chakra" / "pytorch_et_1.0.2-chakra.0.0.4.json.gz")
    assert len(trace.nodes) == 263
    assert {node.type for node in trace.nodes} == {NodeType.COMP, NodeType.METADATA}
    empty = next(node for node in trace.nodes if node.id == 4)
    assert (empty.name, empty.type, empty.ctrl_deps) == ("aten::empty", NodeType.COMP, (2,))
    assert empty.inputs is not None
    assert json.loads(empty.inputs.types)[0] == "GenericList[Int]"
