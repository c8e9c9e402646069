"""Fits the curves of communication libraries to public tables, cross-validates them, and writes both.

    python benchmarks/fit_collectives.py --data FOLDER

FOLDER holds `aiconfigurator` and `xla_perf_tables`, as their READMEs describe. Writes
`backends/models/collectives.yaml` and the tables of errors in `docs/collectives.md`.

A curve goes through the median over library versions of each message size, made monotone by isotonic regression
(half precision; 8-bit integers are scored too, but do not shape a curve). Scored on every row from 1 KiB up:

- sizes held out: five folds of the message sizes of a device, collective and group; a size is held out with all its
  versions and types, so that a prediction interpolates over the hole;
- group size held out: groups of 4 from those of 2 and 8;
- device held out, and a whole generation of links held out: from the data sheet and the curves of the others. What
  a second die costs comes from another table: the serving frameworks' own all-reduce kernels.
"""

import argparse
import csv
import gzip
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from sklearn.isotonic import IsotonicRegression

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.collectives.curves import (
    COLLECTIVE_CONSTANTS_FILE,
    Curve,
    Library,
    Links,
    Reference,
    links_of,
)
from stablecast.backends.estimates import FloatArray

ROOT: Final = Path(__file__).parent.parent
SMALLEST: Final = 1024
FOLDS: Final = 5
NCCL: Final = {
    "a100-sxm-80gb": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "b200-sxm": "b200_sxm",
    "gb200": "gb200",
}
XLA: Final = {"h100-sxm": "sm_90", "b200-sxm": "sm_100_B200", "gb200": "sm_100_GB200", "mi355x": "gfx950"}
GENERATIONS: Final = (("a100-sxm-80gb",), ("h100-sxm", "h200-sxm"), ("b200-sxm", "gb200"))
KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
RACK_SIZES: Final = (8, 16, 32, 64, 72)
"""Group sizes of the rack that only XLA's table has."""
SIGNAL_BYTES: Final = 65536
"""Largest message of a framework's kernel that is all signalling."""
_BEGIN, _END = "<!-- errors: begin -->", "<!-- errors: end -->"


@dataclass(frozen=True, slots=True)
class Point:
    """One measured collective; `shapes`: whether it may shape a curve."""

    device: str
    kind: str
    size: int
    nbytes: float
    seconds: float
    shapes: bool = True


Key = tuple[str, int]


