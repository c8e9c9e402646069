"""Every figure that the learned backend is held to: must, aim, ours and the peer on the same rows.

    python benchmarks/learned_figures.py [--data FOLDER] [--no-log] [--write]

Scores the suites that hold test sets once (each look is appended to `docs/accuracy_log.csv`), and reads the figures on
rows left out of training from the models' cards. `--write` puts the table into `docs/learned.md`.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.learned.calibration import Calibration, MeasuredGemm
from stablecast.backends.learned.rates import MODELS, read_measured
from stablecast.backends.registry import parse_choice
from stablecast.validation.accuracy import AccuracyReport, append_log, model_hash
from stablecast.validation.suites import SUITES, Data, Row, neusight_models
from stablecast.validation.suites.kernels import DEEPBENCH

ROOT = Path(__file__).parent.parent
ONE_GEMM = 4096
_START, _END = "<!-- figures -->\n", "<!-- end of figures -->"


@dataclass(frozen=True)
class Figure:
    """One line: what, targets in percent, errors (mean, median, p90, bias) and the peer's mean and median, as shares.

    `must` is None where the peer is to be beaten on the same rows, mean and median.
    """

    name: str
    must: float | None
    aim: float
    rows: int
    mean: float
    median: float
    p90: float
    bias: float
    peer: float | None = None
    peer_median: float | None = None
    on_median: bool = False

    @property
    def reached(self) -> str:
        """`aim`, `must` or `missed`, and on what it was missed."""
        value = 100 * (self.median if self.on_median else self.mean)
        if self.must is None:
            pairs = (("mean", self.mean, self.peer), ("median", self.median, self.peer_median))
            worse = [name for name, ours, theirs in pairs if theirs is not None and ours >= theirs]
            return f"missed: {' and '.join(worse)}" if worse else "aim" if value <= self.aim else "must"
        return "aim" if value <= self.aim else "must" if value <= self.must else "missed"

    def cells(self) -> list[str]:
        return [
            self.name,
            "peer" if self.must is None else f"{self.must:g}",
            f"{self.aim:g}",
            str(self.rows),
            *(f"{100 * x:.1f}" for x in (self.mean, self.median, self.p90)),
            f"{100 * self.bias:+.1f}",
            *("" if x is None else f"{100 * x:.1f}" for x in (self.peer, self.peer_median)),
            self.reached,
        ]


def of_rows(name: str, must: float | None, aim: float, rows: Iterable[Row]) -> list[Figure]:
    """The figure of scored rows; none where there are none."""
    own = list(rows)
    if not own:
        return []
    signed = np.array([row.predicted_s / row.measured_s - 1.0 for row in own])
    theirs = [abs(row.peer_predicted_s / row.measured_s - 1.0) for row in own if row.peer_predicted_s]
    error = np.abs(signed)
    peer = (float(np.mean(theirs)), float(np.median(theirs))) if theirs else (None, None)
    values = (float(error.mean()), float(np.median(error)), float(np.quantile(error, 0.9)), float(signed.mean()))
    return [Figure(name, must, aim, len(own), *values, *peer)]


def of_card(
    name: str, must: float, aim: float, key: str, *devices: str, part: str = "seen_devices", on_median: bool = False
) -> list[Figure]:
    """The figure of rows left out of training, from a model's card; devices weigh by their rows."""
    path = MODELS / f"{key}.json"
    if not path.is_file():
        return []
    card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    errors = [card[part][device] for device in devices if device in card[part]]
    if not errors:
        return []
    weight = np.array([entry["rows"] for entry in errors], dtype=float)
    means = [
        float(np.average([entry[x] for entry in errors], weights=weight)) for x in ("mape", "median", "p90", "bias")
    ]
    return [Figure(name, must, aim, int(weight.sum()), *means, on_median=on_median)]


