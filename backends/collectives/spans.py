"""Where a group of devices lies in a network: the part of each dimension that it covers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stablecast.backends.device import NetworkDim, System
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups

_RINGS: Final = ("ring", "torus")


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


def levels(covered: Sequence[Span]) -> list[tuple[Span, ...]]:
    """Dimensions that work one after the other, innermost first; the axes of a torus work at once and are one level."""
    found: list[tuple[Span, ...]] = []
    for span in covered:
        if found and span.dim.kind == found[-1][0].dim.kind == "torus":
            found[-1] = (*found[-1], span)
        else:
            found.append((span,))
    return found
