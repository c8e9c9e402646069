"""Kernels and collectives of the HeSPaS 100m step on four devices, beside the peer's optimised export.

    python benchmarks/hespas_kernels.py

Ours: `examples/llama.py` (size 100m, fully sharded over four) captured and partitioned here, under `--exec xla` for
GPUs, collectives before and after they are combined. The peer's counts are its published ones of an export that an
older XLA optimised; its reduce-scatters stand one by one, its other collectives combined.
"""

from collections import Counter
from pathlib import Path

from stablecast.frontends.arguments import ArgumentOptions
from stablecast.frontends.script import capture_script
from stablecast.ir.device_program import DeviceProgram
from stablecast.validation.suites.hespas import lowered

EXAMPLE = Path(__file__).parents[1] / "examples" / "llama.py"
PEER = {"fusions": 831, "reduce_scatter": 51, "all_gather": 12, "all_reduce": 4}


def program() -> DeviceProgram:
    """The kernels of one of the four devices."""
    options = ArgumentOptions(settings=["size=100m", "fsdp=4"])
    return lowered(capture_script(f"{EXAMPLE}:train_step", options, platform="cuda"), "cuda")


def main() -> None:
    """Print both sides."""
    found = program()
    kernels: Counter[str] = Counter()
    for row, count in zip(found.table.rows, found.table.count, strict=True):
        kernels[row.klass] += int(count)
    products = kernels["matmul"]
    combined: Counter[str] = Counter()
    single: Counter[str] = Counter()
    for collective, count in found.collectives():
        combined[collective.kind] += int(count)
        single[collective.kind] += int(count) * collective.merged
    print(f"kernels {sum(kernels.values())}: " + ", ".join(f"{kind} {n}" for kind, n in kernels.most_common()))
    print(f"kernels other than products {sum(kernels.values()) - products}   peer: {PEER['fusions']} fusions")
    for kind in ("reduce_scatter", "all_gather", "all_reduce"):
        print(f"{kind} {single[kind]}, {combined[kind]} once combined   peer: {PEER[kind]}")


if __name__ == "__main__":
    main()
