"""Cycles of matrix products on systolic arrays in closed form, for whole tables at once.

Corrected model (the default): a fold of T streamed steps on an R x C array takes T + 2R + C - 2 cycles under every
dataflow (fill, stream, drain; os as agreed by SCALE-Sim's maintainers in scale-sim-v3 issue 4), and folds follow each
other. `compat="scalesim-3.0"` gives SCALE-Sim v3's stall-free Total Cycles instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from stablecast.backends.systolic.geometry import DATAFLOWS, IntArray
from stablecast.ir.errors import InputError

FloatArray = npt.NDArray[np.float64]
Ints = int | Sequence[int] | npt.NDArray[np.integer]
Dataflows = str | Sequence[str] | npt.NDArray[np.str_] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class FoldArrays:
    """Folds of many products: S_r, S_c and T, fold counts, and which dataflow (bool masks)."""

    sr: IntArray
    sc: IntArray
    t: IntArray
    row_folds: IntArray
    col_folds: IntArray
    rows: IntArray
    cols: IntArray
    is_os: npt.NDArray[np.bool_]
    is_ws: npt.NDArray[np.bool_]


def dataflow_masks(dataflow: Dataflows) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(is os, is ws) of names, or of indices into ("os", "ws", "is"); InputError for anything else."""
    names = np.asarray(dataflow)
    if names.dtype.kind in "iu":
        valid = (names >= 0) & (names < len(DATAFLOWS))
        is_os, is_ws = names == 0, names == 1
    else:
        is_os, is_ws = names == "os", names == "ws"
        valid = is_os | is_ws | (names == "is")
    if not bool(np.all(valid)):
        raise InputError(f"unknown dataflow {names[~valid].ravel()[0]!r}", "allowed: os, ws, is")
    return is_os, is_ws


def from_one(name: str, value: Ints) -> IntArray:
    """`value` as an array; InputError that names it if one is below 1."""
    array = np.asarray(value, dtype=np.int64)
    if array.size and int(array.min()) < 1:
        raise InputError(f"{name} = {int(array.min())}", "allowed: whole numbers from 1")
    return array


def fold_arrays(m: Ints, n: Ints, k: Ints, rows: Ints, cols: Ints, dataflow: Dataflows) -> FoldArrays:
    """Folds of M x K by K x N products; all arguments broadcast against each other. Sizes start at 1."""
    m_, n_, k_ = (from_one(name, value) for name, value in (("m", m), ("n", n), ("k", k)))
    rows_, cols_ = from_one("array rows", rows), from_one("array cols", cols)
    is_os, is_ws = dataflow_masks(dataflow)
    if not is_os.ndim:
        sr, sc, t = (m_, n_, k_) if is_os else (k_, n_, m_) if is_ws else (k_, m_, n_)
    else:
        sr = np.where(is_os, m_, k_)
        sc = np.where(is_os | is_ws, n_, m_)
        t = np.where(is_os, k_, np.where(is_ws, m_, n_))
    return FoldArrays(sr, sc, t, -(-sr // rows_), -(-sc // cols_), rows_, cols_, is_os, is_ws)


def compute_cycles(
    m: Ints,
    n: Ints,
    k: Ints,
    *,
    batch: Ints = 1,
    array_rows: Ints,
    array_cols: Ints,
    dataflow: Dataflows = "ws",
    compat: Literal["scalesim-3.0"] | None = None,
) -> IntArray:
    """Cycles without memory stalls of `batch` products of M x K by K x N each; every argument may be an array.

    Corrected: batch * F * (T + 2R + C - 2). Compatibility: batch * (F * L - 1), L one R shorter for os.
    """
    folds = fold_arrays(m, n, k, array_rows, array_cols, dataflow)
    lines = folds.t + 2 * folds.rows + folds.cols - 2
    count = folds.row_folds * folds.col_folds
    times = from_one("batch", batch)
    if compat is None:
        return times * (count * lines)
    if compat != "scalesim-3.0":
        raise InputError(f"unknown compat {compat!r}", "allowed: scalesim-3.0")
    return times * (count * (lines - np.where(folds.is_os, folds.rows, 0)) - 1)


def partitioned_cycles(
    m: Ints,
    n: Ints,
    k: Ints,
    *,
    array_rows: Ints,
    array_cols: Ints,
    row_parts: Ints = 1,
    col_parts: Ints = 1,
    step_parts: Ints = 1,
    dataflow: Dataflows = "ws",
) -> IntArray:
    """Cycles of the busiest of row_parts x col_parts x step_parts arrays that share one product.

    Row and column folds are dealt out in space; `step_parts` splits the T streamed steps, each part over all folds of
    its own (under os the parts' results must still be added up, which is not counted). One array: `compute_cycles`.
    Formula of SCALE-Sim v3's multi-core mode: (2R + C + T / P_t - 2) x (F_r / P_r) x (F_c / P_c), each rounded up.
    """
    folds = fold_arrays(m, n, k, array_rows, array_cols, dataflow)
    rows, cols = from_one("row_parts", row_parts), from_one("col_parts", col_parts)
    steps = from_one("step_parts", step_parts)
    lines = -(-folds.t // steps) + 2 * folds.rows + folds.cols - 2
    return lines * -(-folds.row_folds // rows) * -(-folds.col_folds // cols)


def mapping_efficiencies(folds: FoldArrays) -> FloatArray:
    """Share of the array that holds an element, 0 to 1, averaged over folds."""
    return folds.sr * folds.sc / (folds.row_folds * folds.col_folds * folds.rows * folds.cols)
