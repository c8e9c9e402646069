"""What the tensors of a step are: parameters, buffers, optimiser state, by name."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from stablecast.frontends.torch.private import storage_of, torch
from stablecast.ir.program import ArgumentKind

_DEPTH = 4


class Named(NamedTuple):
    """Name, kind, and whether optimiser counters of that kind live on the host."""

    name: str
    kind: ArgumentKind
    host: bool = False


def members(held: Any, depth: int = 0) -> Iterator[Any]:
    """Modules and optimisers in a nest of containers and plain objects."""
    if isinstance(held, (torch.nn.Module, torch.optim.Optimizer)):
        yield held
        return
    if depth >= _DEPTH or isinstance(held, (str, bytes, int, float, torch.Tensor)):
        return
    if isinstance(held, Mapping):
        parts: list[Any] = list(held.values())
    elif isinstance(held, (list, tuple, set)):
        parts = list(held)
    else:
        parts = list(getattr(held, "__dict__", {}).values())
    for part in parts[:256]:
        yield from members(part, depth + 1)


def local(tensor: Any) -> Any:
    """The tensor that a distributed or waiting one holds on this rank."""
    while True:
        inner = getattr(tensor, "_local_tensor", None)
        if inner is None:
            inner = getattr(tensor, "elem", None) if type(tensor).__name__ == "AsyncCollectiveTensor" else None
        if inner is None:
            return tensor
        tensor = inner


def _number(tensor: Any) -> int | None:
    storage = storage_of(local(tensor)) if isinstance(tensor, torch.Tensor) else None
    return None if storage is None else storage._cdata


class StateNames:
    """Storage -> name and kind, for what was found in the user's objects."""

    def __init__(self) -> None:
        self.known: dict[int, Named] = {}
        self._optimizers: list[Any] = []

    def add(self, held: Any, device: str) -> None:
        """Name everything in `held`; the first name of shared memory stands."""
        found = list(members(held))
        for module in (one for one in found if isinstance(one, torch.nn.Module)):
            self.add_module(module)
        for optimizer in (one for one in found if isinstance(one, torch.optim.Optimizer)):
            if not any(optimizer is known for known in self._optimizers):
                self._optimizers.append(optimizer)
        self.add_optimizers(device)

    @property
    def optimizers(self) -> list[Any]:
        return list(self._optimizers)

    def add_module(self, module: Any) -> None:
        """Parameters, gradients and buffers of a module."""
        for name, param in module.named_parameters():
            self._name(param, Named(_clean(name), ArgumentKind.PARAM))
            if param.grad is not None:
                self._name(param.grad, Named(f"{_clean(name)}.grad", ArgumentKind.UNKNOWN))
        for name, buffer in module.named_buffers():
            self._name(buffer, Named(_clean(name), ArgumentKind.PARAM))

    def add_optimizers(self, device: str) -> None:
        """Optimiser state, named after its parameter."""
        for number, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                on_host = device.startswith("cuda") and not group.get("fused") and not group.get("capturable")
                for param in group["params"]:
                    known = self.known.get(_number(param) or 0)
                    base = known.name if known is not None else f"optimizer{number}"
                    for key, value in optimizer.state.get(param, {}).items():
                        if isinstance(value, torch.Tensor):
                            host = on_host and key == "step"
                            self._name(value, Named(f"{base}.{key}", ArgumentKind.OPT_STATE, host))

    def _name(self, tensor: Any, named: Named) -> None:
        number = _number(tensor)
        if number is not None:
            self.known.setdefault(number, named)

    def of(self, storage: Any) -> Named | None:
        """The name of a storage, None where nobody gave it one."""
        return None if storage is None else self.known.get(storage._cdata)


def _clean(name: str) -> str:
    for prefix in ("_orig_mod.", "module.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(prefix, "")
    return name
