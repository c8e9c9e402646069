"""From checked files to `Device` and `System` values: the share of one device, and the network of N of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from stablecast.backends import units
from stablecast.backends.device import (
    ASSUMPTION,
    Device,
    Fact,
    Label,
    Link,
    MemoryTier,
    Network,
    NetworkDim,
    Quantity,
    System,
)
from stablecast.backends.hardware.schema import FACT_FIELDS, DeviceFile, DimFile, EfficiencyTable, FactRef, SystemFile
from stablecast.ir.errors import InputError

HOST: Final = "host"
HOST_LATENCY_S: Final = 10e-6
"""Start of a copy between device and host (assumption)."""
_GIB_PER_GB: Final = 2.0**30 / 1e9
_ELEMENT: Final = {"fp64": "f64", "fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "i8"}
_MODES: Final = {"fp8": ("fp8_e4m3", "fp8_e5m2")}
# figures of a whole chip or module, which the devices it shows as share
CHIP_FIELDS: Final = frozenset(
    {
        *("mem_capacity", "mem_capacity_usable", "mem_bandwidth", "mem_stacks", "l2", "l3", "cmem"),
        *("core_count", "tensorcores", "sparsecores", "dies", "tdp", "pcie_bw_per_dir", "host_link_bw_per_dir"),
        *("scaleup_links", "scaleup_bw_per_dir", "scaleout_bw_per_dir"),
        *("ici_links", "ici_link_bw_per_dir", "ici_bw_per_dir"),
    }
)


def facts_of(file: DeviceFile) -> dict[str, Fact]:
    """Every fact a device file states (or inherits), as published, by field name; peaks as `peak.DTYPE.UNIT`."""
    found: dict[str, Fact] = {}
    for name in FACT_FIELDS:
        fact: Fact | None = getattr(file, name)
        if fact is not None:
            found[name] = fact
    found |= {f"peak.{key}": peak for key, peak in file.peaks.items()}
    return found | {f"peak_sparse.{key}": peak for key, peak in file.sparse_peaks.items()}


class _Share:
    """The share that one device has of its chip."""

    def __init__(self, file: DeviceFile, per_chip: int) -> None:
        self.file = file
        self.per_chip = per_chip

    def of(self, name: str, fact: Quantity | None) -> Quantity | None:
        if fact is None or self.per_chip == 1 or name in self.file.per_device or name not in CHIP_FIELDS:
            return fact
        return fact.scaled(1 / self.per_chip, self.note)

    @property
    def note(self) -> str:
        return f"1/{self.per_chip} of the chip"

    def field(self, name: str) -> Quantity | None:
        fact = getattr(self.file, name)
        return self.of(name, fact) if isinstance(fact, Quantity) else None

    def first(self, *names: str) -> Quantity | None:
        return next((fact for name in names if (fact := self.field(name)) is not None), None)

    def peaks(self, table: Mapping[str, Quantity], unit: str) -> dict[str, Quantity]:
        found: dict[str, Quantity] = {}
        for key, peak in table.items():
            dtype, _, on = key.partition(".")
            if on != unit:
                continue
            share = peak if self.per_chip == 1 else peak.scaled(1 / self.per_chip, self.note)
            names = (_ELEMENT.get(dtype, dtype),) if unit == "vector" else _MODES.get(dtype, (dtype,))
            found |= dict.fromkeys(names, share)
        return found


def build_device(name: str, file: DeviceFile, source_file: str, aliases: Sequence[str] = ()) -> Device:
    """The `Device` that a file describes.

    Raises `InputError` naming the file and what it lacks: a kind, a capacity, a memory rate, or any dense peak.
    """
    per_chip = int(file.jax_devices_per_chip.value) if file.jax_devices_per_chip else 1
    share = _Share(file, per_chip)
    bandwidth = share.field("mem_bandwidth")
    capacity = share.of("mem_capacity", _binary(file.mem_capacity, file.kind))
    if file.kind is None or capacity is None or bandwidth is None or not file.peaks:
        needed = {"kind": file.kind, "mem_capacity": capacity, "mem_bandwidth": bandwidth, "peaks": file.peaks}
        missing = next(name for name, value in needed.items() if not value)
        raise InputError(f"{source_file}: field '{missing}' is missing", "state it, or inherit from a known device")
    facts = facts_of(file)
    vector = share.peaks(file.peaks, "vector")
    if "f32" not in vector and (lanes := _lanes_rate(file)):
        vector["f32"] = lanes if per_chip == 1 else lanes.scaled(1 / per_chip, share.note)
    return Device(
        name=name,
        vendor=file.vendor.text if file.vendor else "",
        architecture=file.arch.text if file.arch else "",
        kind=file.kind,
        matrix_flops=share.peaks(file.peaks, "matrix"),
        matrix_flops_acc16=share.peaks(file.peaks, "matrix_acc16"),
        sparse_flops=share.peaks(file.sparse_peaks, "matrix"),
        vector_flops=vector,
        hbm_bytes=capacity,
        hbm_usable_bytes=share.field("mem_capacity_usable"),
        hbm_bytes_per_s=bandwidth,
        l2_bytes=share.first("l2", "l3"),
        shared_bytes_per_core=share.first("vmem_per_core", "lds_per_core", "smem_per_core"),
        cores=share.first("core_count", "tensorcores"),
        clock_hz=share.first("clock_boost", "clock"),
        clock_matrix_hz=share.field("clock_matrix"),
        tdp_w=share.field("tdp"),
        host_bytes_per_s=share.first("host_link_bw_per_dir", "pcie_bw_per_dir"),
        scaleup_bytes_per_s=share.first("scaleup_bw_per_dir", "ici_bw_per_dir"),
        jax_devices_per_chip=per_chip,
        aliases=tuple(aliases),
        system=file.system,
        source_file=source_file,
        facts={key: fact for key, fact in facts.items() if isinstance(fact, Quantity)},
        labels={key: fact for key, fact in facts.items() if isinstance(fact, Label)},
        sustained=dict(file.sustained),
    )


def _binary(capacity: Quantity | None, kind: str | None) -> Quantity | None:
    """A marketed "80 GB" is 80 GiB of memory; TPU figures are stated in GiB and whole GiB stay as they are."""
    if capacity is None or kind != "gpu" or not (capacity.value / 1e9).is_integer():
        return capacity
    return capacity.scaled(_GIB_PER_GB, "marketed GB read as GiB")


def _lanes_rate(file: DeviceFile) -> Quantity | None:
    """f32 FLOP/s of a chip's vector units where none is published: cores x lanes x sublanes x ALUs x clock."""
    parts = (file.tensorcores, file.vpu_lanes, file.vpu_sublanes, file.vpu_alus_per_lane, file.clock)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    text = "tensorcores x vpu_lanes x vpu_sublanes x vpu_alus_per_lane x clock, one FLOP an ALU and cycle"
    doubtful = any(part.doubtful for part in known)
    rate = math.prod(part.value for part in known)
    return Quantity(rate, units.FLOP_PER_S, "derived", "low" if doubtful else "medium", text)


