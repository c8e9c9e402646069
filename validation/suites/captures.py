"""Programs of a suite, kept on disk: to capture and lower a model takes seconds, and gives the same every time.

Captures lie under the versions of torch and of the models' package and the content of the PyTorch frontend, kernels of
programs also under the rules that lower them; nothing is made again because of when a file was written.
"""

import contextlib
import hashlib
import importlib
import logging
import sys
from collections.abc import Callable, Generator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import stablecast.frontends
from stablecast.ir import capture_file
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import InputError, StablecastError
from stablecast.ir.reader import read
from stablecast.ir.workload import Workload
from stablecast.lowering import program_cache
from stablecast.lowering.device import lower
from stablecast.lowering.execution.models import exec_model
from stablecast.lowering.target import Target

MAX_PROGRAMS: Final = 4000
_NO_PART: Final = ("xla", "traces")
"""Frontends that no example program goes through."""

_DECLARED: Final = ("nms", "qnms")
_ADVICE: Final = "torch.distributed.tensor._redistribute"
"""Where DTensor tells authors of programs what would be faster."""


@cache
def _state(package: str) -> str:
    """Versions of torch and of the models' package, and every file of the PyTorch frontend."""
    folders = [Path(root) / "torch" for root in stablecast.frontends.__path__]
    return program_cache.digest_of(folders, *_versions("torch", package))


@cache
def _examples_state(folder: Path, package: str) -> str:
    """Every example program, the version of what it is written in, and the frontends that have a part in it."""
    frontends = [Path(root) for root in stablecast.frontends.__path__]
    others = _NO_PART if package == "torch" else (*_NO_PART, "torch")
    return program_cache.digest_of([folder, *frontends], *_versions(package), without=others)


def _versions(*packages: str) -> list[str]:
    found: list[str] = []
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


def captured(name: str, package: str, make: Callable[[], Workload]) -> Workload:
    """The capture `name` of a model of `package`, from the cache folder or made and kept there.

    A folder that cannot be written is no error. A model that could not be captured is not tried again: `InputError`
    gives the words of the first time. Raises what `make` raises.
    """
    return _kept(_path(name, package), make)


def captured_example(folder: Path, package: str, choices: object, make: Callable[[], Workload]) -> Workload:
    """As `captured`, for an example program below `folder`, written in `package`; `choices`: script and settings."""
    key = hashlib.sha256(f"{_examples_state(folder, package)}\n{choices!r}".encode()).hexdigest()[:32]
    return _kept(program_cache.folder() / "captures" / f"{key}.sc", make)


def _kept(path: Path, make: Callable[[], Workload]) -> Workload:
    if path.is_file():
        with contextlib.suppress(StablecastError):
            return capture_file.read(path)
    failed = path.with_suffix(".failed")
    if failed.is_file():
        raise InputError(failed.read_text(encoding="utf-8"))
    try:
        made = make()
    except (InputError, ValueError) as error:
        with contextlib.suppress(OSError):
            failed.parent.mkdir(parents=True, exist_ok=True)
            failed.write_text(" ".join(str(error).split())[:400], encoding="utf-8")
        raise
    with contextlib.suppress(OSError, StablecastError):
        path.parent.mkdir(parents=True, exist_ok=True)
        capture_file.write(made, path)
    return made


def kernels(workload: Workload, name: str, target: Target) -> DeviceProgram:
    """The kernels of a capture; of an execution model that runs calls as dispatched, those of its launch table."""
    launches = workload.launches if exec_model(target.exec).dispatched else None
    program = read(workload.modules[0].data, name)
    return lower(program, target, launches=launches, schedule=workload.schedule)


def captured_kernels(name: str, package: str, target: Target, make: Callable[[], Workload]) -> DeviceProgram:
    """The kernels of the capture `name`, from disk where they or the capture are kept."""
    return program_cache.cached(
        _kernels_key(name, package, target),
        lambda: kernels(captured(name, package, make), name, target),
        _programs(),
        MAX_PROGRAMS,
    )


def example_kernels(folder: Path, package: str, choices: object, make: Callable[[], DeviceProgram]) -> DeviceProgram:
    """The kernels of an example program below `folder`, from disk where they are kept.

    `package`: what the program is written in. `choices`: script, settings and target, which their `repr` tells apart.
    """

    def quietly() -> DeviceProgram:
        with _without_advice():
            return make()

    return module_kernels(_examples_state(folder, package).encode(), choices, quietly)


@contextlib.contextmanager
def _without_advice() -> Generator[None]:
    logger = logging.getLogger(_ADVICE)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def module_kernels(content: bytes, choices: object, make: Callable[[], DeviceProgram]) -> DeviceProgram:
    """The kernels of a program whose text, or what decides it, is `content`, from disk where they are kept."""
    return program_cache.cached(program_cache.key_of(content, choices), make, _programs(), MAX_PROGRAMS)


def is_captured(name: str, package: str, target: Target | None = None) -> bool:
    """Whether the capture `name`, or its kernels for `target`, are in the cache."""
    if target is not None and program_cache.path_of(_kernels_key(name, package, target), _programs()).is_file():
        return True
    return _path(name, package).is_file()


def _kernels_key(name: str, package: str, target: Target) -> str:
    return program_cache.key_of(f"{name}\n{_state(package)}".encode(), target)


def _programs() -> Path:
    return program_cache.folder() / "suites"


def _path(name: str, package: str) -> Path:
    key = hashlib.sha256(f"{name}\n{_state(package)}".encode()).hexdigest()[:32]
    return program_cache.folder() / "captures" / f"{key}.sc"


def import_models(package: str) -> Any:
    """A package of models, also beside a torchvision whose compiled operators do not load here: no model calls them.

    Raises `ModuleNotFoundError` where the package or what it needs is not installed.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        _declare_operators()
    return importlib.import_module(package)


def _declare_operators() -> None:
    """Declare what torchvision's binary would have registered, so that its Python part can be imported."""
    torch: Any = importlib.import_module("torch")
    for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[module]
    library: Any = torch.library.Library("torchvision", "FRAGMENT")
    for name in _DECLARED:
        with contextlib.suppress(RuntimeError):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT: Final[list[Any]] = []
"""A library's declarations go when it does."""
