"""Time and memory of reading a large Kineto trace: `python benchmarks/trace_reading.py [MEGABYTES]`, 1000 by default.

The file is made first, with operators, launches and kernels as PyTorch writes them; then it is read in this process,
and the peak of its memory is printed beside the size of the file and the number of events.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = [[4096, 1024], [1024, 4096], []]
TYPES = ["c10::BFloat16", "c10::BFloat16", "Scalar"]


def events(step: int) -> list[dict[str, Any]]:
    """One operator, its launch and its kernel."""
    at = step * 10.0
    op = {"Input Dims": SHAPES, "Input type": TYPES, "External id": step, "Record function id": step}
    kernel = {"correlation": step, "device": 0, "stream": 7, "grid": [64, 1, 1], "block": [128, 1, 1]}
    name = f"ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x{step % 8}_nn"
    base = {"ph": "X", "pid": 1, "tid": 1}
    return [
        {**base, "cat": "cpu_op", "name": "aten::mm", "ts": at, "dur": 5, "args": op},
        {
            **base,
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": at + 1,
            "dur": 2,
            "args": {"correlation": step},
        },
        {**base, "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": at + 6, "dur": 8, "args": kernel},
    ]


def write(path: Path, megabytes: float) -> int:
    """A trace of that size; the number of its events."""
    count = step = 0
    with path.open("w", encoding="utf-8") as out:
        out.write('{"schemaVersion": 1, "traceEvents": [\n')
        while out.tell() < megabytes * 1e6:
            chunk = [json.dumps(event) for number in range(step, step + 1000) for event in events(number)]
            out.write(("" if not step else ",\n") + ",\n".join(chunk))
            count, step = count + len(chunk), step + 1000
        out.write("\n]}\n")
    return count


def main(megabytes: float = 1000.0) -> None:
    """Make, read, report."""
    from stablecast.frontends.traces import read_trace

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        count = write(path, megabytes)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        start = time.perf_counter()
        trace = read_trace(path)
        wall = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        size = path.stat().st_size / 1e6
    print(f"{size:,.0f} MB, {count:,} events: {wall:.0f} s, {size / wall:.1f} MB/s")
    own = peak - before
    print(f"peak memory {peak:,.0f} MB, {own:,.0f} MB of it for the trace ({own * 1e6 / count:.0f} B an event)")
    assert len(trace) == count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("megabytes", type=float, nargs="?", default=1000.0, help="size of the file that is made")
    main(parser.parse_args().megabytes)
