"""Captured programs of a suite, kept on disk: capturing a model takes seconds, and is the same every time."""

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import stablecast.frontends
from stablecast.ir import capture_file
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import StablecastError
from stablecast.ir.reader import read
from stablecast.ir.workload import Workload
from stablecast.lowering import program_cache
from stablecast.lowering.device import lower
from stablecast.lowering.execution.models import exec_model
from stablecast.lowering.target import Target


@cache
def _state(package: str) -> str:
    """Versions of torch and of the models' package, and every file of the PyTorch frontend."""
    digest = hashlib.sha256()
    for name in ("torch", package):
        with contextlib.suppress(PackageNotFoundError):
            digest.update(f"{name} {version(name)}\n".encode())
    for root in stablecast.frontends.__path__:
        for path in sorted((Path(root) / "torch").rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def captured(name: str, package: str, make: Callable[[], Workload]) -> Workload:
    """The capture `name` of a model of `package`, from the cache folder or made and kept there.

    A folder that cannot be written is no error.
    """
    path = _path(name, package)
    if path.is_file():
        with contextlib.suppress(StablecastError):
            return capture_file.read(path)
    made = make()
    with contextlib.suppress(OSError, StablecastError):
        path.parent.mkdir(parents=True, exist_ok=True)
        capture_file.write(made, path)
    return made


def kernels(workload: Workload, name: str, target: Target) -> DeviceProgram:
    """The kernels of a capture; of an execution model that runs calls as dispatched, those of its launch table."""
    launches = workload.launches if exec_model(target.exec).dispatched else None
    program = read(workload.modules[0].data, name)
    return lower(program, target, launches=launches, schedule=workload.schedule)


def is_captured(name: str, package: str) -> bool:
    """Whether `name` is in the cache."""
    return _path(name, package).is_file()


def _path(name: str, package: str) -> Path:
    key = hashlib.sha256(f"{name}\n{_state(package)}".encode()).hexdigest()[:32]
    return program_cache.folder() / "captures" / f"{key}.sc"
