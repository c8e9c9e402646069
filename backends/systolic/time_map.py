"""Cycles to seconds: the constants of `backends/models/systolic.yaml` and the forms that they stand in.

`bf16` and every other type but f16 (calibrated on TPU v6e, and on GPUs):

    time = launch + (compute^p + memory^p)^(1/p),
    compute = cycles of the busiest array / (array * clock * rate of a cell),   memory = bytes / (share * peak rate).

`f16` on a TPU, which multiplies no f16 and converts every operand on its way to the arrays (calibrated on TPU v4): a
sum of physical terms with coefficients >= 0, in three sizes. A product within one array (`tile`): the lines that
it streams; its filling is part of `launch`.
Products whose operands and result fit VMEM twice (`resident`), and larger ones (`streamed`): array cycles, steps along
each dimension over the clock, bytes of each operand over the memory's rate, and what depends on the order: `held`, the
right operand's bytes once more where the result is at least as high as wide; `turned`, array time once more where it is
wider; `again`, both operands once more where the right one, 4 bytes an element, takes over a sixth of a core's VMEM;
`relayout`, array time once more where a wider result's width is no multiple of the lanes. The limits of the last two
were drawn from the measurements that the coefficients come from; what the compiler does there is not known.

Coefficients are shares and multiples of a device's own rates, so they carry from one generation to another by the
ratio of array rates, clocks and memory rates; `launch` is carried as it is.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from stablecast.backends.analytical.constants import Constants, constants_for
from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, FloatArray
from stablecast.backends.systolic.machine import LANES, SUBLANES, ArrayMachine
from stablecast.backends.systolic.products import ArrayWork, Products, up

CONSTANTS_FILE: Final = Path(__file__).parent.parent / "models" / "systolic.yaml"

SIZES: Final = ("tile", "resident", "streamed")
"""Ranges of f16 products with constants of their own."""
TERMS: Final = (
    *("launch", "single", "even", "rows", "columns", "depth", "turned", "relayout"),
    *("lhs", "rhs", "out", "held", "again"),
)
"""Terms of f16 products, those of the memory last; `f16.SIZE.TERM` is a coefficient, 0 where the file has none."""
_MEMORY: Final = TERMS.index("lhs")
_CONVERTED_BYTES: Final = 4.0
_RIGHT_SHARE: Final = 6.0


def systolic_constants(device: Device, path: Path = CONSTANTS_FILE) -> Constants:
    """The constants that hold for `device`: its kind's, those of the architecture it is like, its own."""
    return constants_for(device, path)


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a row: on the arrays or lanes, at the memory, before either; `time` is not always their sum."""

    time: FloatArray
    compute: FloatArray
    memory: FloatArray
    launch: FloatArray


def p_norm(first: FloatArray, second: FloatArray, power: float) -> FloatArray:
    """(first^p + second^p)^(1/p): the larger where p is large, the sum where p is 1."""
    larger = np.maximum(first, second)
    ratio = np.divide(np.minimum(first, second), larger, out=np.zeros_like(larger), where=larger > 0)
    return larger * (1.0 + ratio**power) ** (1.0 / power)


def array_seconds(cycles: FloatArray, peak: FloatArray, machine: ArrayMachine) -> FloatArray:
    """Seconds of array `cycles` where all cells together reach `peak` FLOP/s."""
    return cycles * 2.0 * machine.arrays * machine.rows * machine.cols / peak


def overlapped(
    compute: FloatArray, nbytes: FloatArray, launch: FloatArray, machine: ArrayMachine, fit: Constants
) -> Parts:
    """The form of every type but f16; `compute`: seconds at the arrays' full rate, `nbytes`: bytes of the kernel."""
    busy = compute / fit["array"]
    memory = nbytes / (fit["memory"] * machine.hbm_bytes_per_s)
    return Parts(launch + p_norm(busy, memory, fit["overlap"]), busy, memory, launch)


def f16_sizes(products: Products, machine: ArrayMachine) -> FloatArray:
    """Index into `SIZES` of each product."""
    within = (products.m <= machine.cols) & (products.n <= machine.cols) & (products.k <= machine.rows)
    fits = 2.0 * (products.lhs + products.rhs + products.out) < machine.local_bytes
    return np.where(within & (products.batch == 1), 0.0, np.where(fits, 1.0, 2.0))


def f16_terms(products: Products, work: ArrayWork, peak: FloatArray, machine: ArrayMachine) -> FloatArray:
    """[rows, len(TERMS)]: 1 for the launch, then seconds of each term."""
    even = array_seconds(work.even, peak, machine)
    memory, clock = machine.hbm_bytes_per_s, machine.clock_hz
    # the slope in cycles is that of one array, whatever their number
    single = work.single / (clock * np.maximum(peak / machine.cell_flops, 1.0))
    wide = products.n > products.m
    spilled = products.k * products.n * _CONVERTED_BYTES * _RIGHT_SHARE > machine.local_bytes
    columns = [
        np.ones_like(even),
        single,
        even,
        products.batch * up(products.m, SUBLANES) / clock,
        products.batch * up(products.n, LANES) / clock,
        products.batch * up(products.k, LANES) / clock,
        np.where(wide, even, 0.0),
        np.where(turns(products), even, 0.0),
        products.lhs / memory,
        products.rhs / memory,
        (products.out + np.maximum(products.rest, 0.0)) / memory,
        np.where(wide, 0.0, products.rhs / memory),
        np.where(spilled, (products.lhs + products.rhs) / memory, 0.0),
    ]
    return np.stack(columns, axis=1)


def turns(products: Products) -> BoolArray:
    """Results wider than high whose width is no multiple of the lanes: measured 2 to 2.5 times slower on TPU v4."""
    return (products.n > products.m) & (products.n % LANES != 0)


def f16_coefficients(fit: Constants) -> FloatArray:
    """[len(SIZES), len(TERMS)] from the constants."""
    stated = fit.by_name
    names = ((f"f16.{size}.{term}" for term in TERMS) for size in SIZES)
    return np.array([[stated[name].value if name in stated else 0.0 for name in row] for row in names])


def f16_time(
    products: Products, work: ArrayWork, peak: FloatArray, launches: FloatArray, machine: ArrayMachine, fit: Constants
) -> Parts:
    """The form of f16 products on a TPU."""
    terms = f16_terms(products, work, peak, machine)
    chosen = f16_coefficients(fit)[f16_sizes(products, machine).astype(np.int64)]
    parts = terms * chosen
    start = parts[:, 0] * np.maximum(launches, 1.0)
    memory = parts[:, _MEMORY:].sum(axis=1)
    compute = parts[:, 1:_MEMORY].sum(axis=1)
    return Parts(start + compute + memory, compute, memory, start)
