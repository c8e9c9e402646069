"""Products of groups of rows on a TPU, as the kernels of mixtures of experts multiply them (megablox, ragged dot).

Rows lie side by side, sorted by group, and are cut into tiles whatever the groups are: a tile that two groups share is
gone through twice, so that every group costs some rows more. The other two sides are padded to the array's edge. The
last tile along a side that is not whole registers wide (128 lanes) is masked, which the vector lanes do for both
operands of every product of tiles: for a width of 2,880 they work longer than the array.
"""

from typing import Final

import numpy as np

from stablecast.backends.analytical.constants import Constants
from stablecast.backends.analytical.rates import p_norm
from stablecast.backends.estimates import BoolArray, FloatArray
from stablecast.ir.kernels import KernelTable

TILE_ROWS: Final = 512.0
TILE_COLUMNS: Final = 1024.0
"""Rows and columns of a tile in MaxText's configuration (`wi_tile_fwd_batch_seq`, `wi_tile_fwd_mlp_dim`)."""
_LANES: Final = 128.0
_COLUMNS: Final = ("batch", "m", "n", "k", "experts", "elems")


def grouped_time(
    table: KernelTable, mask: BoolArray, matrix_rate: FloatArray, lane_rate: float, edge: float, constants: Constants
) -> FloatArray:
    """Seconds of the rows of `table` in `mask` on the core.

    A row has m rows of all groups, or k where the groups' rows are summed over (the gradient of the groups' matrices,
    whose result has a matrix for each group). `matrix_rate`: sustained FLOP/s of the array for each row; `lane_rate`:
    operations/s of the lanes; `edge`: cells along a side of the array.
    """
    batch, m, n, k, experts, elems = (
        np.maximum(np.asarray(getattr(table, name)[mask], dtype=np.float64), 1.0) for name in _COLUMNS
    )
    groups = np.where(batch > 1, batch, experts)
    summed = (batch == 1) & (experts > 1) & (elems == experts * m * n)
    rows, side = np.where(summed, k, batch * m), np.where(summed, m, k)
    share = np.where(summed, constants["grouped.summed"], constants["grouped.share"])
    padded = np.ceil(n / edge) * edge * np.ceil(side / edge) * edge
    products = 2.0 * (rows + groups * constants["grouped.rows"]) * padded / (share * matrix_rate)
    masked = (n % _LANES > 0) | (side % _LANES > 0)
    visited = rows * side * np.ceil(n / TILE_COLUMNS) + (rows / TILE_ROWS + groups) * n * side
    lanes = np.where(masked, constants["grouped.mask"] * visited / lane_rate, 0.0)
    return p_norm(products, lanes, constants["overlap"])
