"""A training step of a two-layer perceptron, in plain PyTorch.

    stablecast predict examples/torch_mlp.py:build,step --on h100-sxm

`build()` makes the state, `inputs()` the batch, `step(model, optimizer, *batch)` one step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH, WIDTH, HIDDEN, CLASSES = 64, 784, 1024, 10


def build(width: int = WIDTH, hidden: int = HIDDEN, device: str = "cuda") -> tuple[nn.Module, torch.optim.Optimizer]:
    """The perceptron and its optimiser."""
    model = nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, CLASSES)
    )
    model = model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def inputs(batch: int = BATCH, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    return torch.randn(batch, width), torch.randint(0, CLASSES, (batch,))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """Forward, loss, backward, update; returns the loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()
