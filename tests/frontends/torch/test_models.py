"""Whole models: ResNet-50 at its full depth, and recommendation models with embedding bags, alone and sharded."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra")

from stablecast.frontends.torch import capture_torch  # noqa: E402
from stablecast.ir.reader import read  # noqa: E402


@pytest.mark.slow
def test_resnet_50_in_double_precision(training: Callable[..., Any], example: Callable[[str], Any]) -> None:
    """All 53 convolutions; in f32 batch norm over two images amplifies rounding, in eager as well."""
    resnet = example("torch_resnet")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        start = resnet.ResNet(classes=10).state_dict()

        def build(device: str) -> Any:
            model = resnet.ResNet(classes=10).to(device)
            if device == "cpu":
                model.load_state_dict(start)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        workload, errors = training(build, resnet.step, resnet.inputs(2, 64, 10))
    finally:
        torch.set_default_dtype(before)
    convolutions = [launch for launch in workload.launches.launches if launch.op == "aten.convolution.default"]
    assert len(convolutions) == 53
    assert len(errors) == 162
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < 1e-5, (worst, errors[worst])


class Recommender(torch.nn.Module):  # type: ignore[misc, name-defined]
    """DLRM: bags of sparse features, a perceptron for dense ones, pairwise products, a perceptron on top."""

    def __init__(self, tables: int = 3, rows: int = 20, width: int = 8) -> None:
        super().__init__()
        self.bottom = torch.nn.Sequential(torch.nn.Linear(13, width), torch.nn.ReLU())
        self.tables = torch.nn.ModuleList(torch.nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        pairs = tables * (tables + 1) // 2
        self.top = torch.nn.Sequential(torch.nn.Linear(width + pairs, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Any, indices: Any, offsets: Any) -> Any:
        low = self.bottom(dense)
        pooled = [table(indices[number], offsets) for number, table in enumerate(self.tables)]
        both = torch.stack([low, *pooled], 1)
        products = (both @ both.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([low, products], 1)).squeeze(1)


def test_recommender(training: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    start = Recommender().state_dict()

    def build(device: str) -> Any:
        model = Recommender()
        if device == "cpu":
            model.load_state_dict(start)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, dense: Any, indices: Any, offsets: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        logits = model(dense, indices, offsets)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch = (torch.randn(4, 13), torch.randint(0, 20, (3, 9)), torch.tensor([0, 2, 2, 5]), torch.rand(4))
    workload, errors = training(build, step, batch)
    assert max(errors.values()) < 1e-5, errors
    assert not workload.metadata["unlowered"]
    assert Counter(launch.op for launch in workload.launches.launches)["aten._embedding_bag.default"] == 3


def test_sharded_tables_exchange_rows_and_gradients(example: Callable[[str], Any]) -> None:
    dlrm = example("torch_dlrm")
    workload = capture_torch(dlrm.build, dlrm.step, dlrm.inputs, mesh={"dp": 8})
    assert not workload.metadata["unlowered"]
    calls = Counter(launch.op for launch in workload.launches.launches if launch.group)
    assert calls["c10d.alltoall_base_.default"] == 5
    exchanges = [op for op in read(workload.modules[0].data).main.body.ops if op.name == "stablehlo.all_to_all"]
    assert {op.attrs["replica_groups"].axes for op in exchanges} == {("dp",)}
    sizes = [op.operand_types[0].nbytes for op in exchanges]
    rows = dlrm.RANKS * dlrm.BATCH * dlrm.TABLES * dlrm.DIM * 4
    assert sizes.count(rows) == 2, "the rows there, their gradients back"
