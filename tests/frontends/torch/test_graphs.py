"""Programs that arrive as graphs: FX, compiled modules, exported programs, ops over functions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra")

import stablecast  # noqa: E402
from stablecast.frontends.torch import capture_exported, capture_torch  # noqa: E402
from stablecast.ir.errors import InputError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("ramp", torch.arange(8.0))

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm(self.up(x))) * self.ramp
        return {"y": y, "parts": (y.sum(), y.mean(0))}


RESULTS = ["result['y']", "result['parts'][0]", "result['parts'][1]"]
STATE = ["up.weight", "up.bias", "norm.weight", "norm.bias", "ramp", "norm.running_mean", "norm.running_var"]


def graph(net: Net, x: Any) -> Any:
    return torch.fx.symbolic_trace(net)


def compiled(net: Net, x: Any) -> Any:
    return torch.compile(net)


def exported(net: Net, x: Any) -> Any:
    return torch.export.export(net, (x,))


def decomposed(net: Net, x: Any) -> Any:
    return torch.export.export(net, (x,)).run_decompositions()


def unexported(net: Net, x: Any) -> Any:
    return torch.export.export(net, (x,)).module()


@pytest.mark.parametrize("form", [graph, compiled, exported, decomposed, unexported])
def test_a_module_in_any_form_is_the_same_program(
    form: Callable[..., Any], execute: Callable[..., Any], error_of: Callable[..., float]
) -> None:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(3, 4)
    held = form(net, x)
    workload = stablecast.capture(held, *(() if hasattr(held, "graph_signature") else (x,)))
    assert sorted(argument.name for argument in workload.args) == sorted([*STATE, "x"])
    assert workload.metadata["results"] == RESULTS
    found = execute(workload, {**net.state_dict(), "x": x})
    wanted = net(x)
    for name, value in zip(RESULTS, (wanted["y"], *wanted["parts"]), strict=True):
        assert error_of(found[name], value) < 1e-6
    product = next(launch for launch in workload.launches.launches if launch.op == "aten.addmm.default")
    assert product.module_path == ("forward/GraphModule" if form is unexported else "forward/Net/up") or form is graph


@pytest.mark.parametrize("form", [graph, compiled, unexported])
def test_a_module_in_any_form_trains(form: Callable[..., Any]) -> None:
    net, x = Net(), torch.randn(3, 4)
    plain = stablecast.capture(net, x, mode="train")
    formed = stablecast.capture(form(net, x), x, mode="train")
    assert [launch.op for launch in formed.launches.launches if not launch.is_view] == [
        launch.op for launch in plain.launches.launches if not launch.is_view
    ]


def test_a_graph_of_ops_holds_its_tensors() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    weight = torch.randn(4, 4)
    workload = stablecast.capture(make_fx(lambda x: (x @ weight).relu())(torch.randn(3, 4)), torch.randn(3, 4))
    assert [tuple(argument.type.shape) for argument in workload.args] == [(4, 4), (3, 4)]


def test_compiled_pieces_of_a_step_run_as_they_were_written() -> None:
    @torch.compile(fullgraph=True)
    def loss_of(net: Any, x: Any) -> Any:
        return net(x)["parts"][0]

    def build() -> Any:
        net = Net().cuda()
        net.compile()
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    @torch.compile
    def step(net: Any, optimizer: Any, x: Any) -> Any:
        loss = loss_of(net, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    workload = capture_torch(build, step, (torch.randn(3, 4),))
    assert workload.source == f"{__file__}:step"
    assert {"aten.addmm.default", "aten.native_batch_norm.default", "aten._foreach_add_.List"} <= {
        launch.op for launch in workload.launches.launches
    }


def test_an_exported_program_keeps_lines_and_modules() -> None:
    workload = capture_exported(torch.export.export(Net().eval(), (torch.randn(3, 4),)))
    places = {launch.op: (launch.module_path, launch.source) for launch in workload.launches.launches}
    line = Net.forward.__code__.co_firstlineno + 1
    assert places["aten.addmm.default"] == ("forward/Net/up", f"{__file__}:{line}")
    assert places["aten.relu.default"] == ("forward/Net", f"{__file__}:{line}")


def test_an_export_for_training_writes_its_statistics() -> None:
    workload = capture_exported(torch.export.export(Net().train(), (torch.randn(3, 4),)))
    written = {argument.name for argument in workload.args if argument.aliases_output is not None}
    assert written == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_a_function_of_tensors() -> None:
    workload = stablecast.capture(torch.compile(lambda x: x.relu()), torch.randn(3))
    assert [launch.op for launch in workload.launches.launches] == ["aten.relu.default"]


class Chooses(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def test_a_branch_on_data_names_the_line() -> None:
    line = f"{__file__}:{Chooses.forward.__code__.co_firstlineno + 1}: torch.cond chooses by data"
    with pytest.raises(InputError, match=line.replace(".", r"\.")) as caught:
        stablecast.capture(Chooses(), torch.randn(3))
    assert "torch.where" in caught.value.hint
    with pytest.raises(InputError, match=line.replace(".", r"\.")):
        stablecast.capture(torch.export.export(Chooses(), (torch.randn(3),)))


def test_ops_over_functions_are_recorded_op_by_op() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Detached(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                y = x.sin()
            return x + y

    nograd = stablecast.capture(torch.export.export(Detached(), (torch.randn(3),)))
    assert [launch.op for launch in nograd.launches.launches] == ["aten.sin.default", "aten.add.Tensor"]

    def attend(q: Any) -> Any:
        q.requires_grad_()
        flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j)).sum().backward()
        return q.grad

    flexible = capture_torch(None, attend, (torch.randn(1, 2, 128, 16),))
    assert any("flex_attention" in note for note in flexible.notes)
    with pytest.raises(InputError, match="write the loop in Python"):
        capture_torch(
            None, lambda x: torch._higher_order_ops.scan(lambda c, a: (c + a, c * a), x[0] * 0, x), (torch.ones(3, 4),)
        )


def test_dynamic_shapes_are_refused(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch")
    program = torch.export.export(Net().eval(), (torch.randn(3, 4),), dynamic_shapes={"x": {0: batch}})
    with pytest.raises(InputError, match=r"'x' has the dynamic shape"):
        stablecast.capture(program)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(Net().eval(), (torch.randn(3, 4),)), str(path))
    assert stablecast.load(str(path)).source == str(path)
    torch.save(Net().state_dict(), path)
    with pytest.raises(InputError, match=r"not an exported program of this torch; write it"):
        stablecast.load(str(path))
