"""In-place writes through every kind of view give what eager gives."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra")


def _slice(x: Any) -> Any:
    x[1:3].mul_(2)
    return x


def _strided_slice(x: Any) -> Any:
    x[:, ::2].add_(1)
    return x


def _select(x: Any) -> Any:
    x[2].copy_(x[0])
    return x


def _transpose(x: Any) -> Any:
    x.t()[0].zero_()
    return x


def _nested(x: Any) -> Any:
    y = x.view(2, 2, 6)[1].t()
    y[3].fill_(7)
    return x, y


def _as_strided(x: Any) -> Any:
    x.as_strided((2, 3), (6, 1), 2).mul_(-1)
    return x


def _diagonal(x: Any) -> Any:
    x[:, :4].diagonal().add_(5)
    return x


def _read_after_write(x: Any) -> Any:
    y = x[0]
    z = y + 1
    x.mul_(3)
    return y, z


def _split(x: Any) -> Any:
    a, b = x.split(3, 1)
    a.add_(b)
    return x


def _alias(x: Any) -> Any:
    y = x.detach()
    y.add_(1)
    return x * 1, y * 2


def _bits(x: Any) -> Any:
    y = x.clone()
    y.view(torch.int32).bitwise_and_(-2)
    return y


def _foreach(x: Any) -> Any:
    parts = list(x.unbind(0))
    torch._foreach_mul_(parts, 2.0)
    torch._foreach_addcmul_(parts, [part * 1 for part in parts], [part * 1 for part in parts], value=0.5)
    return x


def _out(x: Any) -> Any:
    y = torch.empty(6)
    torch.sum(x, 0, out=y)
    return y


WRITES: dict[str, Callable[[Any], Any]] = {
    name[1:]: function
    for name, function in list(globals().items())
    if name.startswith("_") and callable(function) and getattr(function, "__module__", "") == __name__
}


@pytest.mark.parametrize("name", WRITES)
def test_write(name: str, compare: Callable[..., Any]) -> None:
    workload, error = compare(WRITES[name], torch.randn(4, 6))
    assert error < 1e-6
    assert not workload.metadata["unlowered"]


def test_an_argument_that_is_written_is_donated(compare: Callable[..., Any]) -> None:
    workload, _ = compare(_slice, torch.randn(4, 6))
    (argument,) = workload.args
    assert argument.aliases_output == 1
