"""Reading traces back: stablecast's own bit for bit, those of other tools by what they say."""

import dataclasses
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stablecast.frontends.chakra import TracePrograms, is_chakra, read_chakra
from stablecast.ir.attributes import Shift
from stablecast.ir.chakra import (
    CollectiveType,
    Node,
    NodeType,
    TraceReader,
    TraceWriter,
    check,
    collective_node,
    comp_node,
    diff_traces,
    find_traces,
    recv_node,
    send_node,
)
from stablecast.ir.device_program import P2P, Buffers, Collective, DeviceProgram, Kernel, Loop
from stablecast.ir.errors import InputError
from stablecast.ir.groups import over_axes
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable
from stablecast.ir.program import Mesh
from stablecast.ir.work import SymbolicWork, Work
from stablecast.lowering.chakra import EmitOptions, MemoryNodes, Order, RolePart, emit

MESH = Mesh("mesh", (("dp", 2), ("pp", 2), ("tp", 2)))
ROWS = (
    KernelRow(KernelClass.MATMUL, "bf16", "bf16", "f32", "bf16", m=64, n=64, k=64, matmul_flops=2.0 * 64**3),
    KernelRow(KernelClass.ELEMENTWISE, out_dtype="f32", elems=64, vector_flops=64, bytes_read=256, label="add, mul=2"),
    KernelRow(KernelClass.COPY, bytes_read=4096, library="remote_memory", label="load"),
)
DURATIONS = np.array([1.23456789e-4, 2.5e-7, 3.3e-5])


