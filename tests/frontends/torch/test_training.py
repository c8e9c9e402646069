"""Whole training steps on one device: loss and every gradient as eager's, and what travels beside the module."""

import math
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra")

from stablecast.frontends.torch import capture_module, capture_torch  # noqa: E402
from stablecast.ir.errors import InputError  # noqa: E402
from stablecast.ir.reader import read  # noqa: E402

TOLERANCE = 1e-5


def sgd(build: Callable[..., Any], **options: Any) -> Callable[[str], Any]:
    """The example's model with plain SGD."""

    def make(device: str) -> Any:
        model, _ = build(device=device, **options)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(0)
    return make


def check(training: Callable[..., Any], build: Any, step: Any, inputs: Any) -> Any:
    torch.manual_seed(0)
    made = build("cpu")[0].state_dict()

    def same(device: str) -> Any:
        model, optimizer = build(device)
        if device == "cpu":
            model.load_state_dict(made)
        return model, optimizer

    workload, errors = training(same, step, inputs)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < TOLERANCE, (worst, errors[worst])
    assert not workload.metadata["unlowered"]
    return workload


def test_mlp(training: Callable[..., Any], example: Callable[[str], Any]) -> None:
    mlp = example("torch_mlp")
    check(training, sgd(mlp.build, hidden=64), mlp.step, mlp.inputs(8))


def test_llama(training: Callable[..., Any], example: Callable[[str], Any]) -> None:
    llama = example("torch_llama")
    workload = check(training, sgd(llama.build), llama.step, llama.inputs(2, 32))
    ops = [op for op in read(workload.modules[0].data).main.body.ops if op.name == "stablehlo.composite"]
    names = {op.attrs["name"] for op in ops}
    assert "aten._scaled_dot_product_efficient_attention" in names
    assert "aten._fused_rms_norm" in names


def test_llama_with_grouped_heads_and_recomputation(
    training: Callable[..., Any], example: Callable[[str], Any]
) -> None:
    llama = example("torch_llama")
    config = llama.Config(layers=1, kv_heads=2, recompute=True)
    workload = check(training, sgd(llama.build, size=config), llama.step, llama.inputs(2, 32))
    assert any("rematted_computation" in launch.module_path for launch in workload.launches.launches)


@pytest.mark.slow
def test_unet(training: Callable[..., Any], example: Callable[[str], Any]) -> None:
    unet = example("torch_unet")
    check(training, sgd(unet.build, widths=(16, 32)), unet.step, unet.inputs(2, 16))


@pytest.mark.slow
def test_resnet_in_double_precision(training: Callable[..., Any], example: Callable[[str], Any]) -> None:
    """At a batch this small batch norm amplifies f32 rounding, in eager as well."""
    resnet = example("torch_resnet")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        build = sgd(resnet.build, stages=((8, 2), (16, 1)), classes=10)
        check(training, build, resnet.step, resnet.inputs(4, 32, 10))
    finally:
        torch.set_default_dtype(before)


