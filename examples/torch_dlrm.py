"""One rank's training step of a recommendation model on eight GPUs, with FBGEMM's tables of embeddings.

    stablecast predict examples/torch_dlrm.py:build,step --mesh dp=8 --exec eager --on v100-sxm2:8

The model of the public 8 x V100 profile (`docs/validation.md`), call by call as its TorchRec of 2022 ran it: dense
features through a small perceptron, 24 tables sharded by table (three a rank, looked up for the whole batch and
exchanged by all-to-all), two small tables on every rank, pairwise interactions, a perceptron on top. The next batch's
sparse features are exchanged in the same step, as a pipelined trainer does. The large tables are updated in the
backward pass; all else by Adagrad. Sizes are those of rank 4. FBGEMM's operators are declared where it is absent.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stablecast
from stablecast.frontends.torch import fbgemm

RANKS, BATCH, DIM, TABLES, SMALL = 8, 16, 16, 3, (3, 4)
ROWS = 40_012_001
VALUES, NEXT_VALUES = 4736, 3424
FEATURES = RANKS * TABLES + len(SMALL)
SUM = 0
BITS = 26

ops: Any = fbgemm.operators()


class Exchange(torch.autograd.Function):
    """All-to-all of pooled rows, equal shares by rank; what arrives is laid side by side by table.

    In the backward pass each rank's columns are made contiguous, joined, and go the same way back as a mean over ranks.
    """

    @staticmethod
    def forward(ctx: Any, sent: Tensor) -> Tensor:
        """[RANKS x BATCH, TABLES x DIM] to [BATCH, RANKS x TABLES x DIM]."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.chunk(RANKS), dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        shares = [share.contiguous().view(-1) for share in gradient.split(TABLES * DIM, dim=1)]
        sent = torch.cat(shares)
        returned = torch.empty_like(sent)
        dist.all_to_all_single(returned, sent)
        return returned.div_(RANKS).view(RANKS * BATCH, TABLES * DIM)


class CrossEntropy(torch.autograd.Function):
    """Binary cross-entropy of logits, mean over the batch, in the calls that torch 1.13 made for it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        high = logits.neg().clamp_min_(0)
        terms = torch.ones_like(labels).sub_(labels).mul_(logits).add_(high)
        logs = high.neg().exp_().add_(logits.neg().sub(high).exp_()).log_()
        return terms.add_(logs).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        return logits.sigmoid().sub_(labels).mul_(gradient).div_(labels.numel()), None


class Tables(nn.Module):
    """The tables of one rank as one flat one; rows are looked up, summed by bag, and updated in the backward pass."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.empty(0))
        self.register_buffer("rows", torch.empty(rows * DIM))
        self.register_buffer("squares", torch.empty(rows * DIM))
        for name, count, kind in (
            ("none", 0, torch.float32), ("placements", TABLES, torch.int32), ("begins", TABLES, torch.int64),
            ("dims", TABLES + 1, torch.int32), ("sizes", TABLES + 1, torch.int64), ("limits", TABLES, torch.int64),
            ("warning", 1, torch.int64), ("cached", 0, torch.int32),
        ):  # fmt: skip
            self.register_buffer(name, torch.empty(count, dtype=kind))

    def forward(self, indices: Tensor, lengths: Tensor) -> Tensor:
        """[RANKS x BATCH, TABLES x DIM] sums of rows from the indices of all bags, one after the other."""
        indices = indices.long()
        offsets = ops.asynchronous_complete_cumsum(lengths).long()
        ops.bounds_check_indices(self.limits, indices, offsets, 1, self.warning)
        return ops.split_embedding_codegen_lookup_adagrad_function(
            self.anchor, self.rows, self.none, self.none, self.placements, self.begins, self.dims, TABLES * DIM, DIM,
            self.sizes, BITS, indices, offsets, SUM, None, None, self.cached, False, 1.0, False, self.squares,
            self.none, self.placements, self.begins, 1e-8, 0.01,
        )  # fmt: skip


