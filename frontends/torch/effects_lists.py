"""Ops over lists of tensors (foreach, fused optimisers): one launch, one functional node for each tensor."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stablecast.frontends.torch.private import torch

if TYPE_CHECKING:
    from stablecast.frontends.torch.record import OpInfo, Recorder

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_RENAMED = {"norm": "linalg_vector_norm", "zero": "zero"}
_VALUED = frozenset({"addcmul", "addcdiv"})

FUSED: Mapping[str, tuple[int, ...]] = {
    "_fused_adam_": (0, 2, 3, 4),
    "_fused_adamw_": (0, 2, 3, 4),
    "_fused_sgd_": (0, 2),
    "_fused_adagrad_": (0, 2),
}
"""Fused optimisers: positions of the lists that they update."""


def foreach(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """`_foreach_add_` and its like."""
    func = info.func
    name = func._schema.name.removeprefix("aten::_foreach_")
    in_place = bool(info.writes)
    base = name[:-1] if in_place and name.endswith("_") else name
    lists = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, (list, tuple)))
    count = len(lists)
    taken = [rec.take(arg) for arg in args]
    named = {key: rec.take(arg) for key, arg in kwargs.items()}
    if base in _VALUED and len(taken) == 4:
        named["value"] = taken.pop()
    out = func(*args, **kwargs)
    targets = args[0] if in_place else out
    if base == "copy":
        taken[0] = None
    op = f"aten.{_RENAMED.get(base, base)}.foreach"
    for index in range(count):
        one = tuple([_pick(arg, index, count) for arg in taken])
        more = {key: _pick(arg, index, count) for key, arg in named.items()}
        tensor = targets[index]
        (ref,) = rec.emit(op, one, (rec.spec(tensor),), more)
        assert ref is not None
        if in_place:
            rec.aliases.write(rec.alias(tensor), ref)
        else:
            rec.fresh(tensor, ref)
    rec.call(info, args, kwargs, out)
    return out


def _pick(arg: Any, index: int, count: int) -> Any:
    return arg[index] if isinstance(arg, list) and len(arg) == count else arg


def fused(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """`_fused_adamw_` and its like: one node for each parameter, with its state as results."""
    name = info.func._schema.name.removeprefix("aten::")
    written = [index for index in FUSED[name] if index < len(args)]
    taken = [rec.take(arg) for arg in args]
    named = {key: rec.take(arg) for key, arg in kwargs.items()}
    out = info.func(*args, **kwargs)
    for index in range(len(args[0])):
        one = tuple([arg[index] if isinstance(arg, list) and len(arg) > index else None for arg in taken])
        targets = [args[place][index] for place in written if len(args[place]) > index]
        specs = tuple([rec.spec(tensor) for tensor in targets])
        refs = rec.emit(f"{info.name}.{info.func._overloadname}", one, specs, named)
        for tensor, ref in zip(targets, refs, strict=True):
            assert ref is not None
            rec.aliases.write(rec.alias(tensor), ref)
    rec.call(info, args, kwargs, out)
    return out


def unscale(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """Gradient scaling: each gradient is multiplied, and one flag says whether any was not finite."""
    grads, found, scale = args
    flag, factor = rec.ref(found), rec.ref(scale)
    values = [rec.ref(grad) for grad in grads]
    out = info.func(*args, **kwargs)
    for grad, value in zip(grads, values, strict=True):
        made, flagged = rec.emit("aten.amp_unscale.default", (value, flag, factor), (rec.spec(grad), rec.spec(found)))
        assert made is not None
        assert flagged is not None
        flag = flagged
        rec.aliases.write(rec.alias(grad), made)
    rec.aliases.write(rec.alias(found), flag)
    rec.call(info, args, kwargs, out)
    return out


def is_tensor_list(arg: Any) -> bool:
    """Whether `arg` is a list that holds tensors."""
    return isinstance(arg, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in arg)
