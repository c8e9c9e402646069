"""What each kind of op does to tensors: makes new ones, views, writes in place, or asks the host to wait."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stablecast.frontends.torch import effects_comm, effects_lists
from stablecast.frontends.torch.graph import Spec
from stablecast.frontends.torch.places import in_library
from stablecast.frontends.torch.private import torch
from stablecast.frontends.torch.views import CANONICAL, SAME

if TYPE_CHECKING:
    from stablecast.frontends.torch.record import OpInfo, Recorder

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

UNREAD = frozenset(
    {"zero", "fill", "copy", "normal", "uniform", "exponential", "random", "log_normal", "geometric", "cauchy"}
)
"""In-place ops that do not read what they overwrite."""

HIDDEN_WRITES: Mapping[str, tuple[int, ...]] = {
    "native_batch_norm": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4),
}
"""Ops that update arguments without saying so in their schema: positions of those."""

STAND_IN = 1.0
"""What an optimiser's own host read is answered with: the counter of a first step."""


def handler_of(namespace: str, name: str, functional: str, is_view: bool) -> Callable[..., Any]:
    """How the recorder treats the op `namespace::name`."""
    if namespace in ("profiler", "prim", "debug_mode"):
        return silent
    if namespace in effects_comm.NAMESPACES:
        return effects_comm.handler_of(namespace, name) or plain
    if namespace != "aten":
        return plain
    if functional in _SPECIAL:
        return _SPECIAL[functional]
    if name.startswith("_foreach_"):
        return effects_lists.foreach
    if name in effects_lists.FUSED:
        return effects_lists.fused
    if name in SAME:
        return same
    return view if is_view else plain


