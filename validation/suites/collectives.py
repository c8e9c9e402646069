"""Collectives of one node and of racks: NCCL tables, XLA's tables, Vidur's and LLMCompass's all-reduces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stablecast.backends.collectives import CollectiveModel
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups
from stablecast.validation.suites.base import Data, Record, Row, is_fitted, number, whole

_MICRO: Final = 1e-6
_MILLI: Final = 1e-3
_NCCL: Final[Mapping[str, str]] = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "gb200": "gb200",
}
_XLA: Final[Mapping[str, str]] = {
    "sm_90": "h100-sxm",
    "sm_100_B200": "b200-sxm",
    "sm_100_GB200": "gb200",
    "sm_103": "gb300",
    "gfx950": "mi355x",
}
_KINDS: Final[Mapping[str, str]] = {"alltoall": "all_to_all", "all-to-all": "all_to_all"}
_VIDUR: Final[Mapping[str, str]] = {"a100_dgx": "a100-sxm-80gb"}


@dataclass(frozen=True, slots=True)
class Message:
    """One measured collective; `nbytes` as tables are made: of an all-gather the result, else one device's operand."""

    kind: str
    count: int
    size: int
    nbytes: float
    measured_s: float
    rounding_s: float | None = None


def run(data: Data) -> list[Row]:
    """Every row of the suite."""
    rows: list[Row] = []
    for name, device in _NCCL.items():
        messages = [
            _nccl(record) for record in data.read(f"aiconfigurator/nccl_{name}.csv.gz") if record["dtype"] == "half"
        ]
        rows += _rows(data, device, messages, "nccl", "aiconfigurator nccl")
    records = data.read("xla_perf_tables/collectives.csv.gz")
    for key, device in _XLA.items():
        own = [
            record
            for record in records
            if record["device_key"] == key and record["devices_per_group"] and number(record, "latency_us")
        ]
        rows += _rows(data, device, [_xla(record) for record in own], "xla", "xla collectives")
    records = data.read("vidur/collectives.csv.gz")
    for node, device in _VIDUR.items():
        own = [record for record in records if record["node"] == node and record["collective"] == "all_reduce"]
        inside = [record for record in own if record["num_workers"] == record["devices_per_node"]]
        inside = _possible(data, device, inside)
        rows += _rows(
            data,
            device,
            [_vidur(record) for record in data.thinned(inside, f"vidur collectives on {node}")],
            "vidur",
            "",
        )
    compass = [_compass(record) for record in data.read("llmcompass/allreduce_4xA100.csv")]
    rows += _rows(data, "a100-sxm-80gb", compass, "llmcompass", "")
    return rows


def _possible(data: Data, device: str, records: Sequence[Record]) -> Sequence[Record]:
    """Without all-reduces that would move more bytes than the links of the data sheet can carry."""
    rate = data.catalogue.device(device).scaleup_bytes_per_s
    messages = [_vidur(record) for record in records]
    kept = [
        record
        for record, m in zip(records, messages, strict=True)
        if rate is None or 2 * (m.size - 1) / m.size * m.nbytes / m.measured_s <= rate.value
    ]
    if len(kept) < len(records):
        out = len(records) - len(kept)
        data.notes.append(
            f"vidur collectives: {out} rows on {device} are left out, faster than its links "
            "(half the stated bytes would agree with the other tables)"
        )
    return kept


def _nccl(record: Record) -> Message:
    kind = _KINDS.get(record["collective"], record["collective"])
    ranks = whole(record, "num_gpus")[0]
    return Message(kind, 1, ranks, number(record, "bytes"), number(record, "latency_us") * _MICRO)


def _xla(record: Record) -> Message:
    kind = record["opcode"].replace("-", "_")
    groups, ranks = whole(record, "num_groups", "devices_per_group")
    return Message(kind, groups, ranks, number(record, "tensor_bytes"), number(record, "latency_us") * _MICRO)


def _vidur(record: Record) -> Message:
    ranks = whole(record, "num_workers")[0]
    return Message("all_reduce", 1, ranks, number(record, "bytes"), number(record, "median_ms") * _MILLI)


def _compass(record: Record) -> Message:
    return Message("all_reduce", 1, 4, number(record, "bytes"), number(record, "latency_us") * _MICRO)


def _rows(data: Data, device: str, messages: Sequence[Message], group: str, fitted: str) -> list[Row]:
    seen = bool(fitted) and is_fitted(fitted)
    sets: dict[tuple[str, int, int], list[Message]] = {}
    for message in messages:
        sets.setdefault((message.kind, message.count, message.size), []).append(message)
    rows: list[Row] = []
    for (kind, count, size), own in sets.items():
        try:
            model = CollectiveModel(data.catalogue.resolve(f"{device}:{count * size}"))
            groups = Groups(count, size, (count, size), (0, 1))
            time, low, high, algorithm = model.times(kind, groups, np.array([message.nbytes for message in own]))
        except InputError as error:
            data.notes.append(f"{group} {kind} of {count}x{size} on {device} is left out: {error.message}")
            continue
        rows += [
            Row(
                "collectives",
                f"{kind} {count}x{size} {int(message.nbytes)} B",
                device,
                message.measured_s,
                float(time[place]),
                float(low[place]),
                float(high[place]),
                group=f"{group} {kind}",
                in_sample=seen,
                key=f"{group} {kind} {count}x{size} {int(message.nbytes)}",
                basis=algorithm,
            )
            for place, message in enumerate(own)
        ]
    return rows
