"""Emission: what is written for a program, and what is refused."""

import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stablecast.ir.attributes import Shift
from stablecast.ir.chakra import CollectiveType, NodeType, TraceReader, check, load_trace, open_rank, read_comm_groups
from stablecast.ir.device_program import P2P, Branch, Kernel, Loop
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups
from stablecast.ir.kernels import FloatArray
from stablecast.ir.types import Symbol
from stablecast.lowering.chakra import EmitOptions, MemoryNodes, Order, RolePart, Target, emit
from stablecast.lowering.chakra.unroll import unroll

Steps = Callable[..., Any]


def nodes_of(prefix: Path, rank: int = 0) -> list[Any]:
    return list(open_rank(prefix, rank))


def test_files_groups_and_manifest(steps: Steps, durations: FloatArray, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "step"
    report = emit(
        steps(dp=2, tp=4).layers(),
        durations,
        prefix,
        ranks=8,
        files={"system.json": b'{"roofline-enabled": 0}'},
        notes={"prediction": {"backend": "analytical"}},
    )
    assert (report.ranks, report.nodes, report.groups) == (8, 96, 6)
    names = sorted(os.listdir(prefix.parent))
    assert names == sorted(
        [
            *(f"step.{rank}.et" for rank in range(8)),
            "comm_group.json",
            "step.manifest.json",
            "step.program.json",
            "system.json",
        ]
    )
    groups = read_comm_groups(prefix.parent / "comm_group.json").members
    assert groups == {"1": (0, 1, 2, 3), "2": (4, 5, 6, 7), "3": (0, 4), "4": (1, 5), "5": (2, 6), "6": (3, 7)}
    manifest = json.loads((prefix.parent / "step.manifest.json").read_text())
    assert (manifest["ranks"], manifest["nodes"], manifest["groups"]) == (8, 96, 6)
    assert manifest["prediction"] == {"backend": "analytical"}
    assert manifest["files"]["step.3.et"]["bytes"] == (prefix.parent / "step.3.et").stat().st_size
    assert {(one["kind"], one["axes"]): one["nodes"] for one in manifest["classes"]} == {
        ("COMP", ""): 48,
        ("all_reduce", "dp"): 24,
        ("all_reduce", "tp"): 24,
    }
    found = check(prefix)
    assert found.ok
    assert not found.warnings


def test_attribute_types_and_times(steps: Steps, durations: FloatArray, tmp_path: Path) -> None:
    emit(steps(dp=2, tp=4).layers(1), durations, tmp_path / "s")
    norm, product, reduce, _ = nodes_of(tmp_path / "s", 5)
    kinds = {a.name: (a.kind.field, a.value) for a in product.attributes}
    assert kinds == {
        "is_cpu_op": ("bool_val", False),
        "num_ops": ("int64_val", 2 * 4096 * 4096 * 1024),
        "tensor_size": ("uint64_val", 16_000_000 + 33_554_432),
        "op": ("string_val", "dot_general"),
        "dtype": ("string_val", "bf16"),
        "scope": ("string_val", "jit(step)/layer0/mlp/dot_general"),
        "kernel": ("int32_val", 0),
        "duration_nanos": ("double_val", 123456.78),
    }
    assert (product.duration_micros, norm.duration_micros) == (123, 1)
    assert norm.value("duration_nanos") == 300.0
    assert (norm.name, product.name) == ("COMP_NODE_mul", "COMP_NODE_dot_general")
    kinds = {a.name: (a.kind.field, a.value) for a in reduce.attributes}
    assert kinds["comm_type"] == ("int64_val", CollectiveType.ALL_REDUCE)
    assert kinds["comm_size"] == ("int64_val", 1 << 20)
    assert kinds["pg_name"] == ("string_val", "2")
    assert reduce.data_deps == (1,)


def test_without_durations_consumers_time_compute(steps: Steps, tmp_path: Path) -> None:
    emit(steps(dp=2, tp=4).layers(1), None, tmp_path / "s")
    assert {node.duration_micros for node in nodes_of(tmp_path / "s")} == {0}
    assert check(tmp_path / "s", roofline=True).ok


@pytest.mark.parametrize(
    ("kind", "number", "held"),
    [
        ("all_gather", 2, 1 << 20),
        ("reduce_scatter", 7, 1 << 20),
        ("all_to_all", 6, 1 << 20),
        ("all_reduce", 0, 1 << 20),
    ],
)
def test_sizes_follow_the_consumers(steps: Steps, tmp_path: Path, kind: str, number: int, held: int) -> None:
    made = steps(tp=4)
    emit(made.program((Kernel(0), made.reduce("tp", deps=(0,), kind=kind))), None, tmp_path / "s")
    node = nodes_of(tmp_path / "s")[1]
    assert (node.value("comm_type"), node.value("comm_size")) == (number, held)
    assert node.attribute("pg_name") is None
    assert node.attribute("result_bytes") is None


def test_broadcast_becomes_what_consumers_run(steps: Steps, tmp_path: Path) -> None:
    made = steps(dp=2, tp=4)
    emit(made.program((made.reduce("tp", kind="collective_broadcast"),)), None, tmp_path / "s")
    (node,) = nodes_of(tmp_path / "s")
    assert (node.value("comm_type"), node.value("stands_for")) == (0, "collective_broadcast")
    with pytest.raises(InputError, match="psum at sync/psum has no form in Chakra"):
        emit(made.program((made.reduce("tp", kind="psum"),)), None, tmp_path / "t")
    assert not list(tmp_path.glob("t.*"))


def test_nothing_is_written_for_one_rank_or_no_bytes(steps: Steps, tmp_path: Path) -> None:
    made = steps(dp=2, tp=4)
    alone = replace(made.reduce("tp", deps=(0,)), groups=Groups(8, 1, (8,), (0,)))
    empty = made.reduce("tp", 0, deps=(1,))
    emit(made.program((Kernel(0), alone, empty, Kernel(1, deps=(2,)))), None, tmp_path / "s")
    assert [node.data_deps for node in nodes_of(tmp_path / "s")] == [(), (0,)]
    emit(made.program((replace(alone, deps=()),)), None, tmp_path / "t" / "s")
    (node,) = nodes_of(tmp_path / "t" / "s")
    assert (node.type, node.duration_micros) == (NodeType.COMP, 1)
    assert check(tmp_path / "t" / "s").ok


def test_loops_unrolled_and_compact(steps: Steps, durations: FloatArray, tmp_path: Path) -> None:
    program = steps(dp=2, tp=4).looped(5)
    whole = emit(program, durations, tmp_path / "whole")
    nodes = nodes_of(tmp_path / "whole")
    chained = [(3,), *((at, at + 2) for at in (3, 6, 9, 12))]
    assert [nodes[at].data_deps for at in (4, 6, 9, 12, 15)] == chained
    compact = emit(program, durations, tmp_path / "c", options=EmitOptions(max_unroll=2, overwrite=True))
    assert (whole.roles[0].nodes, whole.roles[0].nodes_unrolled) == (17, 17)
    assert (compact.roles[0].nodes, compact.roles[0].nodes_unrolled) == (8, 17)
    assert compact.roles[0].exact_compute_s == pytest.approx(whole.roles[0].exact_compute_s)
    assert "17 with loops unrolled" in str(compact)
    trips = [node.value("trips") for node in nodes_of(tmp_path / "c")]
    assert trips == [None, None, None, None, 4, 4, 4, None]
    with pytest.raises(InputError, match="--max-unroll 0"):
        emit(program, durations, tmp_path / "d", options=EmitOptions(max_unroll=0))


def test_unknown_trips_and_conditionals_are_said(steps: Steps, durations: FloatArray) -> None:
    made = steps(dp=2, tp=4)
    loop = Loop((Kernel(0),), Symbol("n", low=3))
    branch = Branch(((Kernel(1),), (Kernel(0), Kernel(0, deps=(0,)))), deps=(0,))
    unrolled = unroll(made.program((loop, branch)), durations)
    assert [step.node.row for step in unrolled.steps] == [0] * 5
    assert unrolled.notes == (
        "loop n: trips unknown, taken as 3",
        "of a conditional, the dearest body is written",
    )
    assert len(unroll(made.program((loop,)), None, {"n": 7}).steps) == 7
    likely = replace(branch, probability=(0.9, 0.1), deps=())
    assert [step.node.row for step in unroll(made.program((likely,))).steps] == [1]
    with pytest.raises(InputError, match="more than 4 nodes"):
        unroll(made.program((loop,)), None, {"n": 7}, max_steps=4)


def test_many_ends_of_a_trip_meet_in_one(steps: Steps) -> None:
    made = steps(tp=2)
    unrolled = unroll(made.program((Loop(tuple(Kernel(0) for _ in range(40)), 2),)))
    assert unrolled.steps[39].deps == tuple(range(39))
    assert {step.deps for step in unrolled.steps[40:79]} == {(39,)}


def test_order_that_does_not_follow_the_list(steps: Steps) -> None:
    made = steps(tp=2)
    unrolled = unroll(made.program((Kernel(0, deps=(1,)), Kernel(1))))
    assert [(step.node.row, step.deps) for step in unrolled.steps] == [(1, ()), (0, (0,))]
    with pytest.raises(InputError, match="circular"):
        unroll(made.program((Kernel(0, deps=(1,)), Kernel(1, deps=(0,)))))


def test_pipeline_stages_meet(steps: Steps, tmp_path: Path) -> None:
    made = steps(dp=2, pp=2)
    report = emit(made.stages(), None, tmp_path / "s", options=EmitOptions(order=Order.STREAM))
    assert [(role.name, role.ranks) for role in report.roles] == [("stage0", 2), ("stage1", 2)]
    assert check(tmp_path / "s").ok
    sends = [node for node in nodes_of(tmp_path / "s", 2) if node.type == NodeType.COMM_SEND]
    recvs = [node for node in nodes_of(tmp_path / "s", 3) if node.type == NodeType.COMM_RECV]
    assert [(node.value("comm_dst"), node.value("comm_size")) for node in sends] == [(3, 4096)]
    assert [(node.value("comm_src"), node.value("comm_tag")) for node in recvs] == [(2, sends[0].value("comm_tag"))]


def test_ends_that_do_not_meet_are_refused(steps: Steps, tmp_path: Path) -> None:
    first, second = steps(dp=2, pp=2).stages()
    body = tuple(replace(node, nbytes=4095) if isinstance(node, P2P) else node for node in second.program.body)
    odd = replace(second, program=replace(second.program, body=body))
    with pytest.raises(
        InputError, match="role stage0 has a send of 4096 bytes along pp without a receive of that size"
    ):
        emit([first, odd], None, tmp_path / "s")
    with pytest.raises(InputError, match="rank 1 has 0 roles"):
        emit([first], None, tmp_path / "s")
    with pytest.raises(InputError, match=r"coordinate pp=2 is outside"):
        emit([first, replace(second, coords={"pp": 2})], None, tmp_path / "s")
    assert not os.listdir(tmp_path)


def test_members_that_issue_other_collectives_are_refused(steps: Steps, tmp_path: Path) -> None:
    made = steps(dp=2, pp=2)
    plain = made.program((Kernel(0),))
    syncing = made.program((made.reduce("pp"),))
    with pytest.raises(InputError, match="do not issue the same collectives: roles a, b"):
        emit([RolePart("a", plain, None, {"pp": 0}), RolePart("b", syncing, None, {"pp": 1})], None, tmp_path / "s")
    both = [RolePart("a", syncing, None, {"pp": 0}), RolePart("b", syncing, None, {"pp": 1})]
    assert emit(both, None, tmp_path / "s").groups == 2


def test_permutation_is_a_send_and_a_receive(steps: Steps, tmp_path: Path) -> None:
    made = steps(dp=2, tp=4)
    permute = made.reduce("tp", kind="collective_permute")
    report = emit(made.program((permute, replace(permute, deps=(0,)))), None, tmp_path / "s")
    assert check(tmp_path / "s").ok
    send, recv, again, _ = nodes_of(tmp_path / "s", 7)
    assert (send.value("comm_dst"), recv.value("comm_src")) == (4, 6)
    assert send.value("comm_tag") == recv.value("comm_tag") != again.value("comm_tag")
    assert again.data_deps == (0, 1)
    assert report.notes == ("permutations that are no shift are written as one place along their group, ends joined",)


def test_ends_of_a_chain_stay_apart_where_roles_hold_them(steps: Steps, tmp_path: Path) -> None:
    made = steps(dp=2, pp=3)
    permute = replace(made.reduce("pp", kind="collective_permute"), shift=Shift("pp", 1, cyclic=False))
    program = made.program((permute, Kernel(0, deps=(0,))))
    emit([RolePart(f"stage{at}", program, None, {"pp": at}) for at in range(3)], None, tmp_path / "s")
    assert check(tmp_path / "s").ok
    kinds = [[node.type for node in nodes_of(tmp_path / "s", rank)] for rank in (3, 4, 5)]
    assert kinds == [
        [NodeType.COMM_SEND, NodeType.COMP],
        [NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMP],
        [NodeType.COMM_RECV, NodeType.COMP],
    ]
    report = emit(program, None, tmp_path / "other" / "joined")
    assert report.notes == ("permutations whose ends do not meet are written with their ends joined",)
    assert len(nodes_of(tmp_path / "other" / "joined", 0)) == 3


def test_groups_that_cannot_be_computed(steps: Steps, tmp_path: Path) -> None:
    made = steps(dp=4)
    ragged = replace(made.reduce("dp"), groups=Groups(2, 3, ragged=((2, 0, 1), (3,))))
    with pytest.raises(InputError, match="8 devices, the program over 4"):
        emit(made.program((replace(ragged, groups=Groups(1, 8, (8,), (0,))),)), None, tmp_path / "s")
    half = replace(ragged, groups=Groups(1, 2, ragged=((2, 0),)))
    with pytest.raises(InputError, match="rank 1 runs a collective"):
        emit(made.program((half,)), None, tmp_path / "s")
    pairs = replace(ragged, groups=Groups(2, 2, ragged=((3, 0), (1, 2))))
    emit(made.program((pairs,)), None, tmp_path / "s")
    assert read_comm_groups(tmp_path / "comm_group.json").members == {"1": (3, 0), "2": (1, 2)}


def test_memory_nodes(steps: Steps, durations: FloatArray, tmp_path: Path) -> None:
    program = steps(dp=2, tp=4).layers(1)
    emit(program, durations, tmp_path / "step" / "s", options=EmitOptions(memory=MemoryNodes.STEP))
    nodes = nodes_of(tmp_path / "step" / "s")
    assert [nodes[0].value("tensor_size"), nodes[-1].value("tensor_size")] == [1000, 500]
    assert (nodes[0].type, nodes[-1].type, nodes[-1].data_deps) == (NodeType.MEM_LOAD, NodeType.MEM_STORE, (3, 4))
    emit(program, durations, tmp_path / "kernel" / "s", options=EmitOptions(memory=MemoryNodes.KERNEL))
    counts = Counter(node.type for node in nodes_of(tmp_path / "kernel" / "s"))
    assert counts == {NodeType.COMP: 2, NodeType.MEM_LOAD: 2, NodeType.MEM_STORE: 2, NodeType.COMM_COLL: 2}
    assert check(tmp_path / "kernel" / "s").ok


def test_a_straggler_takes_longer(steps: Steps, durations: FloatArray, tmp_path: Path) -> None:
    made = steps(dp=2)
    program = made.program((Kernel(0), made.reduce("dp", deps=(0,))))
    parts = [
        RolePart("fast", program, durations, {"dp": 0}),
        RolePart("slow", program, durations, {"dp": 1}, speed=0.5),
    ]
    emit(parts, None, tmp_path / "s")
    assert [nodes_of(tmp_path / "s", rank)[0].duration_micros for rank in (0, 1)] == [123, 247]
    with pytest.raises(InputError, match="3 durations for 2 distinct kernels"):
        emit(program, np.ones(3), tmp_path / "t")


@pytest.mark.parametrize(("ranks", "said"), [(0, "0 ranks cannot"), (9, "9 ranks were asked for, .* written for 8")])
def test_ranks_that_do_not_match(steps: Steps, tmp_path: Path, ranks: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        emit(steps(dp=2, tp=4).layers(), None, tmp_path / "s", ranks=ranks)
    assert not os.listdir(tmp_path)


def test_existing_files_are_kept_unless_told(steps: Steps, tmp_path: Path) -> None:
    emit(steps(dp=2, tp=4).layers(), None, tmp_path / "s")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match="exists; add --overwrite"):
        emit(steps(dp=2).layers(0), None, tmp_path / "s")
    with pytest.raises(InputError, match=r"comm_group\.json exists"):
        emit(steps(dp=2, tp=4).layers(), None, tmp_path / "other")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    emit(steps(dp=2, tp=2).layers(), None, tmp_path / "s", options=EmitOptions(overwrite=True))
    assert len(list(tmp_path.glob("*.et"))) == 4
    assert check(tmp_path / "s").ok


def test_a_failed_run_leaves_nothing(steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, [0]

    def full(handle: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] > 3:
            raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(InputError, match="the disk is full"):
        emit(steps(dp=2, tp=4).layers(), None, tmp_path / "s")
    assert not os.listdir(tmp_path)


def test_an_interrupted_run_leaves_nothing(steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: str, target: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        emit(steps(dp=2, tp=4).layers(), None, tmp_path / "s")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz", "s"])
def test_one_tar_file(steps: Steps, tmp_path: Path, name: str) -> None:
    program = steps(dp=2, tp=4).layers()
    emit(program, None, tmp_path / "files" / "s")
    emit(program, None, tmp_path / name, options=EmitOptions(target=Target.TAR))
    (path,) = tmp_path.glob("*.tar*")
    with tarfile.open(path) as archive:
        assert archive.getnames()[-1] == "s.manifest.json"
        archive.extractall(tmp_path / "unpacked", filter="data")
    for file in (tmp_path / "files").iterdir():
        if "manifest" not in file.name:
            assert (tmp_path / "unpacked" / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(InputError, match="exists"):
        emit(program, None, tmp_path / name, options=EmitOptions(target=Target.TAR))


def test_a_dry_run_counts_the_same(steps: Steps, tmp_path: Path) -> None:
    program = steps(dp=2, tp=4).layers()
    counted = emit(program, None, tmp_path / "s", options=EmitOptions(target=Target.DRY_RUN))
    assert not os.listdir(tmp_path)
    written = emit(program, None, tmp_path / "s")
    assert (counted.nodes, counted.bytes, counted.classes) == (written.nodes, written.bytes, written.classes)


def test_many_ranks_share_a_template(steps: Steps, tmp_path: Path) -> None:
    made = steps(dp=64, tp=8)
    emit(made.layers(2), None, tmp_path / "s")
    one, other = load_trace(tmp_path / "s.0.et"), load_trace(tmp_path / "s.511.et")
    differing = [
        (left.name, right.name)
        for first, second in zip(one.nodes, other.nodes, strict=True)
        for left, right in zip(first.attributes, second.attributes, strict=True)
        if left != right
    ]
    assert set(differing) == {("pg_name", "pg_name")}
    assert check(tmp_path / "s").ok


def test_expanded_collectives(steps: Steps, tmp_path: Path) -> None:
    from stablecast.ir.chakra.algorithms import parse_msccl

    text = """<algo name="swap" coll="allreduce" ngpus="2" nchunksperloop="1" nchannels="1" proto="Simple">
    <gpu id="0"><tb id="0" send="1" recv="-1" chan="0"><step s="0" type="s" cnt="1" depid="-1" deps="-1"/></tb>
    <tb id="1" send="-1" recv="1" chan="0"><step s="0" type="rrc" cnt="1" depid="-1" deps="-1"/></tb></gpu>
    <gpu id="1"><tb id="0" send="0" recv="-1" chan="0"><step s="0" type="s" cnt="1" depid="-1" deps="-1"/></tb>
    <tb id="1" send="-1" recv="0" chan="0"><step s="0" type="rrc" cnt="1" depid="-1" deps="-1"/></tb></gpu></algo>"""
    options = EmitOptions(algorithms={"all_reduce": parse_msccl(text)}, reduce_bytes_per_s=1e12)
    made = steps(dp=2, tp=4)
    report = emit(made.layers(1), None, tmp_path / "s", options=options)
    assert check(tmp_path / "s").ok
    assert report.notes == ("all_reduce in groups of 4 stays as it is, swap is for 2",)
    kinds = [node.type.name for node in TraceReader(tmp_path / "s.5.et")]
    assert kinds == ["COMP", "COMP", "COMM_COLL", "COMM_SEND", "COMM_RECV", "COMP"]
    send, recv, local = nodes_of(tmp_path / "s", 5)[3:]
    assert (send.value("comm_dst"), recv.value("comm_src"), send.value("comm_size")) == (1, 1, 1 << 22)
    assert (local.duration_micros, local.data_deps) == (13, (4,))
    with pytest.raises(InputError, match="in groups of 2, of which the program has none"):
        emit(steps(dp=4).layers(0), None, tmp_path / "t", options=options)


def test_collectives_of_a_group_are_chained(steps: Steps, tmp_path: Path) -> None:
    made = steps(tp=4)
    emit(
        made.program((made.reduce("tp"), made.reduce("tp", 8), made.reduce("tp", kind="all_gather"))),
        None,
        tmp_path / "s",
    )
    assert [node.data_deps for node in nodes_of(tmp_path / "s")] == [(), (0,), (1,)]


def test_streams_keep_their_order(steps: Steps, tmp_path: Path) -> None:
    made = steps(tp=4)
    body = (Kernel(0), Kernel(1), made.reduce("tp", deps=(0,)), Kernel(0, stream=2))
    emit(made.program(body), None, tmp_path / "s", options=EmitOptions(order=Order.STREAM))
    nodes = nodes_of(tmp_path / "s")
    assert [node.data_deps for node in nodes] == [(), (0,), (0,), ()]
    assert nodes[3].value("stream") == 2
