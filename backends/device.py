"""What a device and the network around it can do: plain values in SI, each with its source.

A `Device` is what JAX or PyTorch shows as one device. Where a chip or module shows as several (TPU v3 and v7x: two
cores; MI250 and MI250X: two dies), the figures here are one device's share, and the notes say so; `Device.facts`
keeps the figures of the whole chip as published.

Peaks are dense, a multiply-add counts two, integer OP/s stand beside FLOP/s. Rates of links are per device and per
direction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from stablecast.backends import units
from stablecast.ir.errors import InputError, near_names

if TYPE_CHECKING:
    from stablecast.backends.placement import Placement

Confidence = Literal["high", "medium", "low", "user"]
DeviceKind = Literal["gpu", "tpu", "cpu"]
DimKind = Literal["switch", "fully_connected", "ring", "torus", "pcie_tree", "fat_tree"]

RECALL: Final = "recall"
ASSUMPTION: Final = "assumption"

_VECTOR_OF_MATH: Final = {"fp64": "f64", "fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "i8"}
_ALWAYS_ON_VECTOR: Final = frozenset({"fp64", "fp32"})


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its origin.

    `value`: SI. `unit`: its dimension (B, B/s, FLOP/s, Hz, W, s, or 1 for counts and shares). `source`: a key of
    `hardware/sources.yaml`, "fitted: ..." with what it was fitted on, "assumption", "recall" (general knowledge of a
    data sheet, not retrieved), or the user's file. `confidence`: "user" for values that a user's own file states.
    `note`: what to know before relying on it. `source_2`: a second source that agrees. `inherited_from`: the device
    whose file states the value, where it is not the device's own.
    """

    value: float
    unit: str
    source: str
    confidence: Confidence
    note: str = ""
    source_2: str = ""
    inherited_from: str = ""

    @property
    def recalled(self) -> bool:
        """Whether nobody looked it up: general knowledge of the data sheet."""
        return self.source.startswith(RECALL)

    @property
    def assumed(self) -> bool:
        """Whether it is stablecast's own assumption."""
        return self.source.startswith(ASSUMPTION)

    @property
    def doubtful(self) -> bool:
        """Whether a report should mark it: low confidence, recalled, or assumed."""
        return self.confidence == "low" or self.recalled or self.assumed

    def scaled(self, factor: float, note: str) -> "Quantity":
        """The same fact times `factor`, with `note` put in front of its own."""
        joined = f"{note}; {self.note}" if self.note else note
        return replace(self, value=self.value * factor, note=joined)

    def __str__(self) -> str:
        return units.show(self.value, self.unit)


@dataclass(frozen=True, slots=True)
class Label:
    """A fact in words (architecture, memory type, pod shape) with its origin; fields as in `Quantity`."""

    text: str
    source: str
    confidence: Confidence
    note: str = ""
    source_2: str = ""
    inherited_from: str = ""

    @property
    def recalled(self) -> bool:
        """Whether nobody looked it up: general knowledge of the data sheet."""
        return self.source.startswith(RECALL)

    @property
    def doubtful(self) -> bool:
        """Whether a report should mark it: low confidence, recalled, or assumed."""
        return self.confidence == "low" or self.recalled or self.source.startswith(ASSUMPTION)


Fact = Quantity | Label


