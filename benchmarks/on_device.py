"""Measures small programs on the GPU of this machine and validates the predictions made before.

    python benchmarks/on_device.py --on h100-sxm [--out results] [--minutes 8]
    python benchmarks/on_device.py --cpu-rehearsal

One command, eight minutes at most, resumable: what `--out` already holds is not measured again. Without a GPU it says
so and leaves. The predictions of all programs, in JAX and in PyTorch, are written first; then each is measured (median
of repeated runs, and a profile), and the two are laid beside each other. Kept under size limits:
`<name>.prediction.json`, `<name>.medians.json`, the profile, the optimised HLO and `<name>.validation.json`.
`--cpu-rehearsal` goes the same way with tiny sizes on the processor.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from on_device_programs import TINY, Program, Sizes, Step, jax_programs, torch_programs

MOST_BYTES = 8 << 20
WARM_UP, PROFILED, REPEATS, LONGEST_S = 3, 3, 20, 4.0


def has_gpu() -> bool:
    """Whether a driver answers; nothing is imported for it."""
    tool = shutil.which("nvidia-smi") or shutil.which("rocm-smi")
    if tool is None:
        return False
    return subprocess.run([tool], capture_output=True, check=False).returncode == 0


def programs(sizes: Sizes) -> list[Program]:
    """All programs; those of a framework that is not installed are left out."""
    found = jax_programs(sizes)
    try:
        found += torch_programs(sizes)
    except ImportError as error:
        print(f"only JAX is measured: {error}")
    return found


def predict(program: Program, on: str, platform: str, out: Path) -> None:
    """Write capture and prediction of one program, unless they are there."""
    import stablecast
    from stablecast.ir import capture_file

    target = out / f"{program.name}.prediction.json"
    if target.exists():
        return
    workload = program.capture(platform)
    capture_file.write(workload, out / f"{program.name}.sc")
    target.write_text(stablecast.predict(workload, on=on).to_json(), encoding="utf-8")


def measure(program: Program, device: str, out: Path) -> None:
    """Medians, a profile and, of a JAX program, the optimised HLO."""
    step = program.make(device)
    for _ in range(WARM_UP):
        step()
    wait = _waiter(program, device)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < REPEATS and (len(times) < WARM_UP or time.perf_counter() - began < LONGEST_S):
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    if program.name.startswith("jax_"):
        _profile_jax(program.name, step, out)
    else:
        _profile_torch(program.name, step, device, out)
    content = {"median_s": statistics.median(times), "times_s": times}
    (out / f"{program.name}.medians.json").write_text(json.dumps(content), encoding="utf-8")


def _waiter(program: Program, device: str) -> Step:
    if program.name.startswith("jax_") or device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def _profile_jax(name: str, step: Any, out: Path) -> None:
    import jax

    folder = out / f"{name}.profile"
    with jax.profiler.trace(str(folder)):
        for number in range(PROFILED):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                step()
    keep(next(folder.rglob("*.xplane.pb"), None), out / f"{name}.xplane.pb")
    shutil.rmtree(folder)
    text = gzip.compress(step.compiled.as_text().encode())
    if len(text) <= MOST_BYTES:
        (out / f"{name}.hlo.txt.gz").write_bytes(text)


def _profile_torch(name: str, step: Step, device: str, out: Path) -> None:
    import torch

    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] if device == "cpu" else [kinds.CPU, kinds.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        for _ in range(PROFILED):
            with torch.profiler.record_function("step"):
                step()
            if device != "cpu":
                torch.cuda.synchronize()
    path = out / f"{name}.kineto.json"
    profile.export_chrome_trace(str(path))
    keep(path, out / f"{name}.kineto.json.gz")
    path.unlink()


def keep(source: Path | None, target: Path) -> None:
    """Copy a profile, packed where its name says so, if it is small enough."""
    if source is None:
        return
    data = source.read_bytes()
    data = gzip.compress(data) if target.name.endswith(".gz") and not source.name.endswith(".gz") else data
    if len(data) <= MOST_BYTES:
        target.write_bytes(data)


def validate(program: Program, on: str, out: Path) -> str:
    """Lay the profile beside the prediction, written before; a line for the terminal."""
    import stablecast

    endings = (".xplane.pb", ".kineto.json.gz")
    trace = next((path for end in endings if (path := out / f"{program.name}{end}").exists()), None)
    if trace is None:
        return f"{program.name}: no profile was kept"
    report = stablecast.validate(trace, workload=str(out / f"{program.name}.sc"), on=on)
    (out / f"{program.name}.validation.json").write_text(report.to_json(), encoding="utf-8")
    ours, theirs = report.device_s
    matched = report.matching.matched_share if report.matching else 0.0
    error = f"{theirs / ours - 1:+.0%}" if ours else ""
    times = f"device {ours * 1e6:10.1f} us, predicted {theirs * 1e6:10.1f} us {error:>6}"
    return f"{program.name:36} {times}, matched {matched:.0%}"


def run(chosen: list[Program], on: str, device: str, out: Path, until: float) -> None:
    """Predictions of all first, then measurements until the time is up; what cannot be made is said and left out."""
    from stablecast.ir.errors import StablecastError

    expected = (StablecastError, ImportError, RuntimeError, ValueError)
    platform = "cpu" if device == "cpu" else "cuda"
    left: list[Program] = []
    for program in chosen:
        try:
            predict(program, on, platform, out)
            left.append(program)
        except expected as error:
            print(f"{program.name} is left out: {' '.join(str(error).split())[:200]}", flush=True)
    print(f"{len(left)} predictions are written to {out}", flush=True)
    for program in left:
        if (out / f"{program.name}.validation.json").exists():
            continue
        if time.monotonic() > until:
            print(f"time is up before {program.name}; run again to go on")
            return
        try:
            if not (out / f"{program.name}.medians.json").exists():
                measure(program, device, out)
            print(validate(program, on, out), flush=True)
        except expected as error:
            print(f"{program.name}: {' '.join(str(error).split())[:200]}")


def main(arguments: list[str] | None = None) -> None:
    """Run what is left to run."""
    parser = argparse.ArgumentParser(description="Measure on this machine's GPU and validate the predictions.")
    parser.add_argument("--on", default="", help="the catalogue's name of the GPU, such as h100-sxm")
    parser.add_argument("--out", type=Path, default=Path("on_device"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="tiny sizes on the processor")
    options = parser.parse_args(arguments)
    if not options.cpu_rehearsal and not has_gpu():
        print("no GPU on this machine: nothing is measured")
        return
    if not options.on and not options.cpu_rehearsal:
        parser.error("say which GPU this is: --on h100-sxm (stablecast hardware list)")
    until = time.monotonic() + 60 * options.minutes
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options.out.mkdir(parents=True, exist_ok=True)
    found = [entry for entry in programs(TINY if options.cpu_rehearsal else Sizes()) if options.only in entry.name]
    device = "cpu" if options.cpu_rehearsal else "cuda"
    run(found, options.on or "cpu", device, options.out, until)


if __name__ == "__main__":
    main()
