"""A diffusion training step of a small U-Net, in plain PyTorch: predict the noise, mean squared error.

stablecast predict examples/torch_unet.py:build,step --on h100-sxm
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with group norm, shifted by the time embedding."""

    def __init__(self, inside: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inside), nn.Conv2d(inside, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(inside, out, 1) if inside != out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.conv1(nn.functional.silu(self.norm1(x)))
        y = y + self.time(t)[:, :, None, None]
        return self.conv2(nn.functional.silu(self.norm2(y))) + self.skip(x)


class Attention(nn.Module):
    """Self-attention over pixels."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, width), heads
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    """Down, middle with attention, up with skips; `widths` per resolution."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256), channels: int = 3) -> None:
        super().__init__()
        time = 4 * widths[0]
        self.width = widths[0]
        self.embed = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(channels, widths[0], 3, padding=1)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(Block(a, b, time) for a, b in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, 2, 1) for _, b in pairs)
        self.middle, self.attention = Block(widths[-1], widths[-1], time), Attention(widths[-1])
        self.up = nn.ModuleList(Block(2 * b, a, time) for a, b in reversed(pairs))
        self.last = nn.Sequential(nn.GroupNorm(8, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], channels, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-math.log(10000) / (self.width // 2)))
        angles = t[:, None] * rates[None]
        t = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.first(x)
        skips: list[Tensor] = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, t)
            skips.append(x)
            x = shrink(x)
        x = self.attention(self.middle(x, t))
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1), t)
        return self.last(x)


def build(widths: tuple[int, ...] = (64, 128, 256), device: str = "cuda") -> tuple[nn.Module, torch.optim.Optimizer]:
    """The network and its optimiser."""
    model = UNet(widths).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def inputs(batch: int = 16, size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Noised images, times, and the noise that was added."""
    return torch.randn(batch, 3, size, size), torch.rand(batch), torch.randn(batch, 3, size, size)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, noised: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    """Forward, loss, backward, update; returns the loss."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(noised, times), noise)
    loss.backward()
    optimizer.step()
    return loss.detach()
