"""Fused optimisers: one composite for each parameter."""

from typing import Any

from stablecast.frontends.torch.emit.builder import Val
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.registry import composite


def _times(e: Emitter, x: Val, factor: Any) -> Val:
    return e.mul(x, e.operand(factor, x.dtype, x.shape)) if isinstance(factor, Val) else e.scale(x, factor)


def _gradient(e: Emitter, grad: Val, dtype: str, maximize: bool, grad_scale: Val | None) -> Val:
    grad = e.convert(grad, dtype)
    if grad_scale is not None:
        grad = e.div(grad, e.operand(grad_scale, dtype, grad.shape))
    return e.neg(grad) if maximize else grad


@composite(
    "aten._fused_adamw", "aten._fused_adam", attributes=("lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad")
)
def adam(
    e: Emitter,
    param: Val,
    grad: Val,
    mean: Val,
    square: Val,
    largest: Val | None,
    step: Val,
    *,
    lr: Any,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Val | None = None,
    found_inf: Val | None = None,
) -> list[Val]:
    """Adam with decoupled (`adamw`) or added (`adam`) decay; the counter is already that of this step."""
    wide = "f32" if param.dtype in ("bf16", "f16") else param.dtype
    p, m, v = (e.convert(x, wide) for x in (param, mean, square))
    g = _gradient(e, grad, wide, maximize, grad_scale)
    if weight_decay:
        if e.op.startswith("aten._fused_adamw"):
            p = e.sub(p, _times(e, e.scale(p, weight_decay), lr))
        else:
            g = e.add(g, e.scale(p, weight_decay))
    m = e.add(m, e.scale(e.sub(g, m), 1 - beta1))
    v = e.add(e.scale(v, beta2), e.scale(e.mul(g, g), 1 - beta2))
    top = v
    found = [m, v]
    if amsgrad and largest is not None:
        top = e.binary("maximum", e.convert(largest, wide), v)
        found.append(top)
    count = e.convert(step, "f32")
    first, second = _correction(e, count, beta1), _correction(e, count, beta2)
    root = e.div(e.unary("sqrt", top), e.operand(e.unary("sqrt", second), wide, p.shape))
    rate = e.div(_rate(e, lr), first)
    p = e.sub(p, e.div(_times(e, m, rate), e.shift(root, eps)))
    specs = [spec for spec in e.outs if spec is not None]
    return [e.convert(x, spec.dtype) for x, spec in zip([p, *found], specs, strict=False)]


def _rate(e: Emitter, lr: Any) -> Val:
    return e.reshape(e.convert(lr, "f32"), ()) if isinstance(lr, Val) else e.splat(lr, (), "f32")


def _correction(e: Emitter, step: Val, beta: float) -> Val:
    power = e.binary("power", e.splat(beta, (), "f32"), e.reshape(step, ()))
    return e.sub(e.splat(1, (), "f32"), power)


@composite("aten._fused_sgd", attributes=("lr", "momentum", "weight_decay", "dampening", "nesterov"))
def sgd(
    e: Emitter,
    param: Val,
    grad: Val,
    buffer: Val | None,
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Val | None = None,
    found_inf: Val | None = None,
) -> list[Val]:
    g = _gradient(e, grad, param.dtype, maximize, grad_scale)
    if weight_decay:
        g = e.add(g, e.scale(param, weight_decay))
    if buffer is None or not momentum:
        return [e.sub(param, _times(e, g, lr))]
    held = g if is_first_step else e.add(e.scale(buffer, momentum), e.scale(g, 1 - dampening))
    g = e.add(g, e.scale(held, momentum)) if nesterov else held
    return [e.sub(param, _times(e, g, lr)), held]
