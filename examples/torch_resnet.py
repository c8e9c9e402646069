"""A training step of ResNet-50, or of ResNet-18 and 34, in plain PyTorch.

stablecast predict examples/torch_resnet.py:build,step --on a100-sxm
stablecast predict examples/torch_resnet.py:build_18,step --args :inputs --set batch=128 --exec eager --on rtx-2080-ti
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512)
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
BASIC = (18, 34)
EXPANSION = 4


class Basic(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != out:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """The network; `stages` are (width, blocks), by default those of `depth`."""

    def __init__(self, stages: tuple[tuple[int, int], ...] | None = None, classes: int = 1000, depth: int = 50) -> None:
        super().__init__()
        stages = stages or tuple(zip(WIDTHS, BLOCKS[depth], strict=True))
        block, expansion = (Basic, 1) if depth in BASIC else (Bottleneck, EXPANSION)
        first = stages[0][0]
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 7, 2, 3, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        inside = first
        for number, (width, count) in enumerate(stages):
            for index in range(count):
                blocks.append(block(inside, width, 2 if number and not index else 1))
                inside = width * expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def build(
    stages: tuple[tuple[int, int], ...] | None = None, classes: int = 1000, device: str = "cuda", depth: int = 50
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The network and SGD with momentum."""
    model = ResNet(stages, classes, depth).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def build_18() -> tuple[nn.Module, torch.optim.Optimizer]:
    """ResNet-18 and its optimiser."""
    return build(depth=18)


def inputs(batch: int = 32, size: int = 224, classes: int = 1000) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    return torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """Forward, loss, backward, update; returns the loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()
