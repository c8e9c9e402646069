"""Capture of a PyTorch step: one CPU process, no weights, no accelerator, no cluster."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stablecast.frontends.torch import assemble
from stablecast.frontends.torch.private import load, torch
from stablecast.frontends.torch.session import Session, mesh_axes
from stablecast.ir.errors import InputError
from stablecast.ir.workload import Workload

MODES = ("forward", "train")


def capture_torch(
    build: Callable[..., Any] | None,
    step: Callable[..., Any],
    inputs: Sequence[Any] | Callable[[], Sequence[Any]] = (),
    mesh: Mapping[str, int] | None = None,
    rank: int = 0,
    device: str = "cuda",
    *,
    attention: str = "auto",
    source: str = "",
    name: str = "",
) -> Workload:
    """One step as rank `rank` of `mesh` runs it, forward to optimiser.

    `build()` makes the state (model, optimiser, ...) and `step(*state, *inputs)` uses it; where `build` takes an
    argument `mesh` it gets the device mesh. `inputs`: tensors, arrays, or anything with a shape and a dtype, or a
    function that makes them. `device`: what the program is meant for; on `cuda`, tensors are fake CPU ones, streams
    and events are kept as order, and attention is what CUDA would choose (`attention`: `auto`, `flash`, `efficient`,
    `cudnn` or `math`). Raises `InputError` with the line of user code where the step depends on data.
    """
    session = Session(mesh_axes(mesh), rank, device, attention)
    session.compiled = hasattr(step, "_torchdynamo_orig_callable")
    label = name or getattr(step, "__name__", "step")
    with session.open():
        state = () if build is None else _build(build, session)
        given = session.fake(inputs() if callable(inputs) else tuple(inputs))
        parts = state if isinstance(state, tuple) else (state,)
        session.prepare(parts)
        assemble.batch_names(session, given, _labels(step, len(parts), len(given)))
        out = session.record(lambda: step(*parts, *given))
        session.names.add(parts, device)
        return assemble.workload(session, out, source or _source(step), label)


def _build(build: Callable[..., Any], session: Session) -> Any:
    try:
        takes_mesh = "mesh" in inspect.signature(build).parameters
    except (TypeError, ValueError):
        takes_mesh = False
    if not takes_mesh:
        return build()
    if not session.axes:
        raise InputError("the builder takes a mesh and none was given", "say which, as in --mesh dp=8,tp=4")
    return build(mesh=session.mesh())


def _labels(step: Callable[..., Any], skipped: int, count: int) -> list[str]:
    try:
        names = [
            name
            for name, parameter in inspect.signature(step).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ][skipped:]
    except (TypeError, ValueError):
        names = []
    return [names[index] if index < len(names) else f"arg{index}" for index in range(count)]


def _source(step: Callable[..., Any]) -> str:
    step = inspect.unwrap(step)
    code = getattr(step, "__code__", None)
    return f"{code.co_filename}:{getattr(step, '__name__', 'step')}" if code is not None else ""


def capture_module(
    module: Any,
    *inputs: Any,
    mode: str = "forward",
    device: str = "cuda",
    attention: str = "auto",
    loss: Callable[[Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Workload:
    """A plain module on `inputs` (tensors or shapes): `forward`, or `train`.

    `train` runs forward, loss (by default the mean of every floating result, or the `loss` that the module returns),
    backward, and `optimizer(parameters)` (by default fused AdamW). `module` may hold real, fake or meta parameters,
    or be a function that builds it; its parameters are never read.
    """
    if mode not in MODES:
        raise InputError(f"unknown mode '{mode}'", f"known: {', '.join(MODES)}")
    session = Session((), 0, device, attention)
    with session.open():
        built = module if isinstance(module, torch.nn.Module) else module()
        written = getattr(built, "_orig_mod", built)
        label = type(written).__name__
        fakes = fake_state(session, built)
        given, named = session.fake(inputs), session.fake(kwargs)
        assemble.batch_names(session, [*given, *named.values()], [*_labels(written.forward, 0, len(given)), *named])
        run = _runner(built, fakes, mode, loss, optimizer, session)
        out = session.record(lambda: run(given, named))
        return assemble.workload(session, out, label, label)


def fake_state(session: Session, module: Any) -> dict[str, Any]:
    """Fake parameters and buffers for a module, by name; shared ones stay shared."""
    fakes: dict[str, Any] = {}
    known: dict[int, Any] = {}
    pairs = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in pairs:
        if id(tensor) not in known:
            if type(tensor).__name__ == "FakeTensor" and tensor.fake_mode is session.fake_mode:
                made = tensor
            else:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                if isinstance(tensor, torch.nn.Parameter):
                    made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            known[id(tensor)] = made
        fakes[name] = known[id(tensor)]
    return fakes


def _runner(
    module: Any, fakes: dict[str, Any], mode: str, loss: Any, optimizer: Any, session: Session
) -> Callable[[Any, Any], Any]:
    call = load("torch.func").functional_call
    holder = _Holder(fakes)
    session.names.add(holder.module, session.device)
    if mode == "forward":

        def forward(args: Any, kwargs: Any) -> Any:
            with torch.no_grad():
                return call(module, fakes, args, kwargs)

        return forward
    params = [tensor for tensor in holder.module.parameters() if tensor.requires_grad]
    made = optimizer(params) if optimizer is not None else torch.optim.AdamW(params, fused=True)
    session.prepare((holder.module, made))

    def train(args: Any, kwargs: Any) -> Any:
        made.zero_grad()
        value = loss_of(call(module, fakes, args, kwargs), loss)
        value.backward()
        made.step()
        return value.detach()

    return train


class _Holder:
    """A module that owns the fake parameters under their names, so that they are named as the user's are."""

    def __init__(self, fakes: Mapping[str, Any]) -> None:
        self.module = torch.nn.Module()
        for name, tensor in fakes.items():
            target = self.module
            *path, last = name.split(".")
            for part in path:
                if part not in target._modules:
                    target.add_module(part, torch.nn.Module())
                target = target._modules[part]
            if isinstance(tensor, torch.nn.Parameter):
                target.register_parameter(last, tensor)
            else:
                target.register_buffer(last, tensor)


def loss_of(out: Any, loss: Callable[[Any], Any] | None = None) -> Any:
    """A scalar to differentiate: what `loss` gives, the module's own `loss`, or the mean of its floating results."""
    if loss is not None:
        return loss(out)
    own = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if own is not None:
        return own
    leaves = [leaf for leaf in load("torch.utils._pytree").tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    floats = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]
    if not floats:
        raise InputError("nothing that the module returns can be differentiated", "give a loss")
    return sum((leaf.float().mean() for leaf in floats[1:]), floats[0].float().mean())
