"""Measured times of a communication library over message size, and what they say of links that nobody measured.

A `Reference` is one measured kind of device: for each collective and group size a monotone curve through measured
points, cubic in log(time) over log(bytes) (Fritsch and Butland's slopes), constant below the first point and of
constant bandwidth above the last. Its protocols (LL, LL128, Simple) and algorithms are in the curve's shape.

A device with other links gets time s t(b (B' / B) / s): the curve is a function of bytes over latency times rate, so a
rate r times higher moves it by r in bytes, and a latency s times longer stretches it by s. s is the ratio of clocks,
times `cross_die` where flags and data cross to a second die. Over several references the answer is their geometric mean
with weights 1 / distance^2 in the logarithms of rate and clock: a measured device answers with its own curve. (A
permute has one curve, of size 2: every device has one peer.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import yaml

from stablecast.backends.device import Device
from stablecast.backends.estimates import FloatArray

COLLECTIVE_CONSTANTS_FILE: Final = Path(__file__).parent.parent / "models" / "collectives.yaml"
MEASURED_WITHIN: Final = 0.05
"""A device no further than this from a reference is one that was measured."""
_NEAR: Final = 0.01
_OTHER_DIES: Final = 0.5
_LARGER_GROUP: Final = 1.0
"""What lacking groups of the size adds to a reference's distance."""
_REDUCED_BY_SWITCH: Final = 0.85
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Curve:
    """Time over message size: knots in log2(bytes) and ln(seconds), and the slopes there."""

    x: FloatArray
    y: FloatArray
    slope: FloatArray

    @staticmethod
    def through(nbytes: Sequence[float] | FloatArray, seconds: Sequence[float] | FloatArray) -> "Curve":
        """The monotone curve through points that rise in both; bytes must differ."""
        x, y = np.log2(np.asarray(nbytes, dtype=np.float64)), np.log(np.asarray(seconds, dtype=np.float64))
        step, delta = np.diff(x), np.diff(y) / np.diff(x)
        slope = np.zeros_like(x)
        if len(delta):
            slope[0], slope[-1] = delta[0], delta[-1]
            before, after = step[:-1], step[1:]
            left, right = 2 * after + before, after + 2 * before
            rising = (delta[:-1] > 0) & (delta[1:] > 0)
            safe = np.where(rising, delta[:-1], 1.0), np.where(rising, delta[1:], 1.0)
            slope[1:-1] = np.where(rising, (left + right) / (left / safe[0] + right / safe[1]), 0.0)
            slope[[0, -1]] = np.clip(slope[[0, -1]], 0.0, None)
        return Curve(x, y, slope)

    def time(self, nbytes: FloatArray) -> FloatArray:
        """Seconds of messages of `nbytes`."""
        at = np.log2(np.maximum(nbytes, 1e-9))
        inside = np.clip(at, self.x[0], self.x[-1])
        if len(self.x) == 1:
            return np.exp(np.full_like(at, self.y[0]))
        left = np.clip(np.searchsorted(self.x, inside, side="right") - 1, 0, len(self.x) - 2)
        width = self.x[left + 1] - self.x[left]
        u = (inside - self.x[left]) / width
        h00, h10 = (1 + 2 * u) * (1 - u) ** 2, u * (1 - u) ** 2
        h01, h11 = u**2 * (3 - 2 * u), u**2 * (u - 1)
        value = h00 * self.y[left] + h01 * self.y[left + 1]
        value = value + width * (h10 * self.slope[left] + h11 * self.slope[left + 1])
        return np.exp(value + np.maximum(at - self.x[-1], 0.0) * np.log(2.0))

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest message."""
        return float(np.exp(self.y[0]))


@dataclass(frozen=True, slots=True)
class Links:
    """What the law needs to know of a device's links: the rate of one device, its clock, dies, and its switches."""

    bytes_per_s: float
    clock_hz: float | None
    dies: int
    in_network: bool

    def distance(self, other: "Links") -> float:
        """How unlike two devices are: logarithms of rate and clock, and a step for another number of dies."""
        clock = abs(np.log(self.clock_hz / other.clock_hz)) if self.clock_hz and other.clock_hz else 0.0
        dies = _OTHER_DIES if (self.dies > 1) != (other.dies > 1) else 0.0
        return float(abs(np.log(self.bytes_per_s / other.bytes_per_s)) + clock + dies)


