"""The fit finds constants that made the measurements."""

import numpy as np
import pytest

from stablecast.backends import kernel_specs as specs
from stablecast.backends.analytical.constants import constants_for
from stablecast.backends.analytical.fitting import Fit, Measured, move
from stablecast.backends.catalogue import Catalogue
from stablecast.ir.kernels import KernelTable

CATALOGUE = Catalogue()


def test_move_stops_at_the_lowest_loss() -> None:
    values = {"x": 1.0}
    best = move(values, "x", 1.5, 3.0, 0.0, lambda: abs(values["x"] - 4.0))
    assert values["x"] == pytest.approx(1.5**3)
    assert best == pytest.approx(4.0 - 1.5**3)


def test_move_keeps_below_the_ceiling() -> None:
    values = {"share.x": 0.9}
    move(values, "share.x", 1.5, 10.0, 0.0, lambda: -values["share.x"])
    assert values["share.x"] == 1.0


def test_fit_recovers_a_share() -> None:
    device = CATALOGUE.device("a100-sxm-40gb")
    kernels = KernelTable.of([specs.elementwise(device, "f32", 2**power) for power in range(20, 28)])
    values = {"gpu": {name: constant.value for name, constant in constants_for(device).by_name.items()}}
    truth = Fit({"gpu": {**values["gpu"], "share.stream": 0.7}}, {})
    blank = Measured("table", device, kernels, np.ones(len(kernels)), "stream")
    measured = truth.ratios(blank)
    fit = Fit(values, {})
    data = Measured("table", device, kernels, measured, "stream")
    loss = fit.descend([data], [("gpu", "share.stream")], fixed_launch=True)
    assert fit.values["gpu"]["share.stream"] == pytest.approx(0.7, rel=0.02)
    assert loss < 0.02


def test_fit_tells_a_product_from_the_cast_before_it() -> None:
    device = CATALOGUE.device("h100-sxm")
    shapes = [(8192, n, k) for n in (512, 2048, 8192, 32768) for k in (4096, 16384)]
    kernels = KernelTable.of([specs.matmul(device, "fp8", *shape, out="bf16") for shape in shapes])
    casts = np.array([float(m * k) for m, _, k in shapes])
    values = {"gpu": {name: constant.value for name, constant in constants_for(device).by_name.items()}}
    truth = Fit({"gpu": {**values["gpu"], "sustained.byte": 0.75}}, {})
    blank = Measured("table", device, kernels, np.ones(len(kernels)), "byte", casts=casts, cast_s=2.3e-12)
    fit = Fit({"gpu": {**values["gpu"], "sustained.byte": 0.6}}, {})
    data = Measured("table", device, kernels, truth.ratios(blank), "byte", casts=casts, cast_s=1e-12)
    fit.descend([data], [("gpu", "sustained.byte")])
    assert fit.values["gpu"]["sustained.byte"] == pytest.approx(0.75, rel=0.03)
    assert data.cast_s == pytest.approx(2.3e-12, rel=0.1)
