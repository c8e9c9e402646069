"""Fits the constants of the analytical backend to public kernel tables and writes them with their errors.

    python benchmarks/fit_analytical.py --data FOLDER

FOLDER holds `aiconfigurator`, `xla_perf_tables`, `neusight`, `deepbench`, `vidur`, `tpu_v4_kernels`, `llmservingsim`
and `tpu_step_times` (its matrix product table only), as their READMEs describe. Training tables only: no test table,
no whole model, no training step is read. Kernels of a TPU are in `benchmarks/tables`, beside this script. Writes
`backends/models/analytical.yaml` and the error tables in `docs/analytical.md`.

Loss: mean over tables of the mean |log(predicted / measured)|, each row's capped at 1; coordinate descent on
multiplicative steps. Every table has a launch cost of its own, since some hold the host's; only that of kernels
replayed from a graph (aiconfigurator) becomes a constant.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from fit_report import error_table, write_constants
from fit_small_kernels import set_lanes, set_latencies
from kernel_tables import EAGER, STEADY, Tables

from stablecast.backends.analytical.constants import CONSTANTS_FILE, read_constants
from stablecast.backends.analytical.fitting import Fit, Measured
from stablecast.backends.analytical.rates import watts_per_tflops
from stablecast.backends.catalogue import Catalogue

ROOT: Final = Path(__file__).parent.parent
START_FILE: Final = ROOT / "backends" / "models" / "analytical_start.yaml"

AREAS: Final = (32768, 16384, 8192, 4096, 2048, 1024)
STAGES: Final[Sequence[tuple[str, str, tuple[str, ...], tuple[str, ...]]]] = (
    (
        "half",
        "gpu",
        ("sustained.half", "share.matmul"),
        (*(f"tile.{area}" for area in AREAS[1:]), "waves.tile", "fill.tile", "split", "overlap"),
    ),
    (STEADY, "gpu", ("steady.half",), ()),
    ("half.eager", "gpu", ("sustained.half",), ()),
    ("tf32", "gpu", ("sustained.tf32",), ()),
    ("byte", "gpu", ("sustained.byte",), ()),
    ("fma", "gpu", ("sustained.fma",), (*(f"fma.{area}" for area in AREAS), "waves.fma")),
    ("conv.fma", "gpu", (), ("convolution.fma", "convolution.direct", "winograd.fused", "winograd.fill")),
    ("conv.half", "gpu", (), ("convolution.half",)),
    ("stream", "gpu", ("share.stream",), ()),
    ("reduce", "gpu", ("share.reduce",), ()),
    ("attention.context", "gpu", ("attention.forward",), ("waves.attention", "attention.extra", "attention.block")),
    ("attention.generation", "gpu", ("share.attention",), ()),
    ("tpu", "tpu", ("sustained.half",), ("share.matmul", "overlap", "fill.m")),
    (
        *("attention.tpu", "tpu", ()),
        ("attention.forward", "attention.lanes", "attention.lanes.backward", "attention.block"),
    ),
    ("grouped", "tpu", (), ("grouped.share", "grouped.summed", "grouped.rows", "grouped.mask")),
)
"""In this order: stage, kind of device, constants of each architecture, constants of the kind."""

COPIES: Final = (
    ("share.convolution", "share.matmul"),
    ("share.copy", "share.stream"),
    ("convolution.tf32", "convolution.half"),
    ("convolution.byte", "convolution.half"),
)
"""Constants that take another's value, since no table measures them."""

SAME_LANES: Final = {"sm_75": "sm_70"}
"""Architecture that was measured on a board of little power -> one on a board of full power with the same f32 lanes (16
a scheduler, four schedulers a core) in the same process (TSMC 12 nm FFN)."""

_BEGIN, _END = "<!-- errors: begin -->", "<!-- errors: end -->"
RANGES: Final = (
    ("gpu", "matmul", ("half", "half.eager", "tf32", "byte", "fma")),
    ("gpu", "convolution", ("conv.half", "conv.fma")),
    ("gpu", "stream", ("stream",)),
    ("gpu", "reduce", ("reduce",)),
    ("gpu", "attention", ("attention.context", "attention.generation")),
    ("tpu", "matmul", ("tpu", "grouped")),
    ("tpu", "attention", ("attention.tpu",)),
)


def fit_all(datas: Sequence[Measured], fit: Fit) -> None:
    """Runs every stage, gives each kind the median of its architectures, and notes the source of every constant."""
    for stage, kind, own, common in STAGES:
        chosen = [data for data in datas if data.stage == stage]
        keys = sorted({data.key for data in chosen})
        for data in chosen:
            fit.take_growing_cost(data)
        for key in keys if own else ():
            section = fit.values.setdefault(key, {})
            section |= {name: section.get(name, fit.values[kind][name]) for name in own}
        names = [(key, name) for key in keys for name in own] + [(kind, name) for name in common]
        graphs = stage.startswith("attention")
        if graphs:
            for data in chosen:
                data.launch_s = fit.constants(data.device)["launch"]
        fit.descend(chosen, names, fixed_launch=graphs)
        for key, name in names:
            used = [data for data in chosen if key in (kind, data.key)]
            fit.sources[key, name] = _source(fit, used)
        for name in own if stage not in (EAGER, STEADY) else ():
            fit.values[kind][name] = float(np.median([fit.values[key][name] for key in keys]))
            fit.sources[kind, name] = f"median of {', '.join(keys)}"
        _set_launches(fit, stage, kind, chosen)
        _set_power(fit, stage, kind, chosen)
    _set_older_launches(fit)
    for target, source in COPIES:
        for key, section in fit.values.items():
            if source in section and key != "cpu" and (key == "gpu" or target.startswith("share")):
                section[target] = section[source]
                fit.sources[key, target] = f"as {source}, which has measurements"
    _set_ranges(fit, datas)


