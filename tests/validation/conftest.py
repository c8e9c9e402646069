from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of shared measurements beside the repository; skips the test where it is absent."""
    for folder in Path(__file__).resolve().parents:
        found = folder / "shared" / "data"
        if (found / "traces").is_dir():
            return found
    pytest.skip("shared/data is not beside the repository")


@pytest.fixture(scope="session")
def traces(shared_data: Path) -> Path:
    return shared_data / "traces"
