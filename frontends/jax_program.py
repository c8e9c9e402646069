"""JAX functions to workloads: traced and lowered for a platform that need not be there."""

import contextlib
import inspect
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from stablecast.frontends.files import describe
from stablecast.frontends.jax_pmap import absent_devices, is_pmapped, pmapped
from stablecast.ir import mlir
from stablecast.ir.errors import InputError, StablecastError, near_names
from stablecast.ir.program import Argument
from stablecast.ir.reader import read
from stablecast.ir.workload import Module, Workload

PLATFORMS = ("cuda", "rocm", "tpu", "cpu")


def capture_jax(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    platform: str = "cuda",
    static: Sequence[str] = (),
    mesh: Mapping[str, int] | None = None,
    source: str = "",
) -> Workload:
    """Trace `function` for `platform` and keep its StableHLO.

    `args`, `kwargs`: values, `ShapeDtypeStruct`s or anything with `shape` and `dtype`, in pytrees; nothing is
    allocated. `static`: names of parameters that are compile-time constants. `mesh`: axis -> size of an abstract mesh
    that `PartitionSpec`s refer to; its axes are explicit where the program asks for that, and arguments on one mesh of
    their own bring it. A function that `jax.jit` made is traced with its own settings, donation included.
    Raises `InputError` where the function or its arguments do, with the user's file and line.
    """
    if platform not in PLATFORMS:
        raise InputError(f"unknown platform '{platform}'", near_names(platform, PLATFORMS))
    mlir.check_version()
    name = source or _name_of(function)
    call = _Call(function, args, kwargs or {}, tuple(static), name)
    try:
        module, names = _lowered(call, _mesh(mesh) if mesh else None, platform)
    except _WantsExplicitAxes:
        if not mesh:
            raise
        module, names = _lowered(call, _mesh(mesh or {}, explicit=True), platform)
    made = _workload(module, names, name, platform)
    if mesh and is_pmapped(function):
        _check_mapped(made, mesh, name)
    return made


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    static: tuple[str, ...]
    name: str


class _WantsExplicitAxes(InputError):
    """The program is written for a mesh with explicit axes, and was traced on one without."""


def _lowered(call: _Call, mesh: Any, platform: str) -> tuple[Any, list[str]]:
    """The module of a call, its `PartitionSpec`s over `mesh`, and the names of its array arguments."""
    labels = _positional_names(call.function, len(call.args))
    positional = [_abstract(arg, mesh, label) for arg, label in zip(call.args, labels, strict=True)]
    static, named = call.static, call.kwargs.items()
    keywords = {key: value if key in static else _abstract(value, mesh, key) for key, value in named}
    names = leaf_names(call.function, call.args, call.kwargs, static)
    mapped = is_pmapped(call.function)
    around = None if mapped else _own_mesh([positional, keywords]) or mesh
    try:
        with absent_devices(), over_mesh(around):
            if mapped:
                found = pmapped(call.function, positional, keywords)
                names = leaf_names(call.function, call.args, call.kwargs, static, found.static)
                _check_lengths(found.lengths, names, call.name)
                traced = found.jitted.trace(*found.arrays)
            else:
                traced = _jitted(call.function, static).trace(*positional, **keywords)
            return traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo"), names
    except StablecastError:
        raise
    except Exception as error:
        raise _not_traced(error, call.name, names, [positional, keywords]) from None


def _own_mesh(trees: Any) -> Any:
    """The abstract mesh that arguments are on, where it is one."""
    import jax

    leaves: list[Any] = jax.tree.leaves(trees)
    held = [sharding_of(leaf) for leaf in leaves]
    meshes = {sharding.mesh: None for sharding in held if isinstance(sharding, jax.sharding.NamedSharding)}
    found = [mesh for mesh in meshes if isinstance(mesh, jax.sharding.AbstractMesh)]
    return found[0] if len(meshes) == len(found) == 1 else None


def _jitted(function: Callable[..., Any], static: Sequence[str]) -> Any:
    import jax

    return function if hasattr(function, "trace") else jax.jit(function, static_argnames=tuple(static) or None)


def _not_traced(error: Exception, name: str, names: Sequence[str], trees: Any) -> InputError:
    uneven = _uneven(names, trees)
    if uneven:
        return InputError(f"{name}: {uneven}", "choose a mesh whose axes divide the sharded dimensions")
    text = str(error)
    hint = "name the axes of --mesh as the program does" if "not found in mesh" in text else ""
    wants_explicit = "axis names that are of type Auto" in text
    kind = _WantsExplicitAxes if wants_explicit else InputError
    return kind(f"{name} cannot be traced: {describe_exception(error)}", hint)


def _check_lengths(lengths: Sequence[int | None], names: Sequence[str], name: str) -> None:
    """Refuses arguments of different lengths along the axis that `pmap` maps."""
    mapped = [(length, label) for length, label in zip(lengths, names, strict=False) if length is not None]
    first = mapped[0]
    other = next((entry for entry in mapped if entry[0] != first[0]), None)
    if other is not None:
        raise InputError(
            f"{name}: pmap maps argument {first[1]} over {first[0]} devices, but argument {other[1]} is {other[0]} long"
        )


def _check_mapped(made: Workload, mesh: Mapping[str, int], name: str) -> None:
    """Refuses a mesh of another size than the axis that `pmap` maps."""
    if math.prod(mesh.values()) == made.num_devices:
        return
    given = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    raise InputError(
        f"the arguments of {name} are {made.num_devices} long along the axis that pmap maps, the mesh is {given}",
        "pmap takes a device for each entry of the mapped axis",
    )


