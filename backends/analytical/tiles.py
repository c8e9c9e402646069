"""Compute time of matrix products: thread-block tiles in waves on GPUs, padded systolic tiles on TPUs.

GPU: a product m x n x k, `batch` times, is cut into tiles a x b; `split` blocks share the k of one tile. With
w = blocks / cores, the time on the cores is

    waves(w) * 2 a b (k / split + k0) / (share(tile) * sustained * peak / cores),
    waves(w) = max(1, w + q (ceil(w) - w)),

the least over tiles and splits. `sustained` is the share of the peak that large products reach (clocks under power),
`share` what a tile of that size reaches of it, `k0` the length of the pipeline's filling in k, `q` how much of a
partial last wave is lost (persistent schedulers lose less than all of it).
"""

from typing import Final

import numpy as np

from stablecast.backends.estimates import FloatArray

TILES: Final = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (64, 32), (32, 32))
"""Tile shapes m x n that libraries choose among; one efficiency constant for each area (`tile.32768`, ...)."""

SPLITS: Final = (1, 2, 4, 8, 16, 32)
SPLIT_K_MIN: Final = 64.0
"""Shortest part of k that a block of a split product takes."""


def tiled_time(
    batch: FloatArray,
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    core_rate: FloatArray,
    cores: float,
    constants: "TileConstants",
    write_rate: float,
) -> FloatArray:
    """Seconds on the cores, the least over tiles and splits; `core_rate`: sustained FLOP/s of one core per row.

    `write_rate`: bytes a second at which the f32 partial results of a split product are written and read again.
    """
    best = np.full(len(m), np.inf)
    outputs = batch * m * n
    for (a, b), share in constants.tiles:
        blocks = batch * np.ceil(m / a) * np.ceil(n / b)
        per_k = 2.0 * a * b / (share * core_rate)
        for split in SPLITS:
            count = wave_count(blocks * (split / cores), constants.wave_loss)
            if split == 1:
                time = count * per_k * (k + constants.fill_k)
            else:
                part = np.maximum(np.ceil(k / split), SPLIT_K_MIN)
                time = count * per_k * (part + constants.fill_k) + constants.split_s
                time = time + outputs * (4.0 * split + 4.0) / write_rate
            best = np.minimum(best, time)
    return best


def wave_count(waves: FloatArray, loss: float) -> FloatArray:
    """Times that of one block which `waves` = blocks / cores take: at least once; `loss`: share of a last wave that is
    not full which counts as if it were."""
    return np.maximum(1.0, waves + loss * (np.ceil(waves) - waves))


class TileConstants:
    """What `tiled_time` needs for one family of math modes: `tiles` (shape, share), q, k0, cost of a split."""

    __slots__ = ("fill_k", "split_s", "tiles", "wave_loss")

    def __init__(self, shares: dict[int, float], wave_loss: float, fill_k: float, split_s: float) -> None:
        self.tiles = [(tile, shares[tile[0] * tile[1]]) for tile in TILES if tile[0] * tile[1] in shares]
        self.wave_loss = wave_loss
        self.fill_k = fill_k
        self.split_s = split_s


def padded_time(
    batch: FloatArray,
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    rate: FloatArray,
    edge: float,
    sublanes: float,
    fill_m: float,
) -> FloatArray:
    """Seconds of a systolic array of `edge` x `edge` cells at `rate` sustained FLOP/s.

    One operand stays in the array, the other streams through it, whichever is faster: the streamed side is padded to
    the `sublanes` of a register, the other and k to the array's edge. `fill_m`: rows lost on filling the array, as if
    the streamed side were longer.
    """
    sides = [
        (np.ceil(streamed / sublanes) * sublanes + fill_m) * (np.ceil(held / edge) * edge)
        for streamed, held in ((m, n), (n, m))
    ]
    return 2.0 * batch * np.minimum(*sides) * (np.ceil(k / edge) * edge) / rate
