"""Calibrates the systolic backend's map from cycles to seconds and writes it with its errors.

    python benchmarks/fit_systolic.py --data FOLDER

FOLDER holds `tpu_v4_kernels`, `llmservingsim`, `tpu_step_times` and `xla_perf_tables`, as their READMEs describe.
Writes `backends/models/systolic.yaml` and the error table of `docs/systolic.md`.

f16 on TPU v4: a sum of physical terms with coefficients >= 0, least absolute relative error, 5-fold cross-validated.
TPU v6e and the GPUs: coordinate descent on launch, shares of both rates, overlap and hidden filling; loss: mean over
tables of the mean |log(predicted / measured)|, each row's capped at 1. Rows marked "check" were not fitted on.
"""

import argparse
import csv
import gzip
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from stablecast.backends import kernel_specs as specs
from stablecast.backends.analytical.constants import Constant, Constants, constants_for, read_constants
from stablecast.backends.analytical.rates import matrix_rates
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, FloatArray
from stablecast.backends.systolic.backend import SystolicBackend
from stablecast.backends.systolic.machine import ArrayMachine, array_machine
from stablecast.backends.systolic.products import Products, array_work
from stablecast.backends.systolic.rows import products_of
from stablecast.backends.systolic.time_map import (
    CONSTANTS_FILE,
    SIZES,
    TERMS,
    array_seconds,
    f16_sizes,
    f16_terms,
    overlapped,
    turns,
)
from stablecast.backends.systolic.vector_unit import VECTOR_TERMS, vector_terms
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable

ROOT: Final = Path(__file__).parent.parent
FOLDS: Final = 5
SEED: Final = 0
SAMPLE: Final = 400
_CAP: Final = 1.0
_STEPS: Final = (1.3, 1.1, 1.03, 1.01)
_BEGIN: Final = "<!-- errors: begin (written by benchmarks/fit_systolic.py) -->"
_END: Final = "<!-- errors: end -->"

