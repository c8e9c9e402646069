"""The learned backend on the models that ship."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stablecast.backends import kernel_specs as specs
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Quantity
from stablecast.backends.learned import LearnedBackend
from stablecast.backends.learned.calibration import Calibration, parse_gemm, read_calibration
from stablecast.backends.learned.rates import MODELS, Anchor, Measured, Rule, rates_for, trend_at
from stablecast.backends.learned.store import Model, model_keys, read_model, write_model
from stablecast.backends.pricing import price
from stablecast.backends.registry import Choice
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelTable

CATALOGUE = Catalogue()
BACKEND = LearnedBackend()


def _product(device: str, size: int = 4096, batch: int = 1, element: str = "bf16") -> KernelTable:
    return KernelTable.of([specs.matmul(CATALOGUE.device(device), element, size, size, size, batch)])


def test_seen_device_is_learned_and_near_its_measured_rate() -> None:
    """Large bf16 products of an H100 reach 700 to 830 TFLOP/s in public tables."""
    device = CATALOGUE.device("h100-sxm")
    found = BACKEND.estimate(_product("h100-sxm", 8192), device)
    assert found.source.tolist() == ["learned"]
    assert 2 * 8192**3 / found.time_s[0] == pytest.approx(765e12, rel=0.09)
    assert (found.high_s[0] - found.low_s[0]) / found.time_s[0] < 0.3


@pytest.mark.parametrize("name", ["h100-sxm", "a100-pcie-40gb", "tpu-v6e", "b300-sxm"])
def test_batches_are_never_faster(name: str) -> None:
    device = CATALOGUE.device(name)
    rows = [specs.matmul(device, "bf16", 512, 512, 128, 2**power) for power in range(10)]
    rows += [specs.attention(device, "bf16", 2**power, 8, 1024, 1024, 128, causal=1) for power in range(8)]
    time = BACKEND.estimate(KernelTable.of(rows), device).time_s
    assert (np.diff(time[:10]) >= -1e-12).all()
    assert (np.diff(time[10:]) >= -1e-12).all()


def test_unseen_device_has_a_wider_range() -> None:
    seen = BACKEND.estimate(_product("h100-sxm"), CATALOGUE.device("h100-sxm"))
    unseen = BACKEND.estimate(_product("b300-sxm"), CATALOGUE.device("b300-sxm"))
    assert unseen.high_s[0] / unseen.low_s[0] > seen.high_s[0] / seen.low_s[0]
    assert BACKEND.detail(_product("b300-sxm"), CATALOGUE.device("b300-sxm"))["device_seen"].tolist() == [0.0]


def test_unseen_shape_is_flagged_and_widened() -> None:
    device = CATALOGUE.device("h100-sxm")
    usual, odd = _product("h100-sxm"), KernelTable.of([specs.matmul(device, "bf16", 8, 2**24, 8)])
    assert BACKEND.detail(usual, device)["outside_domain"].tolist() == [0.0]
    assert BACKEND.detail(odd, device)["outside_domain"].tolist() == [1.0]
    near, far = BACKEND.estimate(usual, device), BACKEND.estimate(odd, device)
    assert far.high_s[0] / far.time_s[0] > near.high_s[0] / near.time_s[0]


def test_what_has_no_model_falls_to_the_analytical_backend() -> None:
    device = CATALOGUE.device("h100-sxm")
    rows = KernelTable.of([specs.matmul(device, "f64", 512, 512, 512), specs.matmul(device, "bf16", 512, 512, 512)])
    priced = price(rows, device, Choice("learned"))
    assert priced.backend.tolist() == ["analytical", "learned"]
    assert priced.estimates.source.tolist() == ["analytical", "learned"]


def test_nothing_is_covered_without_models(tmp_path: Path) -> None:
    assert not LearnedBackend(tmp_path).covers(_product("h100-sxm"), CATALOGUE.device("h100-sxm")).any()


def test_a_measured_product_is_met() -> None:
    """The share is the one at which the backend gives the measured time."""
    device = CATALOGUE.device("b300-sxm")
    calibrated = Calibration((parse_gemm("8192x8192x8192:bf16=0.7ms"),)).apply(device)
    assert BACKEND.estimate(_product("b300-sxm", 8192), calibrated).time_s[0] == pytest.approx(7e-4, rel=1e-3)
    assert rates_for(calibrated).shares["half"].source == "measured: 8192x8192x8192:bf16"
    other = Calibration((parse_gemm("h100-sxm/8192x8192x8192:bf16=0.7ms"),)).apply(device)
    assert not other.sustained


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8192x8192:bf16=1ms", "no measured product"),
        ("8x8x8:bf17=1ms", "math mode"),
        ("8x8x8:bf16=1GB", "needs sizes"),
        ("8x8x8:bf16=soon", "not a number"),
    ],
)
def test_faulty_products_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_gemm(text)


def test_impossible_products_are_refused() -> None:
    fast = Calibration((parse_gemm("8192x8192x8192:bf16=1us"),))
    with pytest.raises(InputError, match="does not fit h100-sxm"):
        fast.apply(CATALOGUE.device("h100-sxm"))


def test_calibration_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("device: h100-sxm\nsustained: {fp32: 0.7, memory: 0.9}\ngemms: ['4096x4096x4096:bf16=200us']\n")
    device = read_calibration(path).apply(CATALOGUE.device("h100-sxm"))
    assert device.sustained["fp32"] == Quantity(0.7, "1", str(path), "user")
    assert set(device.sustained) == {"fp32", "memory", "half"}
    path.write_text("sustained: {fp32: 1.7}\n")
    with pytest.raises(InputError, match="share between 0 and 1"):
        read_calibration(path)


def _anchor(device: str, share: float, **other: object) -> Anchor:
    known = {"chip": device, "vendor": "NVIDIA", "process": "4 nm", "lanes": 128, "density": 1.0, "lane_density": 8.0}
    return Anchor("half", share, device, **{**known, **other})  # type: ignore[arg-type]


def test_clock_rule_by_hand() -> None:
    """H100's own chip: share times the ratio of watts per TFLOP/s to the power 1/3; another process: the median."""
    device = CATALOGUE.device("h100-sxm")
    density = 700 / 989.4
    same = Rule((_anchor("x", 0.8, chip="gh100", density=2 * density),), 1 / 3)
    assert same.share(device, "half") == pytest.approx(0.8 * 0.5 ** (1 / 3))
    older = [_anchor(f"x{share}", share, process="7 nm") for share in (0.6, 0.7, 0.9)]
    assert Rule(tuple(older), 1 / 3).share(device, "half") == pytest.approx(0.7)
    assert Rule(tuple(older), 1 / 3).share(device, "fp8") is None


