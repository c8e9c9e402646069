"""`capture` and `load`: any input to a workload."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stablecast.frontends.annotations import Annotation, annotation_of
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.frontends.registry import Request, frontend_for
from stablecast.frontends.script import CallArguments, axes_left, from_annotation
from stablecast.frontends.torch.inputs import check_torch
from stablecast.ir.errors import InputError
from stablecast.ir.workload import Workload


def capture(
    function: Callable[..., Any],
    *args: Any,
    platform: str = "cuda",
    static: Sequence[str] = (),
    mesh: Mapping[str, int] | None = None,
    **kwargs: Any,
) -> Workload:
    """Capture a JAX function or a PyTorch module as a workload, with no device of `platform` and nothing allocated.

    Of PyTorch: a `torch.nn.Module` (compiled and FX graph modules too), an `ExportedProgram`, which needs no `args`,
    or a function of tensors. `args`, `kwargs`: values, `jax.ShapeDtypeStruct`s, or pytrees of them; without any, those
    of `@stablecast.workload` on the function are used. `platform`: `cuda`, `rocm`, `tpu` or `cpu`. `static`: names of
    parameters that are compile-time constants. `mesh`: axis -> size. Of a module, `mode="train"` adds loss, backward
    and optimiser. Raises `InputError` where the function cannot be traced.
    """
    from stablecast.frontends.jax_program import capture_jax

    if _is_torch(function, args):
        return _capture_torch(function, args, kwargs, "cpu" if platform == "cpu" else "cuda", mesh)
    if not callable(function):
        raise InputError(
            f"capture needs a function, not a {type(function).__name__}", "load files with stablecast.load"
        )
    annotation = annotation_of(function) or Annotation()
    call = CallArguments(list(args), kwargs)
    name = getattr(function, "__name__", "the function")
    if not args and not kwargs:
        from_annotation(annotation, {}, mesh or {}, call, name)
    return capture_jax(
        function,
        call.args,
        call.kwargs,
        platform=platform,
        static=tuple(static) or annotation.static,
        mesh=axes_left(call, mesh or {}, name) or annotation.mesh,
    )


def capture_torch(
    build: Callable[..., Any] | None,
    step: Callable[..., Any],
    inputs: Sequence[Any] | Callable[[], Sequence[Any]] = (),
    mesh: Mapping[str, int] | None = None,
    rank: int = 0,
    device: str = "cuda",
    **options: Any,
) -> Workload:
    """Capture a PyTorch step, forward to optimiser, as rank `rank` of `mesh` runs it, in this process.

    `build()` makes the state (model, optimiser, ...) and `step(*state, *inputs)` uses it; `options` are those of
    `stablecast.frontends.torch.capture_torch`. Raises `InputError` where the step depends on data, and where torch is
    not installed.
    """
    check_torch()
    from stablecast.frontends import torch as frontend

    return frontend.capture_torch(build, step, inputs, mesh, rank, device, **options)


def capture_hf(config: str | Path | Mapping[str, Any], batch: int = 1, seq: int = 1024, **options: Any) -> Workload:
    """Capture the model of a Hugging Face configuration, without weights or network.

    `options`: `mode`, `dtype`, `parallel` and the others of `stablecast.frontends.torch.capture_hf`. Raises
    `InputError` for what is not known, and where torch is not installed.
    """
    check_torch()
    from stablecast.frontends import torch as frontend

    return frontend.capture_hf(config, batch, seq, **options)


def _is_torch(value: object, args: Sequence[Any]) -> bool:
    """A module, an exported program, or a function that is given tensors."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if isinstance(value, torch.nn.Module) or type(value).__name__ == "ExportedProgram":
        return True
    return any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(args))


def _capture_torch(
    value: Any, args: Sequence[Any], kwargs: dict[str, Any], device: str, mesh: Mapping[str, int] | None
) -> Workload:
    from stablecast.frontends import torch as frontend

    if type(value).__name__ == "ExportedProgram":
        return frontend.capture_exported(value, device)
    if hasattr(value, "named_parameters"):
        return frontend.capture_module(value, *args, device=device, **kwargs)
    return frontend.capture_torch(None, value, args, mesh, device=device, **kwargs)


def load(
    source: str | Path,
    options: ArgumentOptions | None = None,
    *,
    platform: str = "cuda",
    mesh: Mapping[str, int] | None = None,
) -> Workload:
    """The workload that an INPUT of the command line names: `script.py:function`, a capture, or a StableHLO or HLO
    file. `options`, `platform` and `mesh` only concern scripts. Raises `InputError` for anything else.
    """
    request = Request(str(source), platform, mesh, options or ArgumentOptions())
    return frontend_for(request).load(request)