def build_system(name: str, device: Device, count: int, family: SystemFile | None, where: str) -> System:
    """`count` of `device` in the network of `family` (None: only a count of 1 is possible).

    `where` names the family in messages. Raises `InputError` where `count` devices cannot be laid out.
    """
    if count < 1:
        raise InputError(f"{name}:{count} is not a system", "the count after ':' is a whole number from 1 up")
    if count == 1:
        return System(name, device, 1, Network(), tiers=build_tiers((family,), device, where))
    if family is None or not family.dims:
        raise InputError(
            f"device {device.name} names no network for {count} devices",
            f"add `system: FAMILY` to {device.source_file}, or write a system file with `device`, `count` and `dims`",
        )
    dims: list[NetworkDim] = []
    notes: list[str] = []
    left = count
    for spec in family.dims:
        if left == 1:
            break
        if spec.kind == "torus":
            axes, text = _torus(spec, device, left, where)
            dims += axes
            notes.append(text)
            left = 1
            continue
        size = _level_size(spec, device, left, where)
        if size > 1:
            dims.append(_level(spec, device, size, where))
        left //= size
    if left > 1:
        raise InputError(f"{count} x {device.name} is more than {where} can hold", f"at most {count // left}")
    sizes = [f"{dim.size} ({dim.name}, {dim.kind.replace('_', ' ')})" for dim in dims]
    said = (" x ".join(sizes), *notes)
    return System(name, device, count, Network(tuple(dims)), said, tiers=build_tiers((family,), device, where))


