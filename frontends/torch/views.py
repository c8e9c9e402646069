"""ATen's view ops in canonical form: a few kinds with plain parameters, which can be undone or written through."""

from collections.abc import Callable, Sequence
from typing import Any

from stablecast.frontends.torch.aliases import View

Canonical = Callable[[Any, Sequence[Any], Any, int], View]
"""(base tensor, further arguments, result, its index) -> view."""


def _axis(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _bound(index: int | None, size: int, default: int) -> int:
    if index is None:
        return default
    return max(0, min(size, index + size if index < 0 else index))


def _reshape(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    return ("reshape", tuple(out.shape))


def _transpose(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    rank = base.dim()
    order = list(range(rank))
    one, two = (_axis(args[0], rank), _axis(args[1], rank)) if len(args) > 1 else (0, 1)
    if rank > 1:
        order[one], order[two] = order[two], order[one]
    return ("permute", tuple(order))


def _permute(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    return ("permute", tuple(_axis(dim, base.dim()) for dim in args[0]))


def _slice(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    dim = _axis(args[0], base.dim()) if args else 0
    size = base.shape[dim]
    start = _bound(args[1] if len(args) > 1 else None, size, 0)
    end = max(start, _bound(args[2] if len(args) > 2 else None, size, size))
    return ("slice", dim, start, end, args[3] if len(args) > 3 else 1)


def _narrow(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    dim = _axis(args[0], base.dim())
    start = _axis(args[1], base.shape[dim])
    return ("slice", dim, start, start + args[2], 1)


def _select(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    dim = _axis(args[0], base.dim())
    return ("select", dim, _axis(args[1], base.shape[dim]))


def _split(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    dim = _axis(args[1] if len(args) > 1 else 0, base.dim())
    size = args[0]
    return ("slice", dim, index * size, min((index + 1) * size, base.shape[dim]), 1)


def _split_sizes(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    dim = _axis(args[1] if len(args) > 1 else 0, base.dim())
    start = sum(args[0][:index])
    return ("slice", dim, start, start + args[0][index], 1)


def _unbind(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    return ("select", _axis(args[0] if args else 0, base.dim()), index)


def _expand(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    return ("expand", tuple(out.shape))


def _diagonal(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    offset, one, two = (*args, *(0, 0, 1)[len(args) :])
    return ("diagonal", offset, _axis(one, base.dim()), _axis(two, base.dim()))


def _unfold(base: Any, args: Sequence[Any], out: Any, index: int) -> View:
    return ("unfold", _axis(args[0], base.dim()), args[1], args[2])


def _named(kind: str) -> Canonical:
    return lambda base, args, out, index: (kind,)


SAME = frozenset(
    {"detach", "alias", "lift_fresh", "detach_", "requires_grad_", "resolve_conj", "resolve_neg", "_neg_view_copy"}
)
"""Ops whose result is their operand."""

CANONICAL: dict[str, Canonical] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten"), _reshape),
    **dict.fromkeys(("t", "transpose", "numpy_T", "swapaxes"), _transpose),
    "permute": _permute,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "split": _split,
    "split_with_sizes": _split_sizes,
    "unbind": _unbind,
    "expand": _expand,
    "diagonal": _diagonal,
    "unfold": _unfold,
    "view_as_real": _named("as_real"),
    "view_as_complex": _named("as_complex"),
    "_conj": _named("conj"),
    "_neg_view": _named("neg"),
}
"""Name of an ATen view op -> its canonical form."""