@dataclass(frozen=True, slots=True)
class Reference:
    """Curves of one measured device by collective and group size.

    `mesh`: devices that have a link for each pair, of which a group uses those to its own members; 0 with a switch.
    """

    name: str
    links: Links
    source: str
    curves: Mapping[str, Mapping[int, Curve]]
    mesh: int = 0

    def bytes_per_s(self, size: int) -> float:
        """Rate that one device had in the measured groups of `size`."""
        share = (min(size, self.mesh) - 1) / (self.mesh - 1) if self.mesh > 1 else 1.0
        return self.links.bytes_per_s * share

    def time(self, kind: str, size: int, nbytes: FloatArray, in_network: bool = True) -> FloatArray:
        """Seconds of a group of `size`; between measured sizes in log(size), above them with the steps of a ring.

        `in_network` False: without what its switches reduce.
        """
        by_size = self.curves[kind]
        sizes = sorted(by_size)
        if size in by_size:
            return self._at(kind, size, nbytes, in_network)
        if size > sizes[-1]:
            last = sizes[-1]
            volume = (size - 1) / size * last / (last - 1)
            more = by_size[last].latency_s * ((size - 1) / (last - 1) - 1)
            return self._at(kind, last, nbytes * volume, in_network) + more
        above = next(known for known in sizes if known > size)
        below = sizes[sizes.index(above) - 1]
        part = np.log(size / below) / np.log(above / below)
        low, high = self._at(kind, below, nbytes, in_network), self._at(kind, above, nbytes, in_network)
        return np.exp((1 - part) * np.log(low) + part * np.log(high))

    def _at(self, kind: str, size: int, nbytes: FloatArray, in_network: bool) -> FloatArray:
        time = self.curves[kind][size].time(nbytes)
        halves = [self.curves.get(half, {}).get(size) for half in ("reduce_scatter", "all_gather")]
        if kind != "all_reduce" or in_network or not self.links.in_network or halves[0] is None or halves[1] is None:
            return time
        largest = np.array([2.0 ** self.curves[kind][size].x[-1]])
        reduced = self.curves[kind][size].time(largest)[0]
        if reduced > _REDUCED_BY_SWITCH * (halves[0].time(largest) + halves[1].time(largest))[0]:
            return time
        return np.maximum(time, halves[0].time(nbytes) + halves[1].time(nbytes) - halves[1].latency_s)


@dataclass(frozen=True, slots=True)
class Library:
    """A communication library (NCCL, RCCL): its references, and the ranges of its answers.

    `cross_die`: latency of a device of two dies over that of one. `measured`, `carried`: low and high as factors, for
    devices that were measured and for others.
    """

    name: str
    references: Sequence[Reference]
    cross_die: float
    measured: tuple[float, float]
    carried: tuple[float, float]

    def has(self, kind: str) -> bool:
        return any(kind in reference.curves for reference in self.references)

    def is_measured(self, kind: str, links: Links) -> bool:
        """Whether a reference as good as equal to `links` has curves of `kind`."""
        return any(r.links.distance(links) <= MEASURED_WITHIN and kind in r.curves for r in self.references)

    def stretch(self, links: Links, reference: Reference) -> float:
        """Latency of a device with `links` over that of `reference`."""
        clock = reference.links.clock_hz / links.clock_hz if links.clock_hz and reference.links.clock_hz else 1.0
        return clock * self._dies(links) / self._dies(reference.links)

    def _dies(self, links: Links) -> float:
        return self.cross_die if links.dies > 1 else 1.0

    def time(self, kind: str, size: int, links: Links, device: Links, nbytes: FloatArray) -> FloatArray:
        """Seconds of `kind` over `size` devices whose part of the network is `links`.

        `device`: the links of the whole device; they choose the references, so that a slower link is never faster.
        """
        total, weights = np.zeros_like(nbytes), 0.0
        for reference in self.references:
            if kind not in reference.curves:
                continue
            s = self.stretch(device, reference)
            moved = nbytes * (reference.bytes_per_s(size) / links.bytes_per_s / s)
            beyond = _LARGER_GROUP if size > max(reference.curves[kind]) else 0.0
            weight = (device.distance(reference.links) + beyond + _NEAR) ** -2
            total += weight * np.log(s * reference.time(kind, size, moved, links.in_network))
            weights += weight
        return np.exp(total / weights)


def links_of(device: Device, bytes_per_s: float, in_network: bool) -> Links:
    """The links of `device` at a rate; one die unless its file states `dies_per_device`."""
    dies = device.facts.get("dies_per_device")
    count = int(dies.value) if dies else 1
    return Links(bytes_per_s, device.clock_hz.value if device.clock_hz else None, count, in_network)


@cache
def read_libraries(path: Path = COLLECTIVE_CONSTANTS_FILE) -> Mapping[str, Library]:
    """The libraries of the constants file by name."""
    table = cast("Mapping[str, Any]", yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER))
    return {name: _library(name, part) for name, part in table.items() if "references" in part}


@cache
def plain_ranges(path: Path = COLLECTIVE_CONSTANTS_FILE) -> Mapping[str, tuple[float, float]]:
    """Low and high, as factors, of alpha-beta costs: `stated` by a user or data sheet, and `assumed`."""
    table = cast("Mapping[str, Any]", yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER))
    return {name: _range(table["ranges"][name]) for name in ("stated", "assumed")}


def _range(part: Mapping[str, Any]) -> tuple[float, float]:
    return float(part["low"]), float(part["high"])


def _library(name: str, part: Mapping[str, Any]) -> Library:
    references = [_reference(key, found) for key, found in part["references"].items()]
    cross = float(part["cross_die"]["value"])
    return Library(name, references, cross, _range(part["measured"]), _range(part["carried"]))


def _reference(name: str, part: Mapping[str, Any]) -> Reference:
    links = Links(float(part["bytes_per_s"]), float(part["clock_hz"]), int(part["dies"]), bool(part["in_network"]))
    curves = {
        str(kind): {
            int(size): Curve.through(list(points), [float(us) * 1e-6 for us in points.values()])
            for size, points in by_size.items()
        }
        for kind, by_size in part["times_us"].items()
    }
    return Reference(name, links, str(part["source"]), curves, int(part.get("mesh", 0)))
