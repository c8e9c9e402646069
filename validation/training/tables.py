"""Training tables as measured kernels: which rows, on which device, of which kind, how they were timed and grouped."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from stablecast.backends.analytical.fitting import growing_cost
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device
from stablecast.backends.estimates import FloatArray
from stablecast.backends.learned import frame
from stablecast.backends.learned.fitting import SEED, Measured, group_number
from stablecast.backends.learned.rates import Rates
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.validation.training.reader import Record, TrainingTables


@dataclass(frozen=True)
class Source:
    """A training table.

    `name`: how cards call it. `file`; `devices`: how the file names a device (in column `device`) -> catalogue name.
    `kind`, `family`: of the model that learns from it. `make`: the kernel of a record on a device, None for records
    that do not count. `seconds`: measured time of a record. `group`: rows with equal text are never split. `timing`:
    rows with equal text share what the way of timing adds; empty where kernels were timed alone on the device.
    `rows`: at most so many a device. `longest_s`: longer rows do not count, by device. `clocks`: only the sustained
    rates are read from it, no model learns from it. `library`: whose kernels they are. `drifts`: what the way of timing
    adds grew while the table was taken, so that it depends on a row's place in the file.
    """

    name: str
    file: str
    devices: Mapping[str, str]
    kind: str
    family: str
    make: Callable[[Device, Record], KernelRow | None]
    seconds: Callable[[Record], float]
    group: Callable[[Record], str]
    device: str = "device"
    timing: Callable[[Record], str] = field(default=lambda record: "")
    rows: int = 12000
    longest_s: Mapping[str, float] = field(default_factory=dict[str, float])
    clocks: bool = False
    library: str = ""
    drifts: bool = False


def measured(
    found: Iterable[Source],
    tables: TrainingTables,
    catalogue: Catalogue,
    notes: list[str],
    constants: Path | None = None,
) -> Iterator[tuple[Source, Measured]]:
    """The rows of each source, a `Measured` a device, on the analytical `constants` (None: today's); clocks are not yet
    filled in."""
    cache: dict[str, list[Record]] = {}
    for source in found:
        if source.file not in cache:
            cache = {source.file: tables.read(source.file)}
        for label, name in source.devices.items():
            own = [record for record in cache[source.file] if record.get(source.device, label) == label]
            data = _measured(source, catalogue.device(name), own, notes, Rates({}, constants))
            if data is not None:
                yield source, data


def _measured(
    source: Source, device: Device, records: Sequence[Record], notes: list[str], rates: Rates
) -> Measured | None:
    kept: list[tuple[int, KernelRow]] = []
    longest = source.longest_s.get(device.name, np.inf)
    order: list[int] = np.random.default_rng(SEED).permutation(len(records)).tolist()
    for index in order:
        record = records[index]
        try:
            row = source.make(device, record)
        except InputError as error:
            notes.append(f"{source.name} on {device.name}: {error.message}")
            return None
        if row is not None and 0 < source.seconds(record) <= longest:
            kept.append((index, replace(row, library=source.library) if source.library else row))
        if len(kept) == source.rows:
            break
    if not kept:
        return None
    kept.sort(key=lambda pair: pair[0])
    chosen = [records[index] for index, _ in kept]
    table = KernelTable.of([row for _, row in kept])
    seconds = np.array([source.seconds(record) for record in chosen])
    timing = [source.timing(record) for record in chosen]
    place = np.array([index / len(records) for index, _ in kept])
    if source.drifts:
        base = frame.base_of(table, device, rates)
        extra = growing_cost(seconds - base.launch_s - base.core_s, base.core_s, place)
    else:
        extra = _extra(frame.base_of(table, device, rates), seconds, timing)
    return Measured(
        source.name,
        device,
        table,
        seconds,
        extra,
        np.array([group_number(source.group(record)) for record in chosen], dtype=np.int64),
        rates,
        rates,
        tuple(timing),
    )


_SMALLEST: Final = 0.1
_EXTRA_QUANTILE: Final = 0.2
_SHORTEST: Final = 0.01


def _extra(base: frame.Base, seconds: FloatArray, timing: Sequence[str]) -> FloatArray:
    """What the way of timing adds to each row: a low quantile of measured minus base over the smallest kernels.

    Never more than the shortest measured times themselves hold beside a launch.
    """
    found = np.zeros(len(seconds))
    labels = np.array(timing)
    for label in np.unique(labels[labels != ""]):
        own = labels == label
        small = own & (base.core_s <= np.quantile(base.core_s[own], _SMALLEST))
        rest = seconds[small] - base.launch_s[small] - base.core_s[small]
        shortest = float(np.quantile(seconds[own], _SHORTEST))
        found[own] = max(0.0, min(float(np.quantile(rest, _EXTRA_QUANTILE)), shortest - float(base.launch_s[own][0])))
    return found