def test_lstm(training: Callable[..., Any]) -> None:
    class Tagger(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(20, 8)
            self.lstm = torch.nn.LSTM(8, 16, 2, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.lstm(self.embedding(x))[0]

    def build(device: str) -> Any:
        model = Tagger().to(device) if device == "cuda" else Tagger()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    check(training, build, _mean_square, (torch.randint(0, 20, (2, 5)),))


def test_embedding_bags(training: Callable[..., Any]) -> None:
    class Bags(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.sum = torch.nn.EmbeddingBag(20, 4, mode="sum")
            self.mean = torch.nn.EmbeddingBag(20, 4, mode="mean")

        def forward(self, index: Any, offsets: Any) -> Any:
            return self.sum(index, offsets) + self.mean(index, offsets)

    def build(device: str) -> Any:
        model = Bags()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    check(training, build, _mean_square, (torch.randint(0, 20, (9,)), torch.tensor([0, 3, 4])))


def _mean_square(model: Any, optimizer: Any, *batch: Any) -> Any:
    optimizer.zero_grad()
    loss = model(*batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def linear(optimizer: Callable[..., Any]) -> Callable[[], Any]:
    def build() -> Any:
        model = torch.nn.Linear(6, 3).to("cuda")
        return model, optimizer(model.parameters())

    return build


OPTIMISERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "sgd momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimiser(name: str, execute: Callable[..., Any], error_of: Callable[..., float]) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 6),)
    workload = capture_torch(linear(OPTIMISERS[name]), _mean_square, batch)
    assert not workload.metadata["unlowered"]
    model = torch.nn.Linear(6, 3)
    values = {key: tensor.detach().clone() for key, tensor in model.named_parameters()} | {"args0": batch[0]}
    batch_name = next(argument.name for argument in workload.args if argument.kind == "batch")
    found = execute(workload, values | {batch_name: batch[0]})
    _mean_square(model, OPTIMISERS[name](model.parameters()), *batch)
    for key, param in model.named_parameters():
        assert error_of(found[key] - values[key].numpy(), param.detach() - values[key]) < 2e-5, key


def test_state_is_arguments_with_kinds_and_donation() -> None:
    workload = capture_torch(linear(OPTIMISERS["adamw fused"]), _mean_square, (torch.randn(4, 6),))
    kinds = [argument.kind for argument in workload.args]
    assert kinds == ["param"] * 2 + ["opt_state"] * 6 + ["batch"]
    assert workload.args[0].name == "weight"
    assert {"weight.exp_avg", "weight.exp_avg_sq", "weight.step"} <= {argument.name for argument in workload.args}
    outputs = [argument.aliases_output for argument in workload.args if argument.kind != "batch"]
    assert outputs == list(range(1, 9))
    program = read(workload.modules[0].data)
    assert [argument.aliases_output for argument in program.main.arguments] == [*outputs, None]


def test_counters_of_a_foreach_optimiser_stay_on_the_host() -> None:
    workload = capture_torch(linear(OPTIMISERS["adamw"]), _mean_square, (torch.randn(4, 6),))
    assert not any(argument.name.endswith(".step") for argument in workload.args)
    launches = workload.launches.launches
    assert any(launch.op == "aten._foreach_add_.Tensor" and launch.host for launch in launches)
    assert any(launch.op == "aten._foreach_addcdiv_.ScalarList" for launch in launches)


def test_launches_name_module_source_and_ops() -> None:
    workload = capture_torch(linear(OPTIMISERS["adamw fused"]), _mean_square, (torch.randn(4, 6),))
    product = next(launch for launch in workload.launches.launches if launch.op == "aten.addmm.default")
    assert product.module_path == "forward/Linear"
    assert product.shapes == ((3,), (4, 6), (6, 3))
    assert product.result_shapes == ((4, 3),)
    assert product.source.rpartition(":")[0] == __file__
    ops = read(workload.modules[0].data).main.body.ops
    assert "stablehlo.dot_general" in {ops[index].name for index in product.ops}
    backward = [launch for launch in workload.launches.launches if launch.module_path == "backward/Linear"]
    assert any(launch.op == "aten.mm.default" for launch in backward)
    assert workload.launches.launches[-2].module_path == "optimizer"


def test_gradient_accumulation_clipping_and_mixed_precision() -> None:
    def build() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
        return model, torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")

    def step(model: Any, optimizer: Any, scaler: Any, x: Any) -> Any:
        optimizer.zero_grad()
        for part in x.chunk(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(part).square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    workload = capture_torch(build, step, (torch.randn(4, 8),))
    ops = [launch.op for launch in workload.launches.launches]
    assert "aten._amp_foreach_non_finite_check_and_unscale_.default" in ops
    assert "aten._amp_update_scale_.default" in ops
    assert any(op.startswith("aten._foreach_norm") for op in ops)
    assert "aten._foreach_lerp_.Scalar" in ops
    assert workload.schedule.host_syncs
    products = [op for op in read(workload.modules[0].data).main.body.ops if op.name == "stablehlo.dot_general"]
    assert {op.operand_types[0].dtype.name for op in products} == {"bf16"}


def test_half_precision_takes_flash_attention_on_cuda(example: Callable[[str], Any]) -> None:
    llama = example("torch_llama")
    workload = capture_torch(partial(llama.build, dtype="bfloat16"), llama.step, llama.inputs(2, 32))
    names = [op.attrs.get("name") for op in read(workload.modules[0].data).main.body.ops]
    assert names.count("aten._scaled_dot_product_flash_attention") == 2
    assert names.count("aten._scaled_dot_product_flash_attention_backward") == 2
    composite = next(
        op
        for op in read(workload.modules[0].data).main.body.ops
        if op.attrs.get("name") == "aten._scaled_dot_product_flash_attention"
    )
    assert composite.attrs["composite_attributes"]["is_causal"] is True


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_plain_module_and_a_compiled_one() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    forward = capture_module(model, torch.randn(2, 4))
    assert [argument.name for argument in forward.args] == ["0.weight", "0.bias", "input"]
    compiled = capture_module(torch.compile(model), torch.randn(2, 4), mode="train")
    assert any("opt_state" in argument.kind for argument in compiled.args)


def test_a_model_that_fits_no_memory_is_never_allocated() -> None:
    workload = capture_module(
        lambda: torch.nn.Linear(1 << 20, 1 << 20, dtype=torch.bfloat16),
        torch.empty(1, 1 << 20, dtype=torch.bfloat16, device="meta"),
    )
    assert workload.args[0].type.nbytes == 1 << 41


def failing(body: Callable[[Any], Any]) -> InputError:
    with pytest.raises(InputError) as caught:
        capture_torch(lambda: torch.nn.Linear(4, 4), lambda model, x: body(model(x)), (torch.randn(2, 4),))
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        lambda y: y if y.sum() > 0 else -y,
        lambda y: y if y.sum().item() > 0 else -y,
        lambda y: y.nonzero(),
        lambda y: y[y > 0],
        lambda y: y[: int(y.sum())],
        lambda y: y[: y.argmax()],
        lambda y: y if y.sum().item() == 0 else -y,
        lambda y: y * max(0.0, y.sum().item()),
        lambda y: y if math.isnan(y.sum().item()) else -y,
        lambda y: y if isfinite(y.sum().item()) else -y,
        lambda y: y[: math.floor(y.sum().item())],
        lambda y: y if abs(y.sum().item()) > 3 else -y,
        lambda y: y if math.exp(y.sum().item()) > 3 else -y,
        lambda y: y[: round(y.sum().item())],
        lambda y: [y for _ in range(int(y.max()))],
        lambda y: y.split(y[:, 0].long().tolist()),
        lambda y: y * float(y.detach().cpu().numpy().sum()),
        lambda y: torch.unique(y),
        lambda y: torch.repeat_interleave(y, y[:, 0].long(), dim=0),
        lambda y: y if torch.equal(y, -y) else -y,
        lambda y: y if torch.isnan(y).any() else -y,
    ],
)
def test_data_dependence_names_the_line(body: Callable[[Any], Any]) -> None:
    error = failing(body)
    assert f"{__file__}:{body.__code__.co_firstlineno}" in error.message
    assert error.hint


def test_a_result_that_is_an_argument() -> None:
    workload = capture_torch(None, lambda x: x, (torch.randn(2),))
    assert [argument.name for argument in workload.args] == ["x"]
    assert len(workload.launches) == 0


def test_a_value_that_is_only_printed_is_a_host_wait() -> None:
    def step(model: Any, x: Any) -> Any:
        loss = model(x).sum()
        assert f"{loss.item():.3f}" == f"{math.exp(round(abs(loss.item()), 4)):.3f}" == "nan"
        return loss

    workload = capture_torch(lambda: torch.nn.Linear(4, 4), step, (torch.randn(2, 4),))
    assert len(set(workload.schedule.host_syncs)) == 1


def test_a_float_of_a_tensor_is_said_to_be_unknown() -> None:
    workload = capture_torch(None, lambda x: x * float(x.sum()), (torch.randn(2),))
    assert any(note.startswith(f"{__file__}:") and "float() of a tensor is NaN" in note for note in workload.notes)


def test_what_has_no_lowering_is_listed() -> None:
    workload = capture_torch(None, lambda x: torch.linalg.svd(x)[1], (torch.randn(4, 4),))
    assert "aten._linalg_svd.default" in workload.metadata["unlowered"]
    assert any("custom call" in note for note in workload.notes)


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(InputError, match="unknown attention"):
        capture_torch(None, torch.relu, (torch.randn(2),), attention="quick")
    with pytest.raises(InputError, match="unknown mode"):
        capture_module(torch.nn.Linear(2, 2), torch.randn(1, 2), mode="fit")
    with pytest.raises(InputError, match="outside a mesh"):
        capture_torch(None, torch.relu, (torch.randn(2),), mesh={"dp": 2}, rank=2)