def silent(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """Ops that only talk to the profiler or to metadata."""
    return info.func(*args, **kwargs)


def decomposed(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """An op that eager torch takes apart before dispatch, and some modes pass on whole."""
    with rec:
        return info.func.decompose(*args, **kwargs)


def positional(info: "OpInfo", args: Args, kwargs: Kwargs) -> Args:
    """`args` with the keyword arguments that have a place put there, defaults between them."""
    if not kwargs:
        return args
    found = list(args)
    for index, argument in enumerate(info.func._schema.arguments):
        if index < len(args) or argument.kwarg_only:
            continue
        found.append(kwargs.get(argument.name, argument.default_value))
    return tuple(found)


def op_name(info: "OpInfo") -> str:
    """The functional op, with the overload."""
    return f"{info.name}.{info.func._overloadname}"


def results(out: Any) -> list[Any]:
    """The results of a call as a flat list; None for those that are no tensor."""
    if isinstance(out, (list, tuple)):
        return [item for part in out for item in results(part)]
    return [out if isinstance(out, torch.Tensor) else None]


def plain(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """An op that makes new tensors, and perhaps writes some of its arguments."""
    short = info.name.partition(".")[2]
    taken = [rec.take(arg) for arg in args]
    named = {name: rec.take(arg) for name, arg in kwargs.items()} if kwargs else None
    written = [args[index] if 0 <= index < len(args) else kwargs.get(name) for index, name in info.writes]
    if short in HIDDEN_WRITES and args[5] is not False:
        written = [args[index] for index in HIDDEN_WRITES[short] if len(args) > index]
    if written and short in UNREAD:
        taken[0] = None
    out = info.func(*args, **kwargs)
    targets = [tensor for tensor in results(written) if tensor is not None]
    inplace = {id(tensor) for tensor in targets}
    made = [tensor if tensor is not None and id(tensor) not in inplace else None for tensor in results(out)]
    if info.writes:
        made = [tensor for tensor in made if tensor is not None]
    specs: list[Spec | None] = [None if tensor is None else rec.spec(tensor) for tensor in made]
    specs += [rec.spec(tensor) for tensor in targets]
    refs = rec.emit(op_name(info), tuple(taken), tuple(specs), named)
    for tensor, ref in zip(made, refs, strict=False):
        if tensor is not None and ref is not None:
            rec.fresh(tensor, ref)
    for tensor, ref in zip(targets, refs[len(made) :], strict=True):
        if ref is not None:
            rec.aliases.write(rec.alias(tensor), ref)
    rec.call(info, args, kwargs, out)
    return out


def same(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """The result is the operand."""
    alias = rec.alias(args[0])
    out = info.func(*args, **kwargs)
    if out is not args[0]:
        rec.bind(out, alias)
    rec.call(info, args, kwargs, out)
    return out


def view(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """An op whose results share memory with its first argument."""
    args = positional(info, args, kwargs)
    base = args[0]
    alias = rec.alias(base)
    short = info.name.partition(".")[2]
    out = info.func(*args)
    canonical = CANONICAL.get(short)
    for index, tensor in enumerate([out] if isinstance(out, torch.Tensor) else out):
        spec = rec.spec(tensor)
        if spec.dtype != alias.spec.dtype and short == "view":
            made = rec.aliases.view(alias, ("bitcast", spec.shape, spec.dtype), spec)
        elif canonical is None:
            made = rec.adopt_known(tensor, alias.storage)
        elif spec.shape == alias.spec.shape and short not in (
            "t",
            "transpose",
            "permute",
            "view_as_complex",
            "_conj",
            "_neg_view",
        ):
            made = alias
        else:
            made = rec.aliases.view(alias, canonical(base, args[1:], tensor, index), spec)
        setattr(tensor, rec.mark, made)
    rec.call(info, args, {}, out)
    return out


def copy(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """`copy_`: no op of its own where nothing is converted."""
    target, source = args[0], args[1]
    value = rec.ref(source)
    out = info.func(*args, **kwargs)
    spec = rec.spec(target)
    if rec.graph.specs[value] != spec:
        (made,) = rec.emit("aten.copy.default", (None, value), (spec,))
        assert made is not None
        value = made
    alias = rec.alias(target)
    rec.aliases.write(alias, value)
    if rec.copies is not None:
        rec.copies.setdefault(id(alias.storage), []).append(len(rec.calls))
    rec.call(info, args, kwargs, out)
    return out


def host_read(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """`.item()` and its like below the user's code."""
    tensor = args[0]
    if getattr(tensor, "constant", None) is not None or type(tensor) is torch.Tensor:
        return info.func(*args, **kwargs)
    rec.alias(tensor)
    if rec.copies is not None and tensor.dtype == torch.int32 and in_library("autograd"):
        rec.note("parameters that this rank does not use are taken to be unused on all of them (DDP asks)")
        rec.syncs.append(max(0, len(rec.calls) - 1))
        return 0
    if not in_library("optim", "amp"):
        raise rec.dynamic("the value of a tensor is read on the host (.item(), bool(), float(), int() or .tolist())")
    rec.syncs.append(max(0, len(rec.calls) - 1))
    if in_library("amp"):
        rec.note("every gradient is taken to be finite, so that the loss scaler lets the optimiser step")
        value = 0.0
    else:
        rec.note("counters that the optimiser reads on the host have the value of a first step")
        value = STAND_IN
    dtype = tensor.dtype
    return bool(value) if dtype == torch.bool else value if dtype.is_floating_point else int(value)


def rebind(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """`set_`, `resize_`: the tensor stands for other memory afterwards."""
    tensor = args[0]
    source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else None
    held = rec.alias(source) if source is not None else None
    out = info.func(*args, **kwargs)
    if held is not None:
        rec.bind(tensor, held)
    elif tensor.numel() and rec.known_storage(tensor) is not None:
        setattr(tensor, rec.mark, rec.adopt_known(tensor, rec.known_storage(tensor)))
    rec.call(info, args, kwargs, out)
    return out


_SPECIAL: Mapping[str, Callable[..., Any]] = {
    "copy": copy,
    "_local_scalar_dense": host_read,
    "set": rebind,
    "resize": rebind,
    "_amp_foreach_non_finite_check_and_unscale": effects_lists.unscale,
}
