"""Ops one by one: what is emitted, run by jax, equals eager."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra")
F = torch.nn.functional


def grads(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the gradients of its floating arguments."""

    def run(x: Any, y: Any) -> Any:
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        out = function(x, y)
        return out, torch.autograd.grad(out.square().sum(), (x, y))

    return run


def conv(
    shape: tuple[int, ...], kernel: tuple[int, ...], function: Callable[..., Any] = F.conv2d, **options: Any
) -> Any:
    return grads(lambda x, w: function(x, w, **options)), (shape, kernel)


CONVOLUTIONS = {
    "plain": conv((2, 3, 8, 9), (4, 3, 3, 3)),
    "strided": conv((2, 3, 9, 8), (4, 3, 3, 2), stride=(2, 3), padding=(1, 0)),
    "dilated": conv((2, 3, 9, 9), (4, 3, 3, 3), dilation=2, padding=2),
    "grouped": conv((2, 4, 8, 8), (6, 2, 3, 3), groups=2, padding=1),
    "depthwise": conv((2, 4, 8, 8), (4, 1, 3, 3), groups=4, padding=1, stride=2),
    "one": conv((2, 3, 12), (4, 3, 5), F.conv1d, padding=2, stride=2),
    "three": conv((1, 2, 5, 6, 7), (3, 2, 3, 3, 3), F.conv3d, padding=1),
    "transposed": conv((2, 4, 5, 5), (4, 3, 3, 3), F.conv_transpose2d, stride=2, padding=1, output_padding=1),
    "transposed grouped": conv((2, 4, 5, 5), (4, 3, 3, 3), F.conv_transpose2d, groups=2, stride=2),
}

UNARY: dict[str, Callable[[Any], Any]] = {
    "max_pool": lambda x: F.max_pool2d(x[None], 3, 2, 1),
    "max_pool indices": lambda x: F.max_pool2d(x[None], 2, return_indices=True),
    "avg_pool": lambda x: F.avg_pool2d(x[None], 3, 2, 1),
    "avg_pool no pad": lambda x: F.avg_pool2d(x[None], 3, 2, 1, count_include_pad=False),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x[None], (2, 3)),
    "adaptive uneven": lambda x: F.adaptive_avg_pool2d(x[None], (3, 4)),
    "upsample": lambda x: F.interpolate(x[None], scale_factor=2.0),
    "bilinear": lambda x: F.interpolate(x[None], size=(7, 9), mode="bilinear", align_corners=False),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1, descending=True),
    "topk": lambda x: x.topk(3, -1),
    "argmax": lambda x: (x.argmax(), x.argmax(1)),
    "var": lambda x: (x.var(), x.std(1, unbiased=False), torch.var_mean(x, 2)),
    "norms": lambda x: (x.norm(), torch.linalg.vector_norm(x, float("inf")), torch.linalg.vector_norm(x, 3, 1)),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(0)),
    "tri": lambda x: (x.tril(), x.triu(1)),
    "roll": lambda x: (x.roll(2, 1), x.flip(0), x.repeat(2, 1, 3)),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=3.0),
    "index": lambda x: x[:, torch.tensor([0, 2, 1]), torch.tensor([1, -1, 3])],
    "index apart": lambda x: x[torch.tensor([0, 1]), :, torch.tensor([1, 3])],
    "index_put": lambda x: x.index_put((torch.tensor([0, 1]), torch.tensor([2, 2])), torch.ones(6), accumulate=True),
    "masked": lambda x: x.masked_fill(x > 0, -1.0),
    "gather": lambda x: x.gather(1, torch.tensor([[[0, 1, 2, 0, 0, 1]], [[3, 2, 1, 0, 1, 1]]])),
    "scatter": lambda x: torch.zeros(2, 5, 6).scatter_add(1, (x > 0).long() + 1, x),
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 0, 3]), torch.ones(2, 3, 6)),
    "unfold": lambda x: x.unfold(2, 3, 2),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "gelu": lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.softplus(x), F.leaky_relu(x)),
    "rounding": lambda x: (torch.floor_divide(x, 0.3), x.remainder(0.7), x.fmod(0.7), x.round(), x.trunc()),
    "powers": lambda x: (x.abs().pow(2.5), x.pow(3), x.abs().pow(-0.5), 2.0**x),
    "compare": lambda x: ((x > 0).sum(), (x > 0).any(1), (x == x).all()),
    "clamp": lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=torch.zeros(6)), torch.nan_to_num(x / 0)),
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(2, 4, 3, 2)) * torch.polar(x[..., :3], x[..., :3])
    ),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "histc": lambda x: torch.histc(x, 5, -1.0, 1.0),
    "group_norm": lambda x: F.group_norm(x, 2),
    "tril_indices": lambda x: x[:, torch.tril_indices(4, 4)[0], torch.tril_indices(4, 4)[1]],
    "linspace": lambda x: x[0, 0] * torch.linspace(0, 1, 6) + torch.arange(1, 13, 2),
    "mish": lambda x: (F.mish(x), F.hardswish(x), F.elu(x), F.selu(x), F.logsigmoid(x)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str, compare: Callable[..., Any]) -> None:
    function, shapes = CONVOLUTIONS[name]
    workload, error = compare(function, *(torch.randn(shape) for shape in shapes))
    assert error < 1e-5
    assert not workload.metadata["unlowered"]