def neusight(rows: Sequence[Row], one: Sequence[Row]) -> list[Figure]:
    """NeuSight's models, operators and kernels; `one`: with one measured product."""

    def model(group: str, device: str, of: Sequence[Row] = rows) -> list[Row]:
        return [row for row in of if row.group == group and row.device == device]

    def models(device: str) -> list[Row]:
        return model("model inf", device)

    found: list[Figure] = []
    for device, must, aim in (
        ("a100-pcie-40gb", 5, 3), ("v100-pcie", 5, 3), ("p100-pcie", 6.5, 5), ("t4", 8, 5), ("p4", 20, 10)
    ):  # fmt: skip
        found += of_rows(f"models, inference, {device}", must, aim, models(device))
    found += of_rows("models, inference, h100-sxm, data sheet", 9, 6, models("h100-sxm"))
    found += of_rows("models, training, h100-sxm, data sheet", 9, 6, model("model train", "h100-sxm"))
    found += of_rows("models, inference, h100-sxm, one product", 7, 4, model("model inf", "h100-sxm", one))
    found += of_rows("models, training, h100-sxm, one product", 9, 6, model("model train", "h100-sxm", one))
    found += of_rows("models, training, a100-pcie-80gb", 7.5, 6, model("model train", "a100-pcie-80gb"))
    for device in ("a100-pcie-40gb", "h100-sxm"):
        found += of_rows(f"models, compiled, {device}", 10, 7, model("model inf compiled", device))
    for device, must, aim in (("a100-sxm-40gb", 8, 5), ("h100-sxm", 6.5, 4)):
        found += of_rows(f"models on 4, {device}", must, aim, model("model train 4 GPUs", device))
    for device in ("mi100", "mi210", "mi250"):
        found += of_rows(f"models, inference, {device}", 8, 6, models(device))
        found += of_rows(f"models, training, {device}", 12, 9, model("model train", device))
    unseen = ("h100-sxm", "a100-pcie-80gb")
    for group, aim in (("linear", 10), ("bmm", 15), ("elementwise", 12), ("ln", 20), ("softmax", 14)):
        own = [row for row in rows if row.group == f"op {group}" and row.device in unseen]
        found += of_rows(f"operators of unseen GPUs, {group}", None, aim, own)
    for group, device, must, aim in (
        ("linear", "a100-pcie-80gb", 10, 6), ("linear", "h100-sxm", 14, 8),
        ("bmm", "a100-pcie-80gb", 12, 8), ("bmm", "h100-sxm", 18, 13),
    ):  # fmt: skip
        found += of_rows(f"kernels, {group}, {device}, data sheet", must, aim, model(f"kernel {group}", device))
    return found


def cards() -> list[Figure]:
    """Figures on rows left out of training."""
    sxm = ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm")
    return [
        *of_card("fp8 products, unseen (n, k)", 3, 2, "matmul-fp8-gpu", *sxm),
        *of_card("bf16 products, chip never seen", 12, 8, "matmul-half-gpu", *sxm, part="unseen_devices"),
        *of_card("attention, prefill, unseen shapes", 10, 6, "attention_prefill-half-gpu", *sxm),
        *of_card("attention, decode, unseen shapes", 10, 6, "attention_decode-half-gpu", *sxm),
        *of_card("mixtures of experts, unseen shapes", 10, 6, "moe-half-gpu", *sxm),
        *of_card("TPU v4 products, all regimes", 5.5, 4.5, "matmul-half-tpu", "tpu-v4"),
        *of_card("TPU v6e products", 12, 5, "matmul-half-tpu", "tpu-v6e"),
        *of_card("TPU v6e decode", 4, 2, "attention_decode-half-tpu", "tpu-v6e"),
        *of_card("TPU v6e prefill", 6, 4, "attention_prefill-half-tpu", "tpu-v6e"),
        *of_card(
            "convolutions, unseen shapes (NeuSight)",
            15,
            10,
            "conv-fp32-gpu",
            "p4",
            "p100-pcie",
            "v100-pcie",
            "t4",
            "a100-pcie-80gb",
        ),
        *of_card("convolutions, unseen shapes (DeepBench, fp32)", 15, 10, "conv-fp32-gpu", *DEEPBENCH.values()),
        *of_card("convolutions, unseen shapes (DeepBench, fp16)", 15, 10, "conv-half-gpu", "v100-sxm2"),
        *of_card("TPU v4 elementwise (median)", 1.5, 1, "elementwise-half-tpu", "tpu-v4", on_median=True),
        *tables(),
    ]


def tables() -> list[Figure]:
    """Figures by table, which the cards keep apart."""
    found: list[Figure] = []
    wanted: tuple[tuple[str, float, float, str, Callable[[str], bool], bool], ...] = (
        ("bf16 products, unseen (n, k)", 4.5, 3, "matmul-half-gpu", lambda t: t.startswith("aiconfigurator"), False),
        ("fp16 layers, unseen model (Vidur)", 8, 5, "matmul-half-gpu", lambda t: t.startswith("vidur"), False),
        ("TPU v4 products to 128", 2.5, 1.8, "matmul-half-tpu", lambda t: t == "tpu_v4 products to 128", False),
        ("TPU v4 products to 1024", 5.5, 4.5, "matmul-half-tpu", lambda t: t == "tpu_v4 products to 1024", False),
        ("TPU v4 products to 4096", 6, 5, "matmul-half-tpu", lambda t: t == "tpu_v4 products to 4096", False),
        ("TPU v4 products, misaligned", 16, 10, "matmul-half-tpu", lambda t: t == "tpu_v4 products misaligned", False),
        (
            "TPU v4 elementwise, of known shape (median)",
            1.5,
            1,
            "elementwise-half-tpu",
            lambda t: t == "tpu_v4 elementwise",
            True,
        ),
    )
    for name, must, aim, key, want, on_median in wanted:
        path = MODELS / f"{key}.json"
        if not path.is_file():
            continue
        own = [
            entry for entry in json.loads(path.read_text(encoding="utf-8")).get("by_table", ()) if want(entry["table"])
        ]
        if own:
            weight = [entry["rows"] for entry in own]
            means = [float(np.average([e[x] for e in own], weights=weight)) for x in ("mape", "median", "p90", "bias")]
            found.append(Figure(name, must, aim, sum(weight), *means, on_median=on_median))
    return found


