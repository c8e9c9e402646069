"""Kernel rows as products for the arrays: matrix products, convolutions as im2col, mixtures of experts, attention."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from stablecast.backends.analytical.rates import MatrixRates
from stablecast.backends.estimates import BoolArray, FloatArray, TextArray
from stablecast.backends.systolic.products import Products
from stablecast.ir.dtypes import dtype
from stablecast.ir.kernels import KernelClass, KernelTable

SHAPED: Final = (KernelClass.MATMUL, KernelClass.CONVOLUTION, KernelClass.MOE)
ON_LANES: Final = (KernelClass.ELEMENTWISE, KernelClass.REDUCTION, KernelClass.COPY)
_QUERY_BLOCK: Final = 128.0
_DEFAULT_BYTES: Final = 2.0


@dataclass(frozen=True, slots=True)
class Kinds:
    """Which rows run where: `product` by batch, m, n, k; `attention` as two products; `lanes` on the vector unit."""

    product: BoolArray
    attention: BoolArray
    lanes: BoolArray

    @property
    def covered(self) -> BoolArray:
        return self.product | self.attention | self.lanes


def kinds(table: KernelTable, rates: MatrixRates, device_kind: str) -> Kinds:
    """Rows by unit on a device of `device_kind`; GPUs only have their tensor cores modelled."""
    none = np.zeros(len(table), dtype=np.bool_)
    known = np.asarray(table.modelled > 0)
    on_unit = rates.on_matrix_unit & np.asarray(table.matmul_flops > 0) & known
    shaped = on_unit & _is(table, SHAPED) & (table.m > 0) & (table.n > 0) & (table.k > 0)
    if device_kind != "tpu":
        return Kinds(shaped, none, none)
    heads = on_unit & _is(table, (KernelClass.ATTENTION,)) & (table.d > 0) & (table.sq > 0) & (table.skv > 0)
    lanes = known & _is(table, ON_LANES) & np.asarray(table.matmul_flops == 0)
    return Kinds(shaped, heads, lanes)


def _is(table: KernelTable, classes: tuple[KernelClass, ...]) -> BoolArray:
    return np.isin(table.klass, [str(name) for name in classes])


def is_half(table: KernelTable) -> BoolArray:
    """Rows of f16 operands, which a TPU converts."""
    return np.asarray(table.in_dtype == "f16")


def element_bytes(names: TextArray, default: float = _DEFAULT_BYTES) -> FloatArray:
    """Bytes an element of StableHLO types `names`; `default` where a row states none."""
    distinct = {str(name): dtype(str(name)).bits / 8.0 if name else default for name in np.unique(names)}
    return np.array([distinct[str(name)] for name in names], dtype=np.float64)


def products_of(table: KernelTable, skips_zeros: bool = False) -> Products:
    """The products of rows with batch, m, n and k.

    A convolution's left operand is what it reads beside its filter, since windows share words; other bytes that a
    fused kernel moves are `rest`. `skips_zeros`: the zeros of a dilated input are not multiplied, which shortens K;
    GPUs skip them (the analytical backend's `Rows.of` gives the measurement), arrays stream them.
    """
    batch, m, n, k = (np.maximum(_column(table, name), 1.0) for name in ("batch", "m", "n", "k"))
    in_types, out_types = _types(table, "in_dtype"), _types(table, "out_dtype")
    size = element_bytes(in_types)
    result = element_bytes(np.where(out_types == "", in_types, out_types))
    lhs, rhs, out = batch * m * k * size, batch * k * n * size, batch * m * n * result
    windows = np.asarray(table.klass == str(KernelClass.CONVOLUTION))
    if skips_zeros:
        executed = _column(table, "matmul_flops")
        dense = executed / np.maximum(executed + _column(table, "dilation_flops"), 1.0)
        k = np.where(windows, np.maximum(np.ceil(k * dense), 1.0), k)
    read, written = _column(table, "bytes_read"), _column(table, "bytes_written")
    rhs = np.where(windows, np.minimum(rhs, read), rhs)
    lhs = np.where(windows, np.maximum(read - rhs, 0.0), lhs)
    return Products(batch, m, n, k, lhs, rhs, out, read + written - lhs - rhs - out)


def _column(table: KernelTable, name: str) -> FloatArray:
    return np.asarray(table.columns[name], dtype=np.float64)


def _types(table: KernelTable, name: str) -> TextArray:
    return np.asarray(table.columns[name], dtype=np.str_)


def attention_products(table: KernelTable) -> tuple[Products, Products, FloatArray]:
    """Scores and context of attention rows, and the share of both that is visited.

    Queries that share a key head stack in M. Masked blocks of 128 keys are skipped; the blocks on the edge count whole.
    Backward passes repeat both products two and a half times in all, which the third value includes.
    """
    sizes = ("batch", "hq", "hkv", "sq", "skv", "d")
    batch, hq, hkv, queries, keys, depth = (np.maximum(_column(table, name), 1.0) for name in sizes)
    hkv = np.minimum(hkv, hq)
    batch = batch * hkv
    stacked = queries * hq / hkv
    none = np.zeros(len(table))
    nbytes = _column(table, "bytes_read") + _column(table, "bytes_written")
    scores = Products(batch, stacked, keys, depth, none, none, none, nbytes)
    context = Products(batch, stacked, depth, keys, none, none, none, none)
    masked = _column(table, "padded_flops") / np.maximum(_column(table, "matmul_flops"), 1.0)
    seen = 1.0 - np.minimum(masked, 1.0)
    visited = np.where(seen < 1.0, np.minimum(seen + _QUERY_BLOCK / (2.0 * keys), 1.0), 1.0)
    repeats = np.where(table.direction == "bwd", 2.5, 1.0)
    return scores, context, visited * repeats
