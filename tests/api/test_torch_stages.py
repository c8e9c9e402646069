"""Captured stages of a PyTorch pipeline as roles of one step."""

from pathlib import Path
from typing import Any

import pytest

import stablecast
from stablecast._chakra import ChakraOptions
from stablecast.ir.chakra.files import load_trace

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

STAGES, BATCHES = 4, 8


def stage(rank: int) -> Any:
    """Stage `rank` of four equal ones under PyTorch's own 1F1B: a wide layer whose transfers are nothing beside it."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    first, last = rank == 0, rank == STAGES - 1

    def build(mesh: Any) -> Any:
        module = torch.nn.Sequential(torch.nn.Linear(512, 32768), torch.nn.Linear(32768, 512))
        given = torch.randn(512, 512)
        made = PipelineStage(
            module,
            rank,
            STAGES,
            torch.device("cpu"),
            input_args=(torch.randn(512, 512, requires_grad=not first),),
            output_args=(torch.randn(512, 512, requires_grad=True),),
            input_grads=None if first else (given,),
            output_grads=None if last else (given,),
            group=mesh["pp"].get_group(),
        )
        return Schedule1F1B(made, BATCHES, loss_fn=torch.nn.functional.mse_loss)

    def step(schedule: Any, x: Any, y: Any) -> None:
        schedule.step(*([x] if first else []), **({"target": y, "losses": []} if last else {}))

    inputs = (torch.randn(512 * BATCHES, 512), torch.randn(512 * BATCHES, 512))
    return stablecast.capture_torch(build, step, inputs, mesh={"pp": STAGES}, rank=rank)


@pytest.fixture(scope="module")
def stages() -> list[Any]:
    return [stage(rank) for rank in range(STAGES)]


def test_the_bubble_is_that_of_one_forward_one_backward(stages: list[Any]) -> None:
    made = stablecast.predict(stages, on="h100-sxm:4")
    assert [role.name for role in made.roles] == [f"rank {rank}" for rank in range(STAGES)]
    stretch = (BATCHES + STAGES - 1) / BATCHES
    costs = [role.compute_s for role in made.roles]
    assert min(costs) * stretch < made.step_time_s < 1.02 * max(costs) * stretch, (
        "the first stage has no input to derive"
    )
    assert made.bubble == pytest.approx((STAGES - 1) / (BATCHES + STAGES - 1), abs=0.04)
    assert {entry.role for timeline in made.timelines for entry in timeline.slices} == {
        role.name for role in made.roles
    }


def test_a_stage_alone_waits_for_nobody(stages: list[Any]) -> None:
    alone = stablecast.predict(stages[1], on="h100-sxm:4")
    assert alone.step_time_s < stablecast.predict(stages, on="h100-sxm:4").step_time_s
    assert {one.kind for one in alone.collectives} == {"send", "recv"}
    assert [one.count for one in alone.collectives] == [2 * BATCHES, 2 * BATCHES]


def sharded(width: int, rows: int) -> Any:
    """Six layers under FSDP2, each a group of its own."""
    from torch.distributed.fsdp import fully_shard

    def build(mesh: Any) -> Any:
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(6)]
        module = torch.nn.Sequential(*layers)
        for layer in layers:
            fully_shard(layer, mesh=mesh["fsdp"])
        return fully_shard(module, mesh=mesh["fsdp"])

    def step(module: Any, x: Any) -> Any:
        loss = module(x).square().mean()
        loss.backward()
        return loss

    return stablecast.capture_torch(build, step, (torch.randn(rows, width),), mesh={"fsdp": 8})


def test_fsdp_gathers_as_pytorch_recorded_it() -> None:
    """All but the first gather and the last reduction run beside layers that take longer; `--pass` is not needed."""
    workload = sharded(4096, 16384)
    made = stablecast.predict(workload, on="h100-sxm:8")
    gathers = [one for one in made.collectives if one.kind == "all_gather"]
    reductions = [one for one in made.collectives if one.kind == "reduce_scatter"]
    one = gathers[0].time_s / gathers[0].count + reductions[0].time_s / reductions[0].count
    assert sum(found.count for found in gathers) >= 6
    assert made.exposed_communication_s < 0.25 * sum(found.time_s for found in made.collectives)
    assert made.exposed_communication_s == pytest.approx(one, rel=0.3)
    assert any("as PyTorch recorded them" in text for text in made.assumptions)


def test_streams_and_waits_of_fsdp_reach_chakra(tmp_path: Path) -> None:
    """A gather waits for the copy out of two layers before (an event, no data) and for no product beside it."""
    workload = sharded(64, 16)
    for order in ("data", "stream"):
        prefix = tmp_path / order / "fsdp"
        stablecast.to_chakra(workload, out=prefix, on="h100-sxm:8", options=ChakraOptions(order=order))
        nodes = load_trace(prefix.with_name("fsdp.0.et")).nodes
        deps = {node.id: {*node.data_deps, *node.ctrl_deps} for node in nodes}
        before: dict[int, set[int]] = {}
        for number in sorted(deps):
            before[number] = deps[number].union(*(before[dep] for dep in deps[number]))
        ends = ("all_gather_copy_in.default", "split_with_sizes_copy.default", "aten.mm")
        copies_in, copies_out, products = ([node.id for node in nodes if node.name.endswith(end)] for end in ends)
        gathers = [node.id for node in nodes if "all_gather_" in node.name and "COLL" in node.name]
        for layer in range(6):
            assert gathers[layer] in deps[copies_out[layer]]
            assert gathers[layer] in deps[products[layer]]
            assert (copies_out[layer] in deps[products[layer]]) == (order == "stream")
            if layer >= 1:
                assert products[layer - 1] not in before[gathers[layer]]
                assert (products[layer - 1] in deps[copies_out[layer]]) == (order == "stream")
                assert (copies_in[layer - 1] in deps[copies_in[layer]]) == (order == "stream")
            if layer >= 2:
                assert copies_out[layer - 2] in before[gathers[layer]]
