import tarfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of shared measurements beside the repository; skips the test where it is absent."""
    for folder in Path(__file__).resolve().parents:
        data = folder / "shared" / "data"
        if (data / "astrasim_golden").is_dir():
            return data
    pytest.skip("shared/data is not beside the repository")


@pytest.fixture(scope="session")
def unpacked(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """STAGE's traces under `stage/<name>` and ASTRA-sim's examples under `examples`."""
    folder = tmp_path_factory.mktemp("traces")
    archives = {
        f"stage/{path.name.removesuffix('.tar.gz')}": path for path in (shared_data / "stage_traces").glob("*.gz")
    }
    archives["examples"] = shared_data / "astrasim_golden" / "examples" / "traces.tar.gz"
    for name, path in archives.items():
        target = folder / name
        target.mkdir(parents=True)
        with tarfile.open(path) as archive:
            archive.extractall(target, filter="data")
    return folder
