"""Mesh axes on network dimensions: where in the network each device of a mesh lies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stablecast.backends.device import NetworkDim, System
from stablecast.ir.errors import InputError, near_names

IntArray = npt.NDArray[np.int64]
Axes = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Placement:
    """The places of a mesh's devices; place p has coordinate p mod n on the innermost dimension of n, and so on.

    `axes`: name and size, major to minor, as device ids count them. `order`: axis names as places count them.
    """

    axes: tuple[tuple[str, int], ...]
    order: tuple[str, ...]

    @cached_property
    def strides(self) -> Mapping[str, int]:
        """Places from one coordinate of an axis to the next."""
        sizes = dict(self.axes)
        return {name: math.prod(sizes[one] for one in self.order[at + 1 :]) for at, name in enumerate(self.order)}

    def places(self, devices: IntArray) -> IntArray:
        """The place of each device id. Ids beyond the mesh keep theirs."""
        if self.order == tuple(name for name, _ in self.axes):
            return devices
        left, found = devices.copy(), np.zeros_like(devices)
        for name, size in reversed(self.axes):
            found += left % size * self.strides[name]
            left //= size
        return np.where(left > 0, devices, found)

    def neighbours(self, axis: str, shift: int) -> IntArray:
        """Places of the first device and of the one `shift` further along `axis`."""
        size = dict(self.axes)[axis]
        return np.array([0, shift % size * self.strides[axis]], dtype=np.int64)


def place(axes: Axes, wanted: Mapping[str, Sequence[str]], system: System) -> System:
    """`system` with the devices of a mesh placed: axes in `wanted` on these dimensions, the others innermost first.

    `axes`: name and size, major to minor. Of the others the last axis comes innermost, where there is room. Raises
    `InputError` for axes and dimensions that are not there, and for an axis that does not fit on its dimensions.
    """
    dims = system.network.dims
    names = [dim.name for dim in dims]
    sizes = dict(axes)
    for axis, chosen in wanted.items():
        if axis not in sizes:
            raise InputError(f"--map names no axis '{axis}' of the mesh", _hint(axis, list(sizes), "its axes are "))
        for name in chosen:
            if name not in names:
                hint = _hint(name, names, f"{system.name} of {system.count} has ")
                raise InputError(f"--map puts {axis} on '{name}', which the network does not have", hint)
    level = {axis: min(names.index(name) for name in chosen) for axis, chosen in wanted.items() if chosen}
    room = [float(dim.size) for dim in dims]
    for axis, depth in level.items():
        room[depth] /= sizes[axis]
    for axis, size in reversed(list(axes)):
        if axis not in level:
            fits = [depth for depth, left in enumerate(room) if left > 1.0]
            level[axis] = fits[0] if fits else max(len(dims) - 1, 0)
            if fits:
                room[fits[0]] /= size
    names_inward = [name for name, _ in reversed(list(axes))]
    minor_first = sorted(names_inward, key=lambda name: level[name])
    made = Placement(tuple(axes), tuple(reversed(minor_first)))
    for axis, chosen in wanted.items():
        _check(made, axis, sizes[axis], chosen, dims)
    return replace(system, placement=made)


def dims_of(placement: Placement, axis: str, dims: Sequence[NetworkDim]) -> tuple[str, ...]:
    """Names of the dimensions that the devices along `axis` differ in, innermost first."""
    places = np.arange(dict(placement.axes)[axis], dtype=np.int64) * placement.strides[axis]
    found: list[str] = []
    below = 1
    for dim in dims:
        if len(np.unique(places // below % dim.size)) > 1:
            found.append(dim.name)
        below *= dim.size
    return tuple(found)


def _check(placement: Placement, axis: str, size: int, chosen: Sequence[str], dims: Sequence[NetworkDim]) -> None:
    strange = [name for name in dims_of(placement, axis, dims) if name not in chosen]
    if strange:
        there = ", ".join(f"{dim.name} {dim.size}" for dim in dims)
        raise InputError(
            f"--map: axis {axis} of {size} does not fit on {'+'.join(chosen)}, it reaches over {', '.join(strange)}",
            f"the dimensions are {there}; write {axis}={chosen[0]}+{strange[0]}, or another mesh",
        )


def _hint(name: str, known: Sequence[str], otherwise: str) -> str:
    return near_names(name, known) or otherwise + (", ".join(known) or "none")
