"""Traces through the network: hand-worked runs, ASTRA-sim's own answers, and the two ways of running agreeing."""

import json
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stablecast.backends.astrasim import MemoryConfig, SimulationResult, simulate
from stablecast.ir.chakra import (
    CollectiveType,
    Node,
    NodeType,
    collective_node,
    comp_node,
    encode_trace,
    memory_node,
    recv_node,
    send_node,
)
from stablecast.ir.errors import InputError

MIB = 1 << 20
NETWORK = {"topology": ["Ring"], "npus_count": [4], "bandwidth": [50], "latency": [500]}
SYSTEM: dict[str, Any] = {
    "endpoint-delay": 10,
    "preferred-dataset-splits": 1,
    "all-reduce-implementation": ["ring"],
    "all-gather-implementation": ["ring"],
    "collective-optimization": "localBWAware",
    "local-mem-bw": 1000,
    "roofline-enabled": 1,
    "peak-perf": 1,
}
AR, AG = CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER
Program = Callable[[int], Sequence[Node]]


def message(nbytes: float, hops: int = 1) -> int:
    return int(hops * 500.0 + nbytes / (50.0 * 2**30 / 1e9))


def reduced(nbytes: int, n: int = 4) -> int:
    """Cycles of a ring all-reduce of one chunk."""
    return 2 * (n - 1) * message(nbytes / n) + (2 * n - 1) * 10 + (n - 1) * 3 * int(nbytes / n / 1000.0)


def work(node_id: int, micros: int, deps: Sequence[int] = ()) -> Node:
    """Compute of as many us: at 1 TFLOPS, a million operations a us."""
    return comp_node(node_id, f"COMP_NODE_{node_id}", micros * 1_000_000, 1, deps)


def reduce_all(node_id: int, deps: Sequence[int] = (), nbytes: int = MIB, group: str = "") -> Node:
    return collective_node(node_id, f"COMM_COLL_NODE_{node_id}", AR, nbytes, group, deps)


def run(folder: Path, program: Program, ranks: int = 4, **options: Any) -> SimulationResult:
    for rank in range(ranks):
        (folder / f"t.{rank}.et").write_bytes(encode_trace(program(rank)))
    network = {**NETWORK, "npus_count": [ranks], **options.pop("network", {})}
    system = {**SYSTEM, **options.pop("system", {})}
    groups = options.pop("groups", None)
    if groups:
        options["group_file"] = folder / "groups.json"
        (folder / "groups.json").write_text(json.dumps(groups))
    return simulate(folder / "t", network, system, **options)


def cycles(result: SimulationResult) -> list[int]:
    return [rank.cycles for rank in result.ranks]


def test_compute_then_collective(tmp_path: Path) -> None:
    result = run(tmp_path, lambda rank: [work(0, 5), reduce_all(1, [0])])
    assert cycles(result) == [5000 + reduced(MIB)] * 4
    assert {rank.exposed_communication for rank in result.ranks} == {reduced(MIB)}
    assert result.roles == 1
    assert result.to_dict()["ranks"][3] == {
        "rank": 3,
        "cycles": 5000 + reduced(MIB),
        "exposed_communication": reduced(MIB),
    }
    assert "4 ranks, 1 roles" in repr(result)


def test_the_two_limits_of_the_roofline(tmp_path: Path) -> None:
    """1 TFLOPS and 1,000 GB/s: a million operations take a us, as do a million bytes."""
    for ops, nbytes, expected in ((3_000_000, 10, 3000), (3_000_000, 7_000_000, 7000), (1, 1_048_576, 1048)):
        result = run(tmp_path, lambda rank, ops=ops, nbytes=nbytes: [comp_node(0, "c", ops, nbytes)])
        assert cycles(result) == [expected] * 4


def test_durations_without_roofline(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        lambda rank: [comp_node(0, "c", 1, 1, duration_micros=7), comp_node(1, "d", 1, 1, [0])],
        system={"roofline-enabled": 0},
    )
    assert cycles(result) == [7001] * 4


def test_one_node_a_slot_in_ascending_order(tmp_path: Path) -> None:
    """Communication of node 1 runs beside compute of node 0; node 2 waits for the compute slot."""
    result = run(tmp_path, lambda rank: [work(0, 5), reduce_all(1), work(2, 3), reduce_all(3)], events=True)
    assert cycles(result) == [2 * reduced(MIB)] * 4
    assert [(time, what, step.id) for time, what, step in result.events[0]][:4] == [
        (0, "issue", 0),
        (0, "issue", 1),
        (5000, "callback", 0),
        (5000, "issue", 2),
    ]


