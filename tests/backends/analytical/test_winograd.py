"""Winograd's algorithms by hand, on ten cores of 1e12 FLOP/s each and 1e12 B/s of memory."""

from dataclasses import replace

import numpy as np
import pytest

from stablecast.backends import kernel_specs as specs
from stablecast.backends.analytical import AnalyticalBackend, winograd
from stablecast.backends.device import Device
from stablecast.ir.kernels import KernelRow, KernelTable

IMAGES = (8, 16, 16, 64, 64)
"""Batch, height, width, channels, filters."""

BYTES = 4.0 * (2 * 8 * 16 * 16 * 64 + 9 * 64 * 64)
FUSED_S = 4 * 2 * 128 * 128 * 64 / 1e12
"""8 images x 2 groups of 32 filters x 2 strips of 8 rows = 32 blocks on 10 cores: 4 waves of 64 channels."""

MOVED_S = 36 * (128 * 64 + 64 * 64 + 128 * 64) * 4 / 1e12
"""128 tiles of 4 x 4: 36 matrices of tiles x channels, channels x filters and tiles x filters."""

APART_S = BYTES / 1e12 + MOVED_S + 8 * 2 * 64 * 64 * 64 / 1e12
"""Transforms, and 36 x 2 blocks of 64 x 64 in 8 waves, longer than the 2.9 us that their operands take."""


def plain(device: Device, direction: str = "fwd", window: int = 3, stride: int = 1) -> KernelRow:
    row = specs.conv2d(device, "f32", *IMAGES, window, window, stride, window // 2, direction=direction)
    return replace(row, math="fp32")


def time_of(backend: AnalyticalBackend, device: Device, row: KernelRow) -> float:
    return float(backend.estimate(KernelTable.of([row]), device).time_s[0])


def test_one_kernel_in_blocks_of_filters_and_pixels(ideal: AnalyticalBackend, device: Device) -> None:
    assert time_of(ideal, device, plain(device)) == pytest.approx(FUSED_S, rel=1e-3)
    assert plain(device).matmul_flops / 1e13 > FUSED_S, "faster than the lanes could multiply it out"


@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_four_kernels_where_cudnn_is(ideal: AnalyticalBackend, device: Device, direction: str) -> None:
    """By the weights the products are 64 x 64 of 128 tiles: 36 blocks, 4 waves twice as long."""
    cuda = replace(device, vendor="NVIDIA")
    assert time_of(ideal, cuda, plain(cuda, direction)) == pytest.approx(APART_S, rel=1e-3)
    assert APART_S < FUSED_S


def test_gradients_of_weights_are_multiplied_out_elsewhere(ideal: AnalyticalBackend, device: Device) -> None:
    row = plain(device, "wgrad")
    assert time_of(ideal, device, row) >= row.matmul_flops / 1e13


@pytest.mark.parametrize(("window", "stride"), [(3, 2), (1, 1), (7, 1)])
def test_other_windows_and_strides_are_multiplied_out(
    ideal: AnalyticalBackend, device: Device, window: int, stride: int
) -> None:
    row = plain(replace(device, vendor="NVIDIA"), window=window, stride=stride)
    assert time_of(ideal, replace(device, vendor="NVIDIA"), row) >= row.matmul_flops / 1e13 * (1 - 1e-12)


def test_share_that_has_to_be_multiplied(device: Device) -> None:
    """F(4 x 4, 3 x 3): 36 of 144; F(5 x 5, 5 x 5): 81 of 625; F(2 x 2, 3 x 3): 16 of 36, not by the weights."""
    cuda = replace(device, vendor="NVIDIA")
    rows = [plain(cuda), plain(cuda, "wgrad"), plain(cuda, window=5), plain(cuda, stride=2)]
    table, every = KernelTable.of(rows), np.ones(4, dtype=np.bool_)
    assert winograd.multiplied_share(table, every, cuda) == pytest.approx([1 / 4, 1 / 4, 81 / 625, 1.0])
    assert winograd.multiplied_share(table, every, device) == pytest.approx([16 / 36, 1.0, 1.0, 1.0])


def test_passes_are_told_by_their_sizes(device: Device) -> None:
    """As captured programs have them: no direction, batch and channels changed places by the weights."""
    rows = [replace(plain(device, way), direction="") for way in ("fwd", "dgrad", "wgrad")]
    sizes = winograd.Windows.of(KernelTable.of(rows), np.ones(3, dtype=np.bool_))
    assert sizes.by_weights.tolist() == [False, False, True]
    assert sizes.window.tolist() == [3, 3, 3]
    assert (sizes.images.tolist(), sizes.height.tolist(), sizes.width.tolist()) == ([8] * 3, [16] * 3, [16] * 3)
    assert (sizes.channels.tolist(), sizes.filters.tolist()) == ([64] * 3, [64] * 3)
