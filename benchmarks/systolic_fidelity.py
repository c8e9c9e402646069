"""Fidelities side by side: square products, ResNets and Llamas on GPUs and TPUs by several backends.

    python benchmarks/systolic_fidelity.py [--backend analytical --backend systolic ...] [--small]

Prints, for each workload, device x fidelity with the spread and the class of kernel that explains most of it, then the
rank agreement of each pair of fidelities: the share of pairs of times that both put in the same order, and Kendall's
tau (that share of agreeing pairs less the share of others, -1 to 1), over devices for each workload, and over
workloads for each device.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np

from stablecast._compare import compare
from stablecast._predict import Options
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.kernel_specs import matmul
from stablecast.backends.pricing import price
from stablecast.backends.registry import backend_names, parse_choice
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.ir.kernels import KernelTable
from stablecast.ir.text import seconds, table
from stablecast.report.comparison import fidelity_rows

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
DEVICES: Final = ("a100-sxm-80gb", "h100-sxm", "tpu-v3", "tpu-v4")
LADDER: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MODELS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "resnet-18": ("resnet.py", ("depth=18", "batch=64", "dtype=bf16")),
    "resnet-50": ("resnet.py", ("depth=50", "batch=64", "dtype=bf16")),
    "llama 100m": ("llama.py", ("size=100m", "seq=2048")),
    "llama 1b": ("llama.py", ("size=1b", "seq=2048")),
}
Times = dict[tuple[str, str, str], float]
"""Seconds by workload, device and fidelity."""


def ladder(backends: Sequence[str]) -> Times:
    """Square bf16 products."""
    catalogue = Catalogue()
    found: Times = {}
    for name in DEVICES:
        device = catalogue.resolve(name).device
        kernels = KernelTable.of(matmul(device, "bf16", size, size, size) for size in LADDER)
        for backend in backends:
            times = price(kernels, device, parse_choice(backend)).estimates.time_s
            found |= {(f"gemm {size}", name, backend): float(t) for size, t in zip(LADDER, times, strict=True)}
    return found


def models(names: Iterable[str], backends: Sequence[str]) -> Times:
    """Training steps of the bundled examples, printed as they come."""
    found: Times = {}
    for name in names:
        script, settings = MODELS[name]
        options = Options(arguments=ArgumentOptions("", (), settings))
        made = compare(f"{EXAMPLES / script}:train_step", on=DEVICES, backends=backends, options=options)
        print(f"\n{name} ({', '.join(settings)})")
        print("\n".join(table(fidelity_rows(made), indent="  ")))
        found |= {(name, row.system, row.backend): row.step_time_s for row in made.rows}
    return found


def agreement(times: Times, first: str, second: str, within: int) -> tuple[int, float, float]:
    """Pairs, share in the same order and Kendall's tau, among entries that share key part `within` (0 or 1)."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for (workload, device, backend), value in times.items():
        if backend == first and (workload, device, second) in times:
            groups.setdefault((workload, device)[within], []).append((value, times[workload, device, second]))
    signs = [
        np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for pairs in groups.values() for a, b in combinations(pairs, 2)
    ]
    same, other = sum(sign > 0 for sign in signs), sum(sign < 0 for sign in signs)
    return len(signs), same / max(len(signs), 1), (same - other) / max(len(signs), 1)


def report(times: Times, backends: Sequence[str]) -> str:
    """The rank agreement of each pair of fidelities."""
    rows = [("fidelities", "order of", "pairs", "same order", "Kendall tau")]
    for first, second in combinations(backends, 2):
        for what, within in (("devices for a workload", 0), ("workloads on a device", 1)):
            pairs, share, tau = agreement(times, first, second, within)
            rows.append((f"{first}, {second}", what, str(pairs), f"{share:.1%}", f"{tau:.3f}"))
    return "\n".join(table(rows, right=(2, 3, 4), indent="  "))


def main() -> int:
    """Price, print."""
    parser = argparse.ArgumentParser(description="fidelities side by side")
    parser.add_argument("--backend", action="append", help="a backend or a mix of them; several times")
    parser.add_argument("--small", action="store_true", help="without Llama 1b and ResNet-50")
    options = parser.parse_args()
    backends: list[str] = options.backend or list(backend_names())
    times = ladder(backends)
    head = ("product", "device", *backends, "spread")
    rows: list[tuple[str, ...]] = [head]
    for size in LADDER:
        for device in DEVICES:
            own = [times[f"gemm {size}", device, backend] for backend in backends]
            rows.append((f"{size}^3", device, *map(seconds, own), f"{max(own) / min(own):.2f} x"))
    print("\n".join(table(rows, right=range(2, len(head)), indent="  ")))
    names = [name for name in MODELS if not options.small or name in ("resnet-18", "llama 100m")]
    steps = models(names, backends)
    print("\nrank agreement, products\n" + report(times, backends))
    print("\nrank agreement, training steps\n" + report(steps, backends))
    print("\nrank agreement, all\n" + report(times | steps, backends))
    return 0


if __name__ == "__main__":
    sys.exit(main())
