"""Marks in model scripts: `@workload` ties arguments to a step, `region` names a scope. Inert unless something asks."""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

ATTRIBUTE = "__stablecast__"


@dataclass(frozen=True, slots=True)
class Annotation:
    """What `@workload` says of a function.

    `args`: positional arguments, or a factory of them whose keyword parameters `--set` may fill, and `--mesh` where
    they name an axis; values or anything with a shape and dtype. `kwargs`: keyword arguments, or a factory. `static`:
    names of parameters that are compile time constants. `mesh`: axis name -> size.
    """

    args: Sequence[Any] | Callable[..., Any] | None = None
    kwargs: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = None
    static: tuple[str, ...] = ()
    mesh: Mapping[str, int] | None = None


Recorder = Callable[[Callable[..., Any], Annotation, tuple[Any, ...], dict[str, Any]], None]
"""Called with the function, its annotation, and the arguments of its first call."""

_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Generator[None]:
    """While this is open, functions annotated in it tell `recorder` of their first call."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def workload(
    function: Callable[..., Any] | None = None,
    *,
    args: Sequence[Any] | Callable[..., Any] | None = None,
    kwargs: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = None,
    static: Sequence[str] = (),
    mesh: Mapping[str, int] | None = None,
) -> Any:
    """Tie example arguments to a step function, for `stablecast predict script.py:function` and `stablecast run`.

    `args`, `kwargs`: values, `jax.ShapeDtypeStruct`s, or a function that makes them; keyword parameters of that
    function can be set by `--set` and, where they name mesh axes, by `--mesh`. `static`: parameters that are
    compile-time constants. `mesh`: axis -> size.

    The function itself comes back, marked; called, traced or compiled it behaves as before.
    """

    def mark(marked: Callable[..., Any]) -> Any:
        annotation = Annotation(args, kwargs, (static,) if isinstance(static, str) else tuple(static), mesh)
        recorder = _recorder.get()
        result: Any = marked if recorder is None else _Recorded(marked, annotation, recorder)
        setattr(result, ATTRIBUTE, annotation)
        return result

    return mark if function is None else mark(function)


class _Recorded:
    """A function that tells its recorder of its first call, and otherwise is that function."""

    def __init__(self, function: Callable[..., Any], annotation: Annotation, recorder: Recorder) -> None:
        functools.update_wrapper(self, function)
        self._function, self._annotation, self._recorder = function, annotation, recorder
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._called:
            self._called = True
            self._recorder(self._function, self._annotation, args, kwargs)
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def annotation_of(function: Any) -> Annotation | None:
    """The annotation of `function`, or of what it wraps; None if it has none."""
    seen = 0
    while function is not None and seen < 32:
        found = getattr(function, ATTRIBUTE, None)
        if isinstance(found, Annotation):
            return found
        function, seen = getattr(function, "__wrapped__", None), seen + 1
    return None


def region(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context manager that names a scope; the name reaches the kernel table and reports.

    In a script that uses JAX it is `jax.named_scope(name)`; elsewhere it does nothing.
    """
    jax = sys.modules.get("jax")
    if jax is not None and hasattr(jax, "named_scope"):
        return jax.named_scope(name)
    return contextlib.nullcontext()
