"""What `stablecast hardware check` looks for. A fault is one line: file or device, field, what is wrong."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from stablecast.backends.device import Device, Fact, Label, Quantity
from stablecast.backends.hardware.build import facts_of
from stablecast.backends.hardware.schema import DeviceFile, SystemFile
from stablecast.ir.errors import InputError

if TYPE_CHECKING:
    from stablecast.backends.catalogue import Catalogue

_CLOSURE: Final = 0.02
_FREE_SOURCES: Final = ("recall", "assumption", "derived", "fitted:")
_PRODUCTS: Final = (
    ("scaleup_links", "scaleup_link_bw_per_dir", "scaleup_bw_per_dir"),
    ("ici_links", "ici_link_bw_per_dir", "ici_bw_per_dir"),
)
_COUNTS: Final = (1, 4, 8)


def check(catalogue: "Catalogue") -> list[str]:
    """Faults of every device and system file of `catalogue`, one line each; empty where all is sound."""
    faults: list[str] = []
    try:
        names, systems = catalogue.names(), catalogue.system_names()
        faults += [f"aliases: '{a}' names no device" for a in _dangling(catalogue)]
    except InputError as error:
        return [str(error)]
    faults += [f"'{name}' is a device and a system" for name in names if name in systems]
    for name in systems:
        try:
            faults += [f"{name}: {fault}" for fault in _system_faults(catalogue, catalogue.family(name))]
        except InputError as error:
            faults.append(str(error))
    for name in names:
        try:
            device, file = catalogue.device(name), catalogue.device_file(name)
        except InputError as error:
            faults.append(str(error))
            continue
        faults += [f"{name}: {fault}" for fault in _device_faults(catalogue, device, file)]
    return faults


def _dangling(catalogue: "Catalogue") -> list[str]:
    known = {*catalogue.names(), *catalogue.system_names()}
    return [alias for alias, target in catalogue.aliases.items() if target not in known]


def _device_faults(catalogue: "Catalogue", device: Device, file: DeviceFile) -> Iterator[str]:
    facts = facts_of(file)
    for field, fact in facts.items():
        yield from _source_faults(catalogue, field, fact)
    for key, sparse in file.sparse_peaks.items():
        dense = file.peaks.get(key)
        if dense is None:
            yield f"sparse_peaks.{key}: has no dense peak beside it"
        elif f"sparse_peaks.{key}" not in file.exceptions and not _closes(sparse.value, 2 * dense.value):
            yield f"sparse_peaks.{key}: {sparse} is not twice the dense {dense}"
    for count, rate, total in _PRODUCTS:
        parts = [facts.get(name) for name in (count, rate, total)]
        known = [part.value for part in parts if isinstance(part, Quantity)]
        if len(known) == len(parts) and total not in file.exceptions and not _closes(known[2], known[0] * known[1]):
            yield f"{total}: {facts[total]} is not {count} x {rate}"
    yield from (f"exceptions: no fact '{name}' with a note" for name in file.exceptions if not _has_note(file, name))
    if device.hbm_usable_bytes and device.hbm_usable_bytes.value > device.hbm_bytes.value * (1 + _CLOSURE):
        yield f"mem_capacity_usable: {device.hbm_usable_bytes} is more than the capacity {device.hbm_bytes}"
    if (
        device.clock_hz
        and device.clock_matrix_hz
        and device.clock_matrix_hz.value > device.clock_hz.value * (1 + _CLOSURE)
    ):
        yield "clock_matrix: is above clock_boost"
    yield from _layout_faults(catalogue, device)


def _layout_faults(catalogue: "Catalogue", device: Device) -> Iterator[str]:
    if not device.system:
        yield "system: names no network family"
        return
    for count in _COUNTS:
        try:
            system = catalogue.resolve(f"{device.name}:{count}")
        except InputError as error:
            yield f"system: {error}"
            return
        if system.network.size != count:
            yield f"system: {count} devices laid out as {system.network.size}"


def _has_note(file: DeviceFile, name: str) -> bool:
    """Whether an exception names a fact whose note can say why."""
    table, _, key = name.partition(".")
    peaks = {"peaks": file.peaks, "sparse_peaks": file.sparse_peaks}
    fact: object = peaks[table].get(key) if table in peaks else getattr(file, table, None)
    return isinstance(fact, Quantity) and bool(fact.note)


def _closes(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=_CLOSURE)


def _system_faults(catalogue: "Catalogue", file: SystemFile) -> Iterator[str]:
    if not file.dims and not file.device:
        yield "has neither `dims` (a network family) nor `device` (a machine)"
    if file.device and not file.dims:
        yield from _machine_faults(catalogue, file)
    for dim in file.dims:
        stated = {"rate": dim.rate, "size_max": dim.size_max, "pair_rate": dim.pair_rate, "latency": dim.latency}
        stated |= {"oversubscription": dim.oversubscription, "penalty": dim.penalty}
        stated |= {"base_latency": dim.base_latency, "wraps_at_multiple_of": dim.wraps_at_multiple_of}
        for field, value in stated.items():
            if isinstance(value, Quantity):
                yield from _source_faults(catalogue, f"{dim.name}.{field}", value)
        if not _known_source(catalogue, dim.efficiency.source):
            yield f"{dim.name}.efficiency: unknown source '{dim.efficiency.source}'"
        if dim.kind == "torus" and (dim.axes is None or dim.shape_max is None):
            yield f"{dim.name}: a torus needs `axes` and `shape_max`"


def _machine_faults(catalogue: "Catalogue", file: SystemFile) -> Iterator[str]:
    try:
        device = catalogue.device(file.device)
        catalogue.family(file.system or device.system)
    except InputError as error:
        yield str(error)


def _source_faults(catalogue: "Catalogue", field: str, fact: Fact) -> Iterator[str]:
    for source in (fact.source, fact.source_2):
        if source and not _known_source(catalogue, source):
            yield f"{field}: unknown source '{source}'; add it to sources.yaml"
    if fact.recalled and fact.confidence == "high":
        yield f"{field}: a recalled value is never of high confidence"
    if isinstance(fact, Label) and not fact.text.strip():
        yield f"{field}: is empty"


def _known_source(catalogue: "Catalogue", source: str) -> bool:
    """A key of sources.yaml, or a key of the form FAMILY:NAME whose family stands there as `FAMILY:NAME`."""
    family = source.partition(":")[0]
    return source.startswith(_FREE_SOURCES) or source in catalogue.sources or f"{family}:NAME" in catalogue.sources