@dataclass(frozen=True, slots=True)
class Device:
    """One device as JAX or PyTorch shows it.

    Rates:
      matrix_flops: dense FLOP/s of the matrix units by math mode (fp64, tf32, bf16, fp16, fp8_e4m3, fp8_e5m2, fp6,
        fp4, int8, int4; fp32 where matrix cores have it), fp32 accumulation, int32 for integers.
      matrix_flops_acc16: the same with fp16 accumulation, only where that differs.
      sparse_flops: FLOP/s with structured 2:4 sparsity, by math mode.
      vector_flops: FLOP/s of the ordinary lanes by StableHLO element type (f64, f32, bf16, f16, i8).
    Memory:
      hbm_bytes: capacity of the device memory in bytes (of whatever technology). A marketed figure in GB is read as
        GiB, which is what boards carry.
      hbm_usable_bytes: what a runtime reports as usable, where known.
      hbm_bytes_per_s: peak rate of the device memory.
      l2_bytes: L2 cache, all slices together (see its note where they are private to a part of the device).
      shared_bytes_per_core: scratchpad of one core: shared memory (NVIDIA), LDS (AMD), VMEM (TPU).
    Cores:
      cores: SMs, CUs, TensorCores or CPU cores of this device.
      clock_hz: highest ordinary clock. clock_matrix_hz: the clock that the printed matrix peak implies, if lower.
      tdp_w: board power in watts.
    Links, bytes per second and direction:
      host_bytes_per_s: to the host (PCIe, or the chip-to-chip link where there is one).
      scaleup_bytes_per_s: all NVLink, Infinity Fabric or ICI links of this device together.
    Identity:
      name, vendor, architecture, kind, aliases; jax_devices_per_chip; system: the network family that serves it when
      nobody names another; source_file: the file it came from.
    facts, labels: everything the file states, by field name, as published (of the whole chip).
    sustained: measured shares of the peaks that long products reach, by numeric family (fp32, tf32, half, fp8, int8),
      and of the memory rate (memory), where somebody measured this very device.
    """

    name: str
    vendor: str
    architecture: str
    kind: DeviceKind
    matrix_flops: Mapping[str, Quantity]
    matrix_flops_acc16: Mapping[str, Quantity]
    sparse_flops: Mapping[str, Quantity]
    vector_flops: Mapping[str, Quantity]
    hbm_bytes: Quantity
    hbm_usable_bytes: Quantity | None
    hbm_bytes_per_s: Quantity
    l2_bytes: Quantity | None
    shared_bytes_per_core: Quantity | None
    cores: Quantity | None
    clock_hz: Quantity | None
    clock_matrix_hz: Quantity | None
    tdp_w: Quantity | None
    host_bytes_per_s: Quantity | None
    scaleup_bytes_per_s: Quantity | None
    jax_devices_per_chip: int = 1
    aliases: tuple[str, ...] = ()
    system: str = ""
    source_file: str = ""
    facts: Mapping[str, Quantity] = field(default_factory=dict[str, Quantity])
    labels: Mapping[str, Label] = field(default_factory=dict[str, Label])
    sustained: Mapping[str, Quantity] = field(default_factory=dict[str, Quantity])

    @property
    def memory_bytes(self) -> Quantity:
        """Bytes a program can use: the usable figure where known, else the capacity."""
        return self.hbm_usable_bytes or self.hbm_bytes

    def peak(self, math: str) -> Quantity:
        """Dense FLOP/s of the matrix units in math mode `math`.

        Raises `InputError` naming the device and the mode where the device has no such peak.
        """
        found = self.matrix_flops.get(math)
        if found is None:
            raise InputError(*self._no_peak(math))
        return found

    def matmul_rate(self, math: str) -> Quantity:
        """FLOP/s a matrix product can reach in math mode `math`: the matrix peak, else the vector rate.

        "fp32" (no TF32) and "fp64" run on the vector lanes where the matrix units lack them. A device without any
        matrix unit runs fp16, bf16 and int8 at its own vector rate for that type, if it has one.
        Raises `InputError` naming the device and the mode, and listing the modes it has.
        """
        found = self.matrix_flops.get(math)
        vector = self.vector_flops.get(_VECTOR_OF_MATH.get(math, ""))
        if found is None and vector is not None and (math in _ALWAYS_ON_VECTOR or not self.matrix_flops):
            found = vector
        if found is None:
            raise InputError(*self._no_peak(math))
        return found

    def vector_rate(self, dtype: str) -> Quantity:
        """FLOP/s of the vector lanes for StableHLO element type `dtype`.

        A type without a published rate runs at the f32 rate (c128: f64), and the answer's note says so with low
        confidence. Raises `InputError` where the device states no f32 vector rate.
        """
        found = self.vector_flops.get(dtype)
        if found is None and dtype == "c128":
            found = self.vector_flops.get("f64")
        if found is not None:
            return found
        base = self.vector_flops.get("f32")
        if base is None:
            raise InputError(
                f"device {self.name} states no f32 vector rate, needed for {dtype}",
                "add peaks: fp32.vector to its file",
            )
        return replace(base.scaled(1.0, f"f32 rate taken for {dtype}"), confidence="low")

    @property
    def math_modes(self) -> tuple[str, ...]:
        """Math modes that `matmul_rate` answers, sorted."""
        vector = {mode for mode, dtype in _VECTOR_OF_MATH.items() if dtype in self.vector_flops}
        return tuple(sorted(set(self.matrix_flops) | (vector if not self.matrix_flops else vector & _ALWAYS_ON_VECTOR)))

    def _no_peak(self, math: str) -> tuple[str, str]:
        return f"device {self.name} has no peak for math mode {math}", "it has " + ", ".join(self.math_modes)


