"""Host and device traces of one run, linked into Chakra traces."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stablecast._chakra import chakra_from_traces
from stablecast.backends.astrasim import simulate
from stablecast.backends.astrasim.files import network_dict, system_dict
from stablecast.backends.catalogue import Catalogue
from stablecast.ir.chakra import Node, NodeType, check, load_trace
from stablecast.ir.errors import InputError
from stablecast.validation.host_time import host_time

TENSOR = [7, 70, 0, 256, 4, "cuda:0"]


def _op(number: int, name: str, parent: int, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    types = ["Tensor(float)" if isinstance(value, list) else "Int" for value in inputs]
    return {
        "name": name, "id": number, "rf_id": number, "parent": parent, "fw_parent": 0, "seq_id": -1, "scope": 0,
        "tid": 1, "fw_tid": 0, "op_schema": "", "inputs": inputs,
        "input_shapes": [[256] if isinstance(value, list) else [] for value in inputs], "input_types": types,
        "outputs": outputs, "output_shapes": [[256] for _ in outputs], "output_types": ["Tensor(float)"] * len(outputs),
    }  # fmt: skip


def _event(name: str, cat: str, start: int, length: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": start, "dur": length, "args": args}


def _pair(folder: Path, rank: int, elements: int = 256) -> None:
    """aten::mul launches a kernel; an all-reduce of it follows, is waited for, and read by aten::add."""
    shaped = [*TENSOR[:3], elements, *TENSOR[4:]]
    ops = [
        _op(1, "[pytorch|profiler|execution_graph|process]", 1, [], []),
        _op(2, "aten::mul", 1, [[5, 50, 0, 256, 4, "cuda:0"], 3], [TENSOR]),
        _op(3, "record_param_comms", 1, [shaped, 9, 1, "allreduce"], [shaped]),
        _op(4, "nccl:all_reduce", 3, [shaped], []),
        _op(5, "record_param_comms", 1, [9, 1, "wait"], []),
        _op(6, "aten::add", 1, [TENSOR, 1], [[8, 80, 0, 256, 4, "cuda:0"]]),
    ]
    ops[3]["input_shapes"] = [[elements]]
    (folder / f"et{rank}.json").write_text(json.dumps({"schema": "1.0.1", "pid": 1, "nodes": ops}))
    events = [
        _event("aten::mul", "cpu_op", 0, 10, 1),
        _event("cudaLaunchKernel", "cuda_runtime", 2, 3, 1, correlation=1),
        _event("record_param_comms", "cpu_op", 20, 10, 1),
        _event("nccl:all_reduce", "user_annotation", 21, 8, 1, **{"Input Dims": [[elements]], "Input type": ["float"]}),
        _event("cudaLaunchKernel", "cuda_runtime", 22, 3, 1, correlation=2),
        _event("record_param_comms", "cpu_op", 32, 2, 1),
        _event("aten::add", "cpu_op", 40, 10, 1),
        _event("cudaLaunchKernel", "cuda_runtime", 42, 3, 1, correlation=3),
        _event("cudaDeviceSynchronize", "cuda_runtime", 55, 50, 1),
        _event("mul_kernel", "kernel", 6, 20, 7, correlation=1, device=0, stream=7),
        _event("ncclKernel_AllReduce", "kernel", 27, 30, 20, correlation=2, device=0, stream=20),
        _event("add_kernel", "kernel", 60, 40, 7, correlation=3, device=0, stream=7),
    ]
    document = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
    (folder / f"kineto{rank}.json.gz").write_bytes(gzip.compress(json.dumps(document).encode()))


def _named(nodes: list[Node], name: str) -> Node:
    return next(node for node in nodes if node.name == name)


def test_two_ranks_by_hand(tmp_path: Path) -> None:
    for rank, elements in ((0, 256), (1, 200)):
        _pair(tmp_path, rank, elements)
    report = chakra_from_traces(tmp_path / "et{rank}.json", tmp_path / "kineto{rank}.json.gz", tmp_path / "out")
    assert (report.ranks, report.copied) == (2, 0)
    assert check(tmp_path / "out").ok
    nodes = list(load_trace(tmp_path / "out.0.et").nodes)
    (talk,) = (node for node in nodes if node.type == NodeType.COMM_COLL)
    product, addition = _named(nodes, "mul_kernel"), _named(nodes, "add_kernel")
    launch = _named(nodes, "aten::mul")
    assert product.data_deps == (launch.id,)
    assert set(talk.data_deps) == {product.id, _named(nodes, "nccl:all_reduce").id}, (
        "the stream of the launching thread"
    )
    assert set(addition.data_deps) == {product.id, talk.id, _named(nodes, "aten::add").id}, "stream, wait and launch"
    assert (product.duration_micros, talk.duration_micros, addition.duration_micros) == (20, 30, 40)
    assert talk.value("comm_size") == 1024
    pauses = [node.duration_micros for node in nodes if node.name == "pause"]
    assert pauses == [10, 2, 6]
    other = _named(list(load_trace(tmp_path / "out.1.et").nodes), talk.name)
    assert other.value("comm_size") == 1024, "of the rank with most"
    assert any("unequal shares" in note for note in report.notes)


def test_one_rank_stands_for_all(tmp_path: Path) -> None:
    _pair(tmp_path, 1)
    report = chakra_from_traces(tmp_path / "et1.json", tmp_path / "kineto1.json.gz", tmp_path / "out", on="v100-sxm2:2")
    assert (report.ranks, report.copied) == (2, 1)
    assert check(tmp_path / "out").ok
    assert (tmp_path / "network.yml").is_file()


def test_ranks_that_do_not_fit(tmp_path: Path) -> None:
    _pair(tmp_path, 0)
    with pytest.raises(InputError, match="stands in one of the two names only"):
        chakra_from_traces(tmp_path / "et{rank}.json", tmp_path / "kineto0.json.gz", tmp_path / "out")
    with pytest.raises(InputError, match=r"there is no .*other0"):
        chakra_from_traces(tmp_path / "other{rank}", tmp_path / "kineto{rank}.json.gz", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_host_time_is_shared_out_once() -> None:
    """A caller 0-10 with a callee 2-5, a second thread 6-8, a wait 8-9, and a pause before the last one."""
    start, end = np.array([0.0, 2.0, 6.0, 14.0]), np.array([10.0, 5.0, 8.0, 15.0])
    time = host_time(start, end, [(8.0, 9.0)])
    assert time.own_s.tolist() == [4.0, 3.0, 2.0, 1.0]
    assert time.gap_s.tolist() == [0.0, 0.0, 0.0, 4.0]


@pytest.mark.slow
def test_all_ranks_of_a_real_run(traces: Path, tmp_path: Path) -> None:
    """8x V100 DLRM: 8 collectives a rank, every kernel that the profile saw launched, and a simulation that ends."""
    names = [traces / "param" / f"v100x8_dlrm_rank{{rank}}_{kind}.json.gz" for kind in ("et", "kineto")]
    report = chakra_from_traces(*names, tmp_path / "dlrm")
    assert report.ranks == 8
    assert check(tmp_path / "dlrm").ok
    assert all(graph.op_share > 0.99 for graph in report.graphs)
    assert sum(graph.contradicted for graph in report.graphs) == 0
    nodes = load_trace(tmp_path / "dlrm.5.et").nodes
    assert sum(node.type == NodeType.COMM_COLL for node in nodes) == 8
    system = Catalogue().resolve("v100-sxm2:8")
    result = simulate(str(tmp_path / "dlrm"), network_dict(system), system_dict(system, roofline=False))
    measured = np.median([graph.span_s for graph in report.graphs])
    cycles = [rank.cycles for rank in result.ranks]
    assert len(cycles) == 8
    assert np.median(cycles) * 1e-9 == pytest.approx(measured, rel=0.25)


def test_one_step_of_a_longer_run(traces: Path, tmp_path: Path) -> None:
    """The host trace holds one step, the Kineto trace forty; the replayed step takes as long as the measured one."""
    names = [traces / "param" / f"rtx2080ti_linear_{kind}.json.gz" for kind in ("et", "kineto")]
    report = chakra_from_traces(*names, tmp_path / "linear")
    assert check(tmp_path / "linear").ok
    (graph,) = report.graphs
    assert (graph.op_share, graph.work_share) == (1.0, 1.0)
    network = {"topology": ["FullyConnected"], "npus_count": [1], "bandwidth": [1.0], "latency": [0.0]}
    result = simulate(
        str(tmp_path / "linear"), network, system_dict(Catalogue().resolve("v100-sxm2:2"), roofline=False)
    )
    assert result.ranks[0].cycles * 1e-9 == pytest.approx(graph.span_s, rel=0.02)


def test_traces_of_different_runs(traces: Path, tmp_path: Path) -> None:
    """The ResNet's host trace is of another network than its Kineto trace."""
    names = [traces / "param" / f"rtx2080ti_resnet_{kind}.json.gz" for kind in ("et", "kineto")]
    with pytest.raises(InputError, match="different runs: of the host trace's operators 3"):
        chakra_from_traces(*names, tmp_path / "resnet")
    assert not list(tmp_path.iterdir())