SIZE_TERMS: Final[Mapping[str, tuple[str, ...]]] = {
    "tile": ("launch", "single"),
    "resident": ("launch", "even", "lhs", "rhs", "out", "rows", "columns", "depth", "held", "again"),
    "streamed": ("launch", "even", "lhs", "rhs", "out", "rows", "columns", "depth", "turned"),
}
LAYERS: Final = {
    "q_proj": (4096, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
    "lm_head": (128256, 4096),
}
OPERATIONS: Final[Mapping[str, tuple[int, int, int]]] = {
    "add": (2, 1, 0),
    "sub": (2, 1, 0),
    "mul": (2, 1, 0),
    "div": (2, 1, 0),
    "relu": (1, 1, 0),
    "linear": (1, 1, 0),
    "binary": (1, 2, 0),
    "binary_step": (1, 2, 0),
    "leaky": (1, 3, 0),
    "leaky_relu": (1, 3, 0),
    "parametric": (1, 3, 0),
    "parametric_relu": (1, 3, 0),
    "elu": (1, 4, 1),
    "selu": (1, 5, 1),
    "sigmoid": (1, 0, 1),
    "tanh": (1, 0, 1),
}
"""Operands, operations and transcendentals an element, by StableHLO's ops (logistic and tanh are one each)."""

START: Final = {"launch": 2e-6, "array": 0.85, "memory": 0.9, "overlap": 4.0, "fill": 0.2}
LIMITS: Final = {
    "tpu": {"launch": (2e-7, 1.6e-6)},
    "gpu": {"launch": (2e-7, 6e-6)},
    "": {"array": (0.3, 1.0), "memory": (0.6, 1.0), "overlap": (1.0, 8.0), "fill": (0.0, 1.0)},
}
"""Launch: on TPUs bounded by what the smallest product of tpu-recipes takes in all (1.6 us, 128 cubed on v7x)."""
ASSUMED: Final = {
    "tpu": {
        "vector.issue": (
            0.35,
            "assumption: share of the lanes' issue slots that fused code fills, as the analytical backend's",
        ),
        "vector.transcendental": (1.0, "derived: the extended unit takes one register a cycle"),
        "vector.memory": (0.85, "assumption: no table measures it for other types than f16"),
        "vmem.registers": (
            3.0,
            "derived: scaling-book gives VMEM about 22 times the memory rate of v5e, three registers a cycle",
        ),
        "low.vector": (0.8, "assumption: no table measures it"),
        "high.vector": (1.3, "assumption: no table measures it"),
        "low.attention": (0.7, "assumption: no table measures it"),
        "carried": (1.25, "assumption: range of constants carried from another generation, over their own"),
    },
    "gpu": {
        "vector.issue": (
            0.35,
            "assumption: share of the lanes' issue slots that fused code fills, as the analytical backend's",
        ),
        "carried": (1.25, "assumption: range of constants carried from another generation, over their own"),
    },
}


@dataclass(frozen=True)
class Measured:
    """Products of one table on one device; `check`: not fitted on."""

    table: str
    device: Device
    products: Products
    peak: FloatArray
    seconds: FloatArray
    check: bool = False

    @property
    def machine(self) -> ArrayMachine:
        found = array_machine(self.device)
        assert found is not None
        return found

    def pick(self, index: "np.ndarray[tuple[int], np.dtype[np.int64]] | BoolArray") -> "Measured":
        """The chosen rows."""
        p = self.products
        part = Products(*(x[index] for x in (p.batch, p.m, p.n, p.k, p.lhs, p.rhs, p.out, p.rest)))
        return Measured(self.table, self.device, part, self.peak[index], self.seconds[index], self.check)

    def ratios(self, values: Mapping[str, float]) -> FloatArray:
        """Predicted over measured."""
        fit = Constants("", "", {name: Constant(value, "", "") for name, value in values.items()}, True)
        work = array_work(self.products, self.machine, values["fill"])
        compute = array_seconds(work.cycles, self.peak, self.machine)
        launch = np.full(len(self.seconds), values["launch"])
        return overlapped(compute, self.products.nbytes, launch, self.machine, fit).time / self.seconds


class Tables:
    """Reads the measured tables under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.catalogue = Catalogue()

    def read(self, path: str) -> list[dict[str, str]]:
        full = self.folder / path
        data = full.read_bytes()
        text = (gzip.decompress(data) if full.suffix == ".gz" else data).decode()
        return list(csv.DictReader(text.splitlines()))

    def measured(
        self,
        table: str,
        device: str,
        dtype: str,
        shapes: Sequence[tuple[int, int, int, int]],
        seconds: Sequence[float],
        check: bool = False,
    ) -> Measured:
        """`shapes`: batch, m, n, k."""
        found = self.catalogue.resolve(device).device
        made = KernelTable.of(specs.matmul(found, dtype, m, n, k, batch) for batch, m, n, k in shapes)
        rates = matrix_rates(made.math, made.in_dtype, found)
        return Measured(table, found, products_of(made), rates.flops, np.array(seconds), check)

    def tpu_v4(self) -> Mapping[str, Measured]:
        """f16 products by regime: 128, 1024, 4096, misaligned."""
        rows = self.read("tpu_v4_kernels/matmul_fp16.csv")
        found: dict[str, Measured] = {}
        for regime in ("128", "1024", "4096"):
            kept = [row for row in rows if row["regime"] == regime]
            times = [float(row["mean_us"]) * 1e-6 for row in kept]
            found[regime] = self.measured(regime, "tpu-v4", "f16", [_shape(row) for row in kept], times)
        rows = self.read("tpu_v4_kernels/matmul_fp16_misaligned.csv")
        times = [float(row["measured_us"]) * 1e-6 for row in rows]
        found["misaligned"] = self.measured("misaligned", "tpu-v4", "f16", [_shape(row) for row in rows], times)
        return found

    def tpu_v6e(self) -> list[Measured]:
        """bf16 layers of Llama-3.1-8B by layer, over one token; single tokens are wrong by a factor of two."""
        rows = self.read("llmservingsim/tpu_v6e_layers.csv.gz")
        found: list[Measured] = []
        for layer, (n, k) in LAYERS.items():
            kept = [row for row in rows if row["layer"] == layer and int(row["tokens"]) > 1]
            times = [float(row["latency_ns"]) * 1e-9 for row in kept]
            found.append(self.measured(layer, "tpu-v6e", "bf16", [(1, int(r["tokens"]), n, k) for r in kept], times))
        return [
            *found,
            self.recipes("v6e", "tpu-v6e", "per chip, device trace", False),
            self.recipes("v7x", "tpu-v7x", "per device (2 devices per chip)", True),
        ]

    def recipes(self, tpu: str, device: str, basis: str, check: bool) -> Measured:
        """Square bf16 products of tpu-recipes."""
        rows = self.read("tpu_step_times/gemm_tflops.csv")
        kept = [r for r in rows if r["tpu"].startswith(tpu) and r["basis"] == basis and r["dtype"] == "bf16"]
        times = [float(row["latency_us"]) * 1e-6 for row in kept]
        return self.measured("tpu-recipes gemm", device, "bf16", [_shape(row) for row in kept], times, check)

    def xla(self, key: str, device: str) -> list[Measured]:
        """bf16 products of XLA's table below the printed peak."""
        rows = [
            row
            for row in self.read("xla_perf_tables/matmul.csv.gz")
            if row["device_key"] == key and row["lhs"] == row["rhs"] == row["out"] == "bf16"
        ]
        shapes = [(int(row["batch"]), *_shape(row)[1:]) for row in rows]
        made = self.measured("xla matmul bf16", device, "bf16", shapes, [float(r["latency_us"]) * 1e-6 for r in rows])
        work = 2.0 * made.products.batch * made.products.m * made.products.n * made.products.k
        return [made.pick(work / made.seconds < 0.99 * made.peak)]

    def vectors(self) -> tuple[KernelTable, FloatArray, list[str]]:
        """Elementwise and activation kernels of TPU v4, seconds, and their series."""
        series = ("data_add_1d_1", "data_add_2d_1", "data_ele", "data_act1", "data_act2")
        rows = [row for row in self.read("tpu_v4_kernels/nonmatmul_fp16.csv") if row["series"] in series]
        made: list[KernelRow] = []
        for row in rows:
            inputs, operations, functions = OPERATIONS[row["op"]]
            elements = int(float(row["elements"]))
            made.append(
                KernelRow(
                    klass=KernelClass.ELEMENTWISE,
                    in_dtype="f16",
                    out_dtype="f16",
                    elems=elements,
                    inputs=inputs,
                    vector_flops=float(operations * elements),
                    transcendentals=float(functions * elements),
                    bytes_read=2.0 * inputs * elements,
                    bytes_written=2.0 * elements,
                )
            )
        return KernelTable.of(made), np.array([float(r["mean_us"]) * 1e-6 for r in rows]), [r["series"] for r in rows]


def _shape(row: Mapping[str, str]) -> tuple[int, int, int, int]:
    return 1, int(row["m"]), int(row["n"]), int(row["k"])


def least_absolute(terms: FloatArray, seconds: FloatArray) -> FloatArray:
    """Coefficients >= 0 that minimise the mean |predicted / measured - 1|, by reweighted coordinate descent."""
    scale = np.where(terms.max(axis=0) > 0, (terms / seconds[:, None]).max(axis=0), 1.0)
    design = terms / seconds[:, None] / scale
    weights, found = np.ones(len(seconds)), np.zeros(design.shape[1])
    for _ in range(25):
        weighted = design * weights[:, None]
        gram, target = weighted.T @ design, weighted.sum(axis=0)
        for _ in range(400):
            before = found.copy()
            for column in range(len(found)):
                if gram[column, column] > 0:
                    step = (target[column] - gram[column] @ found) / gram[column, column]
                    found[column] = max(found[column] + step, 0.0)
            if np.abs(found - before).max() < 1e-9:
                break
        weights = 1.0 / np.maximum(np.abs(design @ found - 1.0), 0.01)
    return found / scale


def folds(count: int) -> list[BoolArray]:
    """Masks of the held-out rows of each fold, drawn with a fixed seed."""
    order = np.random.default_rng(SEED).permutation(count)
    masks: list[BoolArray] = []
    for fold in range(FOLDS):
        mask = np.zeros(count, dtype=np.bool_)
        mask[order[fold::FOLDS]] = True
        masks.append(mask)
    return masks


def cross_validated(terms: FloatArray, seconds: FloatArray) -> FloatArray:
    """Predicted over measured of every row, by coefficients fitted without its fold."""
    ratios = np.zeros(len(seconds))
    for out in folds(len(seconds)):
        ratios[out] = terms[out] @ least_absolute(terms[~out], seconds[~out]) / seconds[out]
    return ratios


@dataclass
class Result:
    """Constants and their sources by section, lines of the error table, and errors by table and device."""

    values: dict[str, dict[str, tuple[float, str]]] = field(default_factory=dict[str, dict[str, tuple[float, str]]])
    lines: list[str] = field(default_factory=list[str])
    errors: dict[tuple[str, str], FloatArray] = field(default_factory=dict[tuple[str, str], FloatArray])

    def put(self, section: str, name: str, value: float, source: str) -> None:
        """One constant."""
        self.values.setdefault(section, {})[name] = (value, source)

    def line(self, table: str, device: str, ratios: FloatArray, how: str) -> None:
        """One line of the error table."""
        errors = self.errors[table, device] = np.abs(ratios - 1.0)
        self.lines.append(
            f"| {table} | {device} | {len(ratios)} | {errors.mean():.1%} | {np.median(errors):.1%} | "
            f"{np.quantile(errors, 0.9):.1%} | {np.median(ratios):.2f} | {how} |"
        )


def fit_f16(tables: Mapping[str, Measured], result: Result) -> None:
    """The f16 map of TPU v4: products."""
    coefficients: dict[str, FloatArray] = {}
    errors: list[FloatArray] = []
    how = f"{FOLDS}-fold cross-validated"
    for regime, size in zip(("128", "1024", "4096"), SIZES, strict=True):
        data = tables[regime]
        terms = f16_terms(data.products, array_work(data.products, data.machine, 0.0), data.peak, data.machine)
        own = f16_sizes(data.products, data.machine) == SIZES.index(size)
        chosen = [TERMS.index(name) for name in SIZE_TERMS[size]]
        terms = terms[:, chosen]
        found = least_absolute(terms[own], data.seconds[own])
        ratios = cross_validated(terms, data.seconds)
        result.line(f"products f16, regime {regime}", "tpu-v4", ratios, how)
        error = float(np.abs(ratios - 1.0).mean())
        source = f"fitted: tpu_v4_kernels regime {regime}; {len(ratios)} rows, {how} MAPE {error:.1%}"
        errors.append(ratios)
        coefficients[size] = np.zeros(len(TERMS))
        coefficients[size][chosen] = found
        for name, value in zip(SIZE_TERMS[size], found, strict=True):
            if value > 0:
                for section in ("tpu", "tpu-v4"):
                    result.put(section, f"f16.{size}.{name}", float(value), source)
    fit_relayout(tables["misaligned"], coefficients["streamed"], result)
    ranges(result, ("tpu", "tpu-v4"), "f16.product", np.concatenate(errors))


def fit_relayout(data: Measured, streamed: FloatArray, result: Result) -> None:
    """Array time spent again on misaligned wide results; the aligned products' coefficients stay."""
    terms = f16_terms(data.products, array_work(data.products, data.machine, 0.0), data.peak, data.machine)
    base, extra = terms @ streamed, terms[:, TERMS.index("relayout")]
    turned = turns(data.products)

    def fit(kept: BoolArray) -> float:
        rows = kept & turned
        return max(float(np.median((data.seconds[rows] - base[rows]) / extra[rows])), 0.0)

    ratios = np.zeros(len(base))
    for out in folds(len(base)):
        ratios[out] = (base[out] + fit(~out) * extra[out]) / data.seconds[out]
    how = f"{FOLDS}-fold cross-validated; the rule was drawn on the same rows"
    result.line("products f16, misaligned", "tpu-v4", ratios, how)
    result.line("the same without relayout", "tpu-v4", base / data.seconds, "check")
    error = float(np.abs(ratios - 1.0).mean())
    source = f"fitted: tpu_v4_kernels misaligned; {int(turned.sum())} of {len(base)} rows, MAPE of all {error:.1%}"
    for section in ("tpu", "tpu-v4"):
        result.put(section, "f16.streamed.relayout", fit(np.ones(len(base), dtype=np.bool_)), source)


def fit_vectors(tables: Tables, result: Result) -> None:
    """The f16 map of TPU v4: elementwise kernels."""
    kernels, seconds, series = tables.vectors()
    device = tables.catalogue.resolve("tpu-v4").device
    machine = array_machine(device)
    assert machine is not None
    terms = vector_terms(kernels, device, machine)
    ratios = cross_validated(terms, seconds)
    how = f"{FOLDS}-fold cross-validated"
    result.line("elementwise and activations f16", "tpu-v4", ratios, how)
    for name in dict.fromkeys(series):
        chosen = np.array([entry == name for entry in series])
        result.line(f"of these {name}", "tpu-v4", ratios[chosen], how)
    median = float(np.median(np.abs(ratios - 1.0)))
    source = f"fitted: tpu_v4_kernels elementwise; {len(seconds)} rows, {how} median error {median:.1%}"
    for name, value in zip(VECTOR_TERMS, least_absolute(terms, seconds), strict=True):
        for section in ("tpu", "tpu-v4"):
            result.put(section, f"f16.vector.{name}", float(value), source)
    ranges(result, ("tpu", "tpu-v4"), "f16.vector", ratios)


def ranges(result: Result, sections: Sequence[str], group: str, ratios: FloatArray) -> None:
    """Low and high: 10th and 90th percentile of measured over predicted."""
    low, high = np.quantile(1.0 / ratios, (0.1, 0.9))
    text = "10th and 90th percentile of measured / predicted"
    for section in sections:
        result.put(section, f"low.{group}", float(min(low, 0.97)), text)
        result.put(section, f"high.{group}", float(max(high, 1.03)), text)


def descend(tables: Sequence[Measured]) -> dict[str, float]:
    """Constants of the overlapped form: coordinate descent on multiplicative steps within `LIMITS`."""
    sampled = [table.pick(_sample(len(table.seconds))) for table in tables]

    def loss() -> float:
        logs = [np.minimum(np.abs(np.log(table.ratios(values))), _CAP).mean() for table in sampled]
        return float(np.mean(logs))

    values = dict(START)
    limits = {**LIMITS[""], **LIMITS[tables[0].device.kind]}
    values["launch"] = min(values["launch"], limits["launch"][1])
    best = loss()
    for step in _STEPS:
        for _ in range(12):
            before = best
            for name in values:
                best = _move(values, name, step, limits[name], best, loss)
            if before - best < 1e-5:
                break
    return values


def _sample(count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int64))


