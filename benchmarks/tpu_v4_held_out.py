"""The eight profiled products of a TPU v4, predicted by a model that was trained without them.

    python benchmarks/tpu_v4_held_out.py [DATA]

Every row of a TPU v4 training table with one of the eight shapes is left out; the model of products on TPUs is trained
anew into a folder that is then dropped (two minutes; 500 rows are kept of each other TPU for that). Measured times are
those of the profiles.
"""

import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from stablecast.backends import kernel_specs as specs
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device
from stablecast.backends.learned import LearnedBackend
from stablecast.frontends.traces import read_trace
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.validation.measured import measure
from stablecast.validation.training.reader import Record
from stablecast.validation.training.run import train
from stablecast.validation.training.sources import sources
from stablecast.validation.training.tables import Source

ROOT = Path(__file__).parent.parent
DEVICE = "tpu-v4"
MUST_EACH, MUST_MEDIAN = 0.35, 0.15
OTHER_ROWS = 500
Shape = tuple[int, int, int]


def profiled(data: Path) -> dict[Shape, float]:
    """Measured seconds of a product by (m, n, k); file names hold m x n x k."""
    found: dict[Shape, float] = {}
    for path in sorted((data / "traces" / "tpu_v4_jax").glob("*.xplane.pb")):
        m, n, k = map(int, re.findall(r"[0-9]+", path.name)[:3])
        found[m, n, k] = measure(read_trace(path)).class_times()["matmul"]
    return found


def without(shapes: Collection[Shape], left_out: list[Shape]) -> Iterator[Source]:
    """Tables of products on TPUs; those of a TPU v4 without `shapes`, which are noted in `left_out`."""

    def kept(make: Callable[[Device, Record], KernelRow | None]) -> Callable[[Device, Record], KernelRow | None]:
        def kernel(device: Device, record: Record) -> KernelRow | None:
            shape = (int(record["m"]), int(record["n"]), int(record["k"]))
            if shape not in shapes:
                return make(device, record)
            left_out.append(shape)
            return None

        return kernel

    for source in sources():
        names = tuple(source.devices.values())
        if source.kind == "matmul" and all(name.startswith("tpu-") for name in names):
            yield replace(source, make=kept(source.make)) if DEVICE in names else replace(source, rows=OTHER_ROWS)


def main() -> None:
    """Train without the shapes, predict them, print both and what the issue of accuracy asks for."""
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "data"
    device, measured = Catalogue().device(DEVICE), profiled(data)
    left_out: list[Shape] = []
    with TemporaryDirectory() as folder:
        train(data, folder=Path(folder), known=without(measured, left_out))
        table = KernelTable.of([specs.matmul(device, "f16", *shape) for shape in measured])
        estimates = LearnedBackend(Path(folder)).estimate(table, device)
    errors = estimates.time_s / np.array(list(measured.values())) - 1
    print(f"{len(left_out)} rows left out, of {len(set(left_out))} of the {len(measured)} shapes")
    rows = zip(measured.items(), estimates.time_s, estimates.low_s, estimates.high_s, errors, strict=True)
    for ((m, n, k), seconds), time, low, high, error in rows:
        bounds = f"[{low * 1e6:.1f}, {high * 1e6:.1f}]"
        print(f"{m:5} x {n:5} x {k:5}  {seconds * 1e6:7.1f} us  {time * 1e6:7.1f} us {bounds:>16}  {error:+7.1%}")
    size = np.abs(errors)
    print(f"largest {size.max():.1%} (must {MUST_EACH:.0%}), median {np.median(size):.1%} (must {MUST_MEDIAN:.0%})")


if __name__ == "__main__":
    main()
