"""`LearnedBackend`: a physical base, corrected by models that were trained on public measurements."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from stablecast.backends.analytical import AnalyticalBackend
from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, Estimates, FloatArray, Source, TextArray
from stablecast.backends.learned import frame
from stablecast.backends.learned.distinct import IndexArray, distinct
from stablecast.backends.learned.rates import MODELS, Rates, rates_for
from stablecast.backends.learned.store import UNSEEN, Model, key_of, read_model
from stablecast.ir.kernels import KernelTable

_CORRECTION_MAX: Final = 3.0
_HALVINGS: Final = 24
_SHORT: Final = 8.0
Grouping = Callable[[KernelTable, Device], Iterator[tuple[Model, BoolArray]]]


@dataclass(frozen=True, slots=True)
class LearnedBackend:
    """Time = base x exp(correction): `frame.base_of`, and boosted trees over dimensionless features.

    One model a kind of kernel, numeric family and kind of device. What has none is not covered and falls to the
    analytical backend. Times are those of a kernel among others on the device's own clock, one launch included, as
    when replayed from a graph; what a host adds between eager kernels is not in them.

    A device that the models have not seen takes its sustained clock from the frozen rule (or its own calibration), a
    damped correction, and a wider range. Rows outside of what was seen are flagged (`detail`) and widened.

    `folder`: where the models lie.
    """

    folder: Path = MODELS
    name: str = "learned"

    def covers(self, kernels: KernelTable, device: Device) -> BoolArray:
        """Rows that have a model and a peak on `device`."""
        found = np.zeros(len(kernels), dtype=np.bool_)
        for _, mask in self._groups(kernels, device):
            found |= mask
        return found & AnalyticalBackend().covers(kernels, device)

    def estimate(self, kernels: KernelTable, device: Device) -> Estimates:
        """Times of all rows; those without a model get the base alone, with the analytical source."""
        rates = rates_for(device, self.folder)
        priced = _price(self._groups, kernels, device, rates)
        time = self._never_faster(kernels, device, rates, priced)
        low = np.minimum(np.maximum(time * np.exp(priced.low), priced.floor_s), time)
        high = np.maximum(time * np.exp(priced.high), time)
        return Estimates(time, low, high, priced.source, priced.bound)

    def _never_faster(self, kernels: KernelTable, device: Device, rates: Rates, whole: "_Priced") -> FloatArray:
        """No less than the time of half the batch, of a quarter and so on while kernels stay short.

        Trees step up and down; where work outweighs the launch eight times, half of it takes less by 1.8 times in the
        base, and they do not step as far. Kernels that halving makes equal are priced once.
        """
        halvings: list[_Halving] = []
        index = np.flatnonzero(whole.time_s < _SHORT * whole.launch_s)
        time, table = whole.time_s.copy(), _rows_of(kernels, index)
        while len(halvings) < _HALVINGS and (found := _half_batch(table)) is not None:
            first, position = distinct(found[1])
            index, table = index[found[0]], _rows_of(found[1], first)
            before = _price(self._groups, table, device, rates)
            halvings.append(_Halving(index, position, before.time_s))
            index = np.flatnonzero(before.time_s < _SHORT * before.launch_s)
            table = _rows_of(table, index)
        for number, half in reversed([*enumerate(halvings)]):
            above = halvings[number - 1].time_s if number else time
            above[half.index] = np.maximum(above[half.index], half.time_s[half.position])
        return time

    def detail(self, kernels: KernelTable, device: Device) -> Mapping[str, FloatArray]:
        """`outside_domain`: 1 for rows unlike all that the model has seen; `device_seen`: 1 where it has seen the
        device."""
        outside, seen = np.full(len(kernels), np.nan), np.full(len(kernels), np.nan)
        base = frame.base_of(kernels, device, rates_for(device, self.folder))
        for model, mask in self._groups(kernels, device):
            columns = frame.features(model.key.partition("-")[0], kernels, base, mask, device)
            outside[mask] = model.outside(columns) > 0
            seen[mask] = float(device.name in model.devices)
        return {"outside_domain": outside, "device_seen": seen}

    def assumptions(self, device: Device) -> tuple[str, ...]:
        """What its numbers take for granted, one sentence each."""
        rates = rates_for(device, self.folder)
        found = [
            f"{family}: {share.value:.0%} of the peak sustained ({share.source})"
            for family, share in rates.shares.items()
        ]
        return (
            *found,
            "learned: kernel times as replayed from a graph, one launch included; no host time between kernels",
        )

    def _groups(self, kernels: KernelTable, device: Device) -> Iterator[tuple[Model, BoolArray]]:
        kind = frame.kinds(kernels)
        family = frame.families(kernels, kind)
        for of_kind in np.unique(kind):
            for of_family in np.unique(family[kind == of_kind]):
                if of_kind and of_family:
                    model = self._model(str(of_kind), str(of_family), device.kind)
                    if model is not None:
                        yield model, (kind == of_kind) & (family == of_family)

    def _model(self, kind: str, family: str, platform: str) -> Model | None:
        """The model of a kind and family; streams of 16 bits without one borrow that of 32, as on an unseen device."""
        model = read_model(key_of(kind, family, platform), self.folder)
        if model is None and family == "half" and kind in frame.STREAMS:
            borrowed = read_model(key_of(kind, "fp32", platform), self.folder)
            return (
                replace(borrowed, devices=(), low=_unseen(borrowed.low), high=_unseen(borrowed.high))
                if borrowed
                else None
            )
        return model


def _unseen(by_device: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    return {UNSEEN: by_device[UNSEEN]}


@dataclass(frozen=True, slots=True)
class _Priced:
    time_s: FloatArray
    launch_s: FloatArray
    low: FloatArray
    high: FloatArray
    floor_s: FloatArray
    source: TextArray
    bound: TextArray


def _price(groups: Grouping, kernels: KernelTable, device: Device, rates: Rates) -> _Priced:
    base = frame.base_of(kernels, device, rates)
    rows = len(kernels)
    correction, low, high = np.zeros(rows), np.full(rows, -0.3), np.full(rows, 0.3)
    source = np.full(rows, str(Source.ANALYTICAL), dtype="<U16")
    for model, mask in groups(kernels, device):
        columns = frame.features(model.key.partition("-")[0], kernels, base, mask, device)
        correction[mask] = model.correction(columns, device.name)
        low[mask], high[mask], _ = model.interval(columns, device.name)
        source[mask] = str(Source.LEARNED)
    floor = base.rows.useful / base.rows.peak
    raw = (base.launch_s + base.core_s) * np.exp(np.clip(correction, -_CORRECTION_MAX, _CORRECTION_MAX))
    time = np.maximum(raw, floor)
    bound = np.where(base.compute_s > base.memory_s, "compute", "memory")
    bound = np.where(base.launch_s > 0.5 * time, "launch", bound)
    return _Priced(time, base.launch_s, low, high, floor, source, bound)


@dataclass(frozen=True, slots=True)
class _Halving:
    """Times of distinct halved kernels; `index`: the rows that were halved, `position`: which time is theirs."""

    index: IndexArray
    position: IndexArray
    time_s: FloatArray


def _half_batch(kernels: KernelTable) -> tuple[BoolArray, KernelTable] | None:
    """Rows that can be halved along what they repeat, and these alone, halved; None where no row can."""
    kind = frame.kinds(kernels)
    streams = np.isin(kind, frame.STREAMS)
    batched = np.isin(kind, (*frame.ATTENTION, "bmm")) & (kernels.batch > 1)
    halved = (streams & (kernels.batch > 0) & (kernels.elems > 1)) | batched
    if not halved.any():
        return None
    table = _rows_of(kernels, np.flatnonzero(halved))
    columns = dict(table.columns)
    for name in ("batch", "elems"):
        columns[name] = np.maximum((table.columns[name] + 1) // 2, 1)
    share = np.where(streams[halved], 0.5, columns["batch"] / np.maximum(table.batch, 1))
    for name in _EXTENSIVE:
        columns[name] = table.columns[name] * share
    return halved, table.with_columns(columns)


def _rows_of(kernels: KernelTable, index: IndexArray) -> KernelTable:
    columns = {name: values[index] for name, values in kernels.columns.items()}
    chosen: list[int] = index.tolist()
    return KernelTable(tuple(kernels.rows[i] for i in chosen), kernels.count[index]).with_columns(columns)


_EXTENSIVE: Final = (
    *("matmul_flops", "padded_flops", "dilation_flops", "vector_flops", "transcendentals"),
    *("bytes_read", "bytes_written"),
)