def test_files_are_plain_and_small() -> None:
    files = sorted(MODELS.iterdir())
    assert sum(path.stat().st_size for path in files) < 20 * 2**20
    assert {path.suffix for path in files} == {".npz", ".json", ".yaml"}
    for key in model_keys():
        card = json.loads((MODELS / f"{key}.json").read_text())
        assert {"data", "splits", "seen_devices", "domain", "date", "versions", "coverage"} <= set(card)
        with np.load(MODELS / f"{key}.npz", allow_pickle=False) as arrays:
            assert all(arrays[name].dtype != object for name in arrays.files)


def test_models_round_trip(tmp_path: Path) -> None:
    model = read_model("matmul-half-gpu")
    assert isinstance(model, Model)
    write_model(replace(model, card={}), tmp_path)
    again = read_model("matmul-half-gpu", tmp_path)
    assert again is not None
    assert (again.features, again.devices, again.trust) == (model.features, model.devices, model.trust)
    assert all(np.array_equal(again.low[name], model.low[name]) for name in model.low)
    (tmp_path / "matmul-half-gpu.npz").write_bytes(b"no zip")
    with pytest.raises(InputError, match="cannot be read"):
        read_model("matmul-half-gpu", tmp_path)


def test_predicting_does_not_import_scikit_learn() -> None:
    code = (
        "import sys; from stablecast._kernel import kernel_time; "
        "print(kernel_time('matmul', {'m': 64, 'n': 64, 'k': 64}, 'h100-sxm', 'bf16', 'learned').basis); "
        "print('sklearn' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["learned", "False"]


def test_time_of_timing_follows_the_years() -> None:
    """Twice as fast hosts in four years; a table that knows the device says how it lies beside that trend."""
    catalogue = Catalogue()
    add = {"p100-pcie": 4e-5, "t4": 4e-5 / 2**0.5, "a100-pcie-40gb": 2e-5}
    known = {"table add": add, "table ln": {name: 2 * value for name, value in add.items()}}
    h100, a100 = catalogue.device("h100-sxm"), catalogue.device("a100-pcie-40gb")
    times = Measured({}, Rule((), 0.0), known)
    assert times.extra_s("table add", a100) == 2e-5
    assert times.extra_s("table add", h100) == pytest.approx(2e-5 / 2**0.5)
    assert times.extra_s("table mul", h100) == 0.0
    seen = Measured({}, Rule((), 0.0), {**known, "table ln": {**known["table ln"], "mi100": 2e-5}})
    assert seen.extra_s("table add", catalogue.device("mi100")) < 2e-5


def test_shares_of_the_vendor_come_first() -> None:
    """No AMD board of the process was measured: MI100 takes the AMD board with as many lanes a core."""
    catalogue = Catalogue()
    anchors = [
        Anchor("fp32", share, name, name, vendor, process, 64, 10.0, 10.0)
        for name, share, vendor, process in (("a", 0.9, "NVIDIA", "12 nm"), ("b", 0.8, "NVIDIA", "7 nm"), ("c", 0.6, "AMD", "14 nm"))
    ]  # fmt: skip
    assert Rule(tuple(anchors), 0.5).share(catalogue.device("mi100"), "fp32") == pytest.approx(0.6)


def test_memory_shares_of_unseen_boards() -> None:
    """By hand: the same chip, else the vendor's boards with the same kind of memory; folding follows the years."""
    catalogue = Catalogue()
    rule = Rule(
        tuple(
            Anchor("memory", share, name, chip, "NVIDIA", "", 64, None, None, kind)
            for name, chip, share, kind in (("a", "ga100", 0.9, "HBM"), ("b", "b", 0.8, "HBM"), ("c", "c", 0.5, "GDDR"))
        ),
        0.0,
    )
    assert rule.memory_share(catalogue.device("a100-pcie-80gb")) == pytest.approx(0.9)
    assert rule.memory_share(catalogue.device("h100-sxm")) == pytest.approx(0.85)
    assert rule.memory_share(catalogue.device("rtx-4090")) == pytest.approx(0.5)
    assert trend_at([(2016, 1.0), (2018, 2.0), (2020, 3.0)], 2022) == pytest.approx(4.0)
    assert trend_at([(2016, 1.0), (2018, 2.0), (2020, 3.0)], 2030) == pytest.approx(4.0)
    assert trend_at([(2016, 1.0), (2018, 3.0)], 2022) == pytest.approx(2.0)
    shares = rates_for(catalogue.device("h100-sxm")).shares
    assert 0.65 < shares["reduce"].value < shares["memory"].value
    assert "reduce" not in rates_for(catalogue.device("a100-pcie-80gb")).shares


def test_power_does_not_buy_issue_slots() -> None:
    """A board of the same chip with far more watts: no more than the best board with as many lanes a core."""
    device = Catalogue().device("a100-sxm-40gb")
    anchors = (
        Anchor("fp32", 0.85, "a", "ga100", "NVIDIA", "7 nm", 64, 5.0, 5.0),
        Anchor("fp32", 0.9, "b", "b", "NVIDIA", "12 nm", 64, 5.0, 5.0),
        Anchor("fp32", 0.99, "c", "c", "NVIDIA", "12 nm", 128, 5.0, 5.0),
    )
    assert Rule(anchors, 1 / 3).share(device, "fp32") == pytest.approx(0.9)
