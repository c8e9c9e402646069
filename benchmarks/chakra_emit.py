"""How fast all ranks of a training step are emitted, beside plain `write` calls of the same bytes on the same disk.

    python benchmarks/chakra_emit.py [--ranks 1024] [--ranks 131072] [--folder DIR] [--tar | --dry-run] [--layouts]

The step is that of a 32-layer Llama over a mesh of ranks/32 x 8 x 4 (data, tensor, pipeline), its device program
written down by hand (`chakra_models.py`). `--dry-run` counts and renders but writes nothing. `--layouts` prints, in
place of speeds, what is emitted by class for GPT-3 175B and Mixtral 8x7B.
"""

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chakra_models import GPT3_175B, LLAMA_32, MIXTRAL_8X7B, Model, Plan, stage_parts

from stablecast.ir.chakra import check, find_traces
from stablecast.lowering.chakra import EmitOptions, Target, emit

LAYOUTS = (
    (GPT3_175B, Plan(dp=2, tp=4, pp=8, micro=8)),
    (MIXTRAL_8X7B, Plan(ep=8, pp=4, micro=4)),
)


def measure(ranks: int, folder: Path, target: Target) -> dict[str, object]:
    """Figures of one size."""
    plan = Plan(dp=ranks // 32, tp=8, pp=4)
    started = time.perf_counter()
    parts = stage_parts(LLAMA_32, plan)
    build_s = time.perf_counter() - started
    out = folder / "emit" / "step"
    os.sync()
    cpu, started = time.process_time(), time.perf_counter()
    report = emit(parts, None, out, options=EmitOptions(target=target))
    emit_s, emit_cpu_s = time.perf_counter() - started, time.process_time() - cpu
    figures: dict[str, object] = {
        "ranks": ranks,
        "target": target.value,
        "nodes_per_rank": report.nodes / ranks,
        "bytes_per_rank": report.bytes / ranks,
        "program_build_s": build_s,
        "emit_s": emit_s,
        "emit_cpu_s": emit_cpu_s,
        "ranks_per_s": ranks / emit_s,
        "bytes_per_s": report.bytes / emit_s,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if target is Target.FILES:
        plain_s = plain_write(out, folder / "plain")
        figures |= {"plain_write_s": plain_s, "share_of_plain": plain_s / emit_s}
        if ranks <= 4096:
            figures["check_ok"] = check(out).ok
    shutil.rmtree(out.parent, ignore_errors=True)
    return figures


def plain_write(prefix: Path, folder: Path) -> float:
    """Seconds to write the bytes of the prefix again with open, write, close; one file of each size is read."""
    sizes = [path.stat().st_size for path in find_traces(prefix).ranks.values()]
    longest = bytes(max(sizes))
    folder.mkdir()
    os.sync()
    started = time.perf_counter()
    for rank, size in enumerate(sizes):
        with (folder / f"plain.{rank}.et").open("wb", buffering=0) as stream:
            stream.write(longest[:size])
    seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    return seconds


def layouts(plans: Sequence[tuple[Model, Plan]] = LAYOUTS) -> list[dict[str, object]]:
    """What is emitted for models in given layouts, by class; for published ones unless told otherwise."""
    found: list[dict[str, object]] = []
    for model, plan in plans:
        report = emit(stage_parts(model, plan), None, "layout", options=EmitOptions(target=Target.DRY_RUN))
        found.append({"model": model.name, "plan": repr(plan), **report.to_dict()})
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, action="append", help="a multiple of 32; 1024 unless given")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder by default")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--tar", action="store_true", help="one tar file in place of many files")
    parser.add_argument("--layouts", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.layouts:
        rows = layouts()
    else:
        sizes = options.ranks or [1024]
        if any(ranks % 32 for ranks in sizes):
            parser.error("ranks must be multiples of 32")
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            target = Target.DRY_RUN if options.dry_run else Target.TAR if options.tar else Target.FILES
            rows = [measure(ranks, Path(folder), target) for ranks in sizes]
    for row in rows:
        if options.json:
            print(json.dumps(row))
            continue
        for name, value in row.items():
            print(f"{name:20} {value:,.4g}" if isinstance(value, float) else f"{name:20} {value}")
        print()


if __name__ == "__main__":
    main()
