"""A training step of a GPT decoder as Megatron-LM writes it, in plain PyTorch: split by hand, fp16, recomputed.

    stablecast predict examples/torch_gpt.py:build,step --set hidden=2048 --set layers=24 --on a100-sxm-80gb
    stablecast predict examples/torch_gpt.py:build_parallel,step --mesh tp=4 --on a100-sxm-80gb:4

As in its version of 2023 (megatron-core 0.3), activations are laid out as sequence, batch, width, so that the products
of attention read queries, keys and values where they lie; attention writes its scores to memory; scale, mask and
softmax are one kernel; and the product that makes the gradient of a weight adds to the one that is there. Each layer
keeps its input only and runs again in the backward pass. The optimiser holds float32 copies of the parameters, as Apex
does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCAB, VOCAB_MULTIPLE = 50257, 128
DROPOUT = 0.1


class _Copy(torch.autograd.Function):
    """Identity forward, all-reduce of the gradient: where a replicated input enters split columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward: where split rows leave their partial sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Product(torch.autograd.Function):
    """A product with a weight, whose gradient is added to that of earlier micro-batches as it is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        back = grad.matmul(weight)
        rows = grad.reshape(-1, grad.shape[-1])
        columns, known = rows.t(), x.reshape(-1, x.shape[-1])
        bias = rows.sum(0) if ctx.biased else None
        if weight.grad is None:
            return back, columns.mm(known), bias
        weight.grad.addmm_(columns, known)
        return back, None, bias


class _CrossEntropy(torch.autograd.Function):
    """Megatron's loss: one copy of float32 logits becomes their softmax in place, and in place the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> Tensor:
        top = logits.amax(-1)
        _sum(top, group, torch.distributed.ReduceOp.MAX)
        logits.sub_(top.unsqueeze(-1))
        outside = (labels < 0) | (labels >= logits.shape[-1])
        inside = labels.masked_fill(outside, 0)
        picked = logits.gather(-1, inside.unsqueeze(-1)).squeeze(-1).masked_fill_(outside, 0.0)
        _sum(picked, group)
        total = logits.exp_().sum(-1)
        _sum(total, group)
        ctx.save_for_backward(logits.div_(total.unsqueeze(-1)), outside, inside)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        softmax, outside, inside = ctx.saved_tensors
        softmax.scatter_add_(-1, inside.unsqueeze(-1), outside.float().sub_(1.0).unsqueeze(-1))
        return softmax.mul_(grad.unsqueeze(-1)), None, None


def _sum(x: Tensor, group: Any, op: Any = torch.distributed.ReduceOp.SUM) -> None:
    if group is not None:
        torch.distributed.all_reduce(x, op, group=group)


def enter(x: Tensor, group: Any) -> Tensor:
    """`x` on its way into split columns."""
    return x if group is None else _Copy.apply(x, group)


def leave(x: Tensor, group: Any) -> Tensor:
    """The sum over the group of the partial results of split rows."""
    return x if group is None else _Reduce.apply(x, group)


class Linear(nn.Linear):
    """Rows of a weight, or columns of one, on this device."""

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self.weight, self.bias)


def drop(x: Tensor) -> Tensor:
    """Dropout as one kernel, which is what CUDA runs."""
    return torch.native_dropout(x, DROPOUT, True)[0]


