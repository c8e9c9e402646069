"""One forward pass of AlexNet, in training mode, as in the public A100 profile (`docs/validation.md`).

    stablecast predict examples/torch_alexnet.py:build,step --exec eager --on a100-sxm-40gb

The batch is not written in that profile; the threads of its elementwise kernels, four elements each, are those of 128
images.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import stablecast

BATCH = 128


class AlexNet(nn.Module):
    """Five convolutions and three linear layers, sizes of torchvision's."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] of images [batch, 3, 224, 224]."""
        return self.classifier(torch.flatten(self.pool(self.features(images)), 1))


def build() -> nn.Module:
    """The network, ready to train."""
    return AlexNet().train().to("cuda")


def inputs(batch: int = BATCH) -> tuple[Tensor, ...]:
    """Images."""
    return (torch.randn(batch, 3, 224, 224),)


@stablecast.workload(args=inputs)
def step(model: nn.Module, images: Tensor) -> Tensor:
    """The forward pass, with what its backward pass would need."""
    return model(images)