def _move(
    values: dict[str, float],
    name: str,
    step: float,
    limits: tuple[float, float],
    best: float,
    loss: Callable[[], float],
) -> float:
    low, high = limits
    for factor in (step, 1.0 / step):
        while True:
            kept = values[name]
            tried = min(max(kept * factor, low), high)
            if tried == kept or tried < 1e-4 * START[name]:
                break
            values[name] = tried
            found = loss()
            if found >= best:
                values[name] = kept
                break
            best = found
    return best


def fit_overlapped(tables: Sequence[Measured], sections: Sequence[str], text: str, result: Result) -> None:
    """Fits on all tables that are no check, and reports every one."""
    fitted = [table for table in tables if not table.check]
    values = descend(fitted)
    ratios = np.concatenate([table.ratios(values) for table in fitted])
    errors = np.abs(ratios - 1.0)
    source = f"fitted: {text}; {len(ratios)} rows, MAPE {errors.mean():.1%}, median {np.median(errors):.1%}"
    for section in sections:
        for name, value in values.items():
            result.put(section, name, value, source)
    for table in tables:
        how = "check: constants carried by ratio" if table.check else "in sample"
        result.line(f"{table.table} bf16".replace("bf16 bf16", "bf16"), table.device.name, table.ratios(values), how)
    ranges(result, sections, "product", np.concatenate([table.ratios(values) for table in fitted]))


