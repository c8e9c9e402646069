"""What every test may use: measured data where it is there, golden files with an overwrite switch, small programs."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["STABLECAST_CACHE"] = tempfile.mkdtemp(prefix="stablecast-cache-")
ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overwrite-golden", action="store_true", help="write golden files instead of comparing")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of measured data beside the repository; tests that need it are skipped where it is absent."""
    for folder in (ROOT, *ROOT.parents):
        found = folder / "shared" / "data"
        if found.is_dir():
            return found
    pytest.skip("the measured data (shared/data beside the repository) is not here")


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--exec auto` fuses by our own rules in every test, whether or not the extra `xla-gpu` is installed."""
    monkeypatch.setattr("stablecast._ahead.compiler_installed", lambda: False)


@pytest.fixture(scope="session")
def examples() -> Path:
    """The bundled examples."""
    return ROOT / "examples"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the golden file of a name, or writes it under `--overwrite-golden`."""
    folder = Path(request.path).parent / "golden"

    def check(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--overwrite-golden"):
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --overwrite-golden and read what it wrote"
        assert text == path.read_text(encoding="utf-8")

    return check