class Small(nn.Module):
    """The tables that are not worth sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(sum(SMALL) * DIM))
        for name, count, kind in (("begins", len(SMALL), torch.int64), ("dims", len(SMALL) + 1, torch.int32)):
            self.register_buffer(name, torch.empty(count, dtype=kind))
        self.register_buffer("sizes", torch.empty(len(SMALL) + 1, dtype=torch.int64))

    def forward(self, indices: Tensor, lengths: Tensor) -> Tensor:
        """[BATCH, SMALL x DIM] sums of rows."""
        indices = indices.long()
        offsets = ops.asynchronous_complete_cumsum(lengths).long()
        return ops.dense_embedding_codegen_lookup_function(
            self.rows, self.begins, self.dims, len(SMALL) * DIM, DIM, self.sizes, 3, indices, offsets, SUM, None, None
        )


def perceptron(*widths: int, last: bool) -> nn.Sequential:
    """Linear layers with a ReLU between, and after the last one where `last`."""
    layers: list[nn.Module] = []
    for index, (inside, out) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inside, out))
        if last or index < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dense(nn.Module):
    """What every rank holds: both perceptrons."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = perceptron(13, 256, 128, DIM, last=True)
        pairs = (FEATURES + 1) * FEATURES // 2
        self.top = perceptron(DIM + pairs, 512, 512, 256, 1, last=False)
        first, second = torch.triu_indices(FEATURES + 1, FEATURES + 1, offset=1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, low: Tensor, sparse: Tensor) -> Tensor:
        """Logits [batch] from embedded dense features [batch, DIM] and pooled rows [batch, FEATURES x DIM]."""
        by_feature = torch.cat(sparse.split(DIM, dim=1), dim=1).view(BATCH, FEATURES, DIM)
        both = torch.cat([low[:, None], by_feature], dim=1)
        products = torch.bmm(both, both.transpose(1, 2))[:, self.first, self.second]
        return self.top(torch.cat([low, products], dim=1)).squeeze(1)


class Model(nn.Module):
    """Perceptrons under one DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = Dense()

    def forward(self, dense: Tensor, pooled: Tensor, small: Tensor) -> Tensor:
        """Logits from dense features, and pooled rows of the sharded and the small tables."""
        low = self.dense.bottom(dense)
        sharded = Exchange.apply(pooled)
        return self.dense(low, torch.cat([sharded, small], dim=1))


def build() -> tuple[Tables, nn.Module, nn.Module, torch.optim.Optimizer]:
    """Tables, the replicated parts under DDP, and Adagrad for these."""
    model, small = Model().to("cuda"), Small().to("cuda")
    replicated = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    tables = nn.parallel.DistributedDataParallel(small, broadcast_buffers=False, gradient_as_bucket_view=True)
    parameters = [*small.parameters(), *model.parameters()]
    return (
        Tables(TABLES * ROWS // TABLES).to("cuda"),
        replicated,
        tables,
        torch.optim.Adagrad(parameters, foreach=False),
    )


def inputs() -> tuple[Tensor, ...]:
    """A batch: dense features, labels, this rank's look-ups as they arrived (order of features, lengths, values), small
    look-ups (values, lengths); then the next batch's: order of features, lengths, values, three kinds of splits."""
    arriving, leaving, small = RANKS * TABLES, FEATURES, len(SMALL) * BATCH
    return (
        torch.randn(BATCH, 13),
        torch.zeros(BATCH, dtype=torch.int32),
        torch.zeros(arriving, dtype=torch.int32),
        torch.zeros(arriving, BATCH, dtype=torch.int32),
        torch.zeros(VALUES, dtype=torch.int32),
        torch.zeros(small, dtype=torch.int32),
        torch.zeros(small, dtype=torch.int32),
        torch.zeros(leaving, dtype=torch.int32),
        torch.zeros(leaving, BATCH, dtype=torch.int32),
        torch.zeros(NEXT_VALUES, dtype=torch.int32),
        torch.zeros(RANKS, dtype=torch.int64),
        torch.zeros(RANKS, dtype=torch.int64),
        torch.zeros(RANKS, dtype=torch.int64),
    )


def send_next(order: Tensor, lengths: Tensor, values: Tensor, splits: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Exchange the next batch's features that other ranks look up: how many, how long, which (in equal shares)."""
    lengths, values, _ = ops.permute_2D_sparse_data(order, lengths, values, None, values.numel())
    large = RANKS * TABLES
    sent = (
        torch.stack(splits, dim=1).flatten(),
        lengths[:large].flatten(),
        values[: values.numel() - len(SMALL) * BATCH],
    )
    received = [torch.empty_like(part) for part in sent]
    for target, part in zip(received, sent, strict=True):
        dist.all_to_all_single(target, part)
    return tuple(received)


@stablecast.workload(args=inputs)
def step(
    tables: Tables,
    dense_part: nn.Module,
    small_part: nn.Module,
    optimizer: torch.optim.Optimizer,
    dense: Tensor,
    labels: Tensor,
    order: Tensor,
    lengths: Tensor,
    values: Tensor,
    small_values: Tensor,
    small_lengths: Tensor,
    next_order: Tensor,
    next_lengths: Tensor,
    next_values: Tensor,
    *splits: Tensor,
) -> tuple[Tensor, ...]:
    """Forward, loss, exchange of the next batch, backward, update; returns the loss and what was received."""
    optimizer.zero_grad()
    lengths, values, _ = ops.permute_2D_sparse_data(order, lengths, values, None, values.numel())
    counts = lengths.view(TABLES, -1).long().sum(dim=1)
    pooled = tables(values, lengths.flatten())
    logits = dense_part(dense, pooled, small_part(small_values, small_lengths))
    loss = CrossEntropy.apply(logits, labels.float())
    received = send_next(next_order, next_lengths, next_values, splits)
    loss.sum(0).backward()
    optimizer.step()
    return (loss.detach(), counts, *received)
