"""A CUDA program where there is none: device names rewritten, the CUDA API answered, CUDA's own op choices made."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import functools
import math
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from stablecast.frontends.torch import private
from stablecast.frontends.torch.places import in_library, user_frame
from stablecast.frontends.torch.private import DATA_DEPENDENT, TorchFunctionMode, torch
from stablecast.frontends.torch.streams import Timeline, classes, stream_context
from stablecast.ir.errors import InputError

_ATTENTION = ("auto", "flash", "efficient", "cudnn", "math")


class HostNumber(float):
    """A number read from a tensor: it may be printed and summed, and must not decide anything."""

    where: str = ""

    def refuse(self, *_: object) -> Any:
        raise InputError(
            f"{self.where}a value read from a tensor with .item() decides what the program does",
            "a capture has no data: use torch.where, or move the decision out of the step",
        )

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __int__ = __index__ = refuse
    __floor__ = __ceil__ = __trunc__ = __divmod__ = __rdivmod__ = is_integer = as_integer_ratio = refuse
    __hash__ = float.__hash__

    def _same(self, *_: object) -> "HostNumber":
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __neg__ = __pos__ = __abs__ = _same

    def __round__(self, digits: Any = None) -> Any:
        return self.refuse() if digits is None else self


_DECIDE = ("isnan", "isinf", "isfinite", "isclose")
"""Functions of `math` and numpy that read a float's own bits and answer yes or no."""

_CONTINUE = ("exp", "log", "log2", "log10", "sqrt", "pow", "fabs")
"""Those whose result is again a number that nobody knows."""


def number_patches() -> list[tuple[Any, str, Any]]:
    """(module, name, stand-in): functions in C look at a float's value and never ask `HostNumber`.

    They are replaced wherever a module holds them by their name, so after `from math import isnan` too.
    """
    guards: list[tuple[str, Any, Any]] = []
    for library in filter(None, (math, sys.modules.get("numpy"))):
        for name in (*_DECIDE, *_CONTINUE):
            function = getattr(library, name, None)
            if function is not None:
                guards.append((name, function, _guarded(function, name in _DECIDE)))
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [
        (module, name, guard)
        for name, function, guard in guards
        for module in modules
        if vars(module).get(name) is function
    ]