def llmcompass(rows: Sequence[Row]) -> list[Figure]:
    """LLMCompass, test only; its own error is published, not in the data."""
    operators = [row for row in rows if row.group != "gpt3 layer"]
    layer = [row for row in rows if row.group == "gpt3 layer"]
    return [
        *of_rows("LLMCompass operators (peer 10.9 published)", 9, 6, operators),
        *of_rows("GPT-3 layer, tensor parallel 4", 6, 4, layer),
    ]


def one_product(folder: Path) -> Calibration:
    """The 4096^3 product of H100's test table, without what its way of timing adds; left out of every score."""
    sizes = {name: str(ONE_GEMM) for name in "mnk"}
    for record in Data(folder, parse_choice("learned")).read("neusight/test_matmul.csv.gz"):
        same = all(record[name] == size for name, size in sizes.items()) and float(record["batch"]) == 1
        if same and record["device"].startswith("H100") and record["op"] == "linear":
            extra = read_measured().extra_s("neusight linear", Catalogue().device("h100-sxm"))
            time = float(record["latency_ms"]) * 1e-3 - extra
            return Calibration((MeasuredGemm(ONE_GEMM, ONE_GEMM, ONE_GEMM, 1, "fp32", time, "h100-sxm"),))
    return Calibration()


def with_one_product(folder: Path) -> AccuracyReport:
    """Whole models again, H100's clock from one measured product."""
    data = Data(folder, parse_choice("learned"))
    data.calibrate([one_product(folder)])
    rows = tuple(neusight_models.model_rows(data))
    return AccuracyReport(rows, "learned+one-product", {}, tuple(data.notes), data.hashes, model_hash())


def without_programs(folder: Path, rows: int) -> AccuracyReport:
    """NeuSight's tables and graphs, and LLMCompass; captured programs have suites of their own."""
    scored: list[Row] = []
    notes: list[str] = []
    hashes: dict[str, str] = {}
    for score in (_neusight_rows, SUITES["llmcompass"].run):
        data = Data(folder, parse_choice("learned"), rows)
        scored += score(data)
        notes += data.notes
        hashes |= data.hashes
    return AccuracyReport(tuple(scored), "learned", {}, tuple(notes), hashes, model_hash())


def _neusight_rows(data: Data) -> list[Row]:
    parts = (neusight_models.kernel_rows, neusight_models.operator_rows, neusight_models.model_rows)
    return [row for part in parts for row in part(data)]


def ranges() -> str:
    """How often ranges of 80 % held rows left out, by family and device of 50 rows or more; those out of bounds."""
    low, high, widest, least = 0.75, 0.90, 0.15, 50
    found: list[tuple[str, str, float, float]] = []
    for path in sorted(MODELS.glob("*.json")):
        card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for device, entry in card.get("coverage", {}).items():
            if entry["rows"] >= least:
                found.append((path.stem, device, entry["covered"], entry["half_width"]))
    held = sum(low <= covered <= high for _, _, covered, _ in found)
    narrow = sum(width <= widest for *_, width in found)
    lines = [
        f"ranges of 80 %: {held} of {len(found)} pairs of model and device hold 75 to 90 % of the rows left out, "
        f"{narrow} at a median half width of 15 % or less; the others:",
        *(
            f"  {key} on {device}: {covered:.1%} within, half width {width:.1%}"
            for key, device, covered, width in found
            if not low <= covered <= high or width > widest
        ),
    ]
    return "\n".join(lines)


def show(figures: Sequence[Figure]) -> str:
    head = ["figure", "must", "aim", "rows", "mean", "median", "p90", "bias", "peer", "its median", "reached"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(figure.cells()) + " |" for figure in figures)]) + "\n"


def main() -> None:
    """Score, log, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--no-log", action="store_true", help="for tests of this script on other data")
    parser.add_argument("--rows", type=int, default=4000, help="rows of one kernel table and device")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    log = None if given.no_log else ROOT / "docs" / "accuracy_log.csv"
    reports = [
        without_programs(given.data, given.rows),
        with_one_product(given.data),
    ]
    for report in reports if log else ():
        append_log(report, log)
    rows = [row for row in reports[0].rows if row.suite == "neusight"]
    figures = [
        *neusight(rows, reports[1].rows),
        *llmcompass([row for row in reports[0].rows if row.suite == "llmcompass"]),
        *cards(),
    ]
    text = show(figures)
    print(f"models {reports[0].models}\n\n{text}\n{ranges()}")
    if given.write:
        page = ROOT / "docs" / "learned.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(_START)
        page.write_text(before + _START + text + rest[rest.index(_END) :], encoding="utf-8")


if __name__ == "__main__":
    main()
