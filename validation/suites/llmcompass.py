"""LLMCompass: FP16 operators on an A100 and an MI210, and one layer of GPT-3 on four A100, summed from its operators.

Operators were timed on the host, alone and in the layer (its norms take 48 us for 8 tokens as for one); what
that adds is the authors' own correction for the A100, which serves the MI210 too. Nothing is fitted on them.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from stablecast.backends import kernel_specs as specs
from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.device import Device
from stablecast.backends.pricing import price
from stablecast.ir.groups import all_devices
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.validation.suites.base import Case, Data, Record, Row, number, whole

_MILLI: Final = 1e-3
_HOST_S: Final[Mapping[str, float]] = {"softmax": 12e-6, "layernorm": 45e-6, "gelu": 45e-6, "matmul": 21e-6}
_DEVICES: Final = (("A100", "a100-sxm-80gb"), ("MI210", "mi210"))
_LAYER_HOST_S: Final = 6 * _HOST_S["matmul"] + _HOST_S["softmax"] + 2 * _HOST_S["layernorm"] + _HOST_S["gelu"]
_WIDTH, _HEADS, _BATCH, _WORKERS = 12288, 96, 8, 4
_PROMPT, _CONTEXT = 2048, 3072
_SYSTEM: Final = "hgx4-a100-80gb"


def run(data: Data) -> list[Row]:
    """Operators, then the layer: prefill of 2048 tokens and one decoded token at context 3072, batch 8."""
    records = data.read("llmcompass/ops.csv")
    rows: list[Row] = []
    for name, device in _DEVICES:
        rows += data.kernels(
            "llmcompass", device, [record for record in records if record["device"] == name], _operator
        )
    return [*rows, *_layer_rows(data)]


def _operator(device: Device, record: Record) -> Case | None:
    m, n, k = whole(record, "m", "n", "k")
    kind = record["op"]
    if record["dtype"] != "fp16":
        return None  # the source does not say which type ran
    if kind == "matmul":
        row = specs.matmul(device, "f16", m, n, k)
    elif kind == "softmax":
        row = specs.softmax(device, "f16", m, n)
    elif kind == "layernorm":
        row = specs.layernorm(device, "f16", m, n)
    else:
        row = specs.elementwise(device, "f16", m, max(n, 1), 1, 1)
    return Case(f"{kind} {m}x{n}x{k} f16", row, number(record, "latency_ms") * _MILLI, kind, extra_s=_HOST_S[kind])


def _layer_rows(data: Data) -> list[Row]:
    records = data.read("llmcompass/gpt3_layer_tp4.csv")
    rows: list[Row] = []
    for phase in ("prefill", "decode") if records else ():
        measured = sum(number(record, "latency_ms") for record in records if record["phase"] == phase) * _MILLI
        system = data.catalogue.resolve(_SYSTEM)
        kernels = _layer(system.device, 1 if phase == "decode" else _PROMPT, _CONTEXT if phase == "decode" else _PROMPT)
        estimates = price(KernelTable.of(kernels), system.device, data.choice).estimates
        tokens = _BATCH * (1 if phase == "decode" else _PROMPT)
        nbytes = np.array([2.0 * tokens * _WIDTH] * 2)
        sums = CollectiveModel(system).times("all_reduce", all_devices(_WORKERS), nbytes)[:3]
        columns = (estimates.time_s, estimates.low_s, estimates.high_s)
        time, low, high = (
            float(own.sum() + both.sum()) + _LAYER_HOST_S for own, both in zip(columns, sums, strict=True)
        )
        item = f"GPT-3 layer, tensor parallel 4, {phase}"
        row = Row("llmcompass", item, system.device.name, measured, time, low, high, group="gpt3 layer", key=item)
        rows.append(row)
    return rows


def _layer(device: Device, queries: int, keys: int) -> list[KernelRow]:
    tokens, local, heads = _BATCH * queries, _WIDTH // _WORKERS, _BATCH * _HEADS // _WORKERS
    d = _WIDTH // _HEADS
    return [
        specs.matmul(device, "f16", tokens, 3 * local, _WIDTH),
        specs.matmul(device, "f16", queries, keys, d, heads),
        specs.matmul(device, "f16", queries, d, keys, heads),
        specs.matmul(device, "f16", tokens, _WIDTH, local),
        specs.matmul(device, "f16", tokens, 4 * local, _WIDTH),
        specs.matmul(device, "f16", tokens, _WIDTH, 4 * local),
        specs.softmax(device, "f16", heads * queries, keys),
        specs.layernorm(device, "f16", tokens, _WIDTH),
        specs.layernorm(device, "f16", tokens, _WIDTH),
        specs.elementwise(device, "f16", tokens, 4 * local, 1, 1),
    ]
