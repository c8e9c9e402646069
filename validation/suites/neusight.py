"""NeuSight: kernels of its test tables, operators within models, and whole models from their operator graphs.

FP32 with TF32 off, eager PyTorch, one GPU. Whole models are summed from the peer's own operator graph (`path` is
`table`), forward only or forward and backward as the label says; a node that only moves a scalar costs nothing there.
"""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from stablecast.backends import kernel_specs as specs
from stablecast.backends.device import Device
from stablecast.backends.pricing import price
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.validation.suites import neusight_programs
from stablecast.validation.suites.base import Case, Data, Record, Row, is_fitted, number, whole

DEVICES: Final[Mapping[str, str]] = {
    "P4": "p4",
    "P100-PCIe-16GB": "p100-pcie",
    "V100-PCIe-32GB": "v100-pcie",
    "T4": "t4",
    "A100-PCIe-40GB": "a100-pcie-40gb",
    "A100-PCIe-80GB": "a100-pcie-80gb",
    "A100-SXM-40GB": "a100-sxm-40gb",
    "H100-SXM-80GB": "h100-sxm",
    "MI100": "mi100",
    "MI210": "mi210",
    "MI250": "mi250",
}
PEERS: Final = ("neusight", "roofline", "habitat", "micro")
_BINARY: Final = frozenset({"add", "mul", "div", "pow"})
_TRANSCENDENTAL: Final[Mapping[str, int]] = {"gelu": 1, "tanh": 1, "pow": 1, "powu": 1}
_MILLI: Final = 1e-3
_WORTH_A_KERNEL: Final = 64

Part = tuple[str, Sequence[Any]]


def run(data: Data) -> list[Row]:
    """Every row of the suite."""
    programs = neusight_programs.run(data, DEVICES)
    return [*kernel_rows(data), *operator_rows(data), *model_rows(data), *programs]


def plain(row: KernelRow) -> KernelRow:
    """The same product without TF32."""
    return replace(row, math="fp32")


def kernel_rows(data: Data) -> list[Row]:
    """The peer's kernel test tables."""
    tables = (
        ("neusight/test_matmul.csv.gz", product),
        ("neusight/amd_test_matmul.csv.gz", product),
        ("neusight/test_vector.csv.gz", vector),
    )
    rows: list[Row] = []
    for path, make in tables:
        records = data.read(path)
        for name, device in DEVICES.items():
            chosen = [record for record in records if record["device"] == name]
            rows += data.kernels("neusight", device, data.thinned(chosen, f"{path} on {device}"), make)
    rows += data.kernels("neusight", "h100-sxm", data.read("neusight/h100_fp16_bmm.csv"), half_product)
    return rows


def product(device: Device, record: Record) -> Case:
    """A row of a matmul table."""
    batch, m, n, k = whole(record, "batch", "m", "n", "k")
    kind = record["op"]
    row = specs.matmul(device, "f32", m, n, k, batch) if kind == "bmm" else specs.matmul(device, "f32", batch * m, n, k)
    item = f"{kind} {batch}x{m}x{n}x{k} f32"
    return Case(item, plain(row), number(record, "latency_ms") * _MILLI, f"kernel {kind}")


def half_product(device: Device, record: Record) -> Case:
    """A row of the FP16 table, which holds the peer's own prediction."""
    batch, m, n, k = whole(record, "batch", "m", "n", "k")
    peers = {"neusight": number(record, "neusight_pred_ms") * _MILLI}
    row = specs.matmul(device, "f16", m, n, k, batch)
    return Case(f"bmm {batch}x{m}x{n}x{k} f16", row, number(record, "latency_ms") * _MILLI, "kernel bmm f16", peers)


def vector(device: Device, record: Record) -> Case:
    """A row of a vector table."""
    rows, columns = whole(record, "rows", "cols")
    kind = record["op"]
    group = f"kernel {kind}" if kind in ("softmax", "ln") else "kernel elementwise"
    return Case(
        f"{kind} {rows}x{columns} f32",
        vector_row(device, kind, rows, columns),
        number(record, "latency_ms") * _MILLI,
        group,
    )


def vector_row(device: Device, kind: str, rows: int, columns: int) -> KernelRow:
    """The kernel of one of the peer's vector operators."""
    if kind == "softmax":
        return specs.softmax(device, "f32", rows, columns)
    if kind == "ln":
        return specs.layernorm(device, "f32", rows, columns)
    inputs = 2 if kind in _BINARY else 1
    return specs.elementwise(device, "f32", rows, columns, inputs, _TRANSCENDENTAL.get(kind, 0))


def operator_rows(data: Data) -> list[Row]:
    """Operators of models, forward, with every peer's prediction beside them; sizes are those of the operator graph."""
    parts = {
        (record["config"], record["Name"]): found[0]
        for record in data.read("neusight/opgraphs.csv.gz")
        if len(found := _parts(record["FwOps"])) == 1
    }

    def make(device: Device, record: Record) -> Case | None:
        part = parts.get((_config(record), record["node"]))
        row = part_row(device, part) if part is not None and part[0] != "MEM" else None
        return None if part is None or row is None else _operator(record, part[0], row)

    rows: list[Row] = []
    records = data.read("neusight/per_op_labels.csv.gz")
    for name, device in DEVICES.items():
        rows += data.kernels("neusight", device, [record for record in records if record["device"] == name], make)
    return rows


