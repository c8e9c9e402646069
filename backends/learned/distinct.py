"""Rows of a kernel table that no backend could tell apart."""

from typing import Final

import numpy as np
import numpy.typing as npt

from stablecast.ir.kernels import KernelTable

IndexArray = npt.NDArray[np.intp]
_NAMES_ONLY: Final = ("label", "estimated_cycles")
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(29)


def distinct(kernels: KernelTable) -> tuple[IndexArray, IndexArray]:
    """The first row of each set of equal rows, and for each row which of these equals it; names do not count."""
    rows = len(kernels)
    varying = [
        values
        for name, values in kernels.columns.items()
        if name not in _NAMES_ONLY and rows and (values != values[0]).any()
    ]
    mixed = np.zeros(rows, dtype=np.uint64)
    for values in varying:
        mixed = (mixed ^ _bits(values)) * _FACTOR
        mixed ^= mixed >> _SHIFT
    _, first, position = np.unique(mixed, return_index=True, return_inverse=True)
    if all((values[first][position] == values).all() for values in varying):
        return first.astype(np.intp), position.astype(np.intp)
    return np.arange(rows), np.arange(rows)


def _bits(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint64]:
    if values.dtype.kind not in "if":
        values = np.unique(values, return_inverse=True)[1].astype(np.int64)
    return np.ascontiguousarray(values).view(np.uint64)
