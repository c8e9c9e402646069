"""How the rate of large bf16 products changes with their length, a board and framework of aiconfigurator's tables.

    python benchmarks/power_limit.py [--data FOLDER]

A board at its power limit slows down in long products; one below it does not. Rows whose sizes are multiples of 128 and
at least 2,048.
"""

import argparse
import csv
import gzip
import statistics
from pathlib import Path

ROOT = Path(__file__).parent.parent
BOARDS = ("a100", "h100", "h200", "b200")
EDGES = (2e11, 5e11, 1e12, 2e12, 4e12, 8e12, 1e18)
LEAST, STEP = 2048, 128


def rates(path: Path) -> dict[str, list[list[float]]]:
    """TFLOP/s by framework, for each range of FLOPs."""
    found: dict[str, list[list[float]]] = {}
    with gzip.open(path, "rt") as table:
        for record in csv.DictReader(table):
            sizes = [int(record[name]) for name in ("m", "n", "k")]
            flops = 2.0 * sizes[0] * sizes[1] * sizes[2]
            if record["dtype"] != "bfloat16" or any(size < LEAST or size % STEP for size in sizes) or flops <= EDGES[0]:
                continue
            bins = found.setdefault(record["framework"], [[] for _ in EDGES[1:]])
            place = next(index for index, edge in enumerate(EDGES[1:]) if flops <= edge)
            bins[place].append(flops / float(record["latency_us"]) / 1e6)
    return found


def main() -> None:
    """Print a line for each board and framework."""
    parser = argparse.ArgumentParser(description="rates of products by their length")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    folder = parser.parse_args().data / "aiconfigurator"
    print("median TFLOP/s up to " + ", ".join(f"{edge:.0e}" for edge in EDGES[1:-1]) + " FLOPs, and above")
    for board in BOARDS:
        for framework, bins in sorted(rates(folder / f"gemm_{board}_sxm.csv.gz").items()):
            print(f"{board:5} {framework:8}", *(f"{statistics.median(one):7.0f}" if one else "      -" for one in bins))


if __name__ == "__main__":
    main()
