"""Runs on the processor itself: the host's own operators as the work of a device."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from stablecast.frontends.traces.builder import EventBuilder
from stablecast.ir.trace_events import Category, TraceEvents
from stablecast.validation.host_time import host_time
from stablecast.validation.launches import find_launches
from stablecast.validation.operators import launches_nothing

_END: Final = "end: "
_LEAST_OWN: Final = 0.5
_PRODUCTS: Final = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
"""Operators that multiply themselves, whatever they call besides."""
_WORKS: Final = re.compile(r"^(?!autograd::|torch::|c10d::)\w+::")
_CORRELATION: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class _Piece:
    """Work of the processor: the event that it is of, and when it ran."""

    event: int
    start_s: float
    end_s: float


def host_work(events: TraceEvents) -> TraceEvents:
    """`events` with the processor's work added as that of device 0, where the trace has none of another device.

    XLA's ops on the processor, from their start to the mark of their end; else PyTorch's operators, each with the time
    that it does not spend in others. Unchanged where there is neither, and where nothing has a time.
    """
    pieces = [*_xla(events)] or [*_torch(events)]
    if not any(piece.end_s > piece.start_s for piece in pieces):
        return events
    builder = EventBuilder()
    for index in range(len(events)):
        _copy(events, index, builder)
    for number, piece in enumerate(pieces):
        _add(events, piece, _CORRELATION + number, builder)
    builder.metadata.update({**events.metadata, "devices": [0], "device_names": {0: "cpu"}})
    builder.stream_names.update(events.stream_names)
    return builder.build(
        rank=events.rank,
        device="cpu",
        source=events.source,
        epoch_s=events.epoch_s,
        damage=events.damage,
        skipped=events.skipped,
    )


def _copy(events: TraceEvents, index: int, builder: EventBuilder) -> None:
    builder.add(
        events.name_of(index),
        float(events.start_s[index]),
        float(events.duration_s[index]),
        int(events.stream[index]),
        Category(events.categories[events.category[index]]),
        on_device=bool(events.on_device[index]),
        device=int(events.device_index[index]),
        correlation=int(events.correlation[index]),
        nbytes=float(events.nbytes[index]),
        args=events.args.get(index),
    )


def _add(events: TraceEvents, piece: _Piece, correlation: int, builder: EventBuilder) -> None:
    """The work, and a launch of no length inside the operator, which ties the two together."""
    name, stream, args = events.name_of(piece.event), int(events.stream[piece.event]), events.args.get(piece.event)
    begin = float(events.start_s[piece.event])
    builder.add("launch", begin, 0.0, stream, Category.RUNTIME, on_device=False, correlation=correlation)
    builder.add(
        name,
        piece.start_s,
        piece.end_s - piece.start_s,
        0,
        Category.KERNEL,
        on_device=True,
        device=0,
        correlation=correlation,
        args=args if args and "hlo_op" in args else None,
    )


def _xla(events: TraceEvents) -> Iterator[_Piece]:
    """Ops of compiled programs; an op that runs on other threads ends where its mark says."""
    ends: dict[str, list[float]] = {}
    ops: list[int] = []
    for index in range(len(events)):
        name = events.name_of(index)
        if events.args_of(index).get("hlo_op"):
            ops.append(index)
        elif name.startswith(_END):
            ends.setdefault(name.removeprefix(_END), []).append(float(events.start_s[index]))
    for index in ops:
        start, end = float(events.start_s[index]), float(events.end_s[index])
        marks = ends.get(events.name_of(index), [])
        place = int(np.searchsorted(marks, start))
        yield _Piece(index, start, max(marks.pop(place), start) if place < len(marks) else end)


def _torch(events: TraceEvents) -> Iterator[_Piece]:
    """Operators with the last part of their time, as long as what they do not spend in other operators."""
    working = np.array(
        [_WORKS.match(name) is not None and not launches_nothing(name) for name in events.names], dtype=np.bool_
    )
    ops = np.nonzero(events.is_a(Category.OP) & ~events.on_device & working[events.name])[0]
    if not len(ops):
        return
    start, end = events.start_s[ops], events.end_s[ops]
    own = host_time(start, end, ()).own_s.tolist()
    callers = {int(parent) for parent in _callers(events, ops.tolist())}
    for position, index in enumerate(ops.tolist()):
        length = float(events.duration_s[index])
        hands_on = index in callers and events.name_of(index) not in _PRODUCTS
        if hands_on and own[position] < _LEAST_OWN * length:
            continue
        yield _Piece(index, float(end[position]) - own[position], float(end[position]))


def _callers(events: TraceEvents, ops: list[int]) -> Iterator[int]:
    """Of each operator, the nearest one around it that works too."""
    launches = find_launches(events)
    chosen = set(ops)
    for index in ops:
        above = (event for event in launches.above(index) if event != index and event in chosen)
        found = next(above, None)
        if found is not None:
            yield found
