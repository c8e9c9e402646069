"""Measures small programs on the GPU of this machine and validates the predictions made before.

    python benchmarks/on_device.py --on h100-sxm [--out results] [--minutes 8]

One command, eight minutes at most, resumable: what `--out` already holds is not measured again. Without a GPU it says
so and leaves. For every program, in JAX and in PyTorch, the prediction is written first; then the program is measured
(median of repeated runs, and a profile), and `stablecast validate` lays the two beside each other. Kept under size
limits: `<name>.prediction.json`, `<name>.medians.json`, the profile, the optimised HLO and `<name>.validation.json`.
"""

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MOST_BYTES = 8 << 20
WARM_UP, REPEATS = 3, 20
LADDER = (256, 512, 1024, 2048, 4096, 8192)
ATTENTION = ((8, 16, 1024, 64), (2, 16, 4096, 128))


def has_gpu() -> bool:
    """Whether a driver answers; nothing is imported for it."""
    tool = shutil.which("nvidia-smi") or shutil.which("rocm-smi")
    if tool is None:
        return False
    return subprocess.run([tool], capture_output=True, check=False).returncode == 0


def _mlp(x: Any, w1: Any, w2: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jnp.sum(jax.nn.gelu(x @ w1) @ w2)


def _attention(q: Any, k: Any, v: Any) -> Any:
    import jax

    return jax.nn.dot_product_attention(q, k, v)


def jax_programs() -> Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Name -> function and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for size in LADDER:
        found[f"jax_gemm_{size}"] = (jnp.matmul, (shape(size, size), shape(size, size)))
    found["jax_add_64m"] = (jnp.add, (shape(8192, 8192), shape(8192, 8192)))
    for batch, heads, sequence, width in ATTENTION:
        one = shape(batch, sequence, heads, width)
        found[f"jax_attention_{batch}x{heads}x{sequence}x{width}"] = (_attention, (one, one, one))
    layers = (shape(4096, 4096), shape(4096, 16384), shape(16384, 4096))
    found["jax_mlp"] = (_mlp, layers)
    found["jax_mlp_train"] = (jax.grad(_mlp, argnums=(1, 2)), layers)
    return found


def predict_first(name: str, function: Callable[..., Any], shapes: tuple[Any, ...], on: str, out: Path) -> Path:
    """Write capture and prediction before anything is measured; the capture's path."""
    import stablecast
    from stablecast.ir import capture_file

    capture = out / f"{name}.sc"
    if not (out / f"{name}.prediction.json").exists():
        workload = stablecast.capture(function, *shapes, platform="cuda")
        capture_file.write(workload, capture)
        (out / f"{name}.prediction.json").write_text(stablecast.predict(workload, on=on).to_json(), encoding="utf-8")
    return capture


def measure_jax(name: str, function: Callable[..., Any], shapes: tuple[Any, ...], out: Path) -> None:
    """Medians, a profile and the optimised HLO of one JAX program."""
    import jax

    compiled = jax.jit(function).lower(*shapes).compile()
    args = [jax.numpy.ones(shape.shape, shape.dtype) for shape in shapes]
    for _ in range(WARM_UP):
        jax.block_until_ready(compiled(*args))
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    _write_times(out / f"{name}.medians.json", times)
    folder = out / f"{name}.profile"
    with jax.profiler.trace(str(folder)):
        for _ in range(WARM_UP):
            jax.block_until_ready(compiled(*args))
    keep(next(folder.rglob("*.xplane.pb"), None), out / f"{name}.xplane.pb")
    shutil.rmtree(folder)
    (out / f"{name}.hlo.txt.gz").write_bytes(gzip.compress(compiled.as_text().encode()))


def torch_programs() -> Mapping[str, Callable[[], Callable[[], Any]]]:
    """Name -> what makes the step; nothing is allocated before it is called."""
    import torch

    def product(size: int) -> Callable[[], Any]:
        a = torch.ones(size, size, device="cuda", dtype=torch.bfloat16)
        return lambda: a @ a

    def mlp() -> Callable[[], Any]:
        layers = torch.nn.Sequential(torch.nn.Linear(4096, 16384), torch.nn.GELU(), torch.nn.Linear(16384, 4096))
        model = layers.to("cuda", torch.bfloat16)
        x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
        return lambda: model(x).sum().backward()

    found: dict[str, Callable[[], Callable[[], Any]]] = {
        f"torch_gemm_{size}": lambda size=size: product(size) for size in LADDER
    }
    found["torch_mlp_train"] = mlp
    return found


def measure_torch(name: str, make: Callable[[], Callable[[], Any]], out: Path) -> None:
    """Medians and a Kineto trace with shapes of one PyTorch step."""
    import torch

    step = make()
    for _ in range(WARM_UP):
        step()
    times: list[float] = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    _write_times(out / f"{name}.medians.json", times)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        for _ in range(WARM_UP):
            with torch.profiler.record_function("step"):
                step()
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


def _write_times(path: Path, times: list[float]) -> None:
    path.write_text(json.dumps({"median_s": statistics.median(times), "times_s": times}), encoding="utf-8")


def validate(name: str, on: str, out: Path) -> str:
    """`stablecast validate` of one program; a line for the terminal."""
    trace = next(
        (out / f"{name}{end}" for end in (".xplane.pb", ".kineto.json.gz") if (out / f"{name}{end}").exists()), None
    )
    if trace is None:
        return f"{name}: no profile was kept"
    command = [sys.executable, "-m", "stablecast", "validate", str(trace), "--on", on, "--json"]
    if (out / f"{name}.sc").exists():
        command += ["--workload", str(out / f"{name}.sc")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        return f"{name}: {answer.stderr.strip()}"
    (out / f"{name}.validation.json").write_text(answer.stdout, encoding="utf-8")
    found = json.loads(answer.stdout)
    busy = found["measured_parts"]["busy_s"]
    predicted, matched = found["predicted_step_s"], found["matched_share"]
    return f"{name}: device {busy * 1e6:.1f} us, predicted {predicted * 1e6:.1f} us, matched {matched:.0%}"


def _run_all(on: str, out: Path, until: float) -> None:
    chosen = jax_programs()
    captures = {name: predict_first(name, function, shapes, on, out) for name, (function, shapes) in chosen.items()}
    jobs: dict[str, Callable[[], None]] = {
        name: lambda name=name: measure_jax(name, *chosen[name], out) for name in captures
    }
    try:
        made = torch_programs()
    except ImportError:
        print("torch is not installed: only JAX is measured")
        made = {}
    jobs |= {name: lambda name=name: measure_torch(name, made[name], out) for name in made}
    for name, job in jobs.items():
        if (out / f"{name}.medians.json").exists():
            continue
        if time.monotonic() > until:
            print(f"time is up before {name}; run again to go on")
            return
        job()
        print(validate(name, on, out), flush=True)


def main() -> None:
    """Run what is left to run."""
    parser = argparse.ArgumentParser(description="Measure on this machine's GPU and validate the predictions.")
    parser.add_argument("--on", default="", help="the catalogue's name of the GPU, such as h100-sxm")
    parser.add_argument("--out", type=Path, default=Path("on_device"))
    parser.add_argument("--minutes", type=float, default=8.0)
    options = parser.parse_args()
    if not has_gpu():
        print("no GPU on this machine: nothing is measured")
        return
    if not options.on:
        parser.error("say which GPU this is: --on h100-sxm (stablecast hardware list)")
    options.out.mkdir(parents=True, exist_ok=True)
    _run_all(options.on, options.out, time.monotonic() + 60 * options.minutes)


if __name__ == "__main__":
    main()
