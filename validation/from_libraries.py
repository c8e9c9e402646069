"""Kernels of library calls in a trace, rebuilt from the sizes of their operands: FBGEMM's, and writes that accumulate.

How many kernels a call launches is `lowering.execution.library_calls`. A backward pass of FBGEMM states its gradient
alone: tables and indices are those of the last look-up of its kind.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from stablecast.backends import kernel_specs as specs
from stablecast.backends.device import Device
from stablecast.ir.kernels import KernelClass, KernelRow
from stablecast.ir.schedule import Launch
from stablecast.lowering.execution.library_calls import library_call
from stablecast.validation.operators import plain_operator

Shapes = Sequence[tuple[int, ...]]
_LOOKUPS: Final[Mapping[str, tuple[str, int, int, int]]] = {
    "fbgemm::split_embedding_codegen_lookup_adagrad_function": ("adagrad", 1, 5, 8),
    "fbgemm::dense_embedding_codegen_lookup_function": ("dense", 0, 1, 4),
}
"""Look-up -> its kind, and the places of the weights, of a tensor with one entry a table, and of the indices."""

_VALUES: Final[Mapping[str, tuple[int, int]]] = {
    "fbgemm::permute_2D_sparse_data": (2, 1),
    "fbgemm::asynchronous_complete_cumsum": (0, 1),
    "fbgemm::bounds_check_indices": (1, 1),
    "aten::index_put": (-1, 2),
}
"""Call -> the place of the tensor whose elements it walks over, and how many operands of its size it reads."""


class Libraries:
    """Makes the rows of one program's calls, in their order, for pricing on `device`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tables: dict[str, tuple[int, int, int, int]] = {}

    def row(self, name: str, shapes: Shapes, element: str) -> KernelRow | None:
        """The kernels of the call `name` as one row; None for calls that are not known, or not by these operands."""
        op = plain_operator(name)
        try:
            found = self._row(op, shapes, element)
        except IndexError:
            return None
        known = library_call(op.replace("::", ".", 1))
        if found is None or known is None:
            return None
        row, operands = found
        made = Launch(op.replace("::", "."), tuple(operands), (), module_path="backward")
        waits = known.waits(made)
        row = replace(row, klass=known.klass or KernelClass.SCATTER, launches=known.launches(made))
        return replace(row, waits=waits.near, row_waits=waits.rows)

    def _row(self, op: str, shapes: Shapes, element: str) -> tuple[KernelRow, Shapes] | None:
        if op in _LOOKUPS:
            return self._lookup(op, shapes)
        if op in _VALUES:
            place, inputs = _VALUES[op]
            elements = max(math.prod(shapes[place]), 1)
            return specs.elementwise(self._device, element, elements, 1, inputs), shapes
        kind = next((kind for kind in self._tables if f"_backward_codegen_{kind}_" in op), "")
        return self._backward(kind, shapes) if kind else None

    def _lookup(self, op: str, shapes: Shapes) -> tuple[KernelRow, Shapes]:
        """Rows are read; their width is the result's, which a trace does not state: a guess of one line of 32 bytes."""
        kind, weights, tables, indices = _LOOKUPS[op]
        counted = (weights, tables, indices, indices + 1)
        held, tables_held, asked, offsets = (math.prod(shapes[place]) for place in counted)
        sizes = (held, tables_held, asked, max(offsets - 1, 1))
        self._tables[kind] = sizes
        row = specs.elementwise(self._device, "f32", max(sizes[2], 1), 8, 1)
        return replace(row, klass=KernelClass.GATHER), shapes

    def _backward(self, kind: str, shapes: Shapes) -> tuple[KernelRow, Shapes]:
        """For every index its row of the gradient is read, and its rows of weights and state are read and written."""
        weights, tables, indices, bags = self._tables[kind]
        width = max(1, shapes[0][-1] // tables)
        row = specs.elementwise(self._device, "f32", max(indices, 1), width, 3)
        operands = (shapes[0], (weights,), (tables,), (tables + 1,), (tables + 1,), (indices,), (bags + 1,))
        return replace(row, klass=KernelClass.SCATTER, bytes_written=2 * row.bytes_written), operands
