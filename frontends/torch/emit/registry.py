"""Which function emits which op: by full name with overload, else by name."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from stablecast.ir.errors import InputError

Emit = Callable[..., Any]
"""(emitter, *arguments of the op) -> value, or a list of values and None, one for each result."""

EMITTERS: dict[str, Emit] = {}
COMPOSITES: dict[str, tuple[str, ...]] = {}


def emits(*names: str) -> Callable[[Emit], Emit]:
    """Register the decorated function for these ops, `aten.add` or `aten.max.dim`."""

    def register(function: Emit) -> Emit:
        for name in names:
            if name in EMITTERS:
                raise InputError(f"'{name}' already has an emitter")
            EMITTERS[name] = function
        return function

    return register


def composite(*names: str, attributes: tuple[str, ...] = ()) -> Callable[[Emit], Emit]:
    """Register ops that stay one `stablehlo.composite`, whose decomposition the decorated function emits.

    `attributes`: names of plain arguments that the composite carries, as the function calls them.
    """

    def register(function: Emit) -> Emit:
        for name in names:
            COMPOSITES[name] = attributes
        return emits(*names)(function)

    return register


def emitter_of(op: str) -> tuple[str, Emit] | None:
    """The name that `op` is registered under, and its function; None where it has none."""
    found = EMITTERS.get(op)
    if found is not None:
        return op, found
    short = op.rpartition(".")[0]
    found = EMITTERS.get(short)
    return None if found is None else (short, found)


_FAMILIES = (
    *("attention", "collective", "conv", "creation", "index", "linalg", "loss", "norm", "optim", "pointwise", "pool"),
    *("random", "reduce", "shape", "special"),
)


def register_all() -> None:
    """Import the modules of all op families."""
    for family in _FAMILIES:
        import_module(f"stablecast.frontends.torch.emit.{family}")


__all__ = ["COMPOSITES", "EMITTERS", "Emit", "composite", "emits", "emitter_of", "register_all"]