class Attention(nn.Module):
    """Causal self-attention, heads split over the group; the products take every head of every sequence as a batch."""

    def __init__(self, hidden: int, heads: int, parts: int, group: Any) -> None:
        super().__init__()
        self.heads, self.size, self.group = heads // parts, hidden // heads, group
        self.qkv = Linear(hidden, 3 * hidden // parts)
        self.out = Linear(hidden // parts, hidden)

    def forward(self, x: Tensor) -> Tensor:
        s, b, _ = x.shape
        each = self.qkv(enter(x, self.group)).view(s, b * self.heads, 3 * self.size)
        q, k, v = (part.transpose(0, 1) for part in each.split(self.size, -1))
        empty = torch.empty(b * self.heads, s, s, dtype=x.dtype, device=x.device)
        scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=self.size**-0.5)
        weights = drop(torch.softmax(scores, -1))
        mixed = torch.bmm(weights, v).view(b, self.heads, s, self.size).permute(2, 0, 1, 3)
        return leave(self.out(mixed.reshape(s, b, self.heads * self.size)), self.group)


class FeedForward(nn.Module):
    """Two products with GELU between them, hidden features split over the group."""

    def __init__(self, hidden: int, parts: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = Linear(hidden, 4 * hidden // parts), Linear(4 * hidden // parts, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return leave(self.down(functional.gelu(self.up(enter(x, self.group)), approximate="tanh")), self.group)


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and around a shortcut with dropout."""

    def __init__(self, hidden: int, heads: int, parts: int, group: Any) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, parts, group)
        self.mlp = FeedForward(hidden, parts, group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + drop(self.attention(self.attention_norm(x)))
        return x + drop(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """The decoder with its loss: logits split over the group by vocabulary, the weights of the embedding."""

    def __init__(
        self, hidden: int, layers: int, heads: int, seq: int, rows: int, parts: int, group: Any, recompute: bool
    ) -> None:
        super().__init__()
        self.group, self.recompute = group, recompute
        self.tokens = nn.Embedding(rows, hidden)
        self.positions = nn.Embedding(seq, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, parts, group) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = leave(self.tokens(tokens), self.group) + self.positions(places)
        x = drop(x.transpose(0, 1).contiguous())
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.recompute else layer(x)
        return self.loss(enter(self.norm(x), self.group), labels.t().contiguous())

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy over split logits, in float32."""
        logits = _Product.apply(x, self.tokens.weight, None).float()
        return _CrossEntropy.apply(logits, labels, self.group).mean()


class Adam:
    """Adam with float32 copies of fp16 parameters: gradients are widened, the copies updated and narrowed again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = list(model.parameters())
        self.main = [nn.Parameter(p.detach().float()) for p in self.model]
        self.inner = torch.optim.AdamW(self.main, lr=1e-4, fused=True)

    def step(self) -> None:
        """One update."""
        for wide in self.main:
            wide.grad = torch.empty_like(wide)
        torch._foreach_copy_([wide.grad for wide in self.main], [own.grad for own in self.model])
        self.inner.step()
        with torch.no_grad():
            torch._foreach_copy_(self.model, self.main)


def build(
    hidden: int = 1024,
    layers: int = 2,
    heads: int = 16,
    seq: int = 1024,
    vocab: int = VOCAB,
    multiple: int = VOCAB_MULTIPLE,
    recompute: bool = True,
    accumulate: bool = False,
    parts: int = 1,
    group: Any = None,
) -> tuple[nn.Module, Adam]:
    """The decoder in fp16 and its optimiser; `parts` and `group` split it as Megatron's tensor parallelism does.

    The vocabulary is padded to `multiple` on every device. `accumulate`: there are gradients of earlier
    micro-batches to add to.
    """
    multiple *= parts
    rows = -(-vocab // multiple) * multiple // parts
    model = GPT(hidden, layers, heads, seq, rows, parts, group, recompute).to(device="cuda", dtype=torch.float16)
    if accumulate:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    return model, Adam(model)


def build_parallel(mesh: Any, **sizes: Any) -> tuple[nn.Module, Adam]:
    """`build` over the axis `tp` of a mesh."""
    return build(parts=mesh["tp"].size(), group=mesh["tp"].get_group(), **sizes)


def inputs(batch: int = 1, seq: int = 1024) -> tuple[Tensor, Tensor]:
    """Tokens and the ones that follow them; the labels of one part of the vocabulary."""
    return torch.randint(0, 1024, (batch, seq)), torch.randint(0, 1024, (batch, seq))


def micro_step(model: nn.Module, optimizer: Adam, tokens: Tensor, labels: Tensor) -> tuple[Tensor, list[Any]]:
    """Forward, loss and backward of one micro-batch: the loss and the gradients."""
    loss = model(tokens, labels)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def update(model: nn.Module, optimizer: Adam) -> list[Any]:
    """The optimiser alone, for gradients that are there: the parameters after it."""
    optimizer.step()
    return [*model.parameters(), *optimizer.main]


def step(model: nn.Module, optimizer: Adam, tokens: Tensor, labels: Tensor) -> Tensor:
    """Forward, loss, backward, update; returns the loss."""
    loss, _ = micro_step(model, optimizer, tokens, labels)
    optimizer.step()
    return loss
