"""A device and constants round enough to work times out by hand."""

from pathlib import Path

import pytest

from stablecast.backends.analytical import AnalyticalBackend
from stablecast.backends.analytical.classes import GROUPS
from stablecast.backends.analytical.constants import architecture_key
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device, DeviceKind, Quantity

RATE = 1e14
BYTES_PER_S = 1e12
CORES = 10


def quantity(value: float, unit: str = "1") -> Quantity:
    return Quantity(value, unit, "test", "high")


def make_device(
    kind: DeviceKind = "gpu", rate: float = RATE, bytes_per_s: float = BYTES_PER_S, architecture: str = "Test (cc 1.0)"
) -> Device:
    """Ten cores; the matrix rate for bf16 and fp16, a tenth of it for f32 on the vector lanes."""
    return Device(
        name="testchip",
        vendor="Test",
        architecture=architecture,
        kind=kind,
        matrix_flops={mode: quantity(rate, "FLOP/s") for mode in ("bf16", "fp16")},
        matrix_flops_acc16={},
        sparse_flops={},
        vector_flops={"f32": quantity(rate / 10, "FLOP/s"), "f64": quantity(rate / 20, "FLOP/s")},
        hbm_bytes=quantity(1e11, "B"),
        hbm_usable_bytes=None,
        hbm_bytes_per_s=quantity(bytes_per_s, "B/s"),
        l2_bytes=None,
        shared_bytes_per_core=None,
        cores=quantity(CORES),
        clock_hz=None,
        clock_matrix_hz=None,
        tdp_w=None,
        host_bytes_per_s=None,
        scaleup_bytes_per_s=None,
    )


def ideal_constants(launch_s: float) -> dict[str, float]:
    """No loss anywhere but the launch and whole waves; a split costs more than any product."""
    shared = {"launch": launch_s, "overlap": 1000.0, "loose": 1.0, "unmeasured": 1.0, "vector": 1.0, "cores": 1.0}
    shared |= {
        "transcendental": 10.0,
        "sort.passes": 8.0,
        "fft.passes": 2.0,
        "narrow": 0.0,
        "winograd": 1.0,
        "winograd.fused": 1.0,
        "winograd.fill": 0.0,
        "latency.access": 0.0,
        "latency.row": 0.0,
        "latency.reduce": 0.0,
        "casts": 0.0,
    }
    shared |= {f"share.{group}": 1.0 for group in GROUPS}
    shared |= {f"low.{group}": 0.5 for group in GROUPS} | {f"high.{group}": 2.0 for group in GROUPS}
    shared |= {f"{part}.{family}": 1.0 for part in ("sustained", "convolution") for family in _FAMILIES}
    shared |= {"convolution.direct": 1.0, "attention.forward": 1.0, "attention.backward": 1.0}
    shared |= {"attention.extra": 0.0, "attention.block": 0.0, "waves.attention": 1.0, "sublanes": 8.0, "fill.m": 0.0}
    tiles = {f"{prefix}.{area}": 1.0 for prefix in ("tile", "fma") for area in (32768, 16384, 8192, 4096, 2048, 1024)}
    return shared | tiles | {"waves.tile": 1.0, "waves.fma": 1.0, "fill.tile": 0.0, "fill.fma": 0.0, "split": 1.0}


_FAMILIES = ("half", "tf32", "byte", "fma")


def write_constants(path: Path, constants: dict[str, float]) -> Path:
    lines: list[str] = []
    for kind in ("gpu", "tpu", "cpu"):
        lines += [f"{kind}:", *(f"  {name}: {{value: {value}, source: test}}" for name, value in constants.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def device() -> Device:
    return make_device()


@pytest.fixture
def ideal(tmp_path: Path) -> AnalyticalBackend:
    """Every efficiency 1, no launch cost."""
    return AnalyticalBackend(constants_file=write_constants(tmp_path / "ideal.yaml", ideal_constants(0.0)))


@pytest.fixture
def waiting(tmp_path: Path) -> AnalyticalBackend:
    """The same, where an access takes 0.3 us, a row of a large table 0.5 and the tree of a reduction 4."""
    waits = {"latency.access": 3e-7, "latency.row": 5e-7, "latency.reduce": 4e-6}
    return AnalyticalBackend(constants_file=write_constants(tmp_path / "waiting.yaml", ideal_constants(0.0) | waits))


@pytest.fixture(scope="session")
def devices() -> dict[str, Device]:
    """Every device of the catalogue."""
    catalogue = Catalogue()
    found = {name: catalogue.device(name) for name in catalogue.names()}
    assert architecture_key(found["a100-sxm-40gb"]) == "sm_80"
    return found
