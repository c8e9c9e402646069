"""What must hold without torch: imports stay lazy, and emission needs plain values only."""

import subprocess
import sys

import numpy as np

from stablecast.frontends.torch.emit.emitter import Emitter, Settings
from stablecast.frontends.torch.graph import Graph, Group, Place, Spec
from stablecast.ir import mlir
from stablecast.ir.program import Stage
from stablecast.ir.reader import read

F32 = "f32"


def emitted(graph: Graph, **settings: object) -> bytes:
    emitter = Emitter(graph, Settings(**settings))  # type: ignore[arg-type]
    names = [f"x{index}" for index in range(len(graph.inputs))]
    made = emitter.run(names, {}, [f"y{index}" for index in range(len(graph.outputs))])
    return mlir.write_bytecode(made.module)


def test_importing_the_frontend_does_not_import_torch() -> None:
    code = "import sys, stablecast.frontends.torch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_graph_becomes_a_program_with_places() -> None:
    graph = Graph(places=[Place("", "", 0), Place("forward/Net/fc/aten.mm", "net.py", 7)])
    x, w = graph.value(Spec((4, 8), F32)), graph.value(Spec((8, 2), F32))
    graph.inputs = [x, w]
    (y,) = graph.add("aten.mm.default", (x, w), (Spec((4, 2), F32),), place=1)
    assert y is not None
    graph.outputs = [y]
    program = read(emitted(graph))
    (op,) = program.main.body.ops
    assert op.name == "stablehlo.dot_general"
    assert (op.location.scope, op.location.file, op.location.line) == ("forward/Net/fc/aten.mm", "net.py", 7)
    assert [argument.name for argument in program.main.arguments] == ["x0", "x1"]


def test_dead_nodes_are_left_out_and_kept_ones_stay() -> None:
    graph = Graph()
    x = graph.value(Spec((4,), F32))
    graph.inputs = [x]
    graph.add("aten.exp.default", (x,), (Spec((4,), F32),))
    (y,) = graph.add("aten.neg.default", (x,), (Spec((4,), F32),))
    assert y is not None
    graph.outputs = [y]
    assert [op.name for op in read(emitted(graph)).main.body.ops] == ["stablehlo.negate"]


def test_an_unknown_op_becomes_a_custom_call() -> None:
    graph = Graph()
    x = graph.value(Spec((4,), F32))
    graph.inputs = [x]
    (y,) = graph.add("mine.special.default", (x, 3), (Spec((2, 2), F32),))
    assert y is not None
    graph.outputs = [y]
    (op,) = read(emitted(graph)).main.body.ops
    assert op.name == "stablehlo.custom_call"
    assert op.attrs["call_target_name"] == "mine.special"
    assert str(op.result_type) == "f32[2,2]"


def collective(world: int) -> bytes:
    graph = Graph(groups={"g": Group("g", tuple(range(0, world, 4)), ("dp",))})
    x = graph.value(Spec((8, 4), F32))
    graph.inputs = [x]
    (y,) = graph.add("coll.all_reduce", (x, "avg", "g"), (Spec((8, 4), F32),))
    assert y is not None
    graph.outputs = [y]
    return emitted(graph, axes=(("dp", world // 4), ("tp", 4)))


def test_collectives_name_mesh_axes_so_that_size_does_not_grow() -> None:
    small, large = collective(8), collective(131072)
    assert abs(len(large) - len(small)) < 64
    program = read(large)
    assert program.stage is Stage.PER_DEVICE
    op = next(op for op in program.main.body.ops if op.name == "stablehlo.all_reduce")
    groups = op.attrs["replica_groups"]
    assert (groups.count, groups.size, groups.axes) == (4, 32768, ("dp",))
    assert groups.members(5)[:2] == (1, 5)


def test_constants_keep_their_values() -> None:
    graph = Graph()
    (y,) = graph.add("const.data", (np.array([[True, False], [False, True]]),), (Spec((2, 2), "i1"),))
    assert y is not None
    graph.outputs = [y]
    (op,) = read(emitted(graph)).main.body.ops
    assert op.attrs["value"].values is not None
    assert [bool(value) for value in op.attrs["value"].values] == [True, False, False, True]