def over_mesh(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """Under an abstract mesh, given as such or as axis -> size, if there is one: `PartitionSpec`s then refer to it."""
    import jax

    if not mesh:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, jax.sharding.AbstractMesh) else _mesh(mesh))


def _mesh(axes: Mapping[str, int], *, explicit: bool = False) -> Any:
    from jax.sharding import AbstractMesh, AxisType

    kind = AxisType.Explicit if explicit else AxisType.Auto
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def _workload(module: Any, names: Sequence[str], name: str, platform: str) -> Workload:
    """`names`: of all array arguments of the function, in order."""
    data = mlir.write_bytecode(module)
    program = read(data, name)
    known = describe(program, Module("main", data), name)
    order = {label: index for index, label in enumerate(names)}
    arguments = tuple(_placed(_named(argument, names), order) for argument in known.args)
    versions = {
        "frontend": "jax",
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "stablehlo": mlir.stablehlo_version(),
    }
    return replace(known, producer=versions, platform=platform, args=arguments)


def _named(argument: Argument, names: Sequence[str]) -> Argument:
    """`argument` with its own name where the module, as those of pmap, only says its number."""
    found = re.fullmatch(r"flat_args\[(\d+)\]", argument.name)
    return replace(argument, name=names[int(found[1])]) if found and int(found[1]) < len(names) else argument


def _placed(argument: Argument, order: Mapping[str, int]) -> Argument:
    return replace(argument, kept_index=order.get(argument.name, -1))


def leaf_names(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: Sequence[str] = (),
    static_places: Sequence[int] = (),
) -> list[str]:
    """The name of every array argument in the order of the function's own arguments, as JAX writes them.

    `static`, `static_places`: names of keyword and places of positional arguments that are compile-time constants.
    """
    import jax

    pairs = [
        (label, arg)
        for index, (label, arg) in enumerate(zip(_positional_names(function, len(args)), args, strict=True))
        if index not in static_places
    ]
    pairs += [(key, value) for key, value in kwargs.items() if key not in static]
    flatten = cast("Callable[[Any], Any]", jax.tree_util.tree_flatten_with_path)
    return [name + jax.tree_util.keystr(path) for name, tree in pairs for path, _ in flatten(tree)[0]]


def _positional_names(function: Callable[..., Any], count: int) -> list[str]:
    """Names of the first `count` positional arguments; those of `*rest` are `rest[0]`, `rest[1]`, ..."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in plain][:count]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    return names + [f"{rest}[{index}]" for index in range(count - len(names))]


def _abstract(tree: Any, mesh: Any, label: str) -> Any:
    """`tree`, argument `label`, its arrays replaced by shape, dtype and (if several devices hold them) sharding.

    Raises `InputError` for a `PartitionSpec` that `mesh` has no axes for.
    """
    import jax

    def leaf(path: Any, value: Any) -> Any:
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            return value
        sharding = sharding_of(value)
        if isinstance(sharding, jax.sharding.PartitionSpec):
            sharding = _on_mesh(sharding, mesh, label + jax.tree_util.keystr(path))
        if not isinstance(sharding, jax.sharding.NamedSharding):
            sharding = None
        weak = bool(getattr(value, "weak_type", False))
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding, weak_type=weak)

    mapped = cast("Callable[[Any, Any], Any]", jax.tree_util.tree_map_with_path)
    return mapped(leaf, tree)


def _on_mesh(spec: Any, mesh: Any, label: str) -> Any:
    import jax

    if mesh is None:
        raise InputError(
            f"argument {label} is sharded by {spec}, but there is no mesh", "give --mesh data=8,model=4, or mesh={...}"
        )
    try:
        return jax.sharding.NamedSharding(mesh, spec)
    except Exception:
        entries: list[Any] = [entry for entry in spec if entry]
        axes = [axis for entry in entries for axis in (cast("Any", entry) if isinstance(entry, tuple) else (entry,))]
        missing = [axis for axis in axes if axis not in mesh.axis_names]
        has = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        why = f"axis '{missing[0]}', which the mesh ({has}) does not have" if missing else "an axis twice"
        raise InputError(
            f"argument {label} is sharded by {spec}: it names {why}", "name the axes of the mesh as the program does"
        ) from None


def sharding_of(value: Any) -> Any:
    """The sharding of an array or of its description: a `PartitionSpec` where no mesh is set that it would refer to."""
    try:
        return getattr(value, "sharding", None)
    except TypeError:
        return value._sharding


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "") or type(function).__name__


def describe_exception(error: BaseException) -> str:
    """The exception on one line, with the last place of the user's own code that it passed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return text[:300] + place


def _is_users(filename: str) -> bool:
    installed = "site-packages" in Path(filename).parts
    return not installed and not filename.startswith(("<", _OWN, _STDLIB))


_OWN = str(Path(__file__).resolve().parent)
_STDLIB = str(Path(inspect.__file__).resolve().parent)


def _uneven(names: Sequence[str], trees: Any) -> str:
    """Which argument is sharded over a dimension that its axes do not divide; empty if none is."""
    import jax

    for name, leaf in zip(names, jax.tree.leaves(trees), strict=False):
        sharding: Any = sharding_of(leaf)
        if not isinstance(sharding, jax.sharding.NamedSharding):
            continue
        sizes = dict(sharding.mesh.shape)
        for axis, entry in enumerate(sharding.spec):
            several = isinstance(entry, tuple)
            axes = cast("tuple[str, ...]", entry if several else () if entry is None else (entry,))
            parts = math.prod(sizes.get(part, 1) for part in axes)
            if leaf.shape[axis] % parts:
                over = " x ".join(f"{part}={sizes[part]}" for part in axes)
                return f"dimension {axis} of argument {name}, of size {leaf.shape[axis]}, is not divisible by {over}"
    return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
