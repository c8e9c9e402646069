"""Convolutions that are not multiplied out: what cuDNN's two Winograd algorithms take.

For windows of 3 x 3 at stride 1 in plain f32 cuDNN has, beside the product that it forms on the fly,

- one kernel of F(2 x 2, 3 x 3): 16 products of elements make four results, where 36 would. A block holds 32 filters
  and 8 x 16 results of an image, which is the work of a tile of 128 x 128 with one step for each channel;
- F(4 x 4, 3 x 3) in four kernels ("nonfused"): both operands are transformed into 36 matrices each, which are
  multiplied pair by pair in tiles of 64 x 64 or 32 x 128 and never split, and what comes out is transformed back. There
  is one such for 5 x 5 windows too, F(5 x 5, 5 x 5) of 81 products, and one for the gradient by the weights.

Kernels, tiles and grids are those of NeuSight's training table of convolutions, which names them; conditions are those
of cuDNN's documentation (`CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD`, `..._WINOGRAD_NONFUSED` and their backward kin).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from stablecast.backends.analytical.constants import Constants
from stablecast.backends.analytical.rates import p_norm, sustained
from stablecast.backends.analytical.tiles import wave_count
from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, FloatArray
from stablecast.ir.kernels import KernelTable

EDGES: Final = {3.0: (4.0, 6.0), 5.0: (5.0, 9.0)}
"""Window -> results and elements along the edge of a transformed tile of the algorithm in four kernels."""

TILES_APART: Final = ((64, 64), (32, 128), (128, 32))
"""Tiles of the products between the transforms."""

NVIDIA: Final = "NVIDIA"
FUSED_SHARE: Final = 16.0 / 36.0
FUSED_FILTERS, FUSED_ROWS, FUSED_COLUMNS = 32.0, 8.0, 16.0
_FUSED_AREA: Final = 16384
_F32_BYTES: Final = 4.0
_MORE_KERNELS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Windows:
    """Convolutions by the sizes of the pass that they are: `images` of `height` x `width` results (of the output's
    gradient where the pass is by the weights), `channels` in, `filters` out, and the edge of a square window, 0 where
    it is not square. `by_weights`: the pass makes the gradient of the weights. `plain`: no stride, dilation or groups.
    """

    images: FloatArray
    height: FloatArray
    width: FloatArray
    channels: FloatArray
    filters: FloatArray
    window: FloatArray
    by_weights: BoolArray
    plain: BoolArray

    @staticmethod
    def of(table: KernelTable, mask: BoolArray) -> "Windows":
        """The convolutions of `table` that `mask` picks."""

        def column(name: str) -> FloatArray:
            return np.maximum(np.asarray(getattr(table, name)[mask], dtype=np.float64), 1.0)

        cn, ch, cw, cc, co, cr, cs, m = (column(name) for name in ("cn", "ch", "cw", "cc", "co", "cr", "cs", "m"))
        positions = m / cn
        by_weights = is_by_weights(table, mask)
        high = np.rint(np.sqrt(positions * ch / cw))
        height = np.where(by_weights, cr, np.maximum(high, 1.0))
        width = np.where(by_weights, cs, positions / np.maximum(high, 1.0))
        edge = np.sqrt(positions)
        window = np.where(by_weights, np.where(edge == np.rint(edge), edge, 0.0), np.where(cr == cs, cr, 0.0))
        steps = (column("stride"), column("lhs_dilation"), column("rhs_dilation"), column("groups"))
        plain = np.all([step <= 1 for step in steps], axis=0)
        images, channels = np.where(by_weights, cc, cn), np.where(by_weights, cn, cc)
        return Windows(images, height, width, channels, co, window, by_weights, plain)


def is_by_weights(table: KernelTable, mask: BoolArray) -> BoolArray:
    """Which convolutions make the gradient of weights: batch and channels have changed places and the output's gradient
    is the window, which is larger than the result."""
    positions = table.m[mask] / np.maximum(table.cn[mask], 1)
    return np.asarray((table.direction[mask] != "fwd") & (table.cr[mask] * table.cs[mask] > positions))


def multiplied_share(table: KernelTable, mask: BoolArray, device: Device) -> FloatArray:
    """Of the products that the convolutions picked by `mask` stand for, the share that the algorithm with fewest has to
    multiply: 1 where none applies, (6 / 12)^2 for windows of 3 x 3 in four kernels."""
    sizes = Windows.of(table, mask)
    found = np.ones(len(sizes.window))
    if device.vendor == NVIDIA:
        for window, (step, edge) in EDGES.items():
            found = np.where(sizes.plain & (sizes.window == window), (edge / (step * window)) ** 2, found)
    fused = sizes.plain & (sizes.window == 3) & ~sizes.by_weights
    return np.minimum(found, np.where(fused, FUSED_SHARE, 1.0))


def least_times(
    table: KernelTable, mask: BoolArray, nbytes: FloatArray, device: Device, constants: Constants
) -> tuple[FloatArray, FloatArray]:
    """Seconds of the algorithm in one kernel and of that in four, infinite where cuDNN has none; memory included.

    `mask`: f32 convolutions of a GPU. `nbytes`: what each of them reads and writes at least.
    """
    sizes = Windows.of(table, mask)
    stream = constants["share.stream"] * device.hbm_bytes_per_s.value
    cores = device.cores.value if device.cores else constants["cores"]
    rate = sustained("fma", device, constants) * device.vector_rate("f32").value / cores
    one = _fused(sizes, nbytes, cores, rate, device, constants)
    four = np.full(len(nbytes), np.inf)
    if device.vendor == NVIDIA:
        for window in EDGES:
            own = sizes.plain & (sizes.window == window)
            if own.any():
                four = np.where(own, _apart(sizes, window, nbytes, cores, rate, stream, constants), four)
    return one, four


def _fused(
    sizes: Windows, nbytes: FloatArray, cores: float, rate: float, device: Device, constants: Constants
) -> FloatArray:
    blocks = sizes.images * np.ceil(sizes.filters / FUSED_FILTERS)
    blocks = blocks * np.ceil(sizes.height / FUSED_ROWS) * np.ceil(sizes.width / FUSED_COLUMNS)
    block_s = 2.0 * _FUSED_AREA * (sizes.channels + constants["winograd.fill"]) / (constants["winograd.fused"] * rate)
    compute = wave_count(blocks / cores, constants["waves.fma"]) * block_s
    memory = nbytes / (constants["share.convolution"] * device.hbm_bytes_per_s.value)
    time = p_norm(compute, memory, constants["overlap"])
    return np.where(sizes.plain & (sizes.window == 3) & ~sizes.by_weights, time, np.inf)


def _apart(
    sizes: Windows,
    window: float,
    nbytes: FloatArray,
    cores: float,
    rate: float,
    stream: float,
    constants: Constants,
) -> FloatArray:
    """Transforms at the memory's rate, and products of the transformed tiles; every transformed element is written once
    and read once."""
    step, edge = EDGES[window]
    tiles = sizes.images * np.ceil(sizes.height / step) * np.ceil(sizes.width / step)
    m, n = np.where(sizes.by_weights, sizes.channels, tiles), sizes.filters
    k = np.where(sizes.by_weights, tiles, sizes.channels)
    moved = edge**2 * (m * k + k * n + m * n) * _F32_BYTES / stream
    compute = np.full(len(m), np.inf)
    for high, wide in TILES_APART:
        blocks = edge**2 * np.ceil(m / high) * np.ceil(n / wide)
        block_s = 2.0 * high * wide * k / (constants[f"fma.{high * wide}"] * rate)
        compute = np.minimum(compute, wave_count(blocks / cores, constants["waves.fma"]) * block_s)
    products = p_norm(compute, moved, constants["overlap"])
    return nbytes / stream + moved + products + _MORE_KERNELS * constants["launch"]
