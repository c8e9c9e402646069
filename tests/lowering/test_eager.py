"""Eager PyTorch: kernels in number and order as dispatched."""

import math
from typing import Any

import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.ir.schedule import Launch
from stablecast.lowering.execution.dispatch import bare_row, launches_of, multi_tensor_launches


def test_multi_tensor_apply_by_hand() -> None:
    """110 tensors of one chunk fill a launch of one list; 320 chunks fill one whatever the lists."""
    assert multi_tensor_launches([10] * 110, 1) == 1
    assert multi_tensor_launches([10] * 111, 1) == 2
    assert multi_tensor_launches([10] * 73, 4) == 3
    assert multi_tensor_launches([65536 * 320], 2) == 1
    assert multi_tensor_launches([65536 * 321], 2) == 2
    assert multi_tensor_launches([65536 * 319, 65536 * 2], 2) == 2


def test_a_call_without_ops_is_known_by_its_shapes() -> None:
    fill = Launch("aten.zero_.default", ((64, 32),), ("f32",))
    row = bare_row(fill)
    assert (row.bytes_read, row.bytes_written, row.launches) == (0, 64 * 32 * 4, 1)
    assert launches_of(Launch("aten._foreach_mul_.Scalar", ((8,),) * 240, ("f32",) * 240)) == 3