def fit_all(folder: Path) -> Result:
    """Every map."""
    tables = Tables(folder)
    result = Result()
    for kind, assumed in ASSUMED.items():
        for name, (value, source) in assumed.items():
            result.put(kind, name, value, source)
    fit_f16(tables.tpu_v4(), result)
    fit_vectors(tables, result)
    fit_overlapped(tables.tpu_v6e(), ("tpu", "tpu-v6e"), "llmservingsim layers and tpu-recipes gemm of tpu-v6e", result)
    fit_overlapped(tables.xla("sm_90", "h100-sxm"), ("gpu", "sm_90"), "xla matmul bf16 of h100-sxm", result)
    fit_overlapped(tables.xla("sm_100_B200", "b200-sxm"), ("sm_100",), "xla matmul bf16 of b200-sxm", result)
    set_launches(tables, result)
    return result


def set_launches(tables: Tables, result: Result) -> None:
    """A GPU's launch is that of replayed graphs, as the analytical backend has it: XLA's table holds the host's."""
    for section, device in (("sm_80", "a100-sxm-80gb"), ("sm_90", "h100-sxm"), ("sm_100", "b200-sxm"), ("gpu", "")):
        found = (
            read_constants()["gpu"].constants if not device else constants_for(tables.catalogue.device(device)).by_name
        )
        result.put(section, "launch", found["launch"].value, f"as the analytical backend: {found['launch'].source}")


