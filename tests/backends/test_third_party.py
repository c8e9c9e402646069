"""A backend in a package of its own, installed apart, is found by its entry point and used like a built-in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parents[1] / "sample_backend"
_EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp.py"
_CONFORMS = """
from stablecast.backends.conformance import check_backend
from stablecast.backends.registry import backend_names, get_backend
assert "roofline_only" in backend_names(), backend_names()
print(check_backend(get_backend("roofline_only")))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package is installed, into a folder of its own."""
    pytest.importorskip("setuptools", minversion="77", reason="building the sample package needs setuptools")
    pytest.importorskip("pip", reason="installing the sample package needs pip")
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("target")
    _copy(_PACKAGE, source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--disable-pip-version-check", "--no-index", "--target", str(target), str(source)], check=True
    )
    path = os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}


def _copy(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        if path.suffix in (".py", ".toml"):
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())


def _run(arguments: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_conforms(environment: dict[str, str]) -> None:
    assert _run(["-c", _CONFORMS], environment).strip() == "[]"


@pytest.mark.slow
def test_predict_uses_it(environment: dict[str, str]) -> None:
    """It prices what it covers; the rest falls to the analytical backend, and both say what they assumed."""
    command = ["-m", "stablecast", "predict", f"{_EXAMPLE}:train_step", "--on", "h100-sxm", "--json"]
    found = json.loads(_run([*command, "--backend", "roofline_only"], environment))
    assert found["backend"] == "roofline_only"
    assert {kernel["basis"] for kernel in found["kernels"] if kernel["class"] == "matmul"} == {"bound"}
    assert any("5 us a launch" in text for text in found["assumptions"])


@pytest.mark.slow
def test_kernel_time_by_hand(environment: dict[str, str]) -> None:
    """8192^3 in bf16 on an H100: 5 us + 2 * 8192^3 / 989.4e12."""
    sizes = [word for name in "mnk" for word in (f"--{name}", "8192")]
    command = ["-m", "stablecast", "kernel", "matmul", *sizes, "--dtype", "bf16", "--on", "h100-sxm", "--json"]
    found = json.loads(_run([*command, "--backend", "roofline_only"], environment))
    assert found["time_s"] == pytest.approx(5e-6 + 2 * 8192**3 / 989.4e12, rel=1e-9)