def _guarded(function: Any, decides: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if type(arg) is HostNumber:
                return arg.refuse() if decides else arg
        return function(*args, **kwargs)

    return guard


class Rewriter(TorchFunctionMode):
    """Sends accelerator tensors to fake CPU ones and picks the ops that the accelerator would run."""

    def __init__(self, device: str, attention: str, timeline: Timeline) -> None:
        super().__init__()
        if attention not in _ATTENTION:
            raise InputError(f"unknown attention '{attention}'", f"known: {', '.join(_ATTENTION)}")
        self.device = device
        self.attention = attention
        self.timeline = timeline
        self.early_reads = 0
        tensor = torch.Tensor
        numbers = (tensor.__bool__, tensor.__float__, tensor.__int__, tensor.__index__)
        self._reads = {tensor.item, *numbers, tensor.tolist, tensor.numpy, tensor.__array__}
        self._handlers: dict[Any, Callable[..., Any]] = {
            tensor.cuda: lambda func, args, kwargs: args[0],
            tensor.record_stream: lambda func, args, kwargs: None,
            **dict.fromkeys(self._reads, self._read),
        }
        if device.startswith("cuda"):
            self._handlers[torch.nn.functional.scaled_dot_product_attention] = self._attention
            self._handlers[torch.rms_norm] = self._rms_norm
            self._handlers[torch.nn.functional.dropout] = self._handlers[torch.dropout] = _dropout

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and _is_accelerator(kwargs["device"]):
            kwargs = {**kwargs, "device": "cpu"}
        if len(args) > 1 and any(_is_accelerator(arg) for arg in args[1:]):
            args = (args[0], *("cpu" if _is_accelerator(arg) else arg for arg in args[1:]))
        handler = self._handlers.get(func)
        return func(*args, **kwargs) if handler is None else handler(func, args, kwargs)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Host reads by user code; those of optimisers and loss scalers are answered below."""
        tensor = args[0]
        recorder = self.timeline.recorder
        local = getattr(tensor, "_local_tensor", tensor)
        if getattr(local, "constant", None) is not None or (recorder is not None and in_library("optim", "amp")):
            return func(*args, **kwargs)
        if recorder is None:
            return self._read_early(func, args, kwargs)
        file, line = user_frame()
        where = f"{file}:{line}: " if file else ""
        if func is torch.Tensor.item and tensor.dtype.is_floating_point:
            self.timeline.synchronise()
            made = HostNumber("nan")
            made.where = where
            return made
        if func is torch.Tensor.__float__:
            self.timeline.synchronise()
            recorder.note(f"{where}float() of a tensor is NaN in a capture: nothing may be decided by it")
            return math.nan
        what = getattr(func, "__name__", str(func)).strip("_")
        raise InputError(
            f"{where}{what}() reads the value of a tensor, which a capture without data cannot know",
            "use torch.where in place of a branch, a fixed shape in place of a count, or move the read out of the step",
        )

    def _read_early(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads before the step, such as those of initialisers: the values have no say in what the step does."""
        try:
            return func(*args, **kwargs)
        except DATA_DEPENDENT:
            self.early_reads += 1
        dtype = args[0].dtype
        if func is torch.Tensor.__bool__ or dtype == torch.bool:
            return False
        return 0.0 if dtype.is_floating_point and func not in (torch.Tensor.__int__, torch.Tensor.__index__) else 0

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What CUDA would choose: flash for 16-bit without a mask, else the memory-efficient kernel."""
        q, k, v = _bound(args, kwargs, ("query", "key", "value"))
        given = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
        mask, dropout, causal = given.get("attn_mask"), given.get("dropout_p", 0.0), given.get("is_causal", False)
        scale, gqa = given.get("scale"), given.get("enable_gqa", False)
        chosen = self._kernel(q, k, mask, causal)
        if chosen == "math" or q.dim() != 4:
            return func(*args, **kwargs)
        ops = torch.ops.aten
        if chosen == "flash":
            return _padded(ops._scaled_dot_product_flash_attention, q, k, v, dropout, causal, scale)
        if gqa and k.shape[1] != q.shape[1]:
            times = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        bias: Any = mask
        if mask is not None:
            if mask.dtype == torch.bool:
                bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
            bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        needs = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if chosen == "cudnn":
            return ops._scaled_dot_product_cudnn_attention(q, k, v, bias, needs, dropout, causal, scale=scale)[0]
        return ops._scaled_dot_product_efficient_attention(q, k, v, bias, needs, dropout, causal, scale=scale)[0]

    def _kernel(self, q: Any, k: Any, mask: Any, causal: bool) -> str:
        if self.attention != "auto":
            return self.attention
        cuda = torch.backends.cuda
        half = q.dtype in (torch.float16, torch.bfloat16)
        square = not causal or q.shape[2] == k.shape[2]
        if cuda.flash_sdp_enabled() and half and mask is None and q.shape[-1] <= 256 and square:
            return "flash"
        if cuda.mem_efficient_sdp_enabled() and q.dtype != torch.float64:
            return "efficient"
        return "math"

    def _rms_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, shape, weight, eps = _bound(args, kwargs, ("input", "normalized_shape", "weight", "eps"))
        if weight is not None and weight.dtype != x.dtype:
            return func(*args, **kwargs)
        return FusedRMSNorm.apply(x, weight, list(shape), eps)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One fused kernel on CUDA each way, where the CPU draws, scales and multiplies."""
    given = {"p": 0.5, "training": kwargs.get("train", True), **kwargs}
    x, p, train, inplace = _bound(args, given, ("input", "p", "training", "inplace"))
    if inplace or not train or not 0.0 < p < 1.0 or not x.dtype.is_floating_point:
        return func(*args, **kwargs)
    return torch.native_dropout(x, p, True)[0]


class FusedRMSNorm(torch.autograd.Function):
    """`_fused_rms_norm` as CUDA runs it: one op each way, where the CPU would take it apart."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, shape: list[int], eps: float | None) -> Any:
        with private.below_autograd():
            out, inverse = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, inverse = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1]]
        gx, gw = torch.ops.aten._fused_rms_norm_backward(grad, x, ctx.shape, inverse, weight, mask)
        return gx, gw, None, None


def _bound(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...]) -> list[Any]:
    return [args[index] if index < len(args) else kwargs.get(name) for index, name in enumerate(names)]


def _padded(op: Any, q: Any, k: Any, v: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    """Flash kernels want head sizes in eights."""
    size = q.shape[-1]
    if size % 8 == 0:
        return op(q, k, v, dropout, causal, scale=scale)[0]
    scale = 1 / math.sqrt(size) if scale is None else scale
    more = -size % 8
    q, k, v = (torch.nn.functional.pad(x, (0, more)) for x in (q, k, v))
    return op(q, k, v, dropout, causal, scale=scale)[0][..., :size]


def _is_accelerator(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith(("cuda", "xla")) and device.split(":")[0] in ("cuda", "xla")
    return isinstance(device, torch.device) and device.type in ("cuda", "xla")


def patches(device: str, timeline: Timeline) -> list[tuple[Any, str, Any]]:
    """(module, name, stand-in) for the device API, which must be in place while user code runs."""
    stream, event = classes(timeline)
    api: dict[str, Any] = {
        "Stream": stream,
        "Event": event,
        "stream": stream_context(timeline),
        "current_stream": lambda *_, **__: timeline.current,
        "synchronize": lambda *_, **__: timeline.synchronise(),
    }
    found = [(torch.cpu, name, value) for name, value in api.items()]
    found.append((torch, "Event", event))
    functional = torch.nn.functional
    # torch turns function modes off inside a function that it has shown to one: these are not shown, so that the
    # built-in ones that they call are
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    found += [(functional, name, lambda *_: False) for name in checks if hasattr(functional, name)]
    if device.startswith("cuda"):
        found += [(torch.cuda, name, value) for name, value in {**api, **_cuda_answers(timeline)}.items()]
        found.append((torch.amp.autocast_mode.autocast, "__init__", _autocast_init()))
    return found


def _cuda_answers(timeline: Timeline) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "default_stream": lambda *_: timeline.stack[0],
        "set_stream": lambda stream: timeline.stack.__setitem__(-1, stream),
        "empty_cache": lambda: None,
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "NVIDIA H100",
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
    }


def _autocast_init() -> Callable[..., None]:
    """`torch.autocast("cuda", ...)` acts on the CPU tensors that stand for CUDA's."""
    original = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            if kwargs.get("dtype") is None and not args:
                kwargs["dtype"] = torch.float16
            device_type = "cpu"
        original(self, device_type, *args, **kwargs)

    return init
