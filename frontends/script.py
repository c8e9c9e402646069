"""`script.py:function` to a workload: the script is run as a module, its function found and given arguments."""

import contextlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from stablecast.frontends.annotations import Annotation, annotation_of, recording
from stablecast.frontends.arguments import ArgumentOptions, ArraySpec, call_factory, parse_arrays
from stablecast.frontends.jax_program import capture_jax, describe_exception, over_mesh, sharding_of
from stablecast.frontends.registry import Request
from stablecast.ir.errors import InputError, StablecastError, near_names
from stablecast.ir.workload import Workload


@dataclass(slots=True)
class CallArguments:
    """Positional and keyword arguments of a call. `taken`: axes of `--mesh` that the factory of these was given."""

    args: list[Any] = field(default_factory=list[Any])
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    taken: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, slots=True)
class ScriptFrontend:
    """`script.py:function`, a JAX function of a script."""

    name: str = "script"
    priority: int = 0
    lowers: bool = True

    def claims(self, request: Request) -> bool:
        return is_script(request.text)

    def load(self, request: Request) -> Workload:
        return capture_script(request.text, request.arguments, platform=request.platform, mesh=request.mesh)


def is_script(text: str) -> bool:
    """Whether an INPUT names a Python script, with or without a function."""
    path, _, _ = _split(text)
    return path.endswith(".py")


def _split(text: str) -> tuple[str, str, str]:
    path, colon, name = text.rpartition(":")
    return (path, colon, name) if colon and path.endswith(".py") else (text, "", "")


def capture_script(
    text: str, options: ArgumentOptions, *, platform: str = "cuda", mesh: Mapping[str, int] | None = None
) -> Workload:
    """The workload of `script.py:function`.

    Arguments come from `@stablecast.workload` on the function, then from `--args`, then from `--arg`; each later one
    replaces what an earlier one gave. Axes of `mesh` that are keyword parameters of the factory of the arguments are
    set on it, the others are those of an abstract mesh. Raises `InputError` for a missing script or function, a script
    that raises, a function whose arguments nobody gave, and an axis that arguments on a mesh of their own do not have.
    """
    path, _, name = _split(text)
    if not name:
        raise InputError(f"{path} names no function", f"write {path}:function{_candidates(path)}")
    module = load_module(Path(path))
    function = find_function(module, name, path)
    annotation = annotation_of(function) or Annotation()
    with quiet_output(), user_code(f"the arguments of {name}"):
        call = arguments_for(function, name, path, annotation, options, mesh or {})
    rest = axes_left(call, mesh or {}, name)
    return capture_jax(
        function,
        call.args,
        call.kwargs,
        platform=platform,
        static=annotation.static,
        mesh=rest or annotation.mesh,
        source=f"{path}:{name}",
    )


def _candidates(path: str) -> str:
    """Annotated functions of a script, as a hint; empty where it cannot be run."""
    try:
        module = load_module(Path(path))
    except StablecastError:
        return ""
    names = [name for name, value in vars(module).items() if annotation_of(value) is not None]
    return f" (annotated: {', '.join(names)})" if names else ""


