"""Kernels of nine PyTorch train steps at small depth: eager beside what a CPU run dispatches, and `inductor` beside
what TorchInductor's own scheduler makes for the CPU.

    python benchmarks/torch_kernels.py [--only gpt2]     # ours beside the goldens
    python benchmarks/torch_kernels.py --make            # run and compile on this machine, and write the goldens

Eager: the ATen calls of forward, backward and update that launch something, in order (no views; nothing on the scalar
step counters of the optimiser, which stay on the host). Inductor: nodes of the scheduler after fusion, library calls
included, nodes that do nothing or take one of several results left out, for the loss and its gradients; the update is
left to eager PyTorch in both.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from stablecast import capture_torch
from stablecast.ir.device_program import Kernel
from stablecast.ir.reader import read
from stablecast.lowering.device import lower
from stablecast.lowering.target import Target

GOLDEN = Path(__file__).resolve().parent / "golden" / "torch_cpu.json"
WIDTH, HEADS, SEQ, BATCH, CLASSES = 64, 4, 32, 4, 10
NO_KERNEL = (
    "aten.detach.default",
    "aten._unsafe_view.default",
    "aten.lift_fresh.default",
    "aten.empty.memory_format",
    "aten.new_empty_strided.default",
)


class Attention(nn.Module):
    """Heads with one projection for queries, keys and values."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class Experts(nn.Module):
    """Every expert on every token, weighted by the two that a router chooses."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.first = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH))
        self.second = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        top, index = weights.topk(2, -1)
        chosen = torch.zeros_like(weights).scatter(-1, index, top / top.sum(-1, keepdim=True))
        each = functional.silu(torch.einsum("btd,edf->ebtf", x, self.first))
        return torch.einsum("ebtf,efd,bte->btd", each, self.second, chosen)


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module], causal: bool, feed: nn.Module) -> None:
        super().__init__()
        self.before, self.after = norm(WIDTH), norm(WIDTH)
        self.attention, self.feed = Attention(causal), feed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed(self.after(x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Decoder(nn.Module):
    """Token embedding, layers, logits."""

    def __init__(self, norm: type[nn.Module], feed: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.layers = nn.Sequential(*(Layer(norm, True, feed()) for _ in range(layers)))
        self.norm, self.logits = norm(WIDTH), nn.Linear(WIDTH, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.norm(self.layers(self.embedding(tokens)))).flatten(0, 1)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.layers = nn.Sequential(*(Layer(nn.LayerNorm, False, feed_forward()) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layers(x)).mean(1))


class Residual(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module], act: nn.Module) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(WIDTH, WIDTH, 3, 1, 1, bias=False) for _ in "ab")
        self.first, self.second, self.act = norm(WIDTH), norm(WIDTH), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.two(self.act(self.first(self.one(x))))) + x)


def resnet() -> nn.Module:
    blocks = (Residual(nn.BatchNorm2d, nn.ReLU()) for _ in range(2))
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3, 2, 1), *blocks, *pool)


class UNet(nn.Module):
    """Down, up, and a skip between; group norms and SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, WIDTH, 3, 1, 1), nn.Conv2d(2 * WIDTH, CLASSES, 3, 1, 1)
        self.outer, self.inner = (Residual(lambda width: nn.GroupNorm(8, width), nn.SiLU()) for _ in "ab")
        self.shrink = nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        skip = self.outer(self.enter(images))
        deep = functional.interpolate(self.inner(self.shrink(skip)), scale_factor=2.0, mode="nearest")
        return self.leave(torch.cat([deep, skip], 1)).mean((2, 3))