def collective(kind: str, *axes: str, nbytes: int = 4096, **fields: Any) -> Collective:
    groups = over_axes("mesh", MESH.axes, axes)
    result = {"all_gather": nbytes * groups.size, "reduce_scatter": nbytes // groups.size}.get(kind, nbytes)
    return Collective(kind, groups, nbytes, result, **fields)


def program(*body: Any, name: str = "step") -> DeviceProgram:
    work = SymbolicWork({(): Work(matmul_flops=5, bytes_read=7)})
    return DeviceProgram(
        name, body, KernelTable.of(ROWS), work, 8, (MESH,), platform="cuda", model_flops={"bf16": 3.0},
        buffers=Buffers(100, 50, 10, 5, {"layer": 5}), notes=("a note",),
    )  # fmt: skip


STEP = program(
    Kernel(0, scope="jit(step)/layer/dot_general"),
    collective("all_reduce", "tp", deps=(0,), reduce_op="add", dtype="bf16", scope="layer"),
    Kernel(1, stream=3, deps=(1,)),
    collective("all_gather", "dp", deps=(0,), channel=4, merged=3),
    collective("all_gather", "dp", nbytes=2, deps=(3,)),
    collective("reduce_scatter", "dp", "tp", deps=(2,), asynchronous=True, stream=2),
    dataclasses.replace(collective("all_to_all", "tp", deps=(5,)), result_bytes=77),
    collective("collective_broadcast", "pp", deps=(6,)),
    collective("collective_permute", "tp", deps=(7,), shift=Shift("tp", 1, cyclic=True)),
    Kernel(2, deps=(8,)),
    Kernel(0, deps=(4, 8, 9)),
)
LOOPED = program(
    Kernel(1),
    Loop((Kernel(0, scope="a"), collective("all_reduce", "tp", deps=(0,)), Kernel(1, deps=(0,))), 6, deps=(0,)),
    collective("all_reduce", "tp", deps=(1,)),
    Kernel(1, deps=(1, 2)),
)

WIDE = program(
    Kernel(1),
    Kernel(2),
    Loop((*(Kernel(0) for _ in range(30)), collective("all_reduce", "dp"), Kernel(1)), 6, deps=(0, 1)),
    Kernel(1, deps=(2,)),
)


NESTED = program(
    Kernel(1),
    Loop(
        (
            Kernel(0),
            Loop((Kernel(1), collective("all_reduce", "tp", deps=(0,)), Kernel(0)), 3, deps=(0,)),
            Kernel(1, deps=(0,)),
            collective("collective_permute", "pp", deps=(1, 2), shift=Shift("pp", -1, cyclic=False)),
            Kernel(1, deps=(2,)),
        ),
        4,
        deps=(0,),
    ),
    Kernel(1, deps=(1,)),
)


def chain() -> list[RolePart]:
    """Two stages of one program, whose ends do not meet."""
    return [RolePart(f"stage{at}", NESTED, DURATIONS, {"pp": at}) for at in range(2)]


def stages() -> list[RolePart]:
    front = program(Kernel(0), P2P("send", "pp", 1, 5, 640, deps=(0,)), P2P("recv", "pp", 1, 6, 320), name="front")
    back = program(P2P("recv", "pp", -1, 5, 640), Kernel(1, deps=(0,)), P2P("send", "pp", -1, 6, 320), name="back")
    return [
        RolePart("front", front, DURATIONS, {"pp": 0}),
        RolePart("back", back, DURATIONS, {"pp": 1}, speed=0.8),
    ]


def parts_of(traces: TracePrograms) -> list[RolePart]:
    return [
        RolePart(role.name, role.program, role.durations_s, role.coords, role.speed, role.ranks)
        for role in traces.roles.values()
    ]


CASES: dict[str, tuple[Callable[[], list[RolePart]], EmitOptions, EmitOptions]] = {
    "step": (lambda: [RolePart("main", STEP, DURATIONS)], EmitOptions(), EmitOptions()),
    "untimed": (lambda: [RolePart("main", STEP)], EmitOptions(), EmitOptions()),
    "streams": (lambda: [RolePart("main", STEP)], EmitOptions(order=Order.STREAM), EmitOptions(order=Order.STREAM)),
    "unrolled": (lambda: [RolePart("main", LOOPED, DURATIONS)], EmitOptions(), EmitOptions()),
    "compact": (lambda: [RolePart("main", LOOPED)], EmitOptions(max_unroll=1), EmitOptions(max_unroll=1)),
    "compact by two": (lambda: [RolePart("main", LOOPED)], EmitOptions(max_unroll=2), EmitOptions(max_unroll=1)),
    "wide loop": (lambda: [RolePart("main", WIDE)], EmitOptions(max_unroll=1), EmitOptions(max_unroll=1)),
    "memory of the step": (
        lambda: [RolePart("main", STEP, DURATIONS)],
        EmitOptions(memory=MemoryNodes.STEP),
        EmitOptions(memory=MemoryNodes.STEP),
    ),
    "nested loops": (lambda: [RolePart("main", NESTED)], EmitOptions(max_unroll=1), EmitOptions(max_unroll=1)),
    "chain": (chain, EmitOptions(), EmitOptions()),
    "chain, compact": (chain, EmitOptions(max_unroll=1), EmitOptions(max_unroll=1)),
    "roles": (stages, EmitOptions(), EmitOptions()),
}


@pytest.mark.parametrize("case", CASES)
def test_written_again_bit_for_bit(tmp_path: Path, case: str) -> None:
    make, options, again = CASES[case]
    emit(make(), None, tmp_path / "one" / "s", options=options)
    assert check(tmp_path / "one" / "s").ok
    traces = read_chakra(tmp_path / "one" / "s")
    emit(parts_of(traces), None, tmp_path / "two" / "s", options=again)
    assert diff_traces(tmp_path / "one" / "s", tmp_path / "two" / "s").same
    for path in (tmp_path / "one").glob("*.et"):
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes()


def test_everything_comes_back(tmp_path: Path) -> None:
    emit(STEP, DURATIONS, tmp_path / "s")
    traces = read_chakra(tmp_path / "s")
    assert list(traces) == ["main"]
    assert traces.num_devices == 8
    found = traces["main"]
    assert found.table.rows == STEP.table.rows
    timed = traces.roles["main"].durations_s
    assert timed is not None
    assert timed[:2] == pytest.approx(DURATIONS[:2])
    for name in ("name", "work", "meshes", "exec_model", "platform", "model_flops", "buffers", "complete", "notes"):
        assert getattr(found, name) == getattr(STEP, name)
    for read, made in zip(found.body, STEP.body, strict=True):
        kept = {field.name for field in dataclasses.fields(made)} - {"deps", "location", "ops"}
        assert {name: getattr(read, name) for name in kept} == {name: getattr(made, name) for name in kept}
        assert set(read.deps) >= set(made.deps)
    emit(LOOPED, None, tmp_path / "loop" / "s", options=EmitOptions(max_unroll=1))
    (loop,) = [node for node in read_chakra(tmp_path / "loop" / "s")["main"].body if isinstance(node, Loop)]
    assert (loop.count, len(loop.body), loop.deps) == (6, 3, (0,))


def test_a_program_file_that_does_not_fit(tmp_path: Path) -> None:
    emit(STEP, None, tmp_path / "s")
    path = tmp_path / "s.program.json"
    content = json.loads(path.read_text())
    del content["roles"][0]["program"]["rows"]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"not a program file of this version \('rows'\)"):
        read_chakra(tmp_path / "s")
    path.write_text('{"format": "other"}')
    with pytest.raises(InputError, match="not a stablecast-chakra-program"):
        read_chakra(tmp_path / "s")
    path.unlink()
    assert read_chakra(tmp_path / "s")["role0"].num_devices == 8
    (tmp_path / "s.0.et").unlink()
    path.write_text(json.dumps(content | {"partitions": []}))
    with pytest.raises(InputError, match=r"s\.0\.et is missing|program file"):
        read_chakra(tmp_path / "s")


