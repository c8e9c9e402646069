"""Where the reference figures are, and a SCALE-Sim written the slow way to compare with."""

import tarfile
from pathlib import Path

import pytest


def _shared_data() -> Path | None:
    for folder in Path(__file__).resolve().parents:
        data = folder.parent / "shared" / "data"
        if (folder / "pyproject.toml").exists():
            return data if data.is_dir() else None
    return None


def _folder(name: str) -> Path:
    data = _shared_data()
    if data is None or not (data / name).is_dir():
        pytest.skip(f"shared/data/{name} is not beside the repository")
    return data / name


@pytest.fixture(scope="session")
def scalesim_golden() -> Path:
    """Folder of SCALE-Sim's own figures."""
    return _folder("scalesim_golden")


@pytest.fixture(scope="session")
def scalesim_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SCALE-Sim's own configs and topologies, unpacked."""
    archive = _folder("scalesim_inputs") / "configs_topologies_layouts.tar.gz"
    target = tmp_path_factory.mktemp("scalesim_inputs")
    with tarfile.open(archive) as handle:
        handle.extractall(target, filter="data")
    return target