def check_attention(tables: Tables, path: Path, result: Result) -> None:
    """PyTorch/XLA's paged attention on TPU v6e: the only attention measured, which widens the range, no more.

    Its kernel gathers pages and runs several times longer than arrays and lanes need; fused attention was not measured.
    """
    device = tables.catalogue.resolve("tpu-v6e").device
    found: list[FloatArray] = []
    for phase, prefill in (("prefill", "True"), ("decode", "False")):
        kept = [r for r in tables.read("llmservingsim/tpu_v6e_attention.csv.gz") if r["is_prefill"] == prefill]
        made: list[KernelRow] = []
        for row in kept:
            queries = int(row["prefill_chunk_size"]) if phase == "prefill" else 1
            keys = queries + int(row["kv_cache_size"])
            made.append(specs.attention(device, "bf16", int(row["batch_size"]), 32, queries, keys, 128, 8, 1))
        seconds = np.array([float(row["p50_ns"]) * 1e-9 for row in kept])
        found.append(SystolicBackend(path).estimate(KernelTable.of(made), device).time_s / seconds)
        result.line(f"paged attention bf16, {phase}", "tpu-v6e", found[-1], "check")
    high = float(np.quantile(1.0 / found[0], 0.9))
    text = "90th percentile of measured / predicted for paged attention of PyTorch/XLA on tpu-v6e (prefill)"
    for section in ("tpu", "tpu-v6e"):
        result.put(section, "high.attention", max(high, 1.5), text)


