"""The calibration: coefficients found again, the targets on measured tables, and the file that it wrote."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from stablecast.backends.analytical.constants import read_constants
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.systolic.time_map import CONSTANTS_FILE, SIZES, TERMS, f16_coefficients, systolic_constants

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "fit_systolic.py"


@pytest.fixture(scope="module")
def fitting() -> Iterator[ModuleType]:
    """The calibration script as a module."""
    spec = importlib.util.spec_from_file_location("fit_systolic", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fit_systolic", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def products(fitting: ModuleType, shared_data: Path) -> Any:
    """The f16 products of TPU v4, fitted."""
    result = fitting.Result()
    fitting.fit_f16(fitting.Tables(shared_data).tpu_v4(), result)
    return result


def test_least_absolute_finds_what_made_the_data(fitting: ModuleType) -> None:
    draw = np.random.default_rng(1)
    terms = draw.uniform(0.1, 5.0, (200, 4))
    true = np.array([2.0, 0.0, 0.5, 3.0])
    seconds = terms @ true
    # a few rows far off do not move a least absolute error
    seconds[:10] *= 3.0
    assert fitting.least_absolute(terms, seconds) == pytest.approx(true, abs=0.02)
    assert (fitting.least_absolute(terms, draw.uniform(1.0, 2.0, 200)) >= 0).all()


def test_folds_hold_out_every_row_once(fitting: ModuleType) -> None:
    masks = fitting.folds(43)
    assert sum(mask.astype(int) for mask in masks).tolist() == [1] * 43


@pytest.mark.parametrize(
    ("regime", "mean"), [("regime 128", 0.03), ("regime 1024", 0.065), ("regime 4096", 0.065), ("misaligned", 0.26)]
)
def test_products_on_tpu_v4(products: Any, regime: str, mean: float) -> None:
    assert products.errors[f"products f16, {regime}", "tpu-v4"].mean() < mean


def test_elementwise_on_tpu_v4(fitting: ModuleType, shared_data: Path) -> None:
    result = fitting.Result()
    fitting.fit_vectors(fitting.Tables(shared_data), result)
    assert np.median(result.errors["elementwise and activations f16", "tpu-v4"]) < 0.03


@pytest.mark.slow
def test_the_file_is_what_the_script_writes(fitting: ModuleType, shared_data: Path) -> None:
    result = fitting.fit_all(shared_data)
    stated = read_constants(CONSTANTS_FILE)
    for section, constants in result.values.items():
        for name, (value, _) in constants.items():
            assert stated[section].constants[name].value == pytest.approx(value, rel=1e-3), (section, name)
    carried = result.errors["tpu-recipes gemm bf16", "tpu-v7x"]
    assert carried.mean() < 0.15


def test_every_constant_has_a_source() -> None:
    for section in read_constants(CONSTANTS_FILE).values():
        assert all(constant.source for constant in section.constants.values())


def test_coefficients_are_physical() -> None:
    catalogue = Catalogue()
    for name in ("tpu-v3", "tpu-v4", "tpu-v7x"):
        table = f16_coefficients(systolic_constants(catalogue.resolve(name).device))
        assert table.shape == (len(SIZES), len(TERMS))
        assert (table >= 0).all()
        assert (table[:, TERMS.index("launch")] > 0).all()