class DLRM(nn.Module):
    def __init__(self, tables: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, 16) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + (tables + 1) ** 2, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(index) for table, index in zip(self.tables, indices, strict=True))], 1)
        return self.top(torch.cat([x, (rows @ rows.transpose(1, 2)).flatten(1)], 1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


@dataclass(frozen=True, slots=True)
class Step:
    """A model and what it is fed; labels are classes of each output row."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    rows: int = BATCH


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, 128, (BATCH, SEQ)),)


def _images() -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, 3, 16, 16),)


def _looked_up() -> tuple[Tensor, ...]:
    return torch.randn(BATCH, 13), torch.randint(0, 1000, (4, BATCH))


STEPS: Mapping[str, Step] = {
    "mlp": Step(mlp, lambda: (torch.randn(BATCH, WIDTH),)),
    "resnet": Step(resnet, _images),
    "gpt2": Step(lambda: Decoder(nn.LayerNorm, feed_forward), _tokens, BATCH * SEQ),
    "llama": Step(lambda: Decoder(nn.RMSNorm, Gated), _tokens, BATCH * SEQ),
    "llama_deeper": Step(lambda: Decoder(nn.RMSNorm, Gated, 4), _tokens, BATCH * SEQ),
    "moe": Step(lambda: Decoder(nn.RMSNorm, Experts), _tokens, BATCH * SEQ),
    "vit": Step(ViT, _images),
    "dlrm": Step(DLRM, _looked_up),
    "unet": Step(UNet, _images),
}


def loss_of(model: nn.Module, labels: Tensor, *inputs: Tensor) -> Tensor:
    return functional.cross_entropy(model(*inputs), labels)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, labels: Tensor, *inputs: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, labels, *inputs)
    loss.backward()
    optimizer.step()
    return loss


def gradients(model: nn.Module, labels: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    loss = loss_of(model, labels, *inputs)
    return loss, *torch.autograd.grad(loss, list(model.parameters()))


def build(step: Step) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = step.model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fed(step: Step) -> tuple[Tensor, ...]:
    return torch.randint(0, CLASSES, (step.rows,)), *step.inputs()


class Spy(TorchDispatchMode):
    """Notes every call that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view and str(func) not in NO_KERNEL:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def dispatched(step: Step) -> list[str]:
    """ATen calls of the second real step (state is there by then)."""
    model, optimizer = build(step)
    inputs = fed(step)
    train(model, optimizer, *inputs)
    spy = Spy()
    with spy:
        train(model, optimizer, *inputs)
    return spy.seen


def scheduled(step: Step) -> int:
    """Nodes of TorchInductor's scheduler for loss and gradients; nothing is compiled by a C++ compiler."""
    import torch._inductor.async_compile as compiling
    import torch._inductor.config as config
    import torch._inductor.scheduler as scheduling
    from torch._inductor.ir import MultiOutput

    counts: list[int] = []
    codegen = scheduling.Scheduler.codegen

    def counted(self: Any) -> Any:
        idle = scheduling.NopKernelSchedulerNode
        kernels = [node for node in self.nodes if not isinstance(node, idle) and not isinstance(node.node, MultiOutput)]
        counts.append(len(kernels))
        return codegen(self)

    scheduling.Scheduler.codegen = counted  # type: ignore[method-assign]
    compiling.AsyncCompile.cpp_pybinding = lambda self, *args, **kwargs: lambda *values: None  # type: ignore[method-assign,assignment]
    torch._dynamo.reset()
    try:
        with config.patch(force_disable_caches=True):
            model = step.model()
            loss = torch.compile(loss_of)(model, *fed(step))
            loss.backward()
    finally:
        scheduling.Scheduler.codegen = codegen  # type: ignore[method-assign]
    return sum(counts)


def ours_eager(step: Step) -> list[str]:
    workload = capture_torch(lambda: build(step), train, fed(step), device="cpu")
    assert workload.launches is not None
    target = Target("cpu", exec="eager")
    program = lower(read(workload.modules[0].data, "step"), target, launches=workload.launches)
    names = [launch.op for launch in workload.launches.launches if not (launch.is_view or launch.host)]
    gradients_of_convolutions = sum("convolution_backward" in name for name in names)  # up to three kernels each
    more = len(program.body) - len(names)
    assert 0 <= more <= 2 * gradients_of_convolutions, (len(program.body), len(names))
    return names


def ours_inductor(step: Step) -> int:
    workload = capture_torch(step.model, gradients, fed(step), device="cpu")
    program = lower(read(workload.modules[0].data, "step"), Target("cpu", exec="inductor"))
    return sum(node.launch for node in program.body if isinstance(node, Kernel))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--make", action="store_true", help="write the goldens")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(STEPS)
    golden: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if given.make:
        for name in names:
            golden[name] = {"eager": dispatched(STEPS[name]), "inductor": scheduled(STEPS[name])}
            print(name, len(golden[name]["eager"]), golden[name]["inductor"], flush=True)
            GOLDEN.write_text(json.dumps({"torch": torch.__version__, **golden}, indent=1) + "\n")
        return
    errors: list[float] = []
    print(f"{'step':14} {'eager: ours / dispatched':>26} {'order':>8}   {'inductor: ours / torch':>24}")
    for name in names:
        eager, inductor = ours_eager(STEPS[name]), ours_inductor(STEPS[name])
        held = golden[name]
        same = "equal" if eager == held["eager"] else "differs"
        errors.append(abs(inductor / held["inductor"] - 1))
        counts = f"{len(eager):12} / {len(held['eager']):11} {same:>8}   {inductor:10} / {held['inductor']:11}"
        print(f"{name:14} {counts}  {inductor / held['inductor']:.3f}")
    print(f"inductor: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
