"""Time and memory of PyTorch captures: `python benchmarks/torch_capture.py 7b`, or `70b 256 4` for FSDP2 x TP."""

from __future__ import annotations

import functools
import importlib.util
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from stablecast.frontends.torch import capture_torch


def example() -> Any:
    """The Llama example as a module."""
    path = Path(__file__).parents[1] / "examples" / "torch_llama.py"
    spec = importlib.util.spec_from_file_location("torch_llama", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_llama"] = module
    spec.loader.exec_module(module)
    return module


def main(size: str = "7b", dp: str = "1", tp: str = "1") -> None:
    """Capture one training step in bf16, batch 1 x 2,048 tokens, fused AdamW, and print what it took."""
    llama = example()
    mesh = {name: int(count) for name, count in (("dp", dp), ("tp", tp)) if int(count) > 1}
    build = llama.build_parallel if mesh else llama.build
    start = time.perf_counter()
    made = functools.partial(build, size=size, dtype="bfloat16")
    workload = capture_torch(made, llama.step, lambda: llama.inputs(1, 2048), mesh=mesh)
    wall = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    launches = workload.launches.launches if workload.launches else ()
    print(f"{size} {mesh or 'one device'}: {wall:.1f} s wall, {time.process_time():.1f} s CPU, {peak:.2f} GB")
    print(f"{workload.metadata['ops']} ops, {len(launches)} launches, {len(workload.modules[0].data) / 1e6:.2f} MB")
    print(dict(Counter(launch.op for launch in launches if launch.group)))


if __name__ == "__main__":
    main(*sys.argv[1:])
