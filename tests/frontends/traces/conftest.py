from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def traces() -> Path:
    """Real traces beside the repository; skips the test where they are absent."""
    for folder in Path(__file__).resolve().parents:
        found = folder / "shared" / "data" / "traces"
        if found.is_dir():
            return found
    pytest.skip("shared/data/traces is not beside the repository")
