"""Times of collectives over a system's links: alpha-beta costs of ring, direct and multi-axis algorithms.

One dimension of n devices at rate B = `bytes_per_s` x efficiency, S bytes (of an all-gather its result, else the
operand of one device), alpha = base latency + steps x latency:

    all_reduce       2 (n - 1) steps, 2 (n - 1) / n S / B
    all_gather       (n - 1) steps,   (n - 1) / n S / B          also reduce_scatter, all_to_all
    by tree          ceil(log2 n) steps, S / B; twice both for an all_reduce; where it is faster and nothing was fitted
    broadcast        (n - 1) steps,   S / B                      pipelined
    permute          1 step,          S / pair rate

An all-to-all over a ring of n crosses n/4 links a byte: n / 4 S / B (B: both links of a closed ring, else one).
Groups over several dimensions: reduce-scatter inwards out, all-reduce on the outermost, all-gather back, each dimension
with what the inner ones leave; over the axes of a torus all axes work at once on a share of the data. Communication
libraries change protocol with size: below a switch point a low-latency protocol at a fraction of the rate, above it
the full rate after a longer start (`models/analytical_collectives.yaml`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from stablecast.backends.analytical.constants import read_constants
from stablecast.backends.device import NetworkDim, System
from stablecast.backends.estimates import FloatArray
from stablecast.ir.device_program import P2P, Collective
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups

COLLECTIVE_CONSTANTS_FILE: Final = Path(__file__).parent / "models" / "analytical_collectives.yaml"
KINDS: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_broadcast",
    "collective_permute",
)
_RINGS: Final = ("ring", "torus")
_BY_TREE: Final = ("all_reduce", "all_gather", "reduce_scatter", "collective_broadcast")
TREE_FROM: Final = 16
"""Groups larger than this, and any over links that nobody measured, may go by a tree; the latencies of the others were
fitted with what ran there."""


@dataclass(frozen=True, slots=True)
class CollectiveEstimate:
    """Seconds of one collective, `low_s <= time_s <= high_s`, and the algorithm they are for."""

    time_s: float
    low_s: float
    high_s: float
    algorithm: str


@dataclass(frozen=True, slots=True)
class Span:
    """The part of one network dimension that a group covers: `size` devices, `stride` apart."""

    dim: NetworkDim
    size: int
    stride: int

    @property
    def is_ring(self) -> bool:
        return self.dim.kind in _RINGS

    @property
    def closed(self) -> bool:
        """Whether the devices form a closed ring: the whole wrapped axis, or every stride-th device of one."""
        return self.is_ring and self.dim.wrapped and self.size * self.stride >= self.dim.size

    @property
    def bytes_per_s(self) -> float:
        """Rate of one device within the group, before efficiency.

        Part of a closed ring is a line with one link each way; groups that interleave on a ring share its links. In a
        fully connected dimension a group has the links to its own members only.
        """
        rate = self.dim.bytes_per_s.value
        if self.is_ring:
            links = 2.0 if self.dim.wrapped else 1.0
            return rate / links * (2.0 if self.closed else 1.0) / self.stride
        if self.dim.kind == "fully_connected" and self.dim.size > 1:
            return rate * (self.size - 1) / (self.dim.size - 1)
        return rate

    def rate(self, kind: str) -> float:
        """Rate that large messages of collective `kind` reach."""
        return self.bytes_per_s * self.dim.efficiency_for(kind).value

    @property
    def doubtful(self) -> bool:
        return self.dim.efficiency.doubtful or self.dim.bytes_per_s.doubtful


def spans(groups: Groups, system: System) -> tuple[Span, ...]:
    """The dimensions that the group of device 0 covers, innermost first.

    Device ids count the innermost dimension first. A group that is no box in network coordinates takes, on each
    dimension, as many devices as it has distinct coordinates there. Raises `InputError` for a device that the system
    does not have.
    """
    members = np.asarray(groups.members(0) if not groups.ragged else max(groups.ragged, key=len), dtype=np.int64)
    if len(members) and int(members.max()) >= max(system.count, 1):
        raise InputError(
            f"a collective over {groups.num_devices} devices does not fit system {system.name} of {system.count}",
            f"ask for {groups.num_devices} devices",
        )
    places = members if system.placement is None else system.placement.places(members)
    return spans_of(places, system)


def spans_of(places: npt.NDArray[np.int64], system: System) -> tuple[Span, ...]:
    """The dimensions in which places of the network differ, innermost first."""
    found: list[Span] = []
    below = 1
    for dim in system.network.dims:
        coordinates = np.unique(places // below % dim.size)
        below *= dim.size
        if len(coordinates) > 1:
            found.append(Span(dim, len(coordinates), int(np.diff(coordinates).min())))
    return tuple(found)


@dataclass(frozen=True)
class CollectiveModel:
    """Prices collectives on one system; keeps what it worked out about groups.

    `constants`: protocol constants in place of those of the device's vendor.
    """

    system: System
    constants: Mapping[str, float] | None = None
    _spans: dict[Groups, tuple[Span, ...]] = field(default_factory=dict[Groups, tuple[Span, ...]], repr=False)

    def estimate(self, collective: Collective) -> CollectiveEstimate:
        """Seconds of `collective`. Raises `InputError` for an unknown kind or a group outside the system."""
        time, low, high, algorithm = self.times(
            collective.kind, collective.groups, np.array([float(collective.message_bytes)])
        )
        return CollectiveEstimate(float(time[0]), float(low[0]), float(high[0]), algorithm)

    def times(self, kind: str, groups: Groups, nbytes: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, str]:
        """Seconds, low, high for messages of `nbytes` each, and the algorithm."""
        if kind not in KINDS:
            raise InputError(f"unknown collective '{kind}'", "known: " + ", ".join(KINDS))
        if groups not in self._spans:
            self._spans[groups] = spans(groups, self.system)
        covered = self._spans[groups]
        if not covered:
            nothing = np.zeros_like(nbytes)
            return nothing, nothing, nothing, "none"
        time, algorithm = self._time(kind, covered, nbytes)
        return self._ranged(time, covered, algorithm)

    def covered(self, node: Collective | P2P) -> tuple[Span, ...]:
        """The dimensions that a collective or a message uses, innermost first."""
        if isinstance(node, P2P):
            found = self._beside(node)
            return found or tuple(Span(dim, 2, 1) for dim in self.system.network.dims[-1:])
        if node.groups not in self._spans:
            self._spans[node.groups] = spans(node.groups, self.system)
        return self._spans[node.groups]

    def p2p(self, p2p: P2P, groups: Groups | None = None) -> CollectiveEstimate:
        """Seconds of one send or receive: over the outermost dimension that `groups` covers, that the peers along a
        placed axis differ in, else of the system."""
        covered = spans(groups, self.system) if groups else self._beside(p2p)
        if not covered and not self.system.network.dims:
            return CollectiveEstimate(0.0, 0.0, 0.0, "none")
        span = covered[-1] if covered else Span(self.system.network.dims[-1], 2, 1)
        time, low, high, algorithm = self._ranged(self._permute(span, np.array([float(p2p.nbytes)])), (span,), "direct")
        return CollectiveEstimate(float(time[0]), float(low[0]), float(high[0]), algorithm)

    def _beside(self, p2p: P2P) -> tuple[Span, ...]:
        placed = self.system.placement
        if placed is None or p2p.axis not in dict(placed.axes):
            return ()
        return spans_of(placed.neighbours(p2p.axis, p2p.shift), self.system)

    def _time(self, kind: str, covered: Sequence[Span], nbytes: FloatArray) -> tuple[FloatArray, str]:
        if kind == "collective_permute":
            return self._permute(covered[-1], nbytes), "direct"
        if kind == "all_to_all":
            return self._all_to_all(covered, nbytes)
        torus = [span for span in covered if span.dim.kind == "torus"]
        if len(torus) > 1 and len(torus) == len(covered):
            return self._all_axes(kind, torus, nbytes), "torus-multi-ring"
        if len(covered) == 1:
            time = self._flat(kind, covered[0], nbytes)
            by_tree = _has_tree(kind, covered[0]) and float(time[0]) < float(self._ring(kind, covered[0], nbytes)[0])
            return time, "tree" if by_tree else _algorithm(covered[0])
        return self._hierarchical(kind, covered, nbytes), "hierarchical"

    def _flat(self, kind: str, span: Span, nbytes: FloatArray) -> FloatArray:
        """The ring (or direct exchange), or the tree where it is faster."""
        ring = self._ring(kind, span, nbytes)
        if not _has_tree(kind, span):
            return ring
        hops = math.ceil(math.log2(span.size)) * (2.0 if kind == "all_reduce" else 1.0)
        latency = span.dim.base_latency_s.value + hops * span.dim.latency_s.value
        factor = 2.0 if kind == "all_reduce" else 1.0
        return np.minimum(ring, self._protocols(kind, span, latency, factor * nbytes / span.rate(kind)))

    def _ring(self, kind: str, span: Span, nbytes: FloatArray) -> FloatArray:
        n = span.size
        factor = {"all_reduce": 2.0 * (n - 1) / n, "collective_broadcast": 1.0}.get(kind, (n - 1) / n)
        return self._protocols(kind, span, _latency(kind, span), factor * nbytes / span.rate(kind))

    def _hierarchical(self, kind: str, covered: Sequence[Span], nbytes: FloatArray) -> FloatArray:
        total = np.zeros_like(nbytes)
        left = nbytes
        for depth, span in enumerate(covered):
            if kind == "all_reduce" and depth < len(covered) - 1:
                for half in ("reduce_scatter", "all_gather"):
                    total = total + self._flat(half, span, left)
            else:
                total = total + self._flat(kind, span, left)
            if kind != "collective_broadcast":
                left = left / span.size
        return total

    def _all_axes(self, kind: str, axes: Sequence[Span], nbytes: FloatArray) -> FloatArray:
        n = math.prod(span.size for span in axes)
        rate = sum(span.rate(kind) for span in axes)
        factor = {"all_reduce": 2.0 * (n - 1) / n, "collective_broadcast": 1.0}.get(kind, (n - 1) / n)
        base = max(span.dim.base_latency_s.value for span in axes)
        steps = sum(_latency(kind, span) - span.dim.base_latency_s.value for span in axes)
        return base + steps + factor * nbytes / rate

    def _all_to_all(self, covered: Sequence[Span], nbytes: FloatArray) -> tuple[FloatArray, str]:
        """Direct exchange: the slowest dimension decides, each carrying what has to cross it."""
        n = math.prod(span.size for span in covered)
        transfer = np.zeros_like(nbytes)
        latency = 0.0
        inner = 1
        for span in covered:
            share = span.size / 4.0 if span.is_ring else (span.size - 1) * inner / n
            inner *= span.size
            transfer = np.maximum(transfer, share * nbytes / span.rate("all_to_all"))
            latency = max(latency, _latency("all_to_all", span))
        return self._protocols("all_to_all", covered[-1], latency, transfer), "direct"

    def _permute(self, span: Span, nbytes: FloatArray) -> FloatArray:
        dim = span.dim
        pair = dim.pair_bytes_per_s or dim.bytes_per_s
        constants = self._constants()
        rate = pair.value * dim.efficiency.value * constants["permute.share"]
        alpha = constants["permute.base"] * dim.base_latency_s.value + dim.latency_s.value
        return self._protocols("collective_permute", span, alpha, nbytes / rate)

    def _protocols(self, kind: str, span: Span, alpha: float, transfer: FloatArray) -> FloatArray:
        """The faster of two protocols; one where nothing of the dimension was measured."""
        if span.doubtful:
            return alpha + transfer
        constants = self._constants()
        suffix = kind if f"start.{kind}" in constants else "other"
        start, slowdown = constants[f"start.{suffix}"], constants[f"slowdown.{suffix}"]
        return np.minimum(alpha + slowdown * transfer, alpha * (1.0 + start) + transfer)

    def _constants(self) -> Mapping[str, float]:
        return vendor_constants(self.system.device.vendor) if self.constants is None else self.constants

    def _ranged(
        self, time: FloatArray, covered: Sequence[Span], algorithm: str
    ) -> tuple[FloatArray, FloatArray, FloatArray, str]:
        constants = self._constants()
        suffix = "assumed" if any(span.doubtful for span in covered) else "fitted"
        return time, time * constants[f"low.{suffix}"], time * constants[f"high.{suffix}"], algorithm


@cache
def vendor_constants(vendor: str, path: Path = COLLECTIVE_CONSTANTS_FILE) -> Mapping[str, float]:
    """Protocol constants of a vendor's communication library; those of `default` where none was measured."""
    table = read_constants(path)
    section = table.get(vendor) or table["default"]
    return {name: constant.value for name, constant in section.constants.items()}


def collective_time(collective: Collective, system: System) -> CollectiveEstimate:
    """Seconds of one run of `collective` on `system`; see `CollectiveModel` for many on one system.

    Raises `InputError` for an unknown kind or a group with devices that `system` does not have.
    """
    return CollectiveModel(system).estimate(collective)


def _has_tree(kind: str, span: Span) -> bool:
    """Whether a library would also offer a tree: any two of many devices reach each other equally well."""
    unmeasured = span.size > TREE_FROM or (span.doubtful and span.size > 2)
    return unmeasured and not span.is_ring and kind in _BY_TREE


def _algorithm(span: Span) -> str:
    return "direct" if span.dim.kind == "fully_connected" else "ring"


def _latency(kind: str, span: Span) -> float:
    """Base latency and steps: n - 1 of them, twice for an all-reduce, half on a closed ring that goes both ways."""
    steps = span.size - 1.0
    if span.closed:
        steps = math.ceil(steps / 2.0)
    if kind == "all_reduce":
        steps *= 2.0
    return span.dim.base_latency_s.value + steps * span.dim.latency_s.value
