"""Parallel programs under the fake process group: collectives, groups, order, streams, and what eight devices get."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra")

from stablecast.frontends.torch import capture_torch  # noqa: E402
from stablecast.ir.reader import read  # noqa: E402

HERE = Path(__file__).parent
GATHER, SCATTER = "c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"
F_GATHER = "_c10d_functional.all_gather_into_tensor.default"
F_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
F_REDUCE = "_c10d_functional.all_reduce.default"


def llama(example: Callable[[str], Any], mesh: dict[str, int], rank: int = 0, **options: Any) -> Any:
    module = example("torch_llama")
    return capture_torch(
        lambda mesh: module.build_parallel(mesh, **options), module.step, module.inputs(2, 32), mesh=mesh, rank=rank
    )


def collectives(workload: Any) -> Counter[str]:
    return Counter(launch.op for launch in workload.launches.launches if launch.group)


def groups(workload: Any, name: str) -> Counter[tuple[str, ...]]:
    ops = read(workload.modules[0].data).main.body.ops
    return Counter(op.attrs["replica_groups"].axes for op in ops if op.name == f"stablehlo.{name}")


def test_tensor_parallel(example: Callable[[str], Any]) -> None:
    workload = llama(example, {"tp": 8}, sequence=False)
    assert collectives(workload) == {F_REDUCE: 16, F_GATHER: 1}
    assert groups(workload, "all_reduce") == {("tp",): 16}


def test_sequence_parallel(example: Callable[[str], Any]) -> None:
    assert collectives(llama(example, {"tp": 8})) == {F_SCATTER: 10, F_GATHER: 11, F_REDUCE: 5}


def test_fsdp_keeps_streams_and_waits(example: Callable[[str], Any]) -> None:
    workload = llama(example, {"dp": 8})
    assert collectives(workload) == {GATHER: 5, SCATTER: 3}
    launches = workload.launches.launches
    gathers = {launch.stream for launch in launches if launch.op == GATHER}
    scatters = {launch.stream for launch in launches if launch.op == SCATTER}
    assert len(gathers) == len(scatters) == 1
    assert gathers != scatters
    assert 0 not in gathers | scatters
    schedule = workload.schedule
    assert schedule.stream_names[0] == "main"
    waited = {event.recorded for event in schedule.events}
    assert waited & {index for index, launch in enumerate(launches) if launch.op == GATHER}
    assert all(event.recorded < event.waiter for event in schedule.events)


def test_two_dimensions_name_their_axes(example: Callable[[str], Any]) -> None:
    workload = llama(example, {"dp": 2, "tp": 4})
    assert collectives(workload) == {GATHER: 5, SCATTER: 3, F_SCATTER: 10, F_GATHER: 11, F_REDUCE: 5}
    assert groups(workload, "all_gather") == {("dp",): 5, ("tp",): 11}
    assert workload.num_devices == 8
    assert str(workload.stage) == "per_device"


def test_hybrid_sharding(example: Callable[[str], Any]) -> None:
    module = example("torch_llama")

    def build(mesh: Any) -> Any:
        model = module.model()
        module.shard(model, mesh)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    workload = capture_torch(build, module.step, module.inputs(2, 32), mesh={"rep": 2, "shard": 4})
    assert collectives(workload) == {GATHER: 5, SCATTER: 3, "c10d.allreduce_.default": 3}
    assert groups(workload, "all_reduce") == {("rep",): 3}


def test_data_parallel_reduces_buckets(example: Callable[[str], Any]) -> None:
    module = example("torch_llama")

    def build(mesh: Any) -> Any:
        model = torch.nn.parallel.DistributedDataParallel(module.model(), bucket_cap_mb=2)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    workload = capture_torch(build, module.step, module.inputs(2, 32), mesh={"dp": 8})
    assert collectives(workload) == {"c10d.allreduce_.default": 4}
    sizes = [launch.shapes[0][0] for launch in workload.launches.launches if launch.group]
    assert sum(sizes) == sum(param.numel() for param in module.model(device="cpu").parameters())


class Crossed(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Declares `a` before `b` and runs `b` before `a`, so that gradients arrive as declared."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(32, 8, bias=False), torch.nn.Linear(16, 32, bias=False)

    def forward(self, x: Any) -> Any:
        return self.a(self.b(x))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_data_parallel_fills_buckets_as_gradients_arrive(static: bool, passes: int) -> None:
    runs: list[int] = []

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        for _ in range(passes):
            loss = model(x).sum()
            loss.backward()
        optimizer.step()
        runs.append(1)
        return loss.detach()

    def build(mesh: Any) -> Any:
        model = torch.nn.parallel.DistributedDataParallel(Crossed(), bucket_cap_mb=0.0005, static_graph=static)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    workload = capture_torch(build, step, (torch.randn(4, 16),), mesh={"dp": 8})
    ops = [launch for launch in workload.launches.launches if launch.group or launch.op == "aten.mm.default"]
    found = [launch.shapes[0][0] if launch.group else launch.op for launch in ops]
    mm = "aten.mm.default"
    assert found == [*[mm] * 4, 256, mm, 512] * passes
    assert runs == [1]  # the trial run ends with its first backward pass


class Partly(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Half of its parameters take no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.used(x)


@pytest.mark.parametrize("told", [False, True])
def test_data_parallel_says_where_a_bucket_is_not_reduced(told: bool) -> None:
    def step(model: Any, x: Any) -> Any:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    def build(mesh: Any) -> Any:
        return torch.nn.parallel.DistributedDataParallel(Partly(), find_unused_parameters=told)

    workload = capture_torch(build, step, (torch.randn(2, 4),), mesh={"dp": 8})
    reduced = [launch.shapes[0] for launch in workload.launches.launches if launch.op == "c10d.allreduce_.default"]
    assert ((40,) in reduced) == told
    assert any("no gradient under DDP (idle.weight" in note for note in workload.notes) != told


def test_expert_parallel_exchanges_tokens() -> None:
    from torch.distributed import _functional_collectives as collective

    class Experts(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, mesh: Any) -> None:
            super().__init__()
            self.group = mesh["ep"].get_group()
            self.expert = torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            sizes = [x.shape[0] // 4] * 4
            x = collective.all_to_all_single_autograd(x, sizes, sizes, self.group)
            return collective.all_to_all_single_autograd(self.expert(x), sizes, sizes, self.group)

    def step(model: Any, x: Any) -> Any:
        loss = model(x.requires_grad_()).square().mean()
        loss.backward()
        return loss.detach()

    workload = capture_torch(lambda mesh: Experts(mesh), step, (torch.randn(16, 8),), mesh={"dp": 2, "ep": 4})
    assert collectives(workload) == {"_c10d_functional.all_to_all_single.default": 4}
    assert groups(workload, "all_to_all") == {("ep",): 4}


SCHEDULES = {"Schedule1F1B": 1, "ScheduleGPipe": 1, "ScheduleInterleaved1F1B": 2, "ScheduleInterleavedZeroBubble": 2}


def pipeline(rank: int, schedule: str = "Schedule1F1B", ranks: int = 4, micro_batches: int = 4) -> Any:
    from torch.distributed import pipelining

    parts = SCHEDULES[schedule]

    def stage(part: int, mesh: Any) -> Any:
        index, stages = rank + part * ranks, ranks * parts
        first, last = index == 0, index == stages - 1
        return pipelining.PipelineStage(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()),
            index,
            stages,
            torch.device("cpu"),
            input_args=(torch.randn(2, 8, requires_grad=not first),),
            output_args=(torch.randn(2, 8, requires_grad=True),),
            input_grads=None if first else (torch.randn(2, 8),),
            output_grads=None if last else (torch.randn(2, 8),),
            group=mesh["pp"].get_group(),
        )

    def build(mesh: Any) -> Any:
        stages = [stage(part, mesh) for part in range(parts)]
        held = torch.nn.ModuleList([one.submod for one in stages])
        kind = getattr(pipelining, schedule)
        made = kind(stages if parts > 1 else stages[0], micro_batches, loss_fn=torch.nn.functional.mse_loss)
        return made, held, torch.optim.SGD(held.parameters(), lr=0.1)

    def step(schedule: Any, module: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        ends = {"target": y, "losses": []} if rank == ranks - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **ends)
        optimizer.step()

    inputs = (torch.randn(2 * micro_batches, 8), torch.randn(2 * micro_batches, 8))
    return capture_torch(build, step, inputs, mesh={"pp": ranks}, rank=rank)


def transfers(workload: Any) -> list[tuple[str, int]]:
    ops = [op for op in read(workload.modules[0].data).main.body.ops if "stablecast.peer" in op.attrs]
    return [(op.name.rpartition(".")[2], op.attrs["stablecast.peer"] - workload.metadata["rank"]) for op in ops]


@pytest.mark.parametrize(("rank", "each"), [(0, 4), (1, 8), (3, 4)])
def test_pipeline_stage_sends_and_receives(rank: int, each: int) -> None:
    workload = pipeline(rank)
    assert collectives(workload) == {"c10d.send.default": each, "c10d.recv_.default": each}
    near = [shift for shift in (-1, 1) if 0 <= rank + shift < 4]
    assert Counter(transfers(workload)) == {(name, shift): 4 for name in ("send", "recv") for shift in near}


def test_pipeline_schedules_differ_in_order() -> None:
    ahead, back = ("send", 1), ("recv", 1)
    assert transfers(pipeline(0, "ScheduleGPipe")) == [ahead] * 4 + [back] * 4
    assert transfers(pipeline(2, ranks=3)) == [("recv", -1), ("send", -1)] * 4
    assert transfers(pipeline(0, ranks=2)) == [ahead, ahead, back, ahead, back, ahead, back, back]


@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_interleaved_stages_wrap_around_and_meet(schedule: str) -> None:
    """What one end sends along a link, the other receives; two parts a rank send around the end."""
    sent, received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for rank in range(2):
        for name, shift in transfers(pipeline(rank, schedule, ranks=2)):
            ends = (rank, rank + shift) if name == "send" else (rank + shift, rank)
            (sent if name == "send" else received)[ends] += 1
    assert sent == received == {(0, 1): 12, (1, 0): 12}


def test_c10d_collectives_of_user_code() -> None:
    import torch.distributed as dist

    def step(x: Any) -> Any:
        group = dist.group.WORLD
        out = torch.empty(8 * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(out, x)
        parts = [torch.empty_like(x) for _ in range(8)]
        dist.all_gather(parts, x)
        swapped = torch.empty_like(x)
        dist.all_to_all_single(swapped, x)
        dist.broadcast(swapped, 0)
        dist.all_reduce(swapped, op=dist.ReduceOp.MAX, group=group)
        dist.barrier()
        return out.sum() + parts[3].sum() + swapped.sum()

    workload = capture_torch(None, step, (torch.randn(16, 4),), mesh={"dp": 8}, device="cpu")
    ops = Counter(op.name for op in read(workload.modules[0].data).main.body.ops)
    assert ops["stablehlo.all_gather"] == 2
    assert ops["stablehlo.all_to_all"] == ops["stablehlo.collective_broadcast"] == ops["stablehlo.all_reduce"] == 1


def test_size_does_not_depend_on_the_number_of_devices(example: Callable[[str], Any]) -> None:
    small, large = (llama(example, {"dp": count, "tp": 4}) for count in (2, 64))
    assert collectives(small) == collectives(large)
    assert len(large.modules[0].data) < 1.05 * len(small.modules[0].data)


def test_ranks_differ_where_the_program_does(example: Callable[[str], Any]) -> None:
    first, last = (llama(example, {"tp": 4}, rank=rank) for rank in (0, 3))
    assert collectives(first) == collectives(last)
    assert first.modules[0].data != last.modules[0].data


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "tp", "tp_sp", "fsdp_tp"])
def test_eight_devices_get_what_one_process_gets(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "distributed_check.py"), kind],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(errors) == 22
    assert errors.pop("loss") < 1e-5
    assert max(errors.values()) < 1e-2, "beyond the rounding of parameter - rate x gradient in f32"
