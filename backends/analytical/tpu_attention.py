"""Flash attention on a TPU: padded products beside the softmax of the vector lanes, in blocks of queries and keys.

A block of b queries meets blocks of b keys up to the causal edge, or the two and more that a window touches. Of every
pair of positions in these blocks, masked or not, the systolic array multiplies 2 x (d padded to its edge) FLOPs a
product: d is the contraction of the scores and of their gradient, and the held side of the others, so that a head of
64 takes as long as one of 256 on an edge of 256. The lanes spend a fixed number of operations on a pair: maximum,
difference, exponential, sum and cast, and what the gradient adds. Each meeting of two blocks costs a fixed time
(a step of the kernel's grid). Kernels are tuned for their shape, so that b is the best power of two. The queries of
all heads on a key head are one block where they are few, as in decoding.
"""

from typing import Final

import numpy as np

from stablecast.backends.analytical.constants import Constants
from stablecast.backends.analytical.rates import p_norm
from stablecast.backends.estimates import BoolArray, FloatArray
from stablecast.ir.kernels import KernelTable

BLOCKS: Final = (256.0, 512.0, 1024.0, 2048.0, 4096.0)
_COLUMNS: Final = ("batch", "sq", "skv", "hq", "hkv", "d")
_FEW: Final = 128.0
_SUBLANES: Final = 8.0


def attention_time(
    table: KernelTable, mask: BoolArray, matrix_rate: FloatArray, lane_rate: float, edge: float, constants: Constants
) -> FloatArray:
    """Seconds of the rows of `table` in `mask` on the core.

    `matrix_rate`: sustained FLOP/s of the array for each row; `lane_rate`: operations/s of the lanes; `edge`: cells
    along a side of the array.
    """
    batch, queries, keys, hq, hkv, d = (
        np.maximum(np.asarray(getattr(table, name)[mask], dtype=np.float64), 1.0) for name in _COLUMNS
    )
    group = hq / np.minimum(hkv, hq)
    packed = queries * group <= _FEW
    heads = np.where(packed, hq / group, hq)
    backward = table.direction[mask] == "bwd"
    window = np.where(table.window[mask] > 0, table.window[mask], np.inf)
    causal = table.causal[mask] > 0
    padded = np.ceil(d / edge) * edge
    lanes = np.where(backward, constants["attention.lanes.backward"], constants["attention.lanes"])
    products = np.where(backward, 5.0, 2.0) * 2.0 * padded / (constants["attention.forward"] * matrix_rate)
    pair_s = p_norm(products, lanes / lane_rate, constants["overlap"])
    best = np.full(len(batch), np.inf)
    for block in BLOCKS:
        high, wide = np.minimum(queries, block), np.minimum(keys, block)
        rows = np.ceil(queries / high)
        # the last block of queries sees all keys, the one before it a block less, and so on
        met = np.where(causal, np.maximum((keys - (rows - 1.0) * high / 2.0) / wide, 1.0), np.ceil(keys / wide))
        met = np.minimum(met, 1.0 + np.ceil((window - 1.0) / wide))
        high = np.where(packed, np.ceil(queries * group / _SUBLANES) * _SUBLANES, high)
        meetings = batch * heads * rows * met
        best = np.minimum(best, meetings * (high * wide * pair_s + constants["attention.block"]))
    return best