def _dispatched(step: Any) -> list[str]:
    """ATen calls of a real run on the CPU that launch kernels: no views, nothing that only looks at a tensor."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view and not func.name().startswith("prim::"):
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Spy():
        step()
    return seen


def test_kernels_as_dispatched_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    from stablecast import capture_torch
    from stablecast._predict import Options, Session
    from stablecast.backends.catalogue import Catalogue

    def build() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Softmax(-1))

    def step(model: Any, x: Any) -> Any:
        loss = model(x).pow(2).t().contiguous().mean()
        loss.backward()
        return loss

    x = torch.zeros(8, 32)
    workload = capture_torch(build, step, [x], device="cpu")
    assert workload.launches is not None
    program = Session(workload, Options(exec="eager")).device_program(Catalogue().resolve("h100-sxm").device)
    launched = [launch.op for launch in workload.launches.launches if not launch.is_view]
    model = build()
    expected = [name for name in _dispatched(lambda: step(model, x)) if name not in ("aten.detach.default",)]
    assert launched == expected
    assert len(program.body) == len(launched)
    scopes = [node.scope.split("/")[-1] for node in program.body]
    assert len(scopes) == len(launched)
    assert math.isfinite(program.work.evaluate()[0].nbytes)


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_modules_and_steps_run_under_inductor(whole: bool) -> None:
    torch = pytest.importorskip("torch")
    from stablecast import capture_torch
    from stablecast._predict import Options, Session

    def build() -> Any:
        model = torch.nn.Linear(8, 8)
        return model if whole else torch.compile(model)

    def step(model: Any, x: Any) -> Any:
        return torch.relu(model(x)).sum()

    workload = capture_torch(build, torch.compile(step) if whole else step, [torch.zeros(4, 8)])
    prediction = Session(workload, Options()).predict("h100-sxm")
    assert prediction.exec == "inductor"
    assert any("torch.compile" in text for text in prediction.assumptions)


def test_compiled_layers_under_fsdp_are_graphs_of_their_own() -> None:
    """Two layers that run again: norms carry their own layer's scope, gathers are units of one layer, the program's
    order stays."""
    torch = pytest.importorskip("torch")
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    from stablecast import capture_torch
    from stablecast.ir.device_program import Collective
    from stablecast.ir.reader import read
    from stablecast.lowering.device import lower
    from stablecast.lowering.passes.prefetch import _units
    from stablecast.lowering.target import Target

    class Layers(torch.nn.ModuleList):
        def forward(self, x: Any) -> Any:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    def build(mesh: Any) -> Any:
        made = Layers(
            torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 64), torch.nn.SiLU()) for _ in range(2)
        ).to("cuda")
        for layer in made:
            fully_shard(layer, mesh=mesh["dp"])
        return made

    def step(model: Any, x: Any) -> Any:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    workload = capture_torch(build, step, lambda: (torch.zeros(8, 64),), mesh={"dp": 4})
    body = lower(read(workload.modules[0].data, "layers"), Target("cuda", exec="inductor")).body
    norms = {node.scope for node in body if "rms_norm" in node.scope and "forward" in node.scope}
    assert all(any(f"Layers/{layer}" in scope for scope in norms) for layer in (0, 1)), norms
    gathers = [index for index, node in enumerate(body) if isinstance(node, Collective) and node.kind == "all_gather"]
    assert [len([n for n in unit.nodes if n in gathers]) for unit in _units(body)] == [1] * len(gathers)


def test_copies_that_stride_fetch_whole_sectors() -> None:
    """Heads before positions keep their rows together; a transposed matrix is read 4 bytes in each sector of 32."""
    torch = pytest.importorskip("torch")
    from stablecast import capture_torch
    from stablecast._predict import Options, Session
    from stablecast.backends.catalogue import Catalogue

    def step(x: Any) -> Any:
        heads = x.view(2, 64, 4, 32).transpose(1, 2)
        return heads.contiguous(), heads.transpose(2, 3).contiguous(), x.transpose(1, 2).contiguous()

    workload = capture_torch(None, step, [torch.zeros(2, 64, 128)])
    table = Session(workload, Options(exec="eager")).device_program(Catalogue().resolve("h100-sxm").device).table
    assert {row.bytes_read / row.bytes_written for row in table.rows} == {1, 8}


def test_convolutions_are_kernels_of_their_own() -> None:
    """On a GPU the bias is added by a kernel of its own; a gradient's call makes one kernel for each of the three."""
    torch = pytest.importorskip("torch")
    from stablecast import capture_torch
    from stablecast._predict import Options, Session
    from stablecast.backends.catalogue import Catalogue
    from stablecast.ir.device_program import Kernel
    from stablecast.ir.kernels import KernelClass

    def build() -> Any:
        return torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Conv2d(16, 8, 3, stride=2))

    def step(model: Any, x: Any) -> Any:
        loss = model(x).pow(2).sum()
        loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters())]

    session = Session(capture_torch(build, step, (torch.zeros(2, 8, 32, 32),)), Options(exec="eager"))
    device = Catalogue().device("a100-sxm-40gb")
    program = session.device_program(device)
    classes = [program.table.rows[node.row].klass for node in program.body if isinstance(node, Kernel)]
    assert classes[:4] == [KernelClass.CONVOLUTION, KernelClass.ELEMENTWISE] * 2
    assert classes.count(KernelClass.CONVOLUTION) == 2 + 2 + 1, "the first has no gradient to its image"
    assert {row.math for row in program.table.rows if row.klass == KernelClass.CONVOLUTION} == {"tf32"}
    sums = [row.shape for row in program.table.rows if row.klass == KernelClass.REDUCTION]
    assert len(sums) == 3, f"of the loss and of both biases: {sums}"


def test_only_calls_in_place_reuse_the_memory_of_an_operand() -> None:
    torch = pytest.importorskip("torch")
    from stablecast import capture_torch
    from stablecast._predict import Options, Session

    def apart(model: Any, x: Any) -> Any:
        return model(x).exp().sin().sum()

    def in_place(model: Any, x: Any) -> Any:
        return model(x).exp_().sin_().sum()

    def peak(step: Any) -> int:
        workload = capture_torch(lambda: torch.nn.Linear(256, 256), torch.no_grad()(step), [torch.zeros(512, 256)])
        program = Session(workload, Options(exec="eager")).device_program(Catalogue().device("h100-sxm"))
        return program.buffers.temp_bytes

    result = 512 * 256 * 4
    assert peak(in_place) == pytest.approx(result, rel=0.01)
    assert peak(apart) == pytest.approx(2 * result, rel=0.01)
