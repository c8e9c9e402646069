"""Half planes of an index space, and how much of it they leave."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Plane:
    """An affine function of the indices: sum of `coefficients` x index + `constant`; as a condition: it is >= 0."""

    coefficients: tuple[int, ...]
    constant: int

    def plus(self, other: "Plane") -> "Plane":
        pairs = zip(self.coefficients, other.coefficients, strict=True)
        return Plane(tuple(a + b for a, b in pairs), self.constant + other.constant)

    def times(self, factor: int) -> "Plane":
        return Plane(tuple(a * factor for a in self.coefficients), self.constant * factor)


def inverted(planes: tuple[Plane, ...]) -> tuple[Plane, ...] | None:
    """Where `planes` do not hold; None where that is no intersection of half planes."""
    if len(planes) != 1:
        return None
    flipped = planes[0].times(-1)
    return (Plane(flipped.coefficients, flipped.constant - 1),)


def moved(plane: Plane, where: Mapping[int, int], rank: int) -> Plane | None:
    """`plane` with its dimensions moved; None where one that it depends on is not whole any more."""
    coefficients = [0] * rank
    for axis, coefficient in enumerate(plane.coefficients):
        if not coefficient:
            continue
        if axis not in where:
            return None
        coefficients[where[axis]] = coefficient
    return Plane(tuple(coefficients), plane.constant)


def share(planes: tuple[Plane, ...], shape: tuple[int, ...]) -> float | None:
    """The share of the index space `shape` where all `planes` hold; None where they depend on more than two axes."""
    axes = sorted({axis for plane in planes for axis, factor in enumerate(plane.coefficients) if factor})
    if len(axes) > 2 or 0 in shape:
        return None
    first = axes[0] if axes else -1
    second = axes[1] if len(axes) > 1 else -1
    rows = np.arange(shape[first] if axes else 1)
    columns = shape[second] if second >= 0 else 1
    low, high = np.zeros_like(rows), np.full_like(rows, columns - 1)
    for plane in planes:
        fixed = plane.constant + (plane.coefficients[first] if axes else 0) * rows
        slope = plane.coefficients[second] if second >= 0 else 0
        if slope > 0:
            low = np.maximum(low, -(fixed // slope))
        elif slope < 0:
            high = np.minimum(high, fixed // -slope)
        else:
            high = np.where(fixed >= 0, high, -1)
    return float(np.maximum(high - low + 1, 0).sum()) / (len(rows) * columns)
