"""The inputs that are PyTorch's: `script.py:build,step`, Hugging Face configurations, `.pt2` files.

Importing this module does not import torch.
"""

import importlib.util
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stablecast.frontends.annotations import Annotation, annotation_of
from stablecast.frontends.arguments import ArgumentOptions, ArraySpec, call_factory, parse_arrays
from stablecast.frontends.registry import Request
from stablecast.frontends.script import find_function, load_module, quiet_output, user_code
from stablecast.ir.errors import InputError, near_names
from stablecast.ir.workload import Workload

SETTINGS = ("batch", "seq", "mode", "dtype", "parallel")
_LOOK = 1 << 16


def check_torch() -> None:
    """Raises `InputError` where the extra is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("PyTorch programs need the extra 'torch'", "pip install 'stablecast[torch]'")


def _device(platform: str) -> str:
    return "cpu" if platform == "cpu" else "cuda"


@dataclass(frozen=True, slots=True)
class TorchScriptFrontend:
    """`script.py:build,step`: `build()` makes model and optimiser, `step(*state, *inputs)` is one step."""

    name: str = "torch-script"
    priority: int = 10
    lowers: bool = True

    def claims(self, request: Request) -> bool:
        path, _, functions = request.text.rpartition(":")
        return path.endswith(".py") and "," in functions

    def load(self, request: Request) -> Workload:
        check_torch()
        path, _, functions = request.text.rpartition(":")
        names = [name.strip() for name in functions.split(",")]
        if len(names) != 2 or not all(names):
            raise InputError(f"'{request.text}' does not name two functions", f"write {path}:build,step")
        module = load_module(Path(path))
        build, step = (find_function(module, name, path) for name in names)
        from stablecast.frontends.torch import capture_torch

        annotation = annotation_of(step) or Annotation()
        with quiet_output(), user_code(f"the inputs of {names[1]}"):
            inputs = _inputs(annotation, request.arguments, names[1], path)
        mesh = request.mesh or annotation.mesh
        with quiet_output(), _helped(names[1], path), user_code(request.text):
            return capture_torch(
                build, step, inputs, mesh, device=_device(request.platform), source=request.text, name=names[1]
            )


@contextmanager
def _helped(name: str, path: str) -> Generator[None]:
    """Says how to give inputs where a step was called without them."""
    try:
        yield
    except InputError as error:
        if f"{name}() missing" not in error.message or error.hint:
            raise
        mark = f"put @stablecast.workload(args=make_inputs) on {name}"
        raise InputError(error.message, f"{mark}, or --args {path}:make_inputs, or --arg 'tokens=i64[2,128]'") from None


def _inputs(
    annotation: Annotation, options: ArgumentOptions, name: str, path: str
) -> Sequence[Any] | Callable[[], Sequence[Any]]:
    """Inputs from the annotation on the step, `--args` or `--arg`; later ones replace earlier ones."""
    settings = options.values()
    found: Any = annotation.args
    where = f"the argument factory of {name}"
    if options.args:
        file, _, factory = options.args.rpartition(":")
        found, where = find_function(load_module(Path(file or path)), factory, file or path), options.args
    if callable(found):
        made = found
        found = lambda: _sequence(call_factory(made, settings, where))  # noqa: E731
    elif settings:
        raise InputError(
            f"--set has nothing to set: {name} gets its inputs from no factory", "give --args FILE:FACTORY"
        )
    arrays = parse_arrays(options.arrays)
    if arrays:
        if not all(isinstance(spec, ArraySpec) for spec in arrays.values()):
            raise InputError("--arg paths into pytrees are for JAX functions", "give --args FILE:FACTORY")
        found = tuple(arrays.values())
    return found if found is not None else ()


def _sequence(given: Any) -> Sequence[Any]:
    if isinstance(given, dict):
        return tuple(cast("dict[str, Any]", given).values())
    return cast("Sequence[Any]", given) if isinstance(given, (tuple, list)) else (given,)


@dataclass(frozen=True, slots=True)
class HuggingFaceFrontend:
    """A `config.json` of transformers: the model that it describes, without weights or network."""

    name: str = "hugging-face"
    priority: int = 10
    lowers: bool = True

    def claims(self, request: Request) -> bool:
        path = Path(request.text)
        if path.suffix != ".json" or not path.is_file():
            return False
        with path.open("rb") as held:
            return b'"model_type"' in held.read(_LOOK)

    def load(self, request: Request) -> Workload:
        check_torch()
        from stablecast.frontends.torch import capture_hf

        given = request.arguments.model
        for name in given:
            if name not in SETTINGS:
                raise InputError(f"a Hugging Face configuration has no setting '{name}'", near_names(name, SETTINGS))
        sizes = {name: _whole(name, given[name]) for name in ("batch", "seq") if name in given}
        texts = {name: given[name] for name in ("mode", "dtype", "parallel") if name in given}
        with quiet_output(), user_code(request.text):
            return capture_hf(Path(request.text), **sizes, **texts, device=_device(request.platform))  # type: ignore[arg-type]


def _whole(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"--{name} '{text}' is not a whole number from 1 up")
    return int(text)


@dataclass(frozen=True, slots=True)
class ExportedFrontend:
    """A `.pt2` file that `torch.export.save` wrote."""

    name: str = "torch-export"
    priority: int = 10
    lowers: bool = True

    def claims(self, request: Request) -> bool:
        return request.text.endswith(".pt2")

    def load(self, request: Request) -> Workload:
        check_torch()
        if not Path(request.text).is_file():
            raise InputError(f"there is no file {request.text}")
        from stablecast.frontends.torch import capture_exported

        with quiet_output(), user_code(request.text):
            return capture_exported(request.text, _device(request.platform))
