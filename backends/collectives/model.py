"""Times of collectives over a system's links.

Within one dimension whose communication library was measured (`library` of the dimension), times come from its curves
(`curves`); elsewhere from alpha-beta costs (`algorithms`). The algorithm is the cheapest of those that a library offers
there, or the one asked for by name; a named one on measured links takes the curve's time, times its cost over that of
the library's own choice.

Groups over several dimensions: reduce-scatter inwards out, all-reduce on the outermost, all-gather back, each dimension
with what the inner ones leave. Messages go in chunks of 4 MiB, so that the dimensions work at once: the latencies add
up, of the transfers the longest counts, and of the others one chunk. Over the axes of a torus all axes work at once on
a share of the data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

import numpy as np

from stablecast.backends.collectives import algorithms
from stablecast.backends.collectives.balance import balanced_loads, number_of_chunks
from stablecast.backends.collectives.curves import Library, Links, links_of, plain_ranges, read_libraries
from stablecast.backends.collectives.spans import Span, levels, spans, spans_of
from stablecast.backends.device import System
from stablecast.backends.estimates import FloatArray
from stablecast.ir.device_program import P2P, Collective
from stablecast.ir.errors import InputError, near_names
from stablecast.ir.groups import Groups

KINDS: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_broadcast",
    "collective_permute",
)
CHUNK_BYTES: Final = 4.0 * 2**20
"""Buffer of one NCCL channel (NCCL_BUFFSIZE, its documentation): the grain in which dimensions overlap."""
AUTO: Final = "auto"
Level = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class CollectiveEstimate:
    """Seconds of one collective, `low_s <= time_s <= high_s`, and the algorithm they are for."""

    time_s: float
    low_s: float
    high_s: float
    algorithm: str


@dataclass(frozen=True)
class CollectiveModel:
    """Prices collectives on one system; keeps what it worked out about groups.

    `algorithm`: the name of one of `algorithms.SINGLE` or `algorithms.OVER_DIMENSIONS` for every collective that can go
    by it, or "auto": what costs least.
    """

    system: System
    algorithm: str = AUTO
    _spans: dict[Groups, tuple[Span, ...]] = field(default_factory=dict[Groups, tuple[Span, ...]], repr=False)

    def __post_init__(self) -> None:
        known = (AUTO, *algorithms.SINGLE, *algorithms.OVER_DIMENSIONS, *algorithms.ALIASES)
        if self.algorithm not in known:
            raise InputError(
                f"unknown algorithm '{self.algorithm}'",
                near_names(self.algorithm, known) or "known: " + ", ".join(known),
            )

    def estimate(self, collective: Collective) -> CollectiveEstimate:
        """Seconds of `collective`. Raises `InputError` for an unknown kind or a group outside the system."""
        time, low, high, algorithm = self.times(
            collective.kind, collective.groups, np.array([float(collective.message_bytes)])
        )
        return CollectiveEstimate(float(time[0]), float(low[0]), float(high[0]), algorithm)

    def can(self, collective: Collective) -> bool:
        """Whether the collective can go by the algorithm that was named."""
        try:
            self.estimate(replace(collective, operand_bytes=1 << 20, result_bytes=1 << 20))
        except InputError:
            return False
        return True

    def times(self, kind: str, groups: Groups, nbytes: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, str]:
        """Seconds, low, high for messages of `nbytes` each, and the algorithm (of the first)."""
        if kind not in KINDS:
            raise InputError(f"unknown collective '{kind}'", "known: " + ", ".join(KINDS))
        nbytes = np.asarray(nbytes, dtype=np.float64)
        if groups not in self._spans:
            self._spans[groups] = spans(groups, self.system)
        covered = self._spans[groups]
        if not covered:
            nothing = np.zeros_like(nbytes)
            return nothing, nothing, nothing, "none"
        time, algorithm = self._time(kind, covered, nbytes)
        return self._ranged(kind, time, covered, algorithm)

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
        time = self._permute(span, np.array([float(p2p.nbytes)]))
        time, low, high, algorithm = self._ranged("collective_permute", time, (span,), "direct")
        return CollectiveEstimate(float(time[0]), float(low[0]), float(high[0]), algorithm)

    def _beside(self, p2p: P2P) -> tuple[Span, ...]:
        placed = self.system.placement
        if placed is None or p2p.axis not in dict(placed.axes):
            return ()
        return spans_of(placed.neighbours(p2p.axis, p2p.shift), self.system)

    @property
    def _named(self) -> str:
        return algorithms.ALIASES.get(self.algorithm, self.algorithm)

    def _time(self, kind: str, covered: Sequence[Span], nbytes: FloatArray) -> tuple[FloatArray, str]:
        if kind == "collective_permute":
            self._check(kind, ("direct",))
            return self._permute(covered[-1], nbytes), "direct"
        if len(covered) == 1:
            time, name = self._flat(kind, covered[0], nbytes)
            if kind == "all_to_all" and self.algorithm == AUTO:
                return time, "direct"
            return time, name
        if kind == "all_to_all":
            self._check(kind, ("direct",))
            return self._all_to_all(covered, nbytes), "direct"
        if self._named == "ring":
            return self._flat_ring(kind, covered, nbytes), "ring"
        if self._named == "themis":
            return self._balanced(kind, covered, nbytes), "themis"
        found = levels(covered)
        if len(found) == 1:
            self._check(kind, ("torus-multi-ring", "ring"))
            return self._all_axes(kind, found[0], nbytes), "torus-multi-ring"
        self._check(kind, ("hierarchical", "ring", *algorithms.SINGLE))
        return self._hierarchical(kind, found, nbytes), "hierarchical"

    def _check(self, kind: str, possible: Sequence[str]) -> None:
        if self._named != AUTO and self._named not in possible:
            raise InputError(
                f"{kind} cannot go by '{self.algorithm}' here", "possible: " + ", ".join(dict.fromkeys(possible))
            )

    def _flat(self, kind: str, span: Span, nbytes: FloatArray) -> tuple[FloatArray, str]:
        """Seconds within one dimension, and the algorithm."""
        offered = algorithms.offered(kind, span)
        costs = {name: algorithms.cost(name, kind, span, nbytes) for name in offered}
        own = np.min(list(costs.values()), axis=0)
        measured = self._measured(kind, span, nbytes)
        time = own if measured is None else measured
        if self.algorithm == AUTO or self._named in algorithms.OVER_DIMENSIONS:
            if self.algorithm != AUTO and len(self.system.network.dims) == 1:
                self._check(kind, algorithms.possible(kind, span))
            return time, min(costs, key=lambda name: float(costs[name][0]))
        self._check(kind, algorithms.possible(kind, span))
        cost = algorithms.cost(self._named, kind, span, nbytes)
        return (cost if measured is None else measured * (cost / own)), self._named

    def _measured(self, kind: str, span: Span, nbytes: FloatArray) -> FloatArray | None:
        """Times by the curves of the dimension's library, None without one."""
        library = self._library(span)
        if library is None:
            return None
        links, device = self._links(span, span.bytes_per_s), self._links(span, self._device_rate(span))
        if kind == "collective_broadcast" and library.has("all_gather"):
            # a ring sends the whole message on, of an all-gather all but the own part
            grown = nbytes * (span.size / (span.size - 1))
            return library.time("all_gather", span.size, links, device, grown)
        return library.time(kind, span.size, links, device, nbytes) if library.has(kind) else None

    def _library(self, span: Span) -> Library | None:
        return read_libraries().get(span.dim.library) if span.dim.library else None

    def _links(self, span: Span, bytes_per_s: float) -> Links:
        return links_of(self.system.device, bytes_per_s, span.dim.in_network)

    def _device_rate(self, span: Span) -> float:
        """The device's own total rate, whatever part of it the group has."""
        total = self.system.device.scaleup_bytes_per_s
        return total.value if total else span.dim.bytes_per_s.value

    def _hierarchical(self, kind: str, found: Sequence[Level], nbytes: FloatArray) -> FloatArray:
        latency, flows, left = 0.0, list[FloatArray](), nbytes
        for depth, level in enumerate(found):
            inner = kind == "all_reduce" and depth < len(found) - 1
            flow = np.zeros_like(nbytes)
            for half in ("reduce_scatter", "all_gather") if inner else (kind,):
                start = float(self._level(half, level, np.ones(1))[0])
                flow = flow + np.maximum(self._level(half, level, left) - start, 0.0)
                latency += start
            flows.append(flow)
            if kind != "collective_broadcast":
                left = left / math.prod(span.size for span in level)
        slowest = np.max(flows, axis=0)
        chunks = np.maximum(nbytes / CHUNK_BYTES, 1.0)
        return latency + slowest + (np.sum(flows, axis=0) - slowest) / chunks

    def _balanced(self, kind: str, covered: Sequence[Span], nbytes: FloatArray) -> FloatArray:
        """Chunks that start on the least loaded dimension, or the usual order where that is faster."""
        self._check(kind, ("themis",) if kind in ("all_reduce", "all_gather", "reduce_scatter") else ())
        halves = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
        sizes = [span.size for span in covered]
        starts = [[float(self._flat(half, span, np.ones(1))[0][0]) for half in halves] for span in covered]

        latency = sum(map(sum, starts))
        found: list[float] = []
        for whole in map(float, np.atleast_1d(nbytes)):
            chunks = number_of_chunks(whole, CHUNK_BYTES)

            @cache
            def flow(dim: int, size: float, chunks: int = chunks) -> float:
                """Of one chunk, at the rate of all chunks together: they follow each other without a gap."""
                message = np.array([size * chunks])
                times = [float(self._flat(half, covered[dim], message)[0][0]) for half in halves]
                return sum(max(time - start, 0.0) for time, start in zip(times, starts[dim], strict=True)) / chunks

            loads = balanced_loads(sizes, flow, whole, chunks)
            found.append(latency + float(loads.max()) + float(loads.sum() - loads.max()) / chunks)
        depths = levels(covered)
        plain = self._hierarchical(kind, depths, nbytes) if len(depths) > 1 else self._all_axes(kind, depths[0], nbytes)
        return np.minimum(np.array(found), plain)

    def _level(self, kind: str, level: Level, nbytes: FloatArray) -> FloatArray:
        return self._flat(kind, level[0], nbytes)[0] if len(level) == 1 else self._all_axes(kind, level, nbytes)

    def _flat_ring(self, kind: str, covered: Sequence[Span], nbytes: FloatArray) -> FloatArray:
        """One ring through all dimensions: as many channels as inner devices carry a share each outwards."""
        n = math.prod(span.size for span in covered)
        double = 2.0 if kind == "all_reduce" else 1.0
        volume = 1.0 if kind == "collective_broadcast" else double * (n - 1) / n
        inner, latency, flow = 1, max(span.dim.base_latency_s.value for span in covered), np.zeros_like(nbytes)
        for span in covered:
            crossings = n / inner - n / (inner * span.size)
            latency += double * crossings * span.dim.latency_s.value
            flow = np.maximum(flow, volume * nbytes / inner / span.rate(kind))
            inner *= span.size
        return latency + flow

    def _all_axes(self, kind: str, axes: Sequence[Span], nbytes: FloatArray) -> FloatArray:
        n = math.prod(span.size for span in axes)
        rate = sum(span.rate(kind) for span in axes)
        factor = {"all_reduce": 2.0 * (n - 1) / n, "collective_broadcast": 1.0}.get(kind, (n - 1) / n)
        base = max(span.dim.base_latency_s.value for span in axes)
        starts = [algorithms.latency_and_transfer("ring", kind, span, nbytes)[0] for span in axes]
        steps = sum(start - span.dim.base_latency_s.value for start, span in zip(starts, axes, strict=True))
        return base + steps + factor * nbytes / rate

    def _all_to_all(self, covered: Sequence[Span], nbytes: FloatArray) -> FloatArray:
        """Direct exchange: the slowest dimension decides, each carrying what has to cross it."""
        n = math.prod(span.size for span in covered)
        flow, latency, inner = np.zeros_like(nbytes), 0.0, 1
        for span in covered:
            share = span.size / 4.0 if span.is_ring else (span.size - 1) * inner / n
            inner *= span.size
            flow = np.maximum(flow, share * nbytes / span.rate("all_to_all"))
            name = "ring" if span.is_ring else "direct"
            latency = max(latency, algorithms.latency_and_transfer(name, "all_to_all", span, nbytes)[0])
        return latency + flow

    def _permute(self, span: Span, nbytes: FloatArray) -> FloatArray:
        dim = span.dim
        pair = dim.pair_bytes_per_s or dim.bytes_per_s
        library = self._library(span)
        if library is not None and library.has("collective_permute"):
            links, device = self._links(span, pair.value), self._links(span, self._device_rate(span))
            return library.time("collective_permute", 2, links, device, nbytes)
        return dim.base_latency_s.value + dim.latency_s.value + nbytes / (pair.value * dim.efficiency.value)

    def _ranged(
        self, kind: str, time: FloatArray, covered: Sequence[Span], algorithm: str
    ) -> tuple[FloatArray, FloatArray, FloatArray, str]:
        ranges = [self._range(kind, span) for span in covered]
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
        return time, time * low, time * high, algorithm

    def _range(self, kind: str, span: Span) -> tuple[float, float]:
        """Low and high, as factors, of what happens on one dimension."""
        library = self._library(span)
        if library is None or not library.has(kind):
            return plain_ranges()["assumed" if span.doubtful else "stated"]
        measured = library.is_measured(kind, self._links(span, self._device_rate(span)))
        return library.measured if measured else library.carried


def collective_time(collective: Collective, system: System) -> CollectiveEstimate:
    """Seconds of one run of `collective` on `system`; see `CollectiveModel` for many on one system.

    Raises `InputError` for an unknown kind or a group with devices that `system` does not have.
    """
    return CollectiveModel(system).estimate(collective)