def test_a_late_rank_is_caught_up_with(tmp_path: Path) -> None:
    """A message takes longer than the ranks are apart, so the sixth a rank gets began its way two ranks further on."""
    skewed = run(tmp_path, lambda rank: [work(0, 1 + rank), reduce_all(1, [0])])
    assert cycles(skewed) == [1000 * (1 + (rank - 6) % 4) + reduced(MIB) for rank in range(4)]
    assert skewed.roles == 4
    assert cycles(run(tmp_path, lambda rank: [work(0, 1 + rank), reduce_all(1, [0])], reference=True)) == cycles(skewed)


def test_send_and_receive(tmp_path: Path) -> None:
    def program(rank: int) -> Sequence[Node]:
        if rank == 0:
            return [work(0, 2), send_node(1, "s", 2, 5, MIB, [0])]
        return [recv_node(0, "r", 0, 5, MIB), work(1, 1, [0])] if rank == 2 else [work(0, 1)]

    arrival = 2000 + message(MIB, 2)
    assert cycles(run(tmp_path, program)) == [arrival, 1000, arrival + 1000, 1000]
    aware = run(tmp_path, program, backend="congestion_aware")
    assert cycles(aware)[2] == 2000 + 2 * message(MIB) + 1000


def test_groups_and_roles(tmp_path: Path) -> None:
    """Two groups of a different shape; the ranks of each are one role."""

    def program(rank: int) -> Sequence[Node]:
        return [work(0, 1), reduce_all(1, [0], group="1" if rank < 4 else "2")]

    result = run(
        tmp_path, program, 6, groups={"1": [0, 1, 2, 3], "2": [4, 5]}, network={"topology": ["FullyConnected"]}
    )
    assert cycles(result) == [1000 + reduced(MIB)] * 4 + [1000 + reduced(MIB, 2)] * 2
    assert result.roles == 2


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (MemoryConfig("PER_NPU_MEMORY_EXPANSION", 100, 10.0), [104957] * 4),
        (MemoryConfig("MEMORY_POOL", 100, 10.0), [104957, 209914, 314871, 419828]),
        (MemoryConfig("PER_NODE_MEMORY_EXPANSION", 100, 10.0, 2), [104957, 209914, 104957, 209914]),
    ],
)
def test_remote_memory(tmp_path: Path, memory: MemoryConfig, expected: list[int]) -> None:
    """100 ns + 2^20 bytes at 10 B/ns; a pool serves one rank after the other, a node's memory its own two."""

    def program(rank: int) -> Sequence[Node]:
        return [memory_node(0, "m", NodeType.MEM_LOAD, MIB)]

    assert cycles(run(tmp_path, program, memory=memory)) == expected
    assert cycles(run(tmp_path, program, memory=memory, reference=True)) == expected


def test_the_log_is_one_that_the_visualiser_reads(tmp_path: Path) -> None:
    lines = run(tmp_path, lambda rank: [work(0, 5), reduce_all(1, [0])], events=True).log_text().splitlines()
    assert lines[0] == "issue,sys->id=0,tick=0,node->id=0,node->name=COMP_NODE_0"
    assert len([line for line in lines if line.startswith(("issue,", "callback,"))]) == 16
    assert all(len(line.split(",")) == 5 for line in lines[:16])
    assert lines[-1] == f"sys[3] finished, {5000 + reduced(MIB)} cycles, exposed communication {reduced(MIB)} cycles."


def late(rank: int) -> Sequence[Node]:
    return [work(0, 1)] if rank == 3 else [work(0, 1), reduce_all(1, [0])]


