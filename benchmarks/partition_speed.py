"""How long a JAX program takes from capture to the program of one device, and how much memory.

    python benchmarks/partition_speed.py [--json] [--repeat N]

Each program runs in a process of its own, so that peaks are its own; times are wall clock, without the import of jax.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SMALL_MESH = {"data": 2, "fsdp": 2, "tensor": 2}
LARGE_MESH = {"data": 64, "fsdp": 256, "tensor": 8}
LLAMA_7B: dict[str, Any] = {"d_model": 4096, "layers": 32, "heads": 32, "vocab": 32000}
WIDE: dict[str, Any] = {"d_model": 12288, "layers": 96, "heads": 96, "vocab": 32000}

PROGRAMS: dict[str, tuple[dict[str, Any], float | None, float | None]] = {
    "7B unrolled, 131,072 devices": ({**LLAMA_7B, **LARGE_MESH}, 10.0, 500.0),
    "7B scan, 131,072 devices": ({**LLAMA_7B, **LARGE_MESH, "scan": True}, 1.5, None),
    "96 layers unrolled, d 12,288, 131,072 devices": ({**WIDE, **LARGE_MESH}, 30.0, 600.0),
    "7B unrolled, 8 devices": ({**LLAMA_7B, **SMALL_MESH}, None, None),
}
"""Name -> (size, seconds allowed, MB allowed)."""


def measure(size: dict[str, Any]) -> dict[str, Any]:
    """Times in seconds of each part for one program; to be run in a fresh process."""
    sys.path.insert(0, str(ROOT / "examples"))
    import jax  # noqa: F401
    import llama

    from stablecast.ir import mlir
    from stablecast.lowering.device import Target, lower
    from stablecast.lowering.partition import partition, start_worker

    marks, before = [time.perf_counter()], time.process_time()
    worker = start_worker()
    state, batch = llama.make_args(**size)
    traced = llama.train_step.trace(state, batch)
    marks.append(time.perf_counter())
    module = traced.lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")
    data = mlir.write_bytecode(module)
    del module, traced
    marks.append(time.perf_counter())
    program = partition(data, "llama", worker=worker)
    marks.append(time.perf_counter())
    device = lower(program, Target("tpu"))
    marks.append(time.perf_counter())
    parts = dict(
        zip(
            ("trace", "lower", "partition", "kernels"),
            (b - a for a, b in pairwise(marks)),
            strict=True,
        )
    )
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    peaks = [resource.getrusage(who).ru_maxrss / 1e3 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    kinds: dict[str, int] = {}
    for collective, count in device.collectives():
        kinds[collective.kind] = kinds.get(collective.kind, 0) + collective.merged * (
            count if isinstance(count, int) else 1
        )
    return {
        **parts,
        "total": marks[-1] - marks[0],
        "cpu": sum(used.ru_utime + used.ru_stime for used in spent) - before,
        "peak_mb": max(peaks),
        "child_peak_mb": peaks[1],
        "ops": program.num_ops,
        "kernels_made": len(device.table),
        "collectives": kinds,
        "notes": program.notes,
    }


def run(size: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a child process."""
    command = [sys.executable, __file__, "--one", json.dumps(size)]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    if out.returncode:
        raise SystemExit(out.stderr)
    return json.loads(out.stdout.splitlines()[-1])


def fastest(size: dict[str, Any], repeat: int) -> dict[str, Any]:
    """The fastest of `repeat` runs."""
    return min((run(size) for _ in range(repeat)), key=lambda found: found["total"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=1, help="take the fastest of so many runs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(json.loads(options.one))))
        return
    results: dict[str, Any] = {}
    for name, (size, seconds, megabytes) in PROGRAMS.items():
        found = results[name] = {**fastest(size, options.repeat), "target_s": seconds, "target_mb": megabytes}
        if not options.json:
            parts = ", ".join(f"{part} {found[part]:.2f}" for part in ("trace", "lower", "partition", "kernels"))
            limits = f" (target {seconds} s, {megabytes} MB)" if seconds else ""
            spent = f"{found['total']:.2f} s, {found['cpu']:.2f} s of processor [{parts}]"
            print(
                f"{name}: {spent}, peak {found['peak_mb']:.0f} MB{limits}; {found['ops']} ops, {found['collectives']}"
            )
    ratio = results["7B unrolled, 131,072 devices"]["total"] / results["7B unrolled, 8 devices"]["total"]
    print(
        json.dumps({"programs": results, "ratio": ratio})
        if options.json
        else f"131,072 devices ÷ 8 devices: {ratio:.2f} (target 1.1)"
    )


if __name__ == "__main__":
    main()