def write(result: Result, path: Path) -> None:
    """The constants file: kinds, then architectures."""
    lines = ["# Written by benchmarks/fit_systolic.py; change that script or its tables, not this file."]
    for section in ("tpu", "gpu", *sorted(set(result.values) - {"tpu", "gpu"})):
        lines.append(f"{section}:")
        for name, (value, source) in sorted(result.values[section].items()):
            lines.append(f'  {name}: {{value: {value:.4g}, source: "{source}"}}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Fit, write, report."""
    parser = argparse.ArgumentParser(description="calibrate the systolic backend")
    parser.add_argument("--data", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--out", type=Path, default=CONSTANTS_FILE)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "systolic.md")
    options = parser.parse_args()
    result = fit_all(options.data)
    result.put("tpu", "high.attention", 1.5, "")
    write(result, options.out)
    check_attention(Tables(options.data), options.out, result)
    write(result, options.out)
    head = [
        "| table | device | rows | MAPE | median | p90 | predicted / measured | how |",
        "|---|---|---|---|---|---|---|---|",
    ]
    table = "\n".join(head + result.lines)
    print(table)
    if options.docs.exists():
        text = options.docs.read_text(encoding="utf-8")
        before, begin, rest = text.partition(_BEGIN)
        if begin:
            options.docs.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
