"""A training step of a Llama-style decoder, in plain PyTorch, alone or in parallel.

    stablecast predict examples/torch_llama.py:build,step --set size=7b --on h100-sxm
    stablecast predict examples/torch_llama.py:build_parallel,step --mesh dp=8,tp=4 --on h100-sxm:32

`build_parallel` uses what the mesh has: an axis `tp` splits layers (and sequences between them), an axis `dp` shards
parameters with FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocab: int = 1024
    width: int = 256
    hidden: int = 688
    layers: int = 2
    heads: int = 8
    kv_heads: int = 8
    base: float = 10000.0
    eps: float = 1e-5
    recompute: bool = False


SIZES = {
    "tiny": Config(),
    "7b": Config(32000, 4096, 11008, 32, 32, 32),
    "8b": Config(128256, 4096, 14336, 32, 32, 8, 500000.0),
    "70b": Config(32000, 8192, 28672, 80, 64, 8),
    "405b": Config(128256, 16384, 53248, 126, 128, 8, 500000.0),
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, sequence, features]."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.width // config.heads
        self.wq = nn.Linear(config.width, config.heads * self.size, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(config.heads * self.size, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = q.shape[1] != k.shape[1]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and around a shortcut."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(config.width, config.eps), Attention(config)
        self.mlp_norm, self.mlp = nn.RMSNorm(config.width, config.eps), FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The decoder."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        size = self.config.width // self.config.heads
        rates = self.config.base ** (-torch.arange(0, size, 2, device=tokens.device) / size)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rates[None]
        angles = torch.cat((angles, angles), -1)
        x = self.embedding(tokens)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            if self.config.recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return self.head(self.norm(x))


def model(size: str | Config = "tiny", dtype: str = "float32", device: str = "cuda") -> Llama:
    """The decoder in the element type given."""
    config = size if isinstance(size, Config) else SIZES[size]
    return Llama(config).to(device=device, dtype=getattr(torch, dtype))


def build(
    size: str | Config = "tiny", dtype: str = "float32", device: str = "cuda", fused: bool = True
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The decoder and AdamW."""
    made = model(size, dtype, device)
    return made, torch.optim.AdamW(made.parameters(), lr=1e-4, fused=fused)


def tensor_parallel(
    made: nn.Module, mesh: Any, sequence: bool = True, split_logits: bool = False, tables: int = 2
) -> None:
    """Split heads and hidden features over `mesh`; with `sequence` also the tokens between the splits.

    `split_logits`: the logits stay split by vocabulary, for a loss that is. `tables`: inputs of attention but tokens.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between, others = Shard(1) if sequence else Replicate(), (None,) * tables
    plan: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        **{f"mlp.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "attention.wo": RowwiseParallel(output_layouts=between),
        "mlp.w2": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        plan |= {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    for layer in made.layers:
        parallelize_module(layer, mesh, plan)
    top: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if split_logits else Replicate(),
            use_local_output=not split_logits,
        ),
    }
    if sequence:
        top["norm"] = SequenceParallel()
    parallelize_module(made, mesh, top)


def shard(made: nn.Module, mesh: Any, keep_last: bool = False, **options: Any) -> None:
    """FSDP2, a group of parameters for each layer. `keep_last`: the last one stays gathered for the backward pass."""
    from torch.distributed.fsdp import fully_shard

    for layer in made.layers:
        kept = {"reshard_after_forward": False} if keep_last and layer is made.layers[-1] else {}
        fully_shard(layer, mesh=mesh, **{**options, **kept})
    fully_shard(made, mesh=mesh, **options)


def build_parallel(
    mesh: Any, size: str | Config = "tiny", dtype: str = "float32", sequence: bool = True, fused: bool = True
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The decoder over a mesh with axes `tp`, `dp` or both.

    Without `sequence` the norms stay plain tensors beside distributed ones, which only the one-by-one optimiser takes.
    """
    made = model(size, dtype)
    names = mesh.mesh_dim_names
    if "tp" in names:
        tensor_parallel(made, mesh["tp"], sequence)
    if "dp" in names:
        shard(made, mesh["dp"])
    if "tp" in names and not sequence:
        return made, torch.optim.AdamW(made.parameters(), lr=1e-4, foreach=False)
    return made, torch.optim.AdamW(made.parameters(), lr=1e-4, fused=fused)


def inputs(batch: int = 2, seq: int = 128, vocab: int = 1024) -> tuple[Tensor, Tensor]:
    """Tokens and the ones that follow them."""
    return torch.randint(0, vocab, (batch, seq)), torch.randint(0, vocab, (batch, seq))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> Tensor:
    """Forward, loss, backward, update; returns the loss."""
    optimizer.zero_grad()
    logits = model(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()