def load_module(path: Path) -> ModuleType:
    """Run the script at `path` as a module, with its own folder on the import path and its prints on standard error."""
    if not path.is_file():
        raise InputError(f"there is no script {path}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with quiet_output(), user_code(str(path)):
        spec.loader.exec_module(module)
    return module


def find_function(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    """The function `name` of a script; raises `InputError` with near names where it has none."""
    found = getattr(module, name, None)
    if found is None:
        own = [label for label, value in vars(module).items() if callable(value) and not label.startswith("_")]
        raise InputError(f"{path} has no function '{name}'", near_names(name, own))
    if not callable(found):
        raise InputError(f"{path}: '{name}' is not a function but a {type(found).__name__}")
    return found


def arguments_for(
    function: Callable[..., Any],
    name: str,
    path: str,
    annotation: Annotation,
    options: ArgumentOptions,
    mesh: Mapping[str, int],
) -> CallArguments:
    """The arguments of `function` by the rules of `capture_script`."""
    settings = options.values()
    call = CallArguments()
    used = from_annotation(annotation, settings, mesh, call, name)
    if options.args:
        used = _from_factory(options.args, settings, mesh, call) or used
    arrays = {key: _shape_struct(value) for key, value in parse_arrays(options.arrays).items()}
    if arrays:
        _place(function, name, arrays, call)
    if settings and not used:
        raise InputError(
            f"--set has nothing to set: {name} gets its arguments from no factory", "give --args FILE:FACTORY"
        )
    _check_complete(function, name, path, call)
    return call


def from_annotation(
    annotation: Annotation, settings: Mapping[str, Any], mesh: Mapping[str, int], call: CallArguments, name: str
) -> bool:
    """Puts the arguments that `annotation` of `name` gives into `call`; whether a factory made them.

    `settings`, and the axes of `mesh` that are among a factory's parameters, are passed to it. One that raises is run
    once more under an abstract mesh of the other axes.
    """
    used = False
    if callable(annotation.args):
        own = _axes_of(annotation.args, settings, mesh, call)
        factory, what = annotation.args, f"the argument factory of {name}"
        _take(_made(lambda: call_factory(factory, {**settings, **own}, what), mesh, own), call)
        used = True
    elif annotation.args is not None:
        _take(annotation.args, call)
    if callable(annotation.kwargs):
        parameters = inspect.signature(annotation.kwargs).parameters
        own = _axes_of(annotation.kwargs, settings, mesh, call)
        given = {key: value for key, value in {**settings, **own}.items() if key in parameters}
        more = annotation.kwargs
        call.kwargs.update(_made(lambda: more(**given), mesh, own))
        used = True
    elif annotation.kwargs is not None:
        call.kwargs.update(annotation.kwargs)
    return used


def _from_factory(text: str, settings: dict[str, Any], mesh: Mapping[str, int], call: CallArguments) -> bool:
    path, _, name = _split(text)
    if not name:
        raise InputError(f"--args '{text}' names no function", "write --args model.py:make_args")
    factory = find_function(load_module(Path(path)), name, path)
    call.args.clear()
    call.kwargs.clear()
    call.taken.clear()
    own = _axes_of(factory, settings, mesh, call)
    _take(_made(lambda: call_factory(factory, {**settings, **own}, f"{path}:{name}"), mesh, own), call)
    return True


def _made(make: Callable[[], Any], mesh: Mapping[str, int], taken: Mapping[str, int]) -> Any:
    """What `make` returns: as it stands or, where it raises, under an abstract mesh of the axes that are not `taken`.

    Models that carry shardings as metadata can often be made under a mesh only, others without one only.
    """
    rest = {axis: size for axis, size in mesh.items() if axis not in taken}
    try:
        return make()
    except Exception as error:
        if isinstance(error, StablecastError) or not rest:
            raise
        with over_mesh(rest), contextlib.suppress(Exception):
            return make()
        raise


def _axes_of(
    factory: Callable[..., Any], settings: Mapping[str, Any], mesh: Mapping[str, int], call: CallArguments
) -> dict[str, int]:
    """The axes of `mesh` that are keyword parameters of `factory`. Raises `InputError` for one that --set gives too."""
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(factory).parameters
    own = {axis: size for axis, size in mesh.items() if axis in parameters and parameters[axis].kind in by_keyword}
    for axis, size in own.items():
        if settings.get(axis, size) != size:
            raise InputError(f"--mesh says {axis}={size}, --set says {axis}={settings[axis]}")
    call.taken.update(own)
    return own


def axes_left(call: CallArguments, mesh: Mapping[str, int], name: str) -> dict[str, int]:
    """The axes of `mesh` for an abstract mesh; where arguments are on one of their own, all of that, if it has them."""
    rest = {axis: size for axis, size in mesh.items() if axis not in call.taken}
    own = _own_axes([call.args, call.kwargs]) if rest else {}
    for axis, size in rest.items():
        if own and own.get(axis) != size:
            has = ",".join(f"{label}={extent}" for label, extent in own.items())
            raise InputError(
                f"--mesh {axis}={size} fits neither a parameter of the factory of the arguments of {name} nor the mesh "
                f"that they are on ({has})"
            )
    return own or rest


def _own_axes(arguments: Sequence[Any]) -> dict[str, int]:
    """Axes of the meshes that arguments carry."""
    import jax

    leaves: list[Any] = jax.tree.leaves(arguments)
    shardings = [sharding_of(leaf) for leaf in leaves]
    meshes = [held.mesh for held in shardings if isinstance(held, jax.sharding.NamedSharding)]
    return {axis: size for mesh in dict.fromkeys(meshes) for axis, size in mesh.shape.items()}


def _take(given: Any, call: CallArguments) -> None:
    """A dictionary is keyword arguments, a tuple or list positional ones, anything else the only argument."""
    if isinstance(given, dict):
        call.kwargs.update(cast("dict[str, Any]", given))
    elif isinstance(given, (tuple, list)):
        call.args[:] = cast("Sequence[Any]", given)
    else:
        call.args[:] = [given]


def _shape_struct(tree: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def struct(spec: ArraySpec) -> Any:
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype))

    return jax.tree.map(struct, tree, is_leaf=lambda node: isinstance(node, ArraySpec))


def _place(function: Callable[..., Any], name: str, arrays: dict[str, Any], call: CallArguments) -> None:
    parameters = list(inspect.signature(function).parameters)
    for key, value in arrays.items():
        if key not in parameters:
            raise InputError(f"{name} has no parameter '{key}'", near_names(key, parameters))
        index = parameters.index(key)
        if index < len(call.args):
            call.args[index] = value
        else:
            call.kwargs[key] = value


def _check_complete(function: Callable[..., Any], name: str, path: str, call: CallArguments) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        plain = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )
        required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind in plain]
        flags = " ".join(f"--arg '{parameter}=f32[8,128]'" for parameter in required)
        what = f"nobody gave the arguments of {name}({', '.join(required)})" if not call.args else f"{name}: {error}"
        mark = f"@stablecast.workload(args=({', '.join(required)},))"
        raise InputError(what, f"put {mark} on it, or --args {Path(path).name}:make_args, or {flags}") from None