def _source(fit: Fit, used: Sequence[Measured]) -> str:
    errors = np.concatenate([np.abs(fit.ratios(data) - 1.0) for data in used])
    tables = sorted({data.table for data in used})
    return f"fitted: {', '.join(tables)}; {len(errors)} rows, median |err| {np.median(errors):.1%}"


def _set_launches(fit: Fit, stage: str, kind: str, chosen: Sequence[Measured]) -> None:
    """The launch cost of replayed graphs becomes a constant."""
    graphs = [d for d in chosen if stage == "half" and d.table.startswith("aiconf")]
    for data in graphs:
        fit.values[data.key]["launch"] = data.launch_s
        fit.sources[data.key, "launch"] = _source(fit, [data])
    if graphs:
        fit.values[kind]["launch"] = float(np.median([data.launch_s for data in graphs]))
        fit.sources[kind, "launch"] = f"median of {', '.join(sorted({data.key for data in graphs}))}"


def _set_older_launches(fit: Fit) -> None:
    """NVIDIA cards before the first whose launch is measured take that one's: all since have a cheaper one."""
    cards = {int(key[3:]): key for key in fit.values if key.startswith("sm_")}
    measured = [number for number, key in cards.items() if "launch" in fit.values[key]]
    for number, key in cards.items():
        if number < min(measured):
            fit.values[key]["launch"] = fit.values[cards[min(measured)]]["launch"]
            fit.sources[key, "launch"] = f"as {cards[min(measured)]}, the oldest measured; newer ones launch faster"


def _set_power(fit: Fit, stage: str, kind: str, chosen: Sequence[Measured]) -> None:
    """Watts for each TFLOP/s of the boards that `sustained.half` and `sustained.fma` were measured on.

    Of the 16-bit matrix units of the last table's board, of the f32 lanes of the one with most.
    """
    if stage not in ("half", EAGER, "fma"):
        return
    name, unit = ("power.fma", "f32 vector") if stage == "fma" else ("power", "16-bit")
    for data in chosen:
        watts = watts_per_tflops(data.device, stage)
        if watts and (stage != "fma" or watts > fit.values[data.key].get(name, 0.0)):
            fit.values[data.key][name] = watts
            fit.sources[data.key, name] = f"derived: board power in W / {unit} TFLOP/s of {data.device.name}"
            if stage != "fma" and data.device.cores and data.device.tdp_w:
                fit.values[data.key]["power.core"] = data.device.tdp_w.value / data.device.cores.value
                fit.sources[data.key, "power.core"] = f"derived: board power in W / cores of {data.device.name}"
    for key, like in SAME_LANES.items() if stage == "fma" else ():
        for constant in ("power.fma", "sustained.fma"):
            fit.values[key][f"full.{constant}"] = fit.values[like][constant]
            fit.sources[key, f"full.{constant}"] = (
                f"as {like}, whose lanes and process it has, on a board of full power"
            )


def _set_ranges(fit: Fit, datas: Sequence[Measured]) -> None:
    """Low and high: 10th and 90th percentile of measured over predicted, over the median of the tables' own."""
    for kind, group, stages in RANGES:
        chosen = [data for data in datas if data.stage in stages]
        quantiles = np.array([np.quantile(1.0 / fit.ratios(data), (0.1, 0.9)) for data in chosen])
        low, high = np.median(quantiles, axis=0)
        text = f"10th and 90th percentile of measured / predicted, median over {len(chosen)} tables"
        for name, value in ((f"low.{group}", min(low, 0.95)), (f"high.{group}", max(high, 1.05))):
            fit.values[kind][name] = float(value)
            fit.sources[kind, name] = text


def main() -> int:
    """Fit, write, report."""
    parser = argparse.ArgumentParser(description="fit the constants of the analytical backend")
    parser.add_argument("--data", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--out", type=Path, default=CONSTANTS_FILE)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "analytical.md")
    options = parser.parse_args()
    tables = Tables(options.data)
    datas = tables.all()
    start = read_constants(START_FILE)
    values = {key: {name: found.value for name, found in part.constants.items()} for key, part in start.items()}
    initial = {(key, name): found.source for key, part in start.items() for name, found in part.constants.items()}
    fit = Fit(values, {key: part.like for key, part in start.items() if part.like})
    set_lanes(fit, tables.read("tpu_v4_kernels/nonmatmul_fp16.csv"), Catalogue().resolve("tpu-v4").device)
    fit_all(datas, fit)
    set_latencies(fit, tables.read("llmservingsim/gpu_v0_layers.csv.gz"))
    for data in datas:
        if not data.stage:
            fit.take_growing_cost(data)
            fit.descend([data], [])
    write_constants(fit, options.out, initial)
    table = error_table(fit, datas)
    print(table)
    if options.docs.exists():
        text = options.docs.read_text(encoding="utf-8")
        before, _, rest = text.partition(_BEGIN)
        after = rest.partition(_END)[2]
        options.docs.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
