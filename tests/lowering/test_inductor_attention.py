"""Which spellings of attention TorchInductor replaces by one kernel: ours beside its own passes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stablecast.ir.device_program import Kernel
from stablecast.ir.kernels import KernelClass
from stablecast.ir.reader import read
from stablecast.lowering.device import lower
from stablecast.lowering.products import PLAIN_ARITHMETIC, TF32_ARITHMETIC
from stablecast.lowering.target import Target

torch: Any = pytest.importorskip("torch")

B, S, H, D = 2, 32, 4, 16
Weights = Callable[[Any, Any, Any, Any], Any]


def soft(scores: Any) -> Any:
    return scores.softmax(-1)


def dropped(scores: Any) -> Any:
    return torch.nn.functional.dropout(scores.softmax(-1), 0.1)


def scores(q: Any, k: Any) -> Any:
    return q @ k.transpose(-2, -1)


SPELLINGS: dict[str, tuple[Weights, bool, bool]] = {
    "plain": (lambda q, k, m, b: soft(scores(q, k)), True, False),
    "divided": (lambda q, k, m, b: soft(scores(q, k) / 4.0), True, True),
    "multiplied": (lambda q, k, m, b: soft(scores(q, k) * 0.25), True, False),
    "masked": (lambda q, k, m, b: soft(scores(q, k) + m), True, False),
    "divided, masked": (lambda q, k, m, b: soft(scores(q, k) / 4.0 + m), True, True),
    "multiplied, masked": (lambda q, k, m, b: soft(scores(q, k) * 0.25 + m), False, False),
    "queries multiplied": (lambda q, k, m, b: soft(scores(q * 0.25, k)), False, False),
    "queries multiplied, masked": (lambda q, k, m, b: soft(scores(q * 0.25, k) + m), False, False),
    "multiplied, filled": (lambda q, k, m, b: soft((scores(q, k) * 0.25).masked_fill(b, -1e9)), False, False),
    "divided, filled": (lambda q, k, m, b: soft((scores(q, k) / 4.0).masked_fill(b, -1e9)), False, False),
    "capped": (lambda q, k, m, b: soft(torch.tanh(scores(q, k) / 4.0)), False, False),
    "masked by nothing": (lambda q, k, m, b: soft(scores(q, k) * 0.25 + torch.zeros(B, 1, 1, S)), True, False),
    "divided, drops": (lambda q, k, m, b: dropped(scores(q, k) / 4.0), False, True),
    "multiplied, drops": (lambda q, k, m, b: dropped(scores(q, k) * 0.25), False, True),
    "divided, masked, drops": (lambda q, k, m, b: dropped(scores(q, k) / 4.0 + m), False, True),
    "multiplied, masked, drops": (lambda q, k, m, b: dropped(scores(q, k) * 0.25 + m), False, False),
}
"""Spelling -> weights of queries, keys, an added mask and a mask of bits; whether it is replaced alone, and with its
backward pass."""


def mixed(weights: Weights) -> Callable[..., Any]:
    """Attention over heads that projections made side by side."""

    def heads(x: Any) -> Any:
        return x.view(B, S, H, D).transpose(1, 2)

    def run(q: Any, k: Any, v: Any, mask: Any, bits: Any) -> Any:
        found = weights(heads(q), heads(k), mask, bits)
        return (found.to(v.dtype) @ heads(v)).transpose(1, 2).reshape(B, S, H * D)

    return run


def inputs(dtype: Any, *, trained: bool) -> tuple[Any, ...]:
    bits = torch.ones(1, 1, S, S, dtype=torch.bool)
    made = [torch.zeros(B, S, H * D, dtype=dtype, requires_grad=trained) for _ in range(3)]
    return (*made, torch.zeros(B, 1, 1, S, dtype=dtype), bits)


def attention(weights: Weights, target: Target, *, trained: bool = False, dtype: Any = None) -> list[str]:
    """Directions of the attention kernels of a captured program."""
    from stablecast import capture_torch

    class Mixed(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            return mixed(weights)(*given)

    def step(module: Any, *given: Any) -> Any:
        if not trained:
            with torch.no_grad():
                return module(*given)
        result = module(*given)
        return result, *torch.autograd.grad(result.sum(), given[:3])

    workload = capture_torch(Mixed, step, inputs(dtype or torch.float32, trained=trained), device="cpu")
    program = lower(read(workload.modules[0].data, "step"), target)
    rows = [program.table.rows[node.row] for node in program.body if isinstance(node, Kernel)]
    return [row.direction for row in rows if row.klass == KernelClass.ATTENTION]


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_spellings_that_inductor_knows(name: str) -> None:
    weights, alone, with_backward = SPELLINGS[name]
    cpu = Target("cpu", exec="inductor")
    assert attention(weights, cpu) == ["fwd"] * alone
    assert attention(weights, cpu, trained=True) == ["fwd", "bwd"] * with_backward


def test_f32_on_a_gpu_only_where_products_may_be_tf32() -> None:
    weights = SPELLINGS["divided"][0]
    plain = Target("cuda", PLAIN_ARITHMETIC, exec="inductor")
    assert not attention(weights, plain)
    assert attention(weights, plain, dtype=torch.bfloat16) == ["fwd"]
    assert not attention(weights, Target("cuda", TF32_ARITHMETIC, exec="inductor"))  # products are plain by default
    forced = Target("cuda", PLAIN_ARITHMETIC, exec="inductor", attention="flash")
    assert attention(weights, forced) == ["fwd"]


def test_bert_s_training_keeps_its_products_on_cuda() -> None:
    weights = SPELLINGS["divided, masked, drops"][0]
    for platform, found in (("cuda", []), ("rocm", ["fwd", "bwd"])):
        assert attention(weights, Target(platform, exec="inductor"), trained=True, dtype=torch.bfloat16) == found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SPELLINGS)
def test_torch_s_own_passes_say_the_same(name: str) -> None:
    weights, alone, with_backward = SPELLINGS[name]
    for dtype in (torch.float32, torch.bfloat16):
        assert replaced(weights, dtype, trained=False) == alone
        assert replaced(weights, dtype, trained=True) == with_backward


def replaced(weights: Weights, dtype: Any, *, trained: bool) -> bool:
    """Whether Inductor's passes over the graph replace the attention, on this machine's processor."""
    from torch._dynamo.utils import counters

    counters.clear()
    torch._dynamo.reset()
    with torch.set_grad_enabled(trained):
        torch.compile(mixed(weights), backend=only_passes)(*inputs(dtype, trained=trained))
    return counters["inductor"]["fuse_attention"] > 0


def only_passes(graph: Any, examples: Any) -> Any:
    """A compiler that stops after Inductor's passes over the joint graph."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    def passed(module: Any, _: Any) -> Any:
        with fake_mode():
            joint_graph_passes(module)
        return module.forward

    def partitioned(module: Any, joint: Any, **settings: Any) -> Any:
        passed(module, joint)
        return min_cut_rematerialization_partition(module, joint, **settings)

    made = aot_autograd(
        fw_compiler=lambda module, _: module.forward,
        bw_compiler=lambda module, _: module.forward,
        inference_compiler=passed,
        partition_fn=partitioned,
        decompositions=select_decomp_table(),
    )
    return made(graph, examples)


@contextlib.contextmanager
def fake_mode() -> Iterator[None]:
    from torch._inductor.virtualized import V

    with V.set_fake_mode(torch._guards.TracingContext.get().fake_mode):
        yield
