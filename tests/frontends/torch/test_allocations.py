"""What a captured step asks of the allocator, and when it lets go."""

from typing import Any

import pytest

from stablecast.ir import capture_file
from stablecast.ir.allocations import Allocations

torch = pytest.importorskip("torch")

from stablecast.frontends.torch import capture_torch  # noqa: E402

KIB = 1 << 10


def asked(step: Any, *inputs: Any, build: Any = None, mesh: Any = None) -> Allocations:
    workload = capture_torch(build, step, inputs, mesh=mesh)
    assert workload.schedule is not None
    found = workload.schedule.allocations
    assert found is not None
    again = capture_file.from_bytes(capture_file.to_bytes(workload), "a capture").schedule
    assert again is not None
    assert again.allocations == found
    return found


def test_blocks_live_as_long_as_python_holds_them() -> None:
    def step(x: Any) -> Any:
        double = x * 2
        more = double + 1
        del double
        view = more.view(-1)
        total = view.sum()
        del more, view
        return total.reshape(1)

    found = asked(step, torch.zeros(16, 16))
    assert found.nbytes == (KIB, KIB, 4)
    assert found.order == (0, 1, ~0, 2, ~1)  # the total lives on
    assert found.calls == (1, 2, 4)
    assert found.reads == (2, 4, 5)


def test_what_is_there_before_or_written_in_place_is_no_request() -> None:
    held = torch.nn.Parameter(torch.zeros(16, 16))

    def step(x: Any) -> None:
        with torch.no_grad():
            x.add_(1)
            x.t().copy_(x)

    assert asked(step, held.detach()).order == ()


def test_saved_tensors_live_until_the_backward_pass_has_used_them() -> None:
    def step(x: Any, w: Any) -> None:
        w.requires_grad_()
        hidden = x @ w
        torch.sigmoid(hidden).sum().backward()

    found = asked(step, torch.zeros(8, 16), torch.zeros(16, 16))
    hidden, gate = 0, 1
    assert found.nbytes[:2] == (512, 512)
    ends = {~one: place for place, one in enumerate(found.order) if one < 0}
    assert found.order.index(gate) < ends[gate] < ends[hidden]  # the local name holds on to the first to the end
    grads = [number for number in range(len(found.nbytes)) if number not in ends]
    assert [found.nbytes[number] for number in grads] == [KIB]


def test_requests_know_their_stream() -> None:
    def step(x: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            y = x + 1
        return y + 1

    assert asked(step, torch.zeros(16, 16)).streams == (1, 0)


def test_fsdp_empties_and_refills_what_it_gathered() -> None:
    from torch.distributed.fsdp import fully_shard

    def build(mesh: Any) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
        for layer in model:
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    def step(model: Any, x: Any) -> None:
        model(x).sum().backward()

    found = asked(step, torch.zeros(4, 64), build=build, mesh={"dp": 4})
    weight, shard = 64 * 64 * 4, 64 * 64 * 4 // 4
    # a weight is copied out of the gathered buffer twice: forward and, as it was emptied in between, backward
    ends = {~one for one in found.order if one < 0}
    whole = [number for number, size in enumerate(found.nbytes) if size == weight]
    assert all(number in ends for number in whole)
    assert len([number for number in whole if found.streams[number]]) >= 4  # gathered on a stream of their own
    kept = [found.nbytes[number] for number in range(len(found.nbytes)) if number not in ends]
    assert kept == [shard] * 2
