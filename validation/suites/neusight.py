"""NeuSight: the kernels of its tables, FP32 with TF32 off; its models are in `neusight_models`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from stablecast.backends import kernel_specs as specs
from stablecast.backends.device import Device
from stablecast.backends.learned.rates import read_measured
from stablecast.ir.kernels import KernelRow
from stablecast.validation.suites.base import Case, Data, Record, Row, number, whole

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


def _timing_s(kind: str, device: Device) -> float:
    """What the table's way of timing adds to a kernel of a kind on a device, worked out once."""
    key = (kind, device.name)
    if key not in _TIMING_S:
        _TIMING_S[key] = read_measured().extra_s(f"neusight {kind}", device)
    return _TIMING_S[key]


_TIMING_S: Final[dict[tuple[str, str], float]] = {}


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
    return Case(
        item,
        plain(row),
        number(record, "latency_ms") * _MILLI,
        f"kernel {kind}",
        extra_s=_timing_s(kind, device),
    )


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
        extra_s=_timing_s(kind, device),
    )


def vector_row(device: Device, kind: str, rows: int, columns: int) -> KernelRow:
    """The kernel of one of the peer's vector operators."""
    if kind == "softmax":
        return specs.softmax(device, "f32", rows, columns)
    if kind == "ln":
        return specs.layernorm(device, "f32", rows, columns)
    inputs = 2 if kind in _BINARY else 1
    return specs.elementwise(device, "f32", rows, columns, inputs, _TRANSCENDENTAL.get(kind, 0))


def peer_errors(labels: Sequence[Record]) -> dict[tuple[str, str], float]:
    """The peer's own mean error by device and kind of label, percent, from its predictions in the labels."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in labels:
        if record.get("neusight_e2e_ms"):
            error = abs(number(record, "neusight_e2e_ms") / number(record, "e2e_ms") - 1.0)
            found.setdefault((record["device"], record["kind"]), []).append(error)
    return {key: 100.0 * sum(errors) / len(errors) for key, errors in found.items()}
