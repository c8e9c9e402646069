"""Runs on the processor: operators of the host as the work of a device."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stablecast.frontends.traces import read_trace
from stablecast.validation.measured import measure


def _event(name: str, cat: str, start: int, length: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length, "args": args}


def test_operators_of_pytorch(tmp_path: Path) -> None:
    """aten::linear only calls; aten::addmm copies for 10 us and then multiplies for 25; views are no work."""
    shapes = {"Input Dims": [[4], [8, 16], [16, 4]], "Input type": ["float", "float", "float"]}
    events = [
        _event("step", "user_annotation", 0, 90),
        _event("aten::linear", "cpu_op", 2, 50),
        _event("aten::t", "cpu_op", 3, 5),
        _event("aten::addmm", "cpu_op", 10, 40, **shapes),
        _event("aten::expand", "cpu_op", 11, 3),
        _event("aten::copy_", "cpu_op", 15, 10, **{"Input Dims": [[8, 4], [8, 4]], "Input type": ["float", "float"]}),
        _event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", 60, 20),
        _event("aten::sum", "cpu_op", 62, 15, **{"Input Dims": [[8, 4]], "Input type": ["float"]}),
    ]
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    run = measure(read_trace(path))
    assert run.events.device == "cpu"
    found = [(run.name(at), run.klass(at).value, round(float(run.duration_s[at]) * 1e6)) for at in range(len(run.work))]
    assert found == [("aten::copy_", "copy", 10), ("aten::addmm", "matmul", 30), ("aten::sum", "reduction", 15)]
    assert (run.start_s * 1e6).round().tolist() == [15, 20, 62]
    assert [run.op_name(at) for at in range(3)] == ["aten::copy_", "aten::addmm", "aten::sum"]
    assert run.mean_step_s == pytest.approx(90e-6)


def test_a_product_is_work_however_long_its_copy_was_held_up(tmp_path: Path) -> None:
    """On a busy machine the copy of a bias can take longer than the product around it; a call that only hands on is
    none."""
    events = [
        _event("step", "user_annotation", 0, 90),
        _event("aten::matmul", "cpu_op", 2, 60),
        _event("aten::addmm", "cpu_op", 5, 50),
        _event("aten::copy_", "cpu_op", 10, 40),
    ]
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    run = measure(read_trace(path))
    found = {run.name(at): round(float(run.duration_s[at]) * 1e6) for at in range(len(run.work))}
    assert found == {"aten::copy_": 40, "aten::addmm": 10}


@pytest.mark.slow
def test_ops_of_xla(tmp_path: Path) -> None:
    """A JAX program on this processor: two products and what is around them, five steps by their numbers."""
    jax = pytest.importorskip("jax")
    step = jax.jit(lambda x, w: jax.numpy.tanh(x @ w) @ w.T)
    args = (np.ones((256, 512), np.float32), np.ones((512, 512), np.float32))
    jax.block_until_ready(step(*args))
    with jax.profiler.trace(str(tmp_path)):
        for number in range(5):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                jax.block_until_ready(step(*args))
    (path,) = tmp_path.rglob("*.xplane.pb")
    run = measure(read_trace(path))
    assert (len(run.steps), run.step_basis) == (5, "annotation")
    classes = run.class_times()
    assert classes["matmul"] > 0.5 * sum(classes.values())
    assert sum(run.klass(at).value == "matmul" for at in range(len(run.work)) if run.step[at] == 2) == 2
