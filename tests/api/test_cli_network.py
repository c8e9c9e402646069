"""`collective` and `simulate` on the command line."""

import csv
import json
from collections.abc import Callable
from importlib.resources import files as files_of
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stablecast.ir.chakra import CollectiveType, collective_node, comp_node, encode_trace

Run = Callable[..., Any]
SYSTEM = {
    "preferred-dataset-splits": 4,
    "all-reduce-implementation": ["ring"],
    "collective-optimization": "localBWAware",
    "local-mem-bw": 3350,
    "roofline-enabled": 1,
    "peak-perf": 989,
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """network.yml, system.json, groups.json and traces t.0.et to t.3.et of compute and an all-reduce."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "network.yml").write_text(
        "topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ 50 ]\nlatency: [ 500 ]\n"
    )
    (tmp_path / "system.json").write_text(json.dumps(SYSTEM))
    (tmp_path / "groups.json").write_text(json.dumps({"1": [0, 1], "2": [2, 3]}))
    nodes = [
        comp_node(0, "COMP_NODE_a", 1_000_000_000, 1 << 20),
        collective_node(1, "COMM_COLL_NODE_b", CollectiveType.ALL_REDUCE, 1 << 20, "", [0]),
    ]
    for rank in range(4):
        (tmp_path / f"t.{rank}.et").write_bytes(encode_trace(nodes))
    return tmp_path


SCHEMA = json.loads((files_of("stablecast") / "schema" / "stablecast-1.json").read_text())


def published(answer: object, part: str) -> None:
    """`answer` is as the published schema says."""
    jsonschema.validate(answer, {**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{part}"}]})


CONFIGURED = ("--network", "network.yml", "--system", "system.json")


def test_a_collective_in_the_reference_mode(run: Run, files: Path) -> None:
    words = ("collective", "all_reduce", "--bytes", 1048576, *CONFIGURED, "--mode", "astra-sim")
    assert json.loads(run(*words, "--json").out) == {"cycles_max": 42244, "cycles_min": 42244}
    assert "42,244 cycles on every rank" in run(*words).out
    grouped = json.loads(run(*words, "--group-file", "groups.json", "--json").out)
    assert grouped == {"cycles_max": 24116, "cycles_min": 24116}
    assert json.loads(run(*words, "--involved-dim", "1", "--json").out)["cycles_max"] == 42244
    assert json.loads(run(*words, "--backend", "congestion_aware", "--json").out)["cycles_max"] == 42244


def test_a_collective_in_the_calibrated_mode(run: Run, files: Path) -> None:
    words = ("collective", "all-reduce", "--bytes", 1 << 30, "--on", "h100-sxm", "--ranks", 8)
    answer = json.loads(run(*words, "--json").out)
    published(answer, "collective_command")
    assert set(answer) == {"time_s", "low_s", "high_s", "algorithm"}
    assert 0 < answer["low_s"] <= answer["time_s"] <= answer["high_s"]
    assert "over 8 on h100-sxm" in run(*words).out
    cycles = json.loads(run(*words, "--mode", "astra-sim", "--json").out)
    assert cycles["cycles_max"] * 1e-9 == pytest.approx(answer["time_s"], rel=0.7)
    assert json.loads(run("collective", "broadcast", "--bytes", 1024, "--on", "h100-sxm:8", "--json").out)["time_s"] > 0


def test_a_table_of_collectives(run: Run, files: Path, shared_data: Path) -> None:
    table = shared_data / "astrasim_golden" / "collectives.csv"
    assert run("collective", "--table", table, "--mode", "astra-sim", "-o", "out.csv").code == 0
    with Path("out.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 367
    assert all((row["predicted_max"], row["predicted_min"]) == (row["cycles_max"], row["cycles_min"]) for row in rows)


def test_simulate(run: Run, files: Path) -> None:
    answer = json.loads(run("simulate", "t", *CONFIGURED, "--json").out)
    published(answer, "simulate_command")
    assert answer == {"ranks": [{"rank": rank, "cycles": 43255, "exposed_communication": 42244} for rank in range(4)]}
    assert "43,255 cycles" in run("simulate", "t", *CONFIGURED).out
    on_ours = json.loads(run("simulate", "t", "--on", "h100-sxm:4", "--roofline", "--json").out)
    assert len(on_ours["ranks"]) == 4


def test_simulate_takes_the_spellings_of_astra_sim(run: Run, files: Path) -> None:
    (files / "memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
    result = run(
        "simulate",
        "--workload-configuration=t",
        "--system-configuration=system.json",
        "--network-configuration=network.yml",
        "--remote-memory-configuration=memory.json",
        "--comm-group-configuration=empty",
        "--logging-folder=log",
        "--num-queues-per-dim=1",
        "--comm-scale=1",
        "--injection-scale=1",
        "--rendezvous-protocol=false",
        "--json",
    )
    assert result.code == 0
    assert json.loads(result.out)["ranks"][0]["cycles"] == 43255
    lines = (files / "log" / "log.log").read_text().splitlines()
    assert lines[0] == "issue,sys->id=0,tick=0,node->id=0,node->name=COMP_NODE_a"
    assert lines[-1] == "sys[3] finished, 43255 cycles, exposed communication 42244 cycles."


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("simulate", "t"), "needs --network and --system"),
        (("simulate", *CONFIGURED), "needs traces"),
        (("simulate", "u", *CONFIGURED), "no trace files"),
        (("simulate", "t", *CONFIGURED, "--backend", "congestion"), "unknown backend"),
        (("simulate", "t", *CONFIGURED, "--comm-scale", "2"), "not modelled"),
        (("simulate", "t", *CONFIGURED, "--rendezvous-protocol", "true"), "not modelled"),
        (("simulate", "t", *CONFIGURED, "--log", "absent/log"), "no folder"),
        (("collective",), "a kind and a size"),
        (("collective", "all_reduce", "--bytes", "8"), "needs a system"),
        (("collective", "all_reduce", "--bytes", "8", "--on", "h100-sxm"), "how many devices"),
        (("collective", "all_reduce", "--bytes", "8", "--on", "h101-sxm"), "unknown device 'h101-sxm'"),
        (("collective", "all_reduce", "--bytes", "8 s", "--on", "dgx-h100"), "not a number of bytes"),
        (("collective", "all_reduce", "--bytes", "-8", "--on", "dgx-h100"), "not a number of bytes"),
        (("collective", "all_reduce", "--bytes", "8", "--mode", "astra-sim"), "needs --network and --system"),
        (("collective", "all_reduce", "--bytes", "8", "--mode", "exact"), "unknown mode"),
        (("collective", "all_redo", "--bytes", "8", *CONFIGURED), "unknown collective"),
        (("collective", "all_reduce", "--bytes", "8", *CONFIGURED, "--involved-dim", "yes"), "list of 0 and 1"),
        (("collective", "--table", "absent.csv"), "cannot be read"),
        (("collective", "--table", "absent.csv", "--mode", "calibrated"), "astra-sim"),
    ],
)
def test_errors_are_one_line(words: tuple[str, ...], error: str, run: Run, files: Path) -> None:
    result = run(*words)
    assert (result.code, result.out) == (2, "")
    assert error in result.err
    assert len(result.err.splitlines()) == 1


def test_a_machine_brings_its_devices_and_sizes_have_units(run: Run) -> None:
    plain = run("collective", "all_reduce", "--bytes", "1073741824", "--on", "dgx-h100:8", "--json")
    assert plain.code == 0
    for size in ("1073741824", "1GiB", "1 GiB"):
        assert run("collective", "all_reduce", "--bytes", size, "--on", "dgx-h100", "--json").out == plain.out


def test_groups_beside_the_traces(run: Run, files: Path) -> None:
    """Traces of groups need no --group-file where one lies beside them."""
    for rank in range(4):
        nodes = [
            comp_node(0, "COMP_NODE", 10**9, 10**6),
            collective_node(
                1, "COMM_COLL_NODE", CollectiveType.ALL_REDUCE, 1 << 20, deps=(0,), pg_name="1" if rank < 2 else "2"
            ),
        ]
        (files / f"g.{rank}.et").write_bytes(encode_trace(nodes))
    given = run("simulate", "g", *CONFIGURED, "--group-file", "groups.json", "--json")
    assert given.code == 0
    assert run("simulate", "g", *CONFIGURED).code == 2
    (files / "comm_group.json").write_text((files / "groups.json").read_text())
    assert json.loads(run("simulate", "g", *CONFIGURED, "--json").out) == json.loads(given.out)
    assert run("simulate", "g", *CONFIGURED, "--group-file", "empty").code == 2