def build_tiers(files: Sequence[SystemFile | None], device: Device, where: str) -> tuple[MemoryTier, ...]:
    """The memory tiers that files state, the first that names one, and the host's by the device's own link to it."""
    found: dict[str, MemoryTier] = {}
    for file in files:
        for spec in file.tiers if file else ():
            read = _resolve(spec.read, device, where)
            write = _resolve(spec.write, device, where) if spec.write else read
            made = MemoryTier(spec.name, read, write, spec.latency, spec.capacity, spec.shared_by)
            found.setdefault(spec.name, made)
    rate = device.host_bytes_per_s
    if rate is not None and HOST not in found:
        latency = Quantity(HOST_LATENCY_S, units.SECOND, ASSUMPTION, "low")
        found[HOST] = MemoryTier(HOST, rate, rate, latency)
    return tuple(found.values())


def _resolve(spec: FactRef | Quantity, device: Device, where: str) -> Quantity:
    """The value of a reference to a device field: one device's share of it."""
    if isinstance(spec, Quantity):
        return spec
    fact = device.facts.get(spec.fact)
    if fact is None:
        raise InputError(
            f"{where} needs field '{spec.fact}' of device {device.name}", f"add it to {device.source_file}"
        )
    if spec.fact in CHIP_FIELDS and device.jax_devices_per_chip > 1:
        fact = fact.scaled(1 / device.jax_devices_per_chip, f"1/{device.jax_devices_per_chip} of the chip")
    return fact if spec.times == 1 else fact.scaled(spec.times, f"{spec.times:g} x {spec.fact}")


