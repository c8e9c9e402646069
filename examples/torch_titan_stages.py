"""A pipeline stage of Llama 3.1 as TorchTitan runs it: `torch_titan`'s layers under `torch.distributed.pipelining`.

Layers are split over stages as TorchTitan does it: the first and the last stage get the whole part, those between them
what is left over too. FSDP2 keeps what it gathered until the step ends, and sums gradients unsharded until then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_llama import SIZES, Config, shard, tensor_parallel
from torch_titan import Checkpoint, Layer, Norm, inputs

__all__ = ["build", "inputs", "split", "step"]

SCHEDULES = {"1f1b": ("Schedule1F1B", 1), "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2)}
"""PyTorch's class, and the stages of a rank."""


def split(layers: int, stages: int) -> list[int]:
    """First layer of each stage, and the end (TorchTitan's `generate_split_points`)."""
    each, more = divmod(layers, stages)
    edges = [0, each]
    for stage in range(1, stages - 1):
        edges.append(edges[-1] + each + (stage <= more))
    return [*edges[:stages], layers]


class Stage(nn.Module):
    """Layers `low` to `high`, with the embedding before the first and the head behind the last."""

    def __init__(self, config: Config, low: int, high: int, turns: Tensor) -> None:
        super().__init__()
        self.first, self.last = low == 0, high == config.layers
        self.embedding = nn.Embedding(config.vocab, config.width) if self.first else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(low, high))
        self.norm = Norm(config.width, config.eps) if self.last else None
        self.head = nn.Linear(config.width, config.vocab, bias=False) if self.last else None
        self.register_buffer("turns", turns)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.turns)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(
    mesh: Any,
    size: str = "405b",
    stage: int = 0,
    schedule: str = "1f1b",
    batch: int = 8,
    seq: int = 8192,
    layers: int | None = None,
    vocab: int = 128256,
) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """The schedule, what rank `stage` of the axis `pp` holds, and AdamW. As many micro-batches as ranks."""
    from torch.distributed import pipelining

    config = replace(SIZES[size], vocab=vocab, layers=layers or SIZES[size].layers)
    ranks, (name, parts) = mesh["pp"].size(), SCHEDULES[schedule]
    held = [_stage(mesh, config, stage + part * ranks, ranks * parts, batch // ranks, seq) for part in range(parts)]
    made = getattr(pipelining, name)(held if parts > 1 else held[0], ranks, loss_fn=loss)
    modules = nn.ModuleList(one.submod for one in held)
    return made, modules, torch.optim.AdamW(modules.parameters(), lr=1e-4, fused=True)


def _stage(mesh: Any, config: Config, index: int, stages: int, batch: int, seq: int) -> Any:
    from torch.distributed import pipelining
    from torch.distributed.fsdp import MixedPrecisionPolicy

    first, last, tp = index == 0, index == stages - 1, mesh["tp"].size()
    edges = split(config.layers, stages)
    turns = inputs(1, seq, head=config.width // config.heads)[2]
    made = Stage(config, edges[index], edges[index + 1], turns).to("cuda")
    tensor_parallel(made, mesh["tp"], split_logits=True, tables=1)
    made.layers = nn.ModuleList(Checkpoint(layer, True) for layer in made.layers)
    shard(made, mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), reshard_after_forward=False)

    def between(grad: bool) -> Tensor:
        return torch.empty(batch, seq // tp, config.width, dtype=torch.bfloat16, requires_grad=grad)

    logits = torch.empty(batch, seq, config.vocab // tp, dtype=torch.bfloat16, requires_grad=True)
    return pipelining.PipelineStage(
        made,
        index,
        stages,
        torch.device("cpu"),
        input_args=(torch.zeros(batch, seq, dtype=torch.long) if first else between(True),),
        output_args=(logits if last else between(True),),
        input_grads=None if first else (between(False),),
        output_grads=None if last else (between(False),),
        group=mesh["pp"].get_group(),
    )


def step(schedule: Any, modules: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> None:
    """The schedule's forward and backward passes over all micro-batches, then clip and update."""
    from torch.distributed.tensor.parallel import loss_parallel

    optimizer.zero_grad()
    first, last = (any(getattr(part, end) for part in modules) for end in ("first", "last"))
    with loss_parallel():
        schedule.step(*([tokens] if first else []), **({"target": labels, "losses": []} if last else {}))
    torch.nn.utils.clip_grad_norm_(modules.parameters(), 1.0, foreach=True)
    optimizer.step()