@pytest.mark.parametrize("name", UNARY)
def test_op(name: str, compare: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    function = UNARY[name]
    workload, error = compare(lambda x: function(x), torch.randn(2, 4, 6))
    assert error < 2e-6
    assert not workload.metadata["unlowered"]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_with_gradient(reduction: str, compare: Callable[..., Any]) -> None:
    def step(x: Any, labels: Any, weight: Any) -> Any:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x, labels, weight=weight, ignore_index=2, reduction=reduction)
        return loss, torch.autograd.grad(loss.sum(), x)

    _, error = compare(step, torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 2]), torch.rand(5))
    assert error < 2e-6


def test_reads_of_random_state_are_an_argument(execute: Callable[..., Any]) -> None:
    from stablecast.frontends.torch import capture_torch

    workload = capture_torch(None, lambda x: F.dropout(x, 0.25), (torch.ones(64, 64),), device="cpu")
    assert workload.args[-1].name == "rng_state"
    found = execute(workload, {"x": torch.ones(64, 64)})["result"]
    assert set(found.reshape(-1).round(4)) == {0.0, float(torch.tensor(1 / 0.75).numpy().round(4))}
    assert 0.2 < (found == 0).mean() < 0.3


def broken(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Any:
    from stablecast.frontends.torch import capture_torch
    from stablecast.frontends.torch.emit import registry

    def rule(*_: Any, **__: Any) -> Any:
        raise error

    registry.register_all()
    monkeypatch.setitem(registry.EMITTERS, "aten.erfinv", rule)
    return capture_torch(None, torch.erfinv, (torch.ones(3),), device="cpu")


def test_a_fault_in_a_rule_is_told_from_an_op_without_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    from stablecast.frontends.torch.emit.emitter import RuleFault

    with pytest.warns(RuleFault, match="aten.erfinv.default .1x.: ValueError: emitted shape"):
        faulty = broken(monkeypatch, ValueError("emitted shape (2,) where torch has (3,)"))
    assert faulty.metadata["faults"] == {"aten.erfinv.default": "ValueError: emitted shape (2,) where torch has (3,)"}
    assert any("please report" in note for note in faulty.notes)
    assert not broken(monkeypatch, NotImplementedError("no such form")).metadata["faults"]


def test_a_fault_in_a_body_leaves_a_valid_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from stablecast.frontends.torch import capture_torch
    from stablecast.frontends.torch.emit.builder import Builder
    from stablecast.frontends.torch.emit.emitter import RuleFault
    from stablecast.ir.reader import read

    monkeypatch.setattr(Builder, "binary", lambda *_: 1 / 0)
    with pytest.warns(RuleFault, match="ZeroDivisionError"):
        workload = capture_torch(None, torch.sum, (torch.ones(3),), device="cpu")
    assert "stablehlo.custom_call" in {op.name for op in read(workload.modules[0].data).main.body.ops}


def test_dropout_of_cuda_is_one_kernel_each_way() -> None:
    """On CUDA `dropout` runs fused where it drops anything, and not in place."""
    from stablecast import capture_torch

    def step(x: Any) -> Any:
        x = x.requires_grad_()
        (F.dropout(x, 0.25) + F.dropout(x, 0.25, training=False)).sum().backward()
        return x.grad

    workload = capture_torch(None, step, (torch.ones(64, 64),))
    assert workload.launches is not None
    ops = [launch.op for launch in workload.launches.launches]
    assert ops.count("aten.native_dropout.default") == ops.count("aten.native_dropout_backward.default") == 1
    assert "aten.bernoulli_.float" not in ops
