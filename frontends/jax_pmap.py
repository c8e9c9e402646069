"""`jax.pmap` without devices: the one module that touches JAX's private `pmap`, which insists on real ones.

JAX maps over as many devices as the mapped axis is long, by `shard_map` over a mesh of them; here that is abstract.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from stablecast.ir.errors import InputError, ToolError

_MODULE = "jax._src.pmap"
_NEEDED = ("Mesh", "_cached_shard_map", "_get_mesh_devices")


def is_pmapped(function: Callable[..., Any]) -> bool:
    """Whether `jax.pmap` made `function`."""
    lower = getattr(function, "lower", None)
    return not hasattr(function, "trace") and getattr(lower, "__module__", "") == _MODULE


@dataclass(frozen=True, slots=True)
class Pmapped:
    """What is behind a pmapped function: the jitted one, the arrays that it takes, and places of static arguments.

    `lengths`: of each array along the axis that is mapped, None where it is broadcast.
    """

    jitted: Any
    arrays: Sequence[Any]
    static: tuple[int, ...]
    lengths: tuple[int | None, ...]


def pmapped(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pmapped:
    """`function` taken apart, to be called, and what it gives traced, inside `absent_devices`.

    Donation and shardings are those of `pmap`.
    """
    infer: Any = inspect.getclosurevars(cast("Any", function).lower).nonlocals.get("infer_params")
    if infer is None:
        raise _unsupported()
    cached, jitted, arrays, *_ = infer(*args, **kwargs)
    static = inspect.getclosurevars(infer).nonlocals.get("static_broadcasted_tuple", ())
    pairs = zip(arrays, cached.in_specs_flat, strict=True)
    return Pmapped(jitted, arrays, tuple(static), tuple(_length(*pair) for pair in pairs))


def _length(array: Any, spec: Sequence[Any]) -> int | None:
    return next((int(array.shape[dim]) for dim, axis in enumerate(spec) if axis is not None), None)


@contextlib.contextmanager
def absent_devices() -> Generator[None]:
    """Inside, `jax.pmap` maps over as many devices as its axis is long, without there being any."""
    import numpy as np
    from jax.sharding import AbstractMesh

    module = importlib.import_module(_MODULE)
    if not all(hasattr(module, name) for name in _NEEDED):
        raise _unsupported()

    def mesh(devices: Sequence[Any], axes: Sequence[str]) -> AbstractMesh:
        return AbstractMesh((len(devices),), tuple(map(str, axes)))

    def places(_devices: Any, _backend: Any, length: int, axis_size: int | None, _clean: bool) -> tuple[int, ...]:
        if axis_size not in (None, length):
            raise InputError(
                f"pmap has axis_size={axis_size}, but its arguments are {length} long along the mapped axis",
                "one entry of the mapped axis goes to each device",
            )
        return tuple(range(length))

    build = vars(module)["_cached_shard_map"]

    def built(*about: Any) -> Any:
        with _set(AbstractMesh, local_mesh=property(lambda mesh: mesh), devices=property(lambda _: np.array([]))):
            return build(*about)

    with _set(module, Mesh=mesh, _cached_shard_map=built, _get_mesh_devices=places):
        yield


@contextlib.contextmanager
def _set(owner: Any, **values: Any) -> Generator[None]:
    before: dict[str, Any] = {name: vars(owner)[name] for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _unsupported() -> ToolError:
    import jax

    return ToolError(f"jax.pmap of jax {jax.__version__} is not known", "pip install 'jax>=0.10.2,<0.11'")