def _lines(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_nccl(folder: Path) -> list[Point]:
    """All rows of the NCCL tables."""
    names = {"alltoall": "all_to_all"}
    return [
        Point(
            device,
            names.get(line["collective"], line["collective"]),
            int(line["num_gpus"]),
            float(line["bytes"]),
            float(line["latency_us"]) * 1e-6,
            line["dtype"] == "half",
        )
        for device, name in NCCL.items()
        for line in _lines(folder / "aiconfigurator" / f"nccl_{name}.csv.gz")
    ]


def read_xla(folder: Path) -> list[Point]:
    """XLA's rows: all of mi355x, racks of GB200 from 8 devices up, and rings of permutes."""
    found: list[Point] = []
    devices = {key: device for device, key in XLA.items()}
    for line in _lines(folder / "xla_perf_tables" / "collectives.csv.gz"):
        device = devices.get(line["device_key"])
        if device is None or not line["latency_us"]:
            continue
        kind, nbytes, seconds = line["opcode"].replace("-", "_"), float(line["tensor_bytes"]), line["latency_us"]
        ring = line["permute_pairs"].startswith("0>1;1>2")
        size = 2 if kind == "collective_permute" else int(float(line["devices_per_group"]))
        if ring if kind == "collective_permute" else device in ("mi355x", "gb200"):
            found.append(Point(device, kind, size, nbytes, float(seconds) * 1e-6))
    return found


def without_launch(points: Sequence[Point], nccl: Sequence[Point]) -> list[Point]:
    """Rack points less what XLA's timing adds, seen where both tables have groups of 4: the median up to 64 KiB."""
    small = [p for p in points if p.device == "gb200" and p.size == 4 and p.nbytes <= 65536]
    own = fit_curves([p for p in nccl if p.device == "gb200" and p.shapes])
    extra = float(
        np.median([p.seconds - own[p.kind, 4].time(np.array([p.nbytes]))[0] for p in small if (p.kind, 4) in own])
    )
    print(f"XLA's timing on GB200 adds {extra * 1e6:.1f} us")
    kept = [p for p in points if p.device != "gb200" or p.kind == "collective_permute" or p.size in RACK_SIZES]
    return [
        replace(p, seconds=p.seconds - extra)
        if p.device == "gb200" and p.kind != "collective_permute" and p.seconds > 1.5 * extra
        else p
        for p in kept
    ]


def fit_curves(points: Iterable[Point]) -> dict[Key, Curve]:
    """The curve of every collective and group size among points of one device."""
    found: dict[Key, dict[float, list[float]]] = {}
    for p in points:
        found.setdefault((p.kind, p.size), {}).setdefault(p.nbytes, []).append(p.seconds)
    return {key: fit_curve(by_size) for key, by_size in found.items()}


def fit_curve(by_bytes: Mapping[float, Sequence[float]]) -> Curve:
    """The monotone curve through the medians of each message size."""
    nbytes = np.array(sorted(by_bytes))
    middle = np.log([float(np.median(by_bytes[size])) for size in nbytes])
    return Curve.through(nbytes, np.exp(IsotonicRegression().fit_transform(np.log2(nbytes), middle)))


def links(device: str, catalogue: Catalogue) -> Links:
    """The links of a device of the catalogue on its own board."""
    system = catalogue.resolve(f"{device}:2")
    dim = catalogue.resolve(f"{device}:8").network.dims[0]
    found = system.device.scaleup_bytes_per_s
    return links_of(system.device, found.value if found else dim.bytes_per_s.value, dim.in_network)


def reference(device: str, points: Sequence[Point], catalogue: Catalogue, source: str) -> Reference:
    """A device's curves as a reference."""
    curves: dict[str, dict[int, Curve]] = {}
    for (kind, size), curve in fit_curves([p for p in points if p.device == device and p.shapes]).items():
        curves.setdefault(kind, {})[size] = curve
    dim = catalogue.resolve(f"{device}:8").network.dims[0]
    mesh = dim.size if dim.kind == "fully_connected" else 0
    return Reference(device, links(device, catalogue), source, curves, mesh)


def read_framework_kernels(folder: Path) -> dict[str, dict[Key, float]]:
    """Small all-reduces by the serving frameworks' own kernels, by device and by kernel, ranks and bytes; seconds.

    Those that the host launches one by one are left out: they time the host.
    """
    found: dict[str, dict[Key, float]] = {}
    for device, name in NCCL.items():
        for line in _lines(folder / "aiconfigurator" / f"custom_allreduce_{name}.csv.gz"):
            size = int(float(line["message_size"]))
            if size <= SIGNAL_BYTES and not line["kernel"].endswith("_eager"):
                kernel = " ".join(line[column] for column in ("framework", "version", "kernel", "num_gpus"))
                found.setdefault(device, {})[kernel, size] = float(line["latency_us"]) * 1e-6
    return found


def cross_die(kernels: Mapping[str, Mapping[Key, float]], catalogue: Catalogue) -> float:
    """Latency x clock of devices of two dies over that of one die: the median over equal kernels and messages."""
    own = {device: links(device, catalogue) for device in kernels}
    ratios = [
        seconds * (own[far].clock_hz or 1.0) / (kernels[near][key] * (own[near].clock_hz or 1.0))
        for far in kernels
        if own[far].dies > 1
        for near in kernels
        if own[near].dies == 1
        for key, seconds in kernels[far].items()
        if key in kernels[near]
    ]
    print(f"two dies signal {np.median(ratios):.3f} times as long in frameworks' kernels, {len(ratios)} pairs")
    return float(np.median(ratios))


def library(name: str, references: Sequence[Reference], cross: float) -> Library:
    """A library of references, without ranges yet."""
    return Library(name, references, cross, (1.0, 1.0), (1.0, 1.0))


Predict = Callable[[str, Key, FloatArray], FloatArray]


def ratios(points: Sequence[Point], predict: Predict) -> FloatArray:
    """Predicted over measured, points of 1 KiB and more."""
    groups: dict[tuple[str, Key], list[Point]] = {}
    for p in points:
        if p.nbytes >= SMALLEST:
            groups.setdefault((p.device, (p.kind, p.size)), []).append(p)
    parts = [
        predict(device, key, np.array([p.nbytes for p in own])) / np.array([p.seconds for p in own])
        for (device, key), own in groups.items()
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def held_out_sizes(points: Sequence[Point]) -> dict[str, FloatArray]:
    """Ratios by device, each message size predicted without its own rows."""
    found: dict[str, list[FloatArray]] = {}
    groups: dict[tuple[str, str, int], list[Point]] = {}
    for p in points:
        if p.nbytes >= SMALLEST:
            groups.setdefault((p.device, p.kind, p.size), []).append(p)
    for (device, _, _), own in groups.items():
        sizes = np.array(sorted({p.nbytes for p in own}))
        fold_of = dict(zip(sizes, np.random.default_rng(0).permutation(len(sizes)) % FOLDS, strict=True))
        for fold in range(FOLDS):
            train = [p for p in own if fold_of[p.nbytes] != fold and p.shapes]
            test = [p for p in own if fold_of[p.nbytes] == fold]
            curve = next(iter(fit_curves(train).values()))
            predicted = curve.time(np.array([p.nbytes for p in test]))
            found.setdefault(device, []).append(predicted / np.array([p.seconds for p in test]))
    return {device: np.concatenate(parts) for device, parts in found.items()}


def held_out_group(points: Sequence[Point], catalogue: Catalogue) -> FloatArray:
    """Ratios of groups of 4, from those of 2 and 8 of the same device."""
    rest = [p for p in points if p.size != 4]
    full = {device: reference(device, rest, catalogue, "") for device in NCCL if device != "gb200"}
    test = [p for p in points if p.size == 4 and p.device in full]
    return ratios(test, lambda device, key, nbytes: full[device].time(*key, nbytes))


def held_out_devices(points: Sequence[Point], lib: Library, out: Sequence[str], cross: float) -> FloatArray:
    """Ratios of the devices `out`, from the others' curves, the data sheet and what two dies cost."""
    own = {r.name: r.links for r in lib.references}
    left = library("", [r for r in lib.references if r.name not in out], cross)
    test = [p for p in points if p.device in out]
    return ratios(test, lambda device, key, nbytes: left.time(*key, own[device], own[device], nbytes))


def line(name: str, found: FloatArray) -> str:
    """A row of the table of errors."""
    errors = np.abs(found - 1)
    return (
        f"| {name} | {len(found)} | {np.median(errors):.1%} | {errors.mean():.1%} | {np.quantile(errors, 0.9):.1%} | "
        f"{np.median(found) - 1:+.1%} |"
    )


def scores(points: Sequence[Point], lib: Library, catalogue: Catalogue) -> tuple[list[str], FloatArray, FloatArray]:
    """The tables of errors, and the ratios with sizes and with devices held out."""
    rows = ["| held out | rows | median | mean | p90 | bias |", "|---|---|---|---|---|---|"]
    by_device = held_out_sizes(points)
    sizes = np.concatenate(list(by_device.values()))
    rows.append(line("message sizes, all devices", sizes))
    rows += [line(f"message sizes, {device}", found) for device, found in by_device.items()]
    rows.append(line("groups of 4", held_out_group(points, catalogue)))
    devices = [held_out_devices(points, lib, [r.name], lib.cross_die) for r in lib.references]
    carried = np.concatenate(devices)
    rows.append(line("a device, all", carried))
    rows += [line(f"a device: {r.name}", found) for r, found in zip(lib.references, devices, strict=True)]
    whole = [held_out_devices(points, lib, out, lib.cross_die) for out in GENERATIONS]
    rows.append(line("a generation of links, all", np.concatenate(whole)))
    rows += [line(f"a generation: {', '.join(out)}", found) for out, found in zip(GENERATIONS, whole, strict=True)]
    unknown = held_out_devices(points, lib, GENERATIONS[-1], 1.0)
    rows.append(line(f"the same, as if of one die: {', '.join(GENERATIONS[-1])}", unknown))
    return rows, sizes, carried


def curve_text(curve: Curve) -> str:
    """Knots as a YAML flow mapping of bytes to microseconds."""
    return ", ".join(f"{round(2**x)}: {np.exp(y) * 1e6:.5g}" for x, y in zip(curve.x, curve.y, strict=True))


def library_text(lib: Library, cross: str, measured: tuple[FloatArray, str], carried: tuple[FloatArray, str]) -> str:
    """One library as YAML."""
    lines = [f"{lib.name}:", f'  cross_die: {{value: {lib.cross_die:.4g}, source: "{cross}"}}']
    for name, (found, source) in (("measured", measured), ("carried", carried)):
        low, high = np.quantile(1 / found, (0.1, 0.9))
        errors = np.abs(found - 1)
        text = f"{source}; {len(found)} rows, |err| median {np.median(errors):.1%}, mean {errors.mean():.1%}"
        lines.append(
            f'  {name}: {{low: {min(low, 0.95):.4g}, high: {max(high, 1.05):.4g}, source: "10th and 90th percentile of '
            f'measured / predicted, {text}"}}'
        )
    lines.append("  references:")
    for r in lib.references:
        lines += [f"    {r.name}:", f'      source: "{r.source}"']
        lines += [f"      bytes_per_s: {r.links.bytes_per_s:.6g}", f"      clock_hz: {r.links.clock_hz:.6g}"]
        lines += [f"      dies: {r.links.dies}", f"      in_network: {str(r.links.in_network).lower()}"]
        lines += [f"      mesh: {r.mesh}"] if r.mesh else []
        lines.append("      times_us:")
        for kind in KINDS:
            if kind in r.curves:
                lines.append(f"        {kind}:")
                by_size = sorted(r.curves[kind].items())
                lines += [f"          {size}: {{{curve_text(curve)}}}" for size, curve in by_size]
    return "\n".join(lines)


RANGES: Final = """ranges:
  stated: {low: 0.8, high: 1.4, source: "assumption: links whose figures someone stands for, alpha-beta costs"}
  assumed: {low: 0.6, high: 1.8, source: "assumption: nothing of the dimension was measured"}"""


def main() -> int:
    """Fit, score, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--out", type=Path, default=COLLECTIVE_CONSTANTS_FILE)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "collectives.md")
    options = parser.parse_args()
    catalogue = Catalogue()
    nccl = read_nccl(options.data)
    xla = without_launch(read_xla(options.data), nccl)
    text = "fitted: aiconfigurator nccl, half precision, median over versions"
    more = {"gb200": "; groups from 8 up and permutes: xla collectives"}
    more |= dict.fromkeys(("h100-sxm", "b200-sxm"), "; permutes: xla collectives")
    two_dies = cross_die(read_framework_kernels(options.data), catalogue)
    plain = library("nccl", [reference(device, nccl, catalogue, text) for device in NCCL], two_dies)
    rows, sizes, carried = scores(nccl, plain, catalogue)
    full = [reference(device, [*nccl, *xla], catalogue, text + more.get(device, "")) for device in NCCL]
    amd = [p for p in xla if p.device == "mi355x"]
    rccl = library("rccl", [reference("mi355x", amd, catalogue, "fitted: xla collectives, its launch included")], 1.0)
    board = np.concatenate(list(held_out_sizes(amd).values()))
    rows.append(line("message sizes, mi355x (XLA's table)", board))
    cross = "fitted: aiconfigurator custom_allreduce, latency x clock of two dies over one up to 64 KiB, median"
    parts = [
        "# Written by benchmarks/fit_collectives.py; change that script or its tables, not this file.",
        RANGES,
        library_text(
            replace(plain, references=full),
            cross,
            (sizes, "message sizes held out"),
            (carried, "one device held out"),
        ),
        library_text(rccl, "assumption: one die", (board, "message sizes held out"), (carried, "as nccl")),
    ]
    options.out.write_text("\n".join(parts) + "\n", encoding="utf-8")
    table = "\n".join(rows)
    print(table)
    if options.docs.exists():
        page = options.docs.read_text(encoding="utf-8")
        before, _, rest = page.partition(_BEGIN)
        options.docs.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