def test_what_is_a_trace(tmp_path: Path) -> None:
    emit(STEP, None, tmp_path / "s")
    assert is_chakra(tmp_path / "s")
    assert is_chakra(tmp_path)
    assert is_chakra(tmp_path / "s.0.et")
    assert not is_chakra(tmp_path / "other")
    assert not is_chakra(tmp_path / "comm_group.json")


def write(path: Path, *nodes: Node) -> None:
    with TraceWriter(path) as writer:
        for node in nodes:
            writer.write(node)


def test_ranks_that_agree_are_one_role(tmp_path: Path) -> None:
    for rank in range(4):
        peer, group = rank ^ 1, str(1 + rank // 2)
        make = send_node if rank % 2 == 0 else recv_node
        write(
            tmp_path / f"t.{rank}.et",
            collective_node(5, "sync", CollectiveType.ALL_GATHER, 64, group, deps=(9,)),
            comp_node(9, "COMP_NODE_a", 100, 10),
            make(11, "message", peer, 1000 + rank // 2, 32, deps=(5,)),
        )
    (tmp_path / "comm_group.json").write_text('{"1": [0, 1], "2": [2, 3]}')
    traces = read_chakra(tmp_path / "t")
    assert {name: role.ranks for name, role in traces.roles.items()} == {"role0": (0, 2), "role1": (1, 3)}
    kernel, gather, message = traces["role0"].body
    assert isinstance(kernel, Kernel)
    assert isinstance(gather, Collective)
    assert isinstance(message, P2P)
    assert (gather.groups.members(1), gather.operand_bytes, gather.result_bytes) == ((0, 1), 64, 128)
    assert (gather.deps, message.deps) == ((0,), (1,))
    assert (message.direction, message.shift, message.tag, message.nbytes) == ("send", 1, 0, 32)
    emit(parts_of(traces), None, tmp_path / "again" / "t")
    assert check(tmp_path / "again" / "t").ok


def test_a_group_that_is_not_named(tmp_path: Path) -> None:
    write(tmp_path / "t.0.et", collective_node(0, "sync", CollectiveType.ALL_REDUCE, 64, "3"))
    with pytest.raises(InputError, match="no group file names group 3"):
        read_chakra(tmp_path / "t")


def test_circles_and_empty_traces(tmp_path: Path) -> None:
    write(tmp_path / "t.0.et", comp_node(0, "a", 1, 1, (1,)), comp_node(1, "b", 1, 1, (0,)))
    with pytest.raises(InputError, match="its nodes wait for each other"):
        read_chakra(tmp_path / "t")
    write(tmp_path / "e.0.et")
    with pytest.raises(InputError, match="the trace has no nodes"):
        read_chakra(tmp_path / "e")
    with pytest.raises(InputError, match="no trace files"):
        read_chakra(tmp_path / "none")


WORKLOADS = {
    "dp8_mlp3": 1,
    "dp8_mlp3_2d": 1,
    "dp8_mlp3_durations": 1,
    "moe_a2a8": 1,
    "pp4_gpipe": 3,
    "random_dag_1": 1,
    "random_dag_2": 1,
    "remote_mem": 1,
    "straggler": 8,
    "tp2_dp4_zero": 1,
}


def costs(prefix: Path) -> list[list[tuple[Any, ...]]]:
    """What consumers read of every rank, in the order of ids."""
    names = ("num_ops", "tensor_size", "comm_type", "comm_size", "comm_src", "comm_dst")
    return [
        sorted(
            (
                int(node.type),
                node.duration_micros or 1,
                *(str(node.value(name)) for name in names if _needed(node, name)),
            )
            for node in TraceReader(path)
        )
        for path in find_traces(prefix).ranks.values()
    ]


def _needed(node: Node, name: str) -> bool:
    return not (node.type == NodeType.COMM_SEND and name == "comm_src") and not (
        node.type == NodeType.COMM_RECV and name == "comm_dst"
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_golden_workloads_say_the_same_when_written_again(shared_data: Path, tmp_path: Path, name: str) -> None:
    folder = shared_data / "astrasim_golden" / "workloads" / name
    traces = read_chakra(folder / name)
    assert len(traces) == WORKLOADS[name]
    emit(parts_of(traces), None, tmp_path / name)
    assert check(tmp_path / name).ok
    assert costs(tmp_path / name) == costs(folder / name)


@pytest.mark.parametrize(
    ("name", "roles", "kernels"), [("d8", 1, 136), ("fsdp8", 1, 136), ("m64", 4, 31), ("moe", 1, 268)]
)
def test_traces_of_stage(shared_data: Path, tmp_path: Path, name: str, roles: int, kernels: int) -> None:
    with tarfile.open(shared_data / "stage_traces" / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    traces = read_chakra(tmp_path / "w")
    assert len(traces) == roles
    found = traces[f"role{roles // 2}"]
    assert sum(isinstance(node, Kernel) for node in found.body) == kernels
    product = next(row for row in found.table.rows if row.klass == KernelClass.MATMUL and row.k)
    assert product.matmul_flops == 2.0 * product.m * product.n * product.k
    assert all(node.groups.size > 1 for node in found.body if isinstance(node, Collective))
    assert found.work.evaluate()[0].matmul_flops > 1e11


def test_traces_of_a_real_run(shared_data: Path) -> None:
    folder = shared_data / "traces" / "chakra"
    role = read_chakra(folder / "chakra_rank0.et.gz", ranks=8).roles["role0"]
    assert sum(isinstance(node, Kernel) for node in role.program.body) == 1209
    assert sum(isinstance(node, Collective) for node in role.program.body) == 7
    assert role.program.num_devices == 8
    assert role.durations_s is not None
    given = sum(
        node.duration_micros
        for node in TraceReader(folder / "chakra_rank0.et.gz")
        if node.type == NodeType.COMP and node.value("is_cpu_op") is False
    )
    assert float((role.durations_s * role.program.table.count).sum()) == pytest.approx(given * 1e-6)
    assert not role.program.complete
    host = read_chakra(folder / "pytorch_et_1.0.2-chakra.0.0.4.json.gz").roles["role0"].program
    assert len(host.body) == 140
    assert any("host alone" in note for note in host.notes)
    assert len(read_chakra(folder / "chakra_small_rank0.json").roles["role0"].program.body) == 1


def test_example_runs(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "astrasim_golden" / "examples"
    with tarfile.open(folder / "traces.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    runs = json.loads((folder / "examples.json").read_text())
    for name in sorted({run["workload"] for run in runs}):
        traces = read_chakra(tmp_path / "workload" / "microbenchmarks" / name)
        assert len(traces) == 1
        (node,) = traces["role0"].body
        assert isinstance(node, Collective)
        assert node.kind == name.split("/")[0]
        assert node.groups.size == traces.num_devices
    custom = read_chakra(tmp_path / "system" / "custom_collectives" / "custom_ring_allreduce_8npus_1MB")
    assert custom.roles["role0"].ranks == tuple(range(8))
    assert sum(isinstance(node, P2P) for node in custom["role0"].body) == 28