@contextlib.contextmanager
def quiet_output() -> Generator[None]:
    """What user code prints goes to standard error: standard output is for the answer."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def user_code(what: str) -> Generator[None]:
    """An exception of user code as one line."""
    try:
        yield
    except StablecastError:
        raise
    except SystemExit as error:
        raise InputError(f"{what} ended the program (exit {error.code})") from None
    except Exception as error:
        raise InputError(f"{what} raised {describe_exception(error)}") from None


@dataclass(slots=True)
class Recorded:
    """Workloads of a script that ran, by the name of the annotated function."""

    workloads: dict[str, Workload] = field(default_factory=dict[str, Workload])
    failures: dict[str, str] = field(default_factory=dict[str, str])


def run_script(path: Path, argv: Sequence[str], *, platform: str) -> Recorded:
    """Run a script as a program; every annotated function is captured, for `platform`, at its first call."""
    if not path.is_file():
        raise InputError(f"there is no script {path}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    recorded = Recorded()

    def recorder(
        function: Callable[..., Any], annotation: Annotation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        name = getattr(function, "__name__", "step")
        try:
            recorded.workloads[name] = capture_jax(
                function,
                args,
                kwargs,
                platform=platform,
                static=annotation.static,
                mesh=annotation.mesh,
                source=f"{path}:{name}",
            )
        except StablecastError as error:
            recorded.failures[name] = str(error)

    with recording(recorder), quiet_output(), user_code(str(path)), _program(path, argv):
        import runpy

        runpy.run_path(str(path), run_name="__main__")
    return recorded


@contextlib.contextmanager
def _program(path: Path, argv: Sequence[str]) -> Generator[None]:
    before, paths = sys.argv, list(sys.path)
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path[:] = before, paths
