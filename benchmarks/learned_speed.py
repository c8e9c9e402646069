"""How fast the learned backend is: loading its models, and predicting long lists of kernels.

    python benchmarks/learned_speed.py [--rows 100000] [--on h100-sxm] [--profile NAME]

CPU seconds of all threads and wall seconds, the least of three runs. Rows are all different. `--profile products`
prints where the time of one list goes.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Mapping

import numpy as np

from stablecast.backends import kernel_specs as specs
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device
from stablecast.backends.learned import LearnedBackend
from stablecast.backends.learned.store import model_keys, read_model
from stablecast.ir.kernels import KernelRow, KernelTable

_REPEATS = 3


def least(work: Callable[[], object], repeats: int = _REPEATS) -> tuple[float, float]:
    """CPU and wall seconds of the fastest of several runs."""
    found: list[tuple[float, float]] = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        found.append((time.process_time() - cpu, time.perf_counter() - wall))
    return min(found)


def products(device: Device, rows: int) -> list[KernelRow]:
    """bf16 products, each size drawn evenly over its logarithm from 16 to 16384."""
    sizes = np.exp2(np.random.default_rng(0).uniform(4, 14, (rows, 3))).astype(int).tolist()
    return [specs.matmul(device, "bf16", m, n, k) for m, n, k in sizes]


def batched(device: Device, rows: int) -> list[KernelRow]:
    """Batched bf16 products, small ones too."""
    sizes = np.exp2(np.random.default_rng(1).uniform((1, 4, 4, 4), (9, 11, 11, 8), (rows, 4))).astype(int).tolist()
    return [specs.matmul(device, "bf16", m, n, k, b) for b, m, n, k in sizes]


def tiny(device: Device, rows: int) -> list[KernelRow]:
    """Elementwise bf16 kernels of up to 64k elements."""
    sizes = np.exp2(np.random.default_rng(2).uniform(0, 16, rows)).astype(int).tolist()
    return [specs.elementwise(device, "bf16", size, 1 + number % 3) for number, size in enumerate(sizes)]


LISTS: Mapping[str, Callable[[Device, int], list[KernelRow]]] = {
    "products": products,
    "batched products": batched,
    "tiny elementwise": tiny,
}


def load() -> None:
    """Every model that ships, read anew and made ready to evaluate."""
    for key in model_keys():
        model = read_model(key)
        assert model is not None
        model.trees.predict([np.zeros(1) for _ in model.features])


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--on", default="h100-sxm")
    parser.add_argument("--profile", choices=list(LISTS))
    given = parser.parse_args()
    device = Catalogue().device(given.on)
    cpu, wall = least(load, 1)
    print(f"{'loading all models':40} {cpu:6.2f} s CPU {wall:6.2f} s")
    for name, make in LISTS.items():
        rows = make(device, given.rows)
        if given.profile == name:
            table = KernelTable.of(rows)
            with cProfile.Profile() as profile:
                LearnedBackend().estimate(table, device)
            pstats.Stats(profile).sort_stats("cumulative").print_stats(25)
        if given.profile is None:
            cpu, wall = least(lambda rows=rows: KernelTable.of(rows).columns)
            print(f"{f'{len(rows)} {name}, their columns':40} {cpu:6.2f} s CPU {wall:6.2f} s")
            table = KernelTable.of(rows)
            _ = table.columns
            cpu, wall = least(lambda table=table: LearnedBackend().estimate(table, device))
            print(f"{f'{len(rows)} {name}':40} {cpu:6.2f} s CPU {wall:6.2f} s")


if __name__ == "__main__":
    main()
