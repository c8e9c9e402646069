"""Predict a JAX and a PyTorch step, run both on this machine's processor under a profiler, and compare.

    python examples/validate_here.py
    python examples/validate_here.py --batch 512 --out results

Everything from annotation to validation in one script, without an accelerator: the annotated steps of `mlp.py` and
`torch_mlp.py` are captured and predicted, the predictions are written, and only then the steps run. `here.yaml`
describes this machine: its rates are those of one matrix product and one copy, measured first. On a GPU, nothing
changes but the name behind `on` and the profiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

import stablecast

HERE = Path(__file__).parent
STEPS = 5
DEVICE = """# This machine, as `examples/validate_here.py` measured it.
name: here
kind: cpu
system: host
vendor: {{value: generic, source: "this machine"}}
arch: {{value: "{cores} cores", source: "this machine"}}
peaks:
  fp32.vector: {{value: {tflops:.5g}, unit: TFLOP/s, source: "a product of 1024^3 in numpy, best of nine"}}
mem_capacity: {{value: {memory_gib:.4g}, unit: GiB, source: "this machine"}}
mem_bandwidth: {{value: {gbytes:.5g}, unit: GB/s, source: "a copy of 128 MiB in numpy, best of nine"}}
"""


def describe_machine(path: Path) -> Path:
    """Write what this machine does, by one product and one copy."""
    left = np.ones((1024, 1024), np.float32)
    source = np.ones(32 << 20, np.float32)
    target = np.empty_like(source)
    product = best(lambda: left @ left)
    copy = best(lambda: np.copyto(target, source))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    path.write_text(
        DEVICE.format(
            cores=os.cpu_count(),
            tflops=2 * 1024**3 / product / 1e12,
            gbytes=2 * source.nbytes / copy / 1e9,
            memory_gib=memory / 2**30,
        ),
        encoding="utf-8",
    )
    return path


def best(run: Callable[[], Any], repeats: int = 9) -> float:
    """The shortest of some runs, seconds; the first one does not count."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def example(name: str) -> ModuleType:
    """A module beside this one."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_jax(out: Path, batch: int, on: str) -> Any:
    """Capture, predict, profile and validate the JAX step."""
    mlp = example("mlp")
    shapes = mlp.make_args(batch=batch)
    workload = stablecast.capture(mlp.train_step, *shapes, platform="cpu")
    (out / "jax.prediction.json").write_text(stablecast.predict(workload, on=on).to_json(), encoding="utf-8")
    args = jax.tree.map(lambda shape: jax.numpy.zeros(shape.shape, shape.dtype), shapes)
    jax.block_until_ready(mlp.train_step(*args))
    with jax.profiler.trace(str(out / "jax.profile")):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                jax.block_until_ready(mlp.train_step(*args))
    trace = max((out / "jax.profile").rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return stablecast.validate(trace, workload=workload, on=on)


def run_torch(out: Path, batch: int, on: str) -> Any:
    """The same for the PyTorch step."""
    import torch

    mlp = example("torch_mlp")
    workload = stablecast.capture_torch(
        lambda: mlp.build(device="cpu"), mlp.step, lambda: mlp.inputs(batch), device="cpu"
    )
    (out / "torch.prediction.json").write_text(stablecast.predict(workload, on=on).to_json(), encoding="utf-8")
    state, data = mlp.build(device="cpu"), mlp.inputs(batch)
    mlp.step(*state, *data)
    trace = out / "torch.kineto.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in range(STEPS):
            with torch.profiler.record_function("step"):
                mlp.step(*state, *data)
    profile.export_chrome_trace(str(trace))
    return stablecast.validate(trace, workload=workload, on=on)


def main(arguments: list[str] | None = None) -> None:
    """Both frameworks, or JAX alone where PyTorch is not installed."""
    parser = argparse.ArgumentParser(description="Validate predictions against this machine's processor.")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("validate_here"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    on = str(describe_machine(options.out / "here.yaml"))
    runs = {"jax": run_jax}
    if importlib.util.find_spec("torch") is not None:
        runs["torch"] = run_torch
    for name, run in runs.items():
        report = run(options.out, options.batch, on)
        (options.out / f"{name}.html").write_text(report.to_html(), encoding="utf-8")
        print(report, end="\n\n")
        ours, theirs = report.device_s
        median = statistics.median(report.run.step_times_s.tolist())
        print(f"{name}: step {median * 1e3:.2f} ms, work {ours * 1e3:.2f} ms, predicted {theirs * 1e3:.2f} ms\n")


if __name__ == "__main__":
    main()
