"""The memory that a captured step of PyTorch asks for, with what the capture does not see: state, and temporaries."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stablecast.ir.allocations import Allocations
from stablecast.ir.dtypes import dtype
from stablecast.ir.program import Argument, ArgumentKind
from stablecast.ir.schedule import Launch, LaunchTable
from stablecast.ir.scopes import family, parse_scope
from stablecast.lowering.caching_allocator import round_size
from stablecast.lowering.memory import UNNAMED

_FLASH_BACKWARD: Final = "aten._scaled_dot_product_flash_attention_backward"
_PRODUCTS: Final = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm"})
_OPTIMIZER: Final = "optimizer"
_BACKWARD: Final = "backward"


def step_allocations(recorded: Allocations, arguments: Sequence[Argument], launches: LaunchTable) -> Allocations:
    """`recorded` with the arguments of the step, temporaries of its kernels, and threads that call cuBLAS.

    The state of an optimiser is laid down where it first runs, as PyTorch does it in the first step.
    """
    calls = launches.launches
    first = next((number for number, call in enumerate(calls) if call.module_path.startswith(_OPTIMIZER)), len(calls))
    late = [arg.type.nbytes for arg in arguments if arg.kind is ArgumentKind.OPT_STATE]
    held = [arg.type.nbytes for arg in arguments if arg.kind is not ArgumentKind.OPT_STATE]
    made = _with_temporaries(recorded, calls)
    place = next((at for at, one in enumerate(made.order) if one >= 0 and made.calls[one] > first), len(made.order))
    products = [call for call in calls if call.op.rpartition(".")[0] in _PRODUCTS]
    threads = len({call.module_path.startswith(_BACKWARD) for call in products})
    return replace(made, held=tuple(held), late=tuple(late), late_at=place, threads=threads)


def _with_temporaries(recorded: Allocations, calls: Sequence[Launch]) -> Allocations:
    """`recorded` with the buffers that kernels need while they run, beside the results of their calls."""
    sizes = {number + 1: temporaries(call) for number, call in enumerate(calls)}
    nbytes, streams, owners = list(recorded.nbytes), list(recorded.streams), list(recorded.calls)
    reads = list(recorded.reads)
    order: list[int] = []
    for one in recorded.order:
        order.append(one)
        added = sizes.pop(recorded.calls[one], ()) if one >= 0 else ()
        numbers = range(len(nbytes), len(nbytes) + len(added))
        nbytes += added
        streams += [recorded.streams[one]] * len(added)
        owners += [recorded.calls[one]] * len(added)
        reads += [recorded.calls[one]] * len(added)
        order += [*numbers, *(~number for number in numbers)]
    return Allocations(tuple(nbytes), tuple(streams), tuple(owners), tuple(order), tuple(reads))


def until_last_use(asked: Allocations, launches: LaunchTable, compiled: Callable[[Launch], bool]) -> Allocations:
    """`asked` where calls that are `compiled` let go of memory behind its last reader, as compiled graphs do.

    Eager keeps what a name or a checkpoint holds, whether or not the backward pass reads it.
    """
    calls = launches.launches
    moved: dict[int, list[int]] = {}
    gone: set[int] = set()
    ends = {~one: place for place, one in enumerate(asked.order) if one < 0}
    requests = [(place, asked.calls[one]) for place, one in enumerate(asked.order) if one >= 0]
    known = [made for _, made in requests]
    for number, end in ends.items():
        made, last = asked.calls[number], max(asked.reads[number], asked.calls[number])
        if not compiled(calls[max(made - 1, 0)]):
            continue
        after = bisect_right(known, last)
        place = requests[after][0] if after < len(requests) else len(asked.order)
        if place < end:
            moved.setdefault(place, []).append(~number)
            gone.add(~number)
    order = [
        kept
        for place, one in enumerate(asked.order)
        for kept in (*moved.get(place, ()), *(() if one in gone else (one,)))
    ]
    return replace(asked, order=tuple(order))


def temporaries(call: Launch) -> tuple[int, ...]:
    """Bytes of the buffers that the kernel behind a call needs beside operands and results.

    FlashAttention's backward pass sums the gradient of queries in float32, keeps one number a row, and makes gradients
    of keys and values for every query head where heads are shared (`mha_bwd` of
    `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`). All other calls: none known.
    """
    if call.op.rpartition(".")[0] != _FLASH_BACKWARD or len(call.shapes) < 3 or len(call.shapes[1]) != 4:
        return ()
    (batch, heads, rows, size), (_, kv_heads, keys, _) = call.shapes[1], call.shapes[2]
    padded_rows, padded_size = -(-rows // 128) * 128, 256 if size > 192 else -(-size // 32) * 32
    sums = 4 * batch * heads * padded_rows
    if heads == kv_heads:
        return (sums, sums * padded_size)
    spread = dtype(call.dtypes[2]).nbytes(math.prod((batch, keys, heads, size)))
    return (sums, sums * padded_size, int(spread), int(spread))


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the most in use at once over a steady step, and what holds them beside arguments, by scope."""

    nbytes: int
    by_scope: Mapping[str, int]


def peak(asked: Allocations, launches: LaunchTable) -> Peak:
    """The peak of `asked`, every block rounded up as the allocator does it."""
    sizes = [round_size(nbytes) for nbytes in asked.nbytes]
    live = most = sum(map(round_size, filter(None, (*asked.held, *asked.late))))
    at = 0
    for place, one in enumerate(asked.order):
        live += sizes[one] if one >= 0 else -sizes[~one]
        if live > most:
            most, at = live, place + 1
    held: dict[int, None] = {}
    for one in asked.order[:at]:
        if one >= 0:
            held[one] = None
        else:
            held.pop(~one, None)
    ends = {~one: place for place, one in enumerate(asked.order) if one < 0}
    found: dict[str, int] = {}
    for number in held:
        label = _label(asked, number, ends.get(number), launches.launches)
        found[label] = found.get(label, 0) + sizes[number]
    return Peak(most, dict(sorted(found.items(), key=lambda item: -item[1])))


def _label(asked: Allocations, number: int, end: int | None, calls: Sequence[Launch]) -> str:
    """The module that asked for request `number`; `(saved)` if made before the backward pass and given back in it."""
    made = calls[min(max(asked.calls[number] - 1, 0), len(calls) - 1)].module_path
    label = family(parse_scope(f"{made}/op").label) or UNNAMED
    if end is None or made.startswith(_BACKWARD):
        return label
    last = next(asked.calls[one] for one in reversed(asked.order[:end]) if one >= 0)
    return label + (" (saved)" if calls[max(last - 1, 0)].module_path.startswith(_BACKWARD) else "")
