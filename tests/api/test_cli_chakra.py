"""`stablecast chakra` and its commands."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stablecast
from stablecast.ir.chakra import CollectiveType, TraceWriter, collective_node, comp_node
from stablecast.ir.workload import Role

Run = Any

MODULE = """module @reduce attributes {mhlo.num_replicas = 4 : i32} {
 func.func public @main(%x: tensor<1024x1024xbf16>, %w: tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16> {
 %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
   : (tensor<1024x1024xbf16>, tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16>
 %1 = "stablehlo.all_reduce"(%0) ({ ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
   %s = stablehlo.add %a, %b : tensor<bf16>
   stablehlo.return %s : tensor<bf16> }) {replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>}
   : (tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16>
 return %1 : tensor<1024x1024xbf16> } }
"""


@pytest.fixture
def reduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A product and an all-reduce over pairs of 4 devices, as `reduce.mlir` in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("reduce.mlir").write_text(MODULE)
    return "reduce.mlir"


def test_write_and_check(run: Run, reduce: str) -> None:
    made = run("chakra", reduce, "--on", "h100-sxm", "--ranks", 4, "-o", "out/step", "--json")
    assert (made.code, made.err) == (0, "")
    report = json.loads(made.out)
    assert (report["schema"], report["ranks"], report["nodes"], report["groups"]) == (1, 4, 8, 2)
    names = {path.name for path in Path("out").iterdir()}
    assert names >= {"step.0.et", "step.3.et", "comm_group.json", "network.yml", "system.json", "memory.json"}
    manifest = json.loads(Path("out/step.manifest.json").read_text())
    assert manifest["prediction"]["backend"] == "analytical"
    assert manifest["prediction"]["step_time_s"]["main"] > manifest["roles"][0]["exact_compute_s"] > 0
    assert json.loads(Path("out/system.json").read_text())["roofline-enabled"] == 0
    checked = run("chakra", "check", "out/step", "--json")
    assert checked.code == 0
    assert json.loads(checked.out)["ok"]
    assert run("chakra", "check", "out/step").out.startswith("4 ranks, 8 nodes: ok")


def test_looking_at_what_was_written(run: Run, reduce: str) -> None:
    run("chakra", "write", reduce, "--on", "h100-sxm", "-o", "out/step")
    table = run("chakra", "show", "out/step", "--rank", 3).out
    assert "ALL_REDUCE 2097152 B group 2" in table
    assert run("chakra", "show", "out/step", "--dot").out.startswith("digraph")
    assert run("chakra", "show", "out/step", "--svg", "-o", "step.svg").out == ""
    assert Path("step.svg").read_text().startswith("<svg")
    assert json.loads(run("chakra", "stats", "out/step", "--json").out)["nodes"] == 8
    assert len(json.loads(run("chakra", "json", "out/step").out)["nodes"]) == 2
    assert run("chakra", "diff", "out/step", "out/step").code == 0
    both = run("chakra", "show", "out/step", "--svg", "--dot")
    assert (both.code, both.err) == (2, "stablecast: --dot, --svg and --json exclude each other\n")


def test_traces_are_input_again(run: Run, reduce: str) -> None:
    run("chakra", reduce, "--on", "h100-sxm", "-o", "out/step")
    assert run("chakra", "out/step", "-o", "again/step").code == 0
    assert run("chakra", "diff", "out/step", "again/step").out == "the same: 4 ranks\n"
    plain = json.loads(run("predict", reduce, "--on", "h100-sxm", "--json").out)
    traced = json.loads(run("predict", "out/step", "--on", "h100-sxm", "--json").out)
    for key in ("step_time_s", "devices", "work", "collectives", "kernels", "mfu"):
        assert traced[key] == plain[key]
    assert json.loads(run("work", "out/step", "--json").out)["matmul_flops"] == 2 * 1024**3
    assert run("compare", "out/step", "--on", "h100-sxm", "--on", "tpu-v5p").code == 0
    changed = run("chakra", "out/step", "--on", "a100-sxm-80gb", "--roofline", "-o", "other/step", "--json")
    assert changed.code == 0
    different = run("chakra", "diff", "out/step", "other/step")
    assert different.code == 2
    assert "duration_micros" in different.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", 0), "0 ranks cannot be written"),
        (("--ranks", 3), "3 ranks were asked for, but the program is written for 4; say --ranks 4"),
        (("--order", "chaos"), "--order 'chaos' is unknown; known: data, stream"),
        (("--memory", "all"), "--memory 'all' is unknown"),
        (("--collective", "ring.xml"), "--collective 'ring.xml' is not kind=file"),
        (("--tar", "--dry-run"), "--tar and --dry-run exclude each other"),
        (("--max-unroll", 0), "--max-unroll 0"),
    ],
)
def test_one_line_for_what_is_wrong(run: Run, reduce: str, words: tuple[object, ...], said: str) -> None:
    made = run("chakra", reduce, "-o", "out/step", *words)
    assert made.code == 2
    assert made.err.startswith(f"stablecast: {said}")
    assert made.err.count("\n") == 1
    assert not list(Path("out").glob("*"))


def test_existing_files(run: Run, reduce: str) -> None:
    assert run("chakra", reduce, "-o", "out/step").code == 0
    assert "exists; add --overwrite" in run("chakra", reduce, "-o", "out/step").err
    assert run("chakra", reduce, "-o", "out/step", "--overwrite").code == 0
    assert "not written" in run("chakra", reduce, "-o", "out/step", "--dry-run").out
    assert run("chakra", reduce, "-o", "tar/step.tar.gz", "--tar").code == 0
    assert [path.name for path in Path("tar").iterdir()] == ["step.tar.gz"]


def test_faults_leave_with_two(run: Run, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.0.et") as writer:
        writer.write(comp_node(0, "COMP_NODE", 0, 1))
    checked = run("chakra", "check", tmp_path / "t", "--json")
    assert checked.code == 2
    assert json.loads(checked.out)["faults"][0]["kind"] == "zero size or work"


def test_help_and_first_words(run: Run) -> None:
    assert "INPUT | COMMAND" in run("chakra", "--help").out
    assert "there is no file nothing" in run("chakra", "nothing", "-o", "x/y").err
    assert run("chakra", "--on", "h100-sxm").err.count("\n") == 1


def test_from_python(reduce: str) -> None:
    report = stablecast.to_chakra(reduce, out="out/step", on="h100-sxm", ranks=4)
    assert (report.ranks, report.nodes) == (4, 8)
    traces = stablecast.read_chakra("out/step")
    program = traces["main"]
    assert program.num_devices == 4
    again = stablecast.predict(program, on="h100-sxm")
    assert again.step_time_s == stablecast.predict(reduce, on="h100-sxm").step_time_s
    assert stablecast.predict(traces, on="h100-sxm").step_time_s == again.step_time_s
    assert stablecast.to_chakra(traces, out="more/step").nodes == 8


def test_roles_of_which_the_slowest_counts(tmp_path: Path) -> None:
    for rank, operations in enumerate((10**9, 10**12)):
        with TraceWriter(tmp_path / f"t.{rank}.et") as writer:
            writer.write(comp_node(0, "COMP_NODE", operations, 1000))
            writer.write(collective_node(1, "COMM_COLL_NODE", CollectiveType.ALL_REDUCE, 1000, deps=(0,)))
    prediction = stablecast.predict(tmp_path / "t", on="h100-sxm")
    assert prediction.step_time_s > 1e-3
    assert any(
        "2 roles run at once; all but the step is of the busiest (role1)" in note for note in prediction.assumptions
    )


RING = """<algo name="pair" coll="allreduce" ngpus="2" nchunksperloop="1">
<gpu id="0"><tb id="0" send="1" recv="1" chan="0"><step s="0" type="s" cnt="1"/><step s="1" type="rrc" cnt="1"/></tb></gpu>
<gpu id="1"><tb id="0" send="0" recv="0" chan="0"><step s="0" type="s" cnt="1"/><step s="1" type="rrc" cnt="1"/></tb></gpu>
</algo>"""


def test_collectives_by_an_algorithm(run: Run, reduce: str) -> None:
    Path("pair.xml").write_text(RING)
    made = run("chakra", reduce, "--on", "h100-sxm", "-o", "out/step", "--collective", "all_reduce=pair.xml", "--json")
    classes = {one["kind"]: one["nodes"] for one in json.loads(made.out)["classes"]}
    assert classes == {"COMP": 8, "COMM_SEND": 4, "COMM_RECV": 4}
    assert run("chakra", "check", "out/step").code == 0
    collectives = json.loads(run("predict", "out/step", "--on", "h100-sxm", "--json").out)["collectives"]
    assert [(one["kind"], one["group_size"]) for one in collectives] == [("all_reduce", 2)]
    missing = run("chakra", reduce, "-o", "x/step", "--collective", "all_gather=pair.xml")
    assert missing.err == "stablecast: pair.xml is an algorithm for all_reduce, not for all_gather\n"


def test_roles_of_a_workload(reduce: str) -> None:
    workload = stablecast.load(reduce)
    name = workload.modules[0].name
    roles = tuple(Role(f"rank{rank}", name, {"devices": rank}, 0.5 if rank == 3 else 1.0) for rank in range(4))
    report = stablecast.to_chakra(replace(workload, roles=roles), out="out/step", on="h100-sxm")
    assert [(role.name, role.ranks) for role in report.roles] == [(f"rank{rank}", 1) for rank in range(4)]
    times = [role.exact_compute_s for role in report.roles]
    assert times[3] == pytest.approx(2 * times[0])


def test_collectives_of_other_tools_run_beside_kernels(tmp_path: Path) -> None:
    """Traces say by dependencies what must wait; nothing else does, as in ASTRA-sim."""
    for rank in range(8):
        with TraceWriter(tmp_path / f"t.{rank}.et") as writer:
            writer.write(comp_node(0, "COMP_NODE_a", 10**12, 1000))
            writer.write(collective_node(1, "COMM_COLL_NODE_b", CollectiveType.ALL_REDUCE, 10**8, deps=(0,)))
            writer.write(comp_node(2, "COMP_NODE_c", 10**13, 1000, deps=(0,)))
    prediction = stablecast.predict(tmp_path / "t", on="h100-sxm")
    assert prediction.exposed_communication_s == pytest.approx(0.0, abs=1e-12)
    assert any("every collective overlaps" in note for note in prediction.assumptions)
