"""What the models see of a kernel."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stablecast.backends import kernel_specs as specs
from stablecast.backends.analytical.constants import constants_for
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.learned import frame
from stablecast.backends.learned.rates import Rates, Share, rates_for
from stablecast.ir.kernels import KernelRow, KernelTable

V100 = Catalogue().device("v100-sxm2")


def _features(kind: str, *rows: KernelRow) -> dict[str, np.ndarray]:
    table = KernelTable.of(rows)
    base = frame.base_of(table, V100, rates_for(V100))
    return frame.features(kind, table, base, np.ones(len(rows), dtype=np.bool_), V100)


@pytest.mark.parametrize("stride", [1, 2])
def test_passes_of_a_convolution_are_told_by_its_forward_sizes(stride: int) -> None:
    rows = [
        specs.conv2d(V100, "f32", 16, 28, 28, 64, 256, 3, 3, stride, 1, direction=direction)
        for direction in ("fwd", "dgrad", "wgrad")
    ]
    found = _features("conv", *rows)
    assert found["direction"].tolist() == [0.0, 1.0, 2.0]
    side = 28 // stride
    for name, value in (("images", 16), ("channels", 64), ("filters", 256), ("positions", side * side), ("window", 9)):
        assert found[name].tolist() == [pytest.approx(np.log2(value))] * 3, name
    assert found["step"].tolist() == [stride] * 3


@pytest.mark.parametrize("stride", [1, 2])
def test_passes_of_captured_convolutions_are_told_by_their_sizes(stride: int) -> None:
    """A captured convolution names no pass; a gradient by the input at stride 1 looks like a forward pass."""
    rows = [
        specs.conv2d(V100, "f32", 16, 28, 28, 64, 256, 3, 3, stride, 1, direction=direction)
        for direction in ("fwd", "dgrad", "wgrad")
    ]
    captured = _features("conv", *(replace(row, direction="") for row in rows))
    assert captured["direction"].tolist() == [0.0, 0.0 if stride == 1 else 1.0, 2.0]
    named = _features(
        "conv", *(replace(row, direction="fwd") if captured["direction"][i] == 0 else row for i, row in enumerate(rows))
    )
    for name, values in captured.items():
        assert values.tolist() == named[name].tolist(), name


def test_models_keep_the_constants_that_they_rest_on(tmp_path: Path) -> None:
    """Those of their own file win over the analytical backend's, but for what the device sustains."""
    base = tmp_path / "base.yaml"
    base.write_text("gpu: {launch: {value: 1.0, source: then}, share.stream: {value: 0.5, source: then}}")
    found = frame.sustained_constants(V100, Rates({"memory": Share(0.75, "measured", True)}, base))
    assert found["launch"] == 1.0
    assert found["share.stream"] == 0.75
    assert found["overlap"] == constants_for(V100)["overlap"]


def test_whose_products_they_are() -> None:
    row = specs.matmul(V100, "f16", 64, 64, 64)
    found = _features("matmul", row, replace(row, library="vllm"), replace(row, library="cublas"))
    assert found["source"].tolist() == [0.0, 1.0, 0.0]


def test_experts_that_no_token_reaches_are_not_read() -> None:
    """Two tokens of two experts each reach 4 of 64; 64 tokens reach all."""
    found = _features("moe", *(specs.moe(V100, "f16", tokens, 1024, 2048, 64, 2) for tokens in (2, 64)))
    assert found["reached"].tolist() == [4 / 64, 1.0]
    assert found["width"].tolist() == [11.0, 11.0]
    assert found["tokens"].tolist() == [1.0, 6.0]