_GROUPS: Final[Mapping[str, str]] = {
    "Linear": "op linear",
    "BMM": "op bmm",
    "VECln": "op ln",
    "VECsoftmax": "op softmax",
}


def _config(record: Record) -> str:
    sequence, batch = whole(record, "seqlen", "batch")
    return f"{record['model']}-{record['mode']}-{sequence}-{batch}"


def _operator(record: Record, kind: str, row: KernelRow) -> Case:
    peers = {name: number(record, f"{name}_fw_ms") * _MILLI for name in PEERS if number(record, f"{name}_fw_ms") > 0}
    item = f"{_config(record)} {record['node']}"
    return Case(item, row, number(record, "fw_ms") * _MILLI, _GROUPS.get(kind, "op elementwise"), peers)


@dataclass(frozen=True, slots=True)
class Graph:
    """A model's operators: parts of the forward and of the backward pass with how often each runs."""

    forward: tuple[tuple[Part, int], ...]
    backward: tuple[tuple[Part, int], ...]


def model_rows(data: Data) -> list[Row]:
    """Whole models on one GPU, eager: the peer's operator graph, each node as often as the model has it."""
    labels = data.read("neusight/e2e_labels.csv")
    if not labels:
        return []
    graphs = read_graphs(data)
    rows: list[Row] = []
    for record in labels:
        device = DEVICES.get(record["device"], "")
        key = _config(record)
        if record["option"] or not device or key not in graphs:
            continue
        row = _model_row(data, record, device, graphs[key], key)
        rows += [row] if row else []
    return rows


def _model_row(data: Data, record: Record, device: str, graph: Graph, key: str) -> Row | None:
    found = data.catalogue.device(device)
    parts = [*graph.forward, *(graph.backward if record["mode"] == "train" else ())]
    kernels = [(kernel, count) for part, count in parts if (kernel := part_row(found, part)) is not None]
    counts = np.array([count for _, count in kernels], dtype=np.float64)
    try:
        estimates = price(KernelTable.of([kernel for kernel, _ in kernels]), found, data.choice).estimates
    except InputError as error:
        data.notes.append(f"neusight {key} on {device} is left out: {error.message}")
        return None
    times = [float((column * counts).sum()) for column in (estimates.time_s, estimates.low_s, estimates.high_s)]
    peers = {name: number(record, f"{name}_e2e_ms") * _MILLI for name in PEERS if record.get(f"{name}_e2e_ms")}
    return Row(
        "neusight",
        key,
        device,
        number(record, "e2e_ms") * _MILLI,
        *times,
        peer="neusight",
        peer_predicted_s=peers.get("neusight"),
        peers=peers,
        group=f"model {record['mode']}",
        in_sample=is_fitted("neusight e2e"),
        key=key,
        basis=str(estimates.source[0]),
    )


def read_graphs(data: Data) -> dict[str, Graph]:
    """Operator graphs by configuration; a node's repetition comes from the per-operator labels of the same model."""
    repeats: dict[tuple[str, str, str], int] = {}
    for record in data.read("neusight/per_op_labels.csv.gz"):
        repeats[record["model"], record["mode"], record["node"]] = whole(record, "repeat")[0]
    forward: dict[str, list[tuple[Part, int]]] = {}
    backward: dict[str, list[tuple[Part, int]]] = {}
    for record in data.read("neusight/opgraphs.csv.gz"):
        config = record["config"]
        fields = config.split("-")
        if len(fields) != 4:
            continue
        count = repeats.get((fields[0], fields[1], record["Name"]))
        if count is None:
            continue
        forward.setdefault(config, []).extend((part, count) for part in _parts(record["FwOps"]))
        later = [*_parts(record["BwOps"]), *_parts(record["AccOps"])]
        backward.setdefault(config, []).extend((part, count) for part in later)
    return {key: Graph(tuple(found), tuple(backward.get(key, ()))) for key, found in forward.items()}


def _parts(text: str) -> list[Part]:
    return [(str(kind), dims) for kind, dims in ast.literal_eval(text or "[]")]


def part_row(device: Device, part: Part) -> KernelRow | None:
    """The kernel of one part of a node; None for what only concerns the host."""
    kind, dims = part
    if kind == "Linear":
        m, k, n = dims
        return plain(specs.matmul(device, "f32", m, n, k))
    if kind == "BMM":
        batch, m, k, n = dims
        return plain(specs.matmul(device, "f32", m, n, k, batch))
    if kind == "MEM":
        elements = sum(math.prod(shape) for shape in dims)
        return specs.elementwise(device, "f32", elements, 1, 0) if elements >= _WORTH_A_KERNEL else None
    if kind.startswith("VEC"):
        rows, columns = dims
        return vector_row(device, kind.removeprefix("VEC"), rows, columns)
    return None


def peer_errors(labels: Sequence[Record]) -> dict[tuple[str, str], float]:
    """The peer's own mean error by device and kind of label, percent, from its predictions in the labels."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in labels:
        if record.get("neusight_e2e_ms"):
            error = abs(number(record, "neusight_e2e_ms") / number(record, "e2e_ms") - 1.0)
            found.setdefault((record["device"], record["kind"]), []).append(error)
    return {key: 100.0 * sum(errors) / len(errors) for key, errors in found.items()}
