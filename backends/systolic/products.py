"""Matrix products of kernel tables as a device's arrays see them: folds, cycles of the busiest array, operand bytes.

A product M x K by K x N lies weight-stationary on a TPU's arrays in one of two orders, whichever takes fewer cycles:
as it is (filter K x N held, M rows streamed) or transposed (filter K x M held, N rows streamed). Column folds, those of
all batches together, are dealt out over arrays, and the streamed rows over the arrays that are left. While one fold
streams, the weights of the next shift in, so a fold takes max(T, R) cycles, T in whole sublanes, and the share `fill`
of its 2R + C - 2 cycles of filling and draining that is not hidden behind its neighbours.

On a GPU a core's array is output-stationary: a thread block holds a x b results, its folds take K + `fill` (2R + C - 2)
cycles each, and blocks run in waves over the cores; the best of a few block shapes counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from stablecast.backends.estimates import BoolArray, FloatArray
from stablecast.backends.systolic.machine import SUBLANES, ArrayMachine

BLOCKS: Final = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 32))
"""Results that a thread block holds, as libraries choose them."""


@dataclass(frozen=True, slots=True)
class Products:
    """`batch` products M x K by K x N a row, and bytes of one run: left and right operand, result, and what else.

    `rest`: further bytes of the kernel, of a fused epilogue for example; negative where windows of a convolution
    share input or operands stay on the chip.
    """

    batch: FloatArray
    m: FloatArray
    n: FloatArray
    k: FloatArray
    lhs: FloatArray
    rhs: FloatArray
    out: FloatArray
    rest: FloatArray

    @property
    def nbytes(self) -> FloatArray:
        """All bytes that cross the device memory's pins."""
        return self.lhs + self.rhs + self.out + self.rest


@dataclass(frozen=True, slots=True)
class ArrayWork:
    """Cycles of the array clock at one multiply-add a cell and cycle, and how the product lies on the arrays.

    `cycles`: of the busiest array, filling included; `even`: if folds could be shared out evenly; `single`: lines that
    one array alone streams, in the order with fewer; `folds`: of the busiest array. `swapped`: the transposed order.
    `mapping_eff`: share of the cells of all folds that hold an element.
    """

    cycles: FloatArray
    even: FloatArray
    single: FloatArray
    folds: FloatArray
    swapped: BoolArray
    mapping_eff: FloatArray


def up(value: FloatArray, step: float) -> FloatArray:
    """`value` rounded up to a multiple of `step`."""
    return np.ceil(value / step) * step


def array_work(products: Products, machine: ArrayMachine, fill: float) -> ArrayWork:
    """How `products` run on the arrays of `machine`; `fill`: share of each fold's filling that is not hidden."""
    if machine.kind == "gpu":
        return _blocks(products, machine, fill)
    plain = _stationary(products.batch, products.m, products.n, products.k, machine, fill)
    turned = _stationary(products.batch, products.n, products.m, products.k, machine, fill)
    swapped = turned[0] < plain[0]
    cycles, folds, mapping = (np.where(swapped, other, one) for one, other in zip(plain[:3], turned[:3], strict=True))
    single = np.minimum(plain[3], turned[3])
    even = products.batch * up(products.m, SUBLANES) * _folds(products.n, products.k, machine) / machine.arrays
    return ArrayWork(cycles, even, single, folds, swapped, mapping)


def _folds(columns: FloatArray, rows: FloatArray, machine: ArrayMachine) -> FloatArray:
    return np.ceil(columns / machine.cols) * np.ceil(rows / machine.rows)


def _stationary(
    batch: FloatArray, streamed: FloatArray, columns: FloatArray, rows: FloatArray, machine: ArrayMachine, fill: float
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Cycles and folds of the busiest array, mapping efficiency, and lines that one array alone streams."""
    edge = 2.0 * machine.rows + machine.cols - 2.0
    row_folds, col_folds = np.ceil(rows / machine.rows), np.ceil(columns / machine.cols)
    best = np.full(len(batch), np.inf)
    folds = np.zeros(len(batch))
    for parts in _divisors(machine.arrays):
        lines = np.maximum(up(np.ceil(streamed / parts), SUBLANES), machine.rows)
        count = row_folds * np.ceil(batch * col_folds * parts / machine.arrays)
        cycles = count * (lines + fill * edge) + (1.0 - fill) * edge
        folds = np.where(cycles < best, count, folds)
        best = np.minimum(best, cycles)
    single = batch * row_folds * col_folds * streamed
    mapping = rows * columns / (row_folds * col_folds * machine.rows * machine.cols)
    return best, folds, mapping, single


def _divisors(number: int) -> Iterator[int]:
    return (part for part in range(1, number + 1) if number % part == 0)


def _blocks(products: Products, machine: ArrayMachine, fill: float) -> ArrayWork:
    edge = 2.0 * machine.rows + machine.cols - 2.0
    batch, m, n, k = products.batch, products.m, products.n, products.k
    best = np.full(len(m), np.inf)
    folds, mapping = np.zeros(len(m)), np.zeros(len(m))
    for height, width in BLOCKS:
        per_block = float(np.ceil(height / machine.rows) * np.ceil(width / machine.cols))
        count = batch * np.ceil(m / height) * np.ceil(n / width)
        mine = np.ceil(count / machine.cores) * per_block
        cycles = mine * (k + fill * edge) + (1.0 - fill) * edge
        better = cycles < best
        folds = np.where(better, mine, folds)
        cells = count * per_block * machine.rows * machine.cols
        mapping = np.where(better, batch * m * n / cells, mapping)
        best = np.minimum(best, cycles)
    single = batch * np.ceil(m / machine.rows) * np.ceil(n / machine.cols) * k
    even = batch * m * n * k / (machine.arrays * machine.rows * machine.cols)
    return ArrayWork(best, even, single, folds, np.zeros(len(m), dtype=np.bool_), mapping)