FAULTS: dict[str, tuple[Program, str]] = {
    "a member lacks it": (late, r"rank 0 node 1 \(COMM_COLL_NODE all_reduce\) never ends: rank 3 does not begin it"),
    "order differs": (
        lambda rank: (
            [collective_node(0, "g", AG, MIB), reduce_all(1, [0])]
            if rank == 3
            else [reduce_all(0), collective_node(1, "g", AG, MIB, "", [0])]
        ),
        r"rank \d node 0 .* of 1048576 bytes meets .* on rank \d",
    ),
    "size differs": (lambda rank: [reduce_all(0, (), MIB << (rank == 3))], "meets all_reduce of"),
    "no send": (lambda rank: [recv_node(0, "r", 1, 1, MIB)] if rank == 0 else [work(0, 1)], "rank 0 node 0 .*tag 1"),
    "circle": (lambda rank: [work(0, 1), work(1, 1, [2]), work(2, 1, [1])], "rank 0 node 1 .* circle"),
    "waits for itself": (lambda rank: [work(0, 1, [0])], "rank 0 node 0 .* waits for itself"),
    "absent": (lambda rank: [work(0, 1, [9])], "rank 0 node 0 .* node 9, which is not there"),
    "id twice": (lambda rank: [work(0, 1), work(0, 1)], "rank 0 node 0 .* used twice"),
    "empty": (lambda rank: [], "rank 0: .* has no nodes"),
    "metadata node": (lambda rank: [Node(0, "m", NodeType.METADATA)], "rank 0 node 0 .METADATA_NODE.: ASTRA-sim takes"),
    "no remote memory": (lambda rank: [memory_node(0, "m", NodeType.MEM_LOAD, MIB)], "rank 0 node 0 .* remote memory"),
    "unknown group": (lambda rank: [reduce_all(0, (), MIB, "7")], "rank 0 node 0 .* no group 7"),
    "barrier": (lambda rank: [collective_node(0, "b", CollectiveType.BARRIER, 1)], "comm_type 9"),
    "nothing to do": (lambda rank: [comp_node(0, "c", 1, 0), work(1, 1, [0])], "rank 0 node 0 .* tensor_size is 0"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("reference", [False, True])
def test_what_astra_sim_passes_over_in_silence(name: str, reference: bool, tmp_path: Path) -> None:
    program, words = FAULTS[name]
    with pytest.raises(InputError, match=words):
        run(tmp_path, program, reference=reference)


def test_missing_ranks_and_records(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no trace of rank 3"):
        run(tmp_path, lambda rank: [work(0, 1)], 3, network={"npus_count": [4]})
    (tmp_path / "t.0.et").write_bytes(encode_trace([work(0, 1)])[5:])
    with pytest.raises(InputError, match=r"rank 0: .* (no metadata record|cut off|malformed|byte)"):
        simulate(tmp_path / "t", {**NETWORK, "npus_count": [3]}, SYSTEM)
    with pytest.raises(InputError, match="one rank"):
        run(tmp_path, lambda rank: [reduce_all(0, (), MIB, "1")], groups={"1": [0], "2": [1, 2, 3]})
    with pytest.raises(InputError, match=r"rank 3 node 0 .* not in group 1"):
        run(tmp_path, lambda rank: [reduce_all(0, (), MIB, "1")], groups={"1": [0, 1, 2]})


def expected(result: SimulationResult, answer: dict[str, Any]) -> None:
    assert cycles(result) == answer["cycles"]
    assert [rank.exposed_communication for rank in result.ranks] == answer["exposed_comm"]


WORKLOADS = [
    "dp8_mlp3", "dp8_mlp3_2d", "dp8_mlp3_durations", "moe_a2a8", "pp4_gpipe", "random_dag_1", "random_dag_2",
    "remote_mem", "straggler", "tp2_dp4_zero",
]  # fmt: skip


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", WORKLOADS)
def test_golden_workloads(name: str, reference: bool, shared_data: Path) -> None:
    folder = shared_data / "astrasim_golden" / "workloads" / name
    groups = folder / "comm_group.json"
    answers = json.loads((folder / "expected.json").read_text())
    for backend in ("congestion_unaware", "congestion_aware"):
        if backend in answers:
            result = simulate(
                folder / name,
                folder / "network.yml",
                folder / "system.json",
                folder / "memory.json",
                groups if groups.exists() else None,
                backend,
                reference=reference,
            )
            expected(result, answers[backend])


@pytest.mark.parametrize("name", ["d8", "fsdp8", "m64", "moe"])
def test_stage_traces(name: str, shared_data: Path, tmp_path: Path) -> None:
    with tarfile.open(shared_data / "stage_traces" / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    prefix = next(tmp_path.rglob("w.0.et")).parent / "w"
    answer = json.loads((shared_data / "stage_traces" / f"{name}.expected.json").read_text())
    result = simulate(prefix, answer["network"], answer["system"], group_file=prefix.with_suffix(".json"))
    expected(result, answer["congestion_unaware"])
    assert result.roles == (4 if name == "m64" else 1)


def test_the_examples_of_astra_sim(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "astrasim_golden" / "examples"
    with tarfile.open(folder / "traces.tar.gz") as archive:
        archive.extractall(tmp_path / "examples", filter="data")
    runs = json.loads((folder / "examples.json").read_text())
    assert len(runs) == 26
    for entry in runs:
        network = re.sub(r" (npus_count|bandwidth|latency):", r"\n\1:", entry["network_config"])
        (tmp_path / "network.yml").write_text(network)
        (tmp_path / "system.json").write_text(json.dumps(entry["system_config"]))
        prefix = next(word for word in entry["arguments"] if word.startswith("--workload-")).partition("=")[2]
        result = simulate(
            tmp_path / "examples" / prefix,
            tmp_path / "network.yml",
            tmp_path / "system.json",
            backend=entry["backend"],
        )
        assert cycles(result) == entry["cycles"]