@dataclass(frozen=True, slots=True)
class Link:
    """One physical link: `bytes_per_s` one way, `count` of them a device (None: not published)."""

    name: str
    bytes_per_s: Quantity
    count: Quantity | None = None


@dataclass(frozen=True, slots=True)
class NetworkDim:
    """One level or axis of a network; devices that differ only in this coordinate talk over it.

    name: "nvlink", "pcie", "x", ... kind: "switch" (any pair at full rate), "fully_connected" (a link between each
    pair), "ring", "torus" (one axis of a torus, itself a ring), "pcie_tree", "fat_tree" (a tier of switches).
    size: devices along this dimension.
    bytes_per_s: all links of one device in this dimension together, one way. An axis without its wrap-around link,
      or of two devices, counts one link; a wrapped axis two.
    efficiency: share of `bytes_per_s` that large messages reach in a ring or direct algorithm.
    efficiency_by_kind: the same by collective kind (all_reduce, all_gather, reduce_scatter, all_to_all); may exceed 1
      for all_reduce where switches reduce in the network.
    latency_s: cost of one step (hop) of an algorithm. base_latency_s: fixed cost of one collective.
    pair_bytes_per_s: the rate between one pair, where that is less than `bytes_per_s`.
    wrapped: whether a ring or torus axis is closed. link: the physical link, where published.
    library: the measured communication library that runs here ("nccl", "rccl"), "" where none was measured.
    in_network: whether the switches add up and multicast (NVLS, SHARP).
    """

    name: str
    kind: DimKind
    size: int
    bytes_per_s: Quantity
    efficiency: Quantity
    latency_s: Quantity
    base_latency_s: Quantity
    efficiency_by_kind: Mapping[str, Quantity] = field(default_factory=dict[str, Quantity])
    pair_bytes_per_s: Quantity | None = None
    wrapped: bool = True
    link: Link | None = None
    library: str = ""
    in_network: bool = False

    def efficiency_for(self, kind: str) -> Quantity:
        """Share of the link rate that large messages of collective `kind` reach; the common value if not measured."""
        return self.efficiency_by_kind.get(kind, self.efficiency)


@dataclass(frozen=True, slots=True)
class Network:
    """Dimensions from the innermost (fastest) outwards; the product of their sizes is the number of devices."""

    dims: tuple[NetworkDim, ...] = ()

    @property
    def size(self) -> int:
        """Devices in the network, 1 for a network without dimensions."""
        product = 1
        for dim in self.dims:
            product *= dim.size
        return product


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """Memory beyond the device's own: the host's, or storage.

    `read_bytes_per_s`, `write_bytes_per_s`: of one device, to and from it. `latency_s`: of a transfer. `nbytes`: one
    device's share of its capacity, None where it is not stated. `shared_by`: devices that share these rates.
    """

    name: str
    read_bytes_per_s: Quantity
    write_bytes_per_s: Quantity
    latency_s: Quantity
    nbytes: Quantity | None = None
    shared_by: int = 1

    def seconds(self, nbytes: float, *, load: bool) -> float:
        """Seconds to load or store `nbytes` on every device that shares the tier at once."""
        rate = self.read_bytes_per_s if load else self.write_bytes_per_s
        return self.latency_s.value + nbytes * self.shared_by / rate.value


@dataclass(frozen=True, slots=True)
class System:
    """`count` equal devices and their network. `name`: what the user asked for, without the count.

    `placement`: where the devices of a mesh lie, None where ids count the innermost dimension first. `tiers`: memory
    beyond the devices' own.
    """

    name: str
    device: Device
    count: int
    network: Network
    notes: tuple[str, ...] = ()
    placement: "Placement | None" = None
    tiers: tuple[MemoryTier, ...] = ()

    def tier(self, name: str) -> MemoryTier:
        """The memory tier of that name. Raises `InputError` with those that the system has."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        known = [tier.name for tier in self.tiers]
        hint = near_names(name, known) or (f"it has {', '.join(known)}" if known else "add tiers: to a system file")
        raise InputError(f"system {self.name} has no memory tier '{name}'", hint)
