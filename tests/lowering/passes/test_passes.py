"""Schedule passes: what they move, what they keep, and what they cost in memory."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from stablecast.ir.device_program import Body, Buffers, Collective, DeviceProgram, Kernel, Loop, Node
from stablecast.ir.errors import InputError
from stablecast.ir.groups import over_axes
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable
from stablecast.ir.work import SymbolicWork
from stablecast.lowering.copies import Copy, with_copies
from stablecast.lowering.passes import default_passes, find_pass, illegal, pass_names, pass_summaries, run_passes
from stablecast.lowering.passes import registry as registered
from stablecast.lowering.passes.body import peak_bytes

MB = 2**20
GROUPS = over_axes("mesh", [("data", 8)], ["data"])
MATMUL, SMALL = 0, 1
TABLE = KernelTable(
    (
        KernelRow(KernelClass.MATMUL, "bf16", m=1024, n=1024, k=1024, matmul_flops=2e12, bytes_read=1e6),
        KernelRow(elems=100, bytes_read=100, bytes_written=100),
    ),
    np.zeros(2),
)


def program(*body: Node, temp_bytes: int = 1000 * MB) -> DeviceProgram:
    return DeviceProgram("step", body, TABLE, SymbolicWork(), 8, buffers=Buffers(temp_bytes=temp_bytes))


def matmul(*deps: int, scope: str = "", held: int = MB, ahead: bool = False) -> Kernel:
    return Kernel(MATMUL, deps=deps, scope=scope, held_bytes=held, ahead=ahead)


def cut(*deps: int) -> Kernel:
    """A slice of stacked parameters."""
    return Kernel(SMALL, deps=deps, held_bytes=MB, ahead=True)


def gather(*deps: int, ahead: bool = True, mb: int = 8) -> Collective:
    return Collective("all_gather", GROUPS, mb * MB // 8, mb * MB, deps=deps, held_bytes=mb * MB, ahead=ahead)


def reduce(*deps: int, mb: int = 8, kind: str = "reduce_scatter") -> Collective:
    return Collective(kind, GROUPS, mb * MB, mb * MB // 8, "add", deps=deps, held_bytes=mb * MB // 8)


def fsdp(layers: int) -> list[Node]:
    """Forward of layers whose parameters are gathered right before they are read."""
    body: list[Node] = []
    for layer in range(layers):
        body.append(gather())
        body.append(matmul(*((len(body) - 2,) if layer else ()), len(body) - 1, scope=f"jit(f)/layer{layer}/dot"))
    return body


def scan(trips: int) -> DeviceProgram:
    trip = (cut(), gather(0), matmul(1), matmul(2))
    return program(cut(), Loop(trip, trips, deps=(0,)), matmul(1))


def backward(layers: int) -> list[Node]:
    """Gradients that a data-parallel step reduces at its end, and updates that read them."""
    body: list[Node] = [matmul()]
    grads: list[int] = []
    for _ in range(layers):
        body.append(matmul(len(body) - 1, scope="dx"))
        body.append(matmul(len(body) - 1, scope="dw"))
        grads.append(len(body) - 1)
        last = body[-2]
        body[-2], body[-1] = last, body[-1]
    reduces = []
    for grad in grads:
        body.append(reduce(grad, kind="all_reduce"))
        reduces.append(len(body) - 1)
    body += [Kernel(SMALL, deps=(one,)) for one in reduces]
    return body


def kinds(body: Body) -> list[str]:
    return [node.kind if isinstance(node, Collective) else type(node).__name__ for node in body]


def shared(layers: int) -> list[Node]:
    """Gathers far from their readers, which need a counter that others read too."""
    body: list[Node] = [Kernel(SMALL, held_bytes=4, ahead=True)]
    for _ in range(layers):
        body.append(cut(0))
        body.append(gather(len(body) - 1))
    for layer in range(layers):
        body.append(Kernel(SMALL, deps=(2 * layer + 2,), held_bytes=MB, ahead=True))
        body.append(matmul(0, len(body) - 1, *((len(body) - 2,) if layer else ())))
    return body


EVERY: dict[str, Callable[[], DeviceProgram]] = {
    "fsdp": lambda: program(*fsdp(6)),
    "shared": lambda: program(Loop(tuple(shared(4)), 5), *shared(3)),
    "scattered": lambda: program(matmul(), reduce(0), matmul(1), matmul(2), Loop((matmul(), reduce(0)), 3, deps=(3,))),
    "scan": lambda: scan(7),
    "backward": lambda: program(*backward(5)),
    "tensor": lambda: program(
        matmul(), gather(0, ahead=False), matmul(1), reduce(2), matmul(3), reduce(4, kind="all_reduce"), matmul(5)
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "async",
        "latency-hiding",
        "fsdp-prefetch",
        "fsdp-prefetch=2",
        "fsdp-prefetch=0",
        "all-gather-reorder",
        "bucket-gradients",
        "bucket-gradients=1000",
        "collective-matmul",
        "pin",
    ],
)
@pytest.mark.parametrize("which", sorted(EVERY))
def test_every_pass_keeps_what_nodes_wait_for(which: str, name: str) -> None:
    change, own = find_pass(name)
    assert own
    assert illegal(change, EVERY[which]()) == ""


def test_a_gather_runs_beside_the_layer_before() -> None:
    changed = run_passes(program(*fsdp(4)), ["fsdp-prefetch=1"])
    assert kinds(changed.body) == ["all_gather"] * 2 + [
        "Kernel",
        "all_gather",
        "Kernel",
        "all_gather",
        "Kernel",
        "Kernel",
    ]
    assert all(node.asynchronous for node in changed.body if isinstance(node, Collective))
    two = run_passes(program(*fsdp(4)), ["fsdp-prefetch=2"])
    assert kinds(two.body) == ["all_gather"] * 3 + ["Kernel", "all_gather", "Kernel", "Kernel", "Kernel"]
    every = run_passes(program(*fsdp(4)), ["all-gather-reorder"])
    assert kinds(every.body) == ["all_gather"] * 4 + ["Kernel"] * 4
    assert kinds(run_passes(program(*fsdp(4)), ["fsdp-prefetch=0"]).body) == kinds(tuple(fsdp(4)))


def test_copies_around_gathers_go_with_them() -> None:
    trip = with_copies((cut(), gather(0), matmul(1), matmul(2)), {1: Copy(1, 8.0 * MB, before=True)}, lambda _: SMALL)
    changed = run_passes(program(cut(), Loop(trip, 7, deps=(0,)), matmul(1)), ["fsdp-prefetch=1"])
    turned = next(node for node in changed.body if isinstance(node, Loop))
    assert kinds(turned.body)[:3] == ["Kernel", "Kernel", "all_gather"]
    assert turned.count == 6


def test_gathers_ahead_hold_memory() -> None:
    """One unit of 8 MB and an activation in and out by default; another unit for each one ahead."""
    plain = program(*fsdp(4))
    assert peak_bytes(plain.body) == 10 * MB
    for text, more in (("fsdp-prefetch=1", 8), ("fsdp-prefetch=2", 16), ("all-gather-reorder", 24)):
        buffers = run_passes(plain, [text]).buffers
        assert buffers is not None
        assert buffers.temp_bytes == (1000 + more - (1 if text == "all-gather-reorder" else 0)) * MB, text


def test_a_loop_gathers_for_its_next_trip() -> None:
    changed = run_passes(scan(7), ["fsdp-prefetch=1"])
    assert kinds(changed.body) == ["Kernel", "Kernel", "all_gather", "Loop", "Loop", "Kernel"]
    turned, rest = changed.body[3], changed.body[4]
    assert isinstance(turned, Loop)
    assert isinstance(rest, Loop)
    assert (turned.count, rest.count) == (6, 1)
    assert kinds(turned.body) == ["Kernel", "all_gather", "Kernel", "Kernel"]
    assert [node.deps for node in turned.body] == [(), (0,), (), (2,)]
    assert kinds(rest.body) == ["Kernel", "Kernel"]
    assert changed.body[5].deps == (4,)
    buffers = changed.buffers
    assert buffers is not None
    assert buffers.temp_bytes > 1000 * MB
    assert kinds(run_passes(scan(1), ["fsdp-prefetch=1"]).body) == ["Kernel", "Loop", "Kernel"]


def test_latency_hiding_starts_reductions_in_the_backward_pass() -> None:
    changed = run_passes(program(*backward(5)), ["latency-hiding"])
    order = kinds(changed.body)
    assert order.index("all_reduce") < len(order) - 8
    assert sorted(order) == sorted(kinds(tuple(backward(5))))


def test_latency_hiding_gathers_no_earlier_than_it_must() -> None:
    """A layer takes 5 ms at the nominal rates, a gather 0.1 ms: one layer ahead is enough."""
    changed = run_passes(program(*fsdp(6)), ["latency-hiding"])
    assert kinds(changed.body[:5]) == ["all_gather", "all_gather", "Kernel", "all_gather", "Kernel"]


def test_buckets() -> None:
    whole = program(*backward(5))
    assert kinds(run_passes(whole, ["bucket-gradients=16"]).body).count("all_reduce") == 3
    assert kinds(run_passes(whole, ["bucket-gradients=1000"]).body).count("all_reduce") == 1
    sums = [
        node.operand_bytes for node in run_passes(whole, ["bucket-gradients=16"]).body if isinstance(node, Collective)
    ]
    assert sums == [16 * MB, 16 * MB, 8 * MB]
    order = kinds(run_passes(whole, ["bucket-gradients=16"]).body)
    assert order.index("all_reduce") == 5, "right behind the second gradient"
    chained = program(matmul(), reduce(0, kind="all_reduce"), matmul(1), reduce(2, kind="all_reduce"))
    assert kinds(run_passes(chained, ["bucket-gradients"]).body).count("all_reduce") == 2


def test_a_product_goes_round_the_ring_with_its_gather() -> None:
    changed = run_passes(program(matmul(), gather(0, ahead=False), matmul(1), matmul(2)), ["collective-matmul"])
    assert kinds(changed.body) == ["Kernel", *["collective_permute", "Kernel"] * 7, "Kernel", "Kernel"]
    pieces = [node for node in changed.body if isinstance(node, Kernel) and node.row == 2]
    assert len(pieces) == 8
    row = changed.table.rows[2]
    assert (row.m, row.matmul_flops) == (128, 2e12 / 8)
    assert changed.table.count.tolist() == [2.0, 0.0, 8.0]
    permute = changed.body[1]
    assert isinstance(permute, Collective)
    assert permute.operand_bytes == MB
    scattered = run_passes(program(matmul(), reduce(0), matmul(1)), ["collective-matmul"])
    assert kinds(scattered.body) == [*["Kernel", "collective_permute"] * 7, "Kernel", "Kernel"]
    small = program(matmul(), gather(0, ahead=False), matmul(1))
    assert run_passes(small, ["collective-matmul=9"]).body == small.body


def test_the_order_of_issue_as_dependencies() -> None:
    """A kernel waits for the kernel and the gather before it; one that runs beside is waited for by its readers."""
    body = [matmul(), gather(), matmul(), matmul(1)]
    held = run_passes(program(*body), ["pin"]).body
    assert [node.after for node in held] == [(), (0,), (1,), (2,)]
    beside = run_passes(program(*body), ["async", "pin"]).body
    assert [node.after for node in beside] == [(), (0,), (0,), (2,)]


def lose(body: DeviceProgram) -> DeviceProgram:
    return replace(body, body=body.body[:-1])


def forget(body: DeviceProgram) -> DeviceProgram:
    return replace(body, body=tuple(replace(node, deps=()) for node in body.body))


def hoist(body: DeviceProgram) -> DeviceProgram:
    """Takes the last node of a trip, which needs the trip before, out in front of the loop."""
    loop = body.body[1]
    assert isinstance(loop, Loop)
    out = [replace(loop.body[2], deps=()) for _ in range(loop.count if isinstance(loop.count, int) else 0)]
    inner = (*loop.body[:2], replace(loop.body[3], deps=(1,)))
    first = len(out) + 1
    return replace(
        body,
        body=(
            body.body[0],
            *out,
            replace(loop, body=inner, deps=tuple(range(first))),
            replace(body.body[2], deps=(first,)),
        ),
    )


def reversed_order(body: DeviceProgram) -> DeviceProgram:
    return replace(body, body=body.body[::-1])


@pytest.mark.parametrize(
    ("change", "which", "fault"),
    [
        (lose, "fsdp", "runs 0 times"),
        (forget, "fsdp", "no longer waits for"),
        (hoist, "scan", "no longer waits for"),
        (reversed_order, "backward", "does not come before it"),
        (
            lambda one: replace(one, table=KernelTable.of([replace(TABLE.rows[0], matmul_flops=1.0), TABLE.rows[1]])),
            "fsdp",
            "FLOPs",
        ),
    ],
)
def test_what_a_pass_may_not_do(change: Callable[[DeviceProgram], DeviceProgram], which: str, fault: str) -> None:
    assert fault in illegal(change, EVERY[which]())


def test_a_third_partys_pass_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "find_pass", lambda text: (forget, False))
    with pytest.raises(InputError, match=r"pass 'mine' breaks the program: .* no longer waits for"):
        run_passes(program(*fsdp(3)), ["mine"])


def test_names() -> None:
    assert {
        "async",
        "latency-hiding",
        "fsdp-prefetch",
        "all-gather-reorder",
        "bucket-gradients",
        "collective-matmul",
    } <= set(pass_names())
    assert all(pass_summaries().values())
    for text, message in (
        ("fsdp-prefetsh", "unknown pass 'fsdp-prefetsh'"),
        ("fsdp-prefetch=x", "number of units"),
        ("async=1", "takes no value"),
        ("bucket-gradients=-1", "takes MB"),
        ("collective-matmul=big", "takes MB"),
    ):
        with pytest.raises(InputError, match=message):
            find_pass(text)
    assert default_passes("xla") == ("latency-hiding",)
    assert default_passes("inductor") == ("fsdp-prefetch=1", "async")
    assert default_passes("eager", recorded=True) == default_passes("eager") == ()
    assert default_passes("as-written") == ()
