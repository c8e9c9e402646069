"""A training step of Llama 3.1 as TorchTitan writes and runs it: its own plain PyTorch, mixed precision under FSDP2.

Norms are written out in float32, rotary embeddings are complex products, key and value heads are repeated before
attention, gradients are clipped. Parameters are float32, gathered in bfloat16 and reduced in float32; activation
checkpointing is full (every layer runs again) or selective (every second product, and all but attention, runs again).
An axis `tp` splits layers and the loss, one called `cp` sequences (PyTorch's ring attention).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch_llama import SIZES, Config, FeedForward, shard, tensor_parallel

__all__ = ["build_mixed", "inputs", "ring_step", "split_loss_step", "step"]


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding of [batch, sequence, heads, features] by complex numbers [sequence, features / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


def repeat(x: Tensor, times: int) -> Tensor:
    """[batch, sequence, heads, features] with every head `times` times."""
    b, s, heads, size = x.shape
    return x if times == 1 else x[:, :, :, None].expand(b, s, heads, times, size).reshape(b, s, heads * times, size)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size, self.times = config.width // config.heads, config.heads // config.kv_heads
        self.wq = nn.Linear(config.width, config.heads * self.size, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(config.heads * self.size, config.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.size) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = repeat(k, self.times), repeat(v, self.times)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, s, -1))


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and around a shortcut."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(config.width, config.eps), Attention(config)
        self.mlp_norm, self.mlp = Norm(config.width, config.eps), FeedForward(config)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))


def selective() -> Any:
    """Contexts of a checkpoint that keeps attention and every second product, and runs all else again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten, products = torch.ops.aten, 0
    kept = (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal products
        products += op is aten.mm.default
        keep = op in kept or (op is aten.mm.default and products % 2)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Checkpoint(nn.Module):
    """A layer behind a checkpoint, full or selective."""

    def __init__(self, layer: Layer, full: bool) -> None:
        super().__init__()
        self.layer, self.options = layer, {} if full else {"context_fn": selective}

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, x, turns, use_reentrant=False, **self.options)


class Llama(nn.Module):
    """The decoder."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.width, config.eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor, turns: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(self.norm(x))


def build_mixed(
    mesh: Any, size: str = "8b", layers: int | None = None, vocab: int = 128256, recompute: str = "full"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The decoder and AdamW. `recompute`: `none`, `selective` or `full`.

    With an axis `tp` the logits stay split (`split_loss_step`). With one called `cp` a device has its part of a
    sequence, and parameters are sharded over `dp` and `cp` (`ring_step`).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    made = Llama(replace(SIZES[size], vocab=vocab, layers=layers or SIZES[size].layers)).to("cuda")
    if "tp" in mesh.mesh_dim_names:
        tensor_parallel(made, mesh["tp"], split_logits=True, tables=1)
    if recompute != "none":
        made.layers = nn.ModuleList(Checkpoint(layer, recompute == "full") for layer in made.layers)
    over = mesh["dp"]
    if "cp" in mesh.mesh_dim_names:
        made.ring = mesh["cp"]
        over = mesh["dp", "cp"]._flatten("dp_cp") if over.size() > 1 else made.ring
    shard(made, over, keep_last=True, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return made, torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)


def inputs(batch: int = 2, seq: int = 128, vocab: int = 1024, head: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the ones that follow them, and the turns of the rotary embedding."""
    angles = torch.arange(seq)[:, None] * 500000.0 ** (-torch.arange(0, head, 2) / head)[None]
    tokens, labels = torch.randint(0, vocab, (batch, seq)), torch.randint(0, vocab, (batch, seq))
    return tokens, labels, torch.polar(torch.ones_like(angles), angles)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor, turns: Tensor) -> Tensor:
    """Forward, loss, backward, clip, update; returns the loss."""
    optimizer.zero_grad()
    logits = model(tokens, turns)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    del logits  # "need to free to before bwd to avoid peaking memory", says TorchTitan
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    return loss.detach()


def split_loss_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor, turns: Tensor
) -> Tensor:
    """`step` for logits that are split by vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel():
        return step(model, optimizer, tokens, labels, turns)


def ring_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor, turns: Tensor
) -> Tensor:
    """`step` with PyTorch's ring attention over the axis `cp`, of tokens that are this device's part already."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._cp_options.enable_load_balance = True
    ring._enable_context_parallel_dispatcher_impl(seq_dim=2, mesh=model.ring)
    try:
        return step(model, optimizer, tokens, labels, turns)
    finally:
        ring._disable_context_parallel_dispatcher_impl()
