"""One rank's training step of a recommendation model on eight GPUs, in plain PyTorch.

    stablecast predict examples/torch_dlrm.py:build,step --mesh dp=8 --exec eager --on v100-sxm2:8

The model of the public 8 x V100 profile (`docs/validation.md`): dense features through a small perceptron, 24 tables
sharded by table (three a rank, looked up for the whole batch and exchanged by all-to-all), two small tables on every
rank, pairwise interactions, a perceptron on top. The next batch's sparse features are exchanged in the same step, as a
pipelined trainer does. The large tables are updated in place, row by row; all else by Adagrad.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stablecast

RANKS, BATCH, DIM, TABLES, SMALL = 8, 16, 16, 3, (3, 4)
ROWS = 40_040_603
VALUES = 4736
FEATURES = RANKS * TABLES + len(SMALL)


class Exchange(torch.autograd.Function):
    """All-to-all of pooled rows, equal shares by rank; what arrives is laid side by side by table.

    In the backward pass each rank's columns are made contiguous, joined, and go the same way back.
    """

    @staticmethod
    def forward(ctx: Any, sent: Tensor) -> Tensor:
        """[RANKS x BATCH x TABLES x DIM] to [BATCH, RANKS x TABLES x DIM]."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat([share.view(BATCH, TABLES * DIM) for share in received.chunk(RANKS)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        shares = [share.contiguous().view(-1) for share in gradient.split(TABLES * DIM, dim=1)]
        sent = torch.cat(shares)
        returned = torch.empty_like(sent)
        dist.all_to_all_single(returned, sent)
        return returned


class Tables(nn.Module):
    """The tables of one rank as one; rows are looked up, summed by bag, and updated where they were read."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.empty(rows, DIM))
        self.register_buffer("squares", torch.empty(rows))

    def pooled(self, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """[bags, DIM] sums and the rows that they are of, which collect a gradient."""
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
        picked = self.rows.index_select(0, indices).requires_grad_()
        places = torch.arange(indices.numel(), device=indices.device)
        return nn.functional.embedding_bag(places, picked, offsets, mode="sum", include_last_offset=True), picked

    def update(self, indices: Tensor, gradient: Tensor, rate: float = 0.01) -> None:
        """Row-wise Adagrad on the rows that were read, sorted so that equal rows are updated together."""
        indices, order = indices.sort()
        gradient = gradient.index_select(0, order)
        self.squares.index_add_(0, indices, gradient.square().mean(dim=1))
        scale = self.squares.index_select(0, indices).sqrt().add_(1e-8)
        self.rows.index_add_(0, indices, gradient / scale[:, None], alpha=-rate)


def perceptron(*widths: int, last: bool) -> nn.Sequential:
    """Linear layers with a ReLU between, and after the last one where `last`."""
    layers: list[nn.Module] = []
    for index, (inside, out) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inside, out))
        if last or index < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dense(nn.Module):
    """What every rank holds: both perceptrons and the small tables."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = perceptron(13, 256, 128, DIM, last=True)
        pairs = (FEATURES + 1) * FEATURES // 2
        self.top = perceptron(DIM + pairs, 512, 512, 256, 1, last=False)
        first, second = torch.triu_indices(FEATURES + 1, FEATURES + 1, offset=1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Logits [batch] from dense features [batch, 13] and pooled rows [batch, FEATURES, DIM]."""
        low = self.bottom(dense)
        both = torch.cat([low[:, None], sparse], dim=1)
        products = torch.bmm(both, both.transpose(1, 2))[:, self.first, self.second]
        return self.top(torch.cat([low, products], dim=1)).squeeze(1)


class Small(nn.Module):
    """The tables that are not worth sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.empty(rows, DIM)) for rows in SMALL])

    def forward(self, indices: Tensor) -> Tensor:
        rows = [nn.functional.embedding(indices[number], table) for number, table in enumerate(self.tables)]
        return torch.stack(rows, dim=1)


def build() -> tuple[Tables, nn.Module, nn.Module, torch.optim.Optimizer]:
    """Tables, the replicated parts under DDP, and Adagrad for these."""
    dense, small = Dense().to("cuda"), Small().to("cuda")
    replicated = nn.parallel.DistributedDataParallel(dense, broadcast_buffers=False, gradient_as_bucket_view=True)
    tables = nn.parallel.DistributedDataParallel(small, broadcast_buffers=False, gradient_as_bucket_view=True)
    parameters = [*small.parameters(), *dense.parameters()]
    return Tables(ROWS).to("cuda"), replicated, tables, torch.optim.Adagrad(parameters, foreach=False)


def inputs() -> tuple[Tensor, ...]:
    """A batch: dense features, labels, this rank's look-ups (indices, how many by bag), small look-ups; then the next
    batch's numbers of values by feature and rank, lengths and values, as they are sent."""
    bags = RANKS * BATCH * TABLES
    return (
        torch.randn(BATCH, 13),
        torch.rand(BATCH),
        torch.zeros(VALUES, dtype=torch.int32),
        torch.zeros(bags, dtype=torch.int32),
        torch.zeros(len(SMALL), BATCH, dtype=torch.int32),
        torch.zeros(RANKS * TABLES, dtype=torch.int64),
        torch.zeros(RANKS * TABLES * BATCH, dtype=torch.int32),
        torch.zeros(3392, dtype=torch.int32),
    )


def send_next(splits: Tensor, lengths: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Exchange the next batch's sparse features: how many, how long, which (in equal shares of what a rank sends)."""
    received = [torch.empty_like(sent) for sent in (splits, lengths, values)]
    for target, sent in zip(received, (splits, lengths, values), strict=True):
        dist.all_to_all_single(target, sent)
    return tuple(received)


@stablecast.workload(args=inputs)
def step(
    tables: Tables,
    dense_part: nn.Module,
    small_part: nn.Module,
    optimizer: torch.optim.Optimizer,
    dense: Tensor,
    labels: Tensor,
    indices: Tensor,
    bags: Tensor,
    small: Tensor,
    splits: Tensor,
    lengths: Tensor,
    values: Tensor,
) -> tuple[Tensor, ...]:
    """Forward, loss, exchange of the next batch, backward, update; returns the loss and what was received."""
    optimizer.zero_grad()
    indices, small = indices.long(), small.long()
    pooled, picked = tables.pooled(indices, bags)
    mine = pooled.view(TABLES, RANKS, BATCH, DIM).permute(1, 2, 0, 3).reshape(-1)
    sharded = Exchange.apply(mine).view(BATCH, RANKS * TABLES, DIM)
    logits = dense_part(dense, torch.cat([sharded, small_part(small)], dim=1))
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
    received = send_next(splits, lengths, values)
    loss.backward()
    tables.update(indices, picked.grad)
    optimizer.step()
    return (loss.detach(), *received)
