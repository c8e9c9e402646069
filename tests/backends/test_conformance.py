"""The conformance suite passes what is right and catches what is wrong."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from stablecast.backends.analytical import AnalyticalBackend
from stablecast.backends.conformance import check_backend
from stablecast.backends.estimates import Estimates
from stablecast.backends.registry import Choice, backend_names, get_backend, parse_choice
from stablecast.ir.errors import InputError


@pytest.mark.parametrize("name", backend_names())
def test_registered_backends_conform(name: str) -> None:
    assert check_backend(get_backend(name)) == []


@dataclass(frozen=True)
class Broken:
    """The analytical backend with one fault."""

    fault: str
    name: str = "broken"

    def covers(self, kernels: Any, device: Any) -> Any:
        covered = AnalyticalBackend().covers(kernels, device)
        return covered.astype(float) if self.fault == "mask" else covered

    def estimate(self, kernels: Any, device: Any) -> Estimates:
        right = AnalyticalBackend().estimate(kernels, device)
        if self.fault == "negative":
            return replace(right, time_s=-right.time_s)
        if self.fault == "range":
            return replace(right, low_s=right.high_s * 2)
        if self.fault == "source":
            return replace(right, source=np.full(len(right), "guess"))
        if self.fault == "too fast":
            return replace(right, time_s=right.time_s * 1e-3, low_s=right.low_s * 1e-3)
        if self.fault == "shape":
            return replace(right, time_s=right.time_s[:-1])
        return right

    def assumptions(self, device: Any) -> tuple[str, ...]:
        return ("",) if self.fault == "assumptions" else ()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("mask", "covers gives float64"),
        ("negative", "not positive and finite"),
        ("range", "does not hold everywhere"),
        ("source", "not in Source"),
        ("too fast", "faster than the device's peak"),
        ("shape", "time_s has shape"),
        ("assumptions", "not sentences"),
    ],
)
def test_faults_are_found(fault: str, message: str) -> None:
    faults = check_backend(Broken(fault), ["h100-sxm"])
    assert any(message in text for text in faults), faults
    assert check_backend(Broken("none"), ["h100-sxm"]) == []


def test_choices_by_class() -> None:
    choice = parse_choice("matmul=analytical,default=analytical")
    assert choice == Choice("analytical", (("matmul", "analytical"),))
    assert str(choice) == "matmul=analytical,default=analytical"
    assert str(parse_choice("analytical")) == "analytical"
    with pytest.raises(InputError, match="unknown backend 'analytic'; did you mean analytical"):
        parse_choice("analytic")
    with pytest.raises(InputError, match="unknown kernel class 'gemm'"):
        parse_choice("gemm=analytical")