def _level_size(spec: DimFile, device: Device, left: int, where: str) -> int:
    """Devices on one level: all that are left, else the largest equal share that fills more than half of it."""
    if spec.size_max is None:
        return left
    limit = int(_resolve(spec.size_max, device, where).value)
    if left <= limit:
        return left
    fitting = [size for size in range(limit // 2 + 1, limit + 1) if left % size == 0]
    if fitting:
        return fitting[-1]
    lower, upper = left // limit * limit, (left // limit + 1) * limit
    raise InputError(
        f"{left} x {device.name} does not divide into equal groups of up to {limit} ({spec.name} of {where})",
        f"try {lower} or {upper}",
    )


def _level(spec: DimFile, device: Device, size: int, where: str) -> NetworkDim:
    rate = _resolve(spec.rate, device, where)
    if spec.oversubscription and spec.oversubscription.value > 1:
        ratio = spec.oversubscription.value
        rate = rate.scaled(1 / ratio, f"oversubscribed {ratio:g}:1")
    pair = _resolve(spec.pair_rate, device, where) if spec.pair_rate else None
    if pair and spec.kind in ("fully_connected", "ring") and pair.value * (size - 1) < rate.value:
        rate = pair.scaled(size - 1, f"links to {size - 1} peer{'s' if size > 2 else ''}")
    return _dim(spec, spec.name, size, rate, pair, True, _link(device))


def _link(device: Device) -> Link | None:
    rate, count = device.facts.get("scaleup_link_bw_per_dir"), device.facts.get("scaleup_links")
    return Link("scale-up link", rate, count) if rate else None


def _dim(
    spec: DimFile, name: str, size: int, rate: Quantity, pair: Quantity | None, wrapped: bool, link: Link | None
) -> NetworkDim:
    common, by_kind = _efficiency(spec.efficiency, size)
    if spec.penalty:
        kept, note = 1 - spec.penalty.value, f"less {spec.penalty.value:.0%} for flow control"
        common, by_kind = common.scaled(kept, note), {kind: part.scaled(kept, note) for kind, part in by_kind.items()}
    return NetworkDim(
        name=name,
        kind=spec.kind,
        size=size,
        bytes_per_s=rate,
        efficiency=common,
        latency_s=spec.latency,
        base_latency_s=spec.base_latency,
        efficiency_by_kind=by_kind,
        pair_bytes_per_s=pair,
        wrapped=wrapped,
        link=link,
        library=spec.library,
        in_network=spec.in_network,
    )


def _efficiency(spec: EfficiencyTable | Quantity, size: int) -> tuple[Quantity, dict[str, Quantity]]:
    """Efficiency at a group size: tables are interpolated in 1/size, and held constant beyond their ends."""
    if isinstance(spec, Quantity):
        return spec, {}
    values = {kind: _interpolate(table, size) for kind, table in spec.by_kind.items()}
    mean = sum(values.values()) / len(values)
    common = Quantity(mean, units.COUNT, spec.source, spec.confidence, spec.note)
    return replace(common, note=f"mean over kinds; {spec.note}".rstrip("; ")), {
        kind: replace(common, value=value) for kind, value in values.items()
    }


def _interpolate(table: Mapping[int, float], size: int) -> float:
    sizes = sorted(table)
    if size in table:
        return table[size]
    if size < sizes[0] or size > sizes[-1]:
        return table[sizes[0] if size < sizes[0] else sizes[-1]]
    above = next(known for known in sizes if known > size)
    below = sizes[sizes.index(above) - 1]
    part = (1 / below - 1 / size) / (1 / below - 1 / above)
    return table[below] + part * (table[above] - table[below])


def _torus(spec: DimFile, device: Device, left: int, where: str) -> tuple[list[NetworkDim], str]:
    """The axes of a slice for `left` chips (each a torus dimension of its own), and a note that names it."""
    limits = _shape_limits(spec, device, where)
    shape = slice_shape(left, limits)
    if shape is None:
        largest = math.prod(limits)
        raise InputError(
            f"{left} chips of {device.name} form no slice of a {'x'.join(map(str, limits))} torus ({where})",
            f"at most {largest} chips; sizes such as 4, 8, 16, 32 always fit",
        )
    link_rate = _resolve(spec.rate, device, where)
    multiple = int(spec.wraps_at_multiple_of.value) if spec.wraps_at_multiple_of else 0
    closable = [bool(multiple) and length % multiple == 0 for length in shape]
    if spec.wraps_together:
        closable = [all(closable)] * len(shape)
    dims: list[NetworkDim] = []
    count = device.facts.get("ici_links")
    link = Link("ICI link", device.facts.get("ici_link_bw_per_dir", link_rate), count)
    for axis, length, closes in zip("xyz", shape, closable, strict=False):
        wrapped = closes and length > 2
        rate = link_rate.scaled(2.0, "two links an axis") if wrapped else link_rate
        if length > 1:
            dims.append(_dim(spec, axis, length, rate, link_rate, wrapped, link))
    closed = ", ".join(dim.name for dim in dims if dim.wrapped) or "none"
    return dims, f"slice {'x'.join(map(str, shape))}; closed axes: {closed}"


def _shape_limits(spec: DimFile, device: Device, where: str) -> tuple[int, ...]:
    label = device.labels.get(spec.shape_max.fact) if spec.shape_max else None
    if label is None:
        raise InputError(
            f"{where} needs the pod shape of device {device.name}", f"add pod_shape to {device.source_file}"
        )
    parts = label.text.split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"{device.source_file}: pod_shape '{label.text}' is not a shape", "write it as 16x16x16")
    return tuple(sorted(int(part) for part in parts))


def slice_shape(chips: int, limits: Sequence[int]) -> tuple[int, ...] | None:
    """The most cubic shape of `chips` whose sorted axes fit the sorted `limits`, or None where none does."""
    found = [
        shape
        for shape in _factorisations(chips, len(limits))
        if all(a <= b for a, b in zip(shape, limits, strict=True))
    ]
    return min(found, key=lambda shape: (sum(shape), shape[-1]), default=None)


def _factorisations(product: int, parts: int, least: int = 1) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(product,)] if product >= least else []
    found: list[tuple[int, ...]] = []
    for first in range(least, round(product ** (1 / parts)) + 1):
        if product % first == 0:
            found += [(first, *rest) for rest in _factorisations(product // first, parts - 1, first)]
    return found
