"""Collectives of a measured run: kind, message, group, time."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from stablecast.ir.trace_events import NO_ARGS, Category, TraceEvents
from stablecast.validation.kernel_names import MeasuredClass, collective_kind
from stablecast.validation.measured import MeasuredRun

ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "float": 4,
    "double": 8,
    "half": 2,
    "c10::half": 2,
    "bfloat16": 2,
    "c10::bfloat16": 2,
    "int": 4,
    "long": 8,
    "long int": 8,
    "short": 2,
    "byte": 1,
    "char": 1,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of an element, by Kineto's names of types in small letters."""


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One collective of a run.

    `nbytes`: of one device's operand, of an all-gather its result; 0 where the trace does not say. `group_size`: 0
    where it does not say. `ranks`: of the group, where listed. `exposed_s`: the part that no other work hides.
    """

    position: int
    kind: str
    nbytes: float
    group_size: int
    ranks: tuple[int, ...]
    step: int
    start_s: float
    duration_s: float
    exposed_s: float
    dtype: str = ""


def collectives(run: MeasuredRun) -> tuple[MeasuredCollective, ...]:
    """Every collective of the run in order."""
    from stablecast.validation.intervals import clip, length
    from stablecast.validation.kernel_names import COMPUTE

    compute = run.intervals(run.is_class(*COMPUTE))
    found: list[MeasuredCollective] = []
    for position in np.nonzero(run.is_class(MeasuredClass.COMMUNICATION))[0].tolist():
        start, duration = float(run.start_s[position]), float(run.duration_s[position])
        hidden = length(clip(compute, start, start + duration))
        kind, nbytes, size, ranks, dtype = _describe(run, position)
        step = int(run.step[position])
        found.append(
            MeasuredCollective(position, kind, nbytes, size, ranks, step, start, duration, duration - hidden, dtype)
        )
    return tuple(found)


def _describe(run: MeasuredRun, position: int) -> tuple[str, float, int, tuple[int, ...], str]:
    events = run.events
    event = int(run.work[position])
    own = events.args_of(event)
    above = _annotation(events, run, event)
    called = events.args_of(above) if above >= 0 else NO_ARGS
    kind = collective_kind(str(own.get("Collective name", "")))
    if not kind and above >= 0:
        kind = collective_kind(events.name_of(above).removeprefix("nccl:"))
    kind = kind or collective_kind(events.name_of(event))
    dtype = str(own.get("dtype", "")) or next(iter(_types(called)), "")
    nbytes = _message(kind, own, called, dtype) or float(events.nbytes[event])
    size = int(own.get("Group size") or 0) or _world(events)
    return kind, nbytes, size, _ranks(own.get("Process Group Ranks")), dtype


def _annotation(events: TraceEvents, run: MeasuredRun, event: int) -> int:
    """The host event around the launch that names the collective, -1 without one."""
    launch = int(run.launches.launch[event])
    for index in run.launches.above(launch):
        if events.name_of(index).startswith("nccl:"):
            return index
    return -1


def _message(kind: str, own: Mapping[str, Any], called: Mapping[str, Any], dtype: str) -> float:
    size = ELEMENT_BYTES.get(dtype.lower(), 0)
    key = "Out msg nelems" if kind == "all_gather" else "In msg nelems"
    if own.get(key) is not None:
        return float(own[key]) * size
    return float(sum(math.prod(shape) for shape in shapes_of(called))) * size


def shapes_of(args: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The shapes of tensors in `Input Dims`, those in lists too; scalars and what has no shape are left out."""
    dims: Any = args.get("Input Dims")
    return list(_shapes(dims)) if isinstance(dims, list) else []


def _shapes(dims: Any) -> Iterator[tuple[int, ...]]:
    for shape in cast("list[Any]", dims):
        sizes = cast("list[Any]", shape) if isinstance(shape, list) else []
        if sizes and all(isinstance(size, int) for size in sizes):
            yield tuple(sizes)
        elif any(isinstance(size, list) for size in sizes):
            yield from _shapes(sizes)


def _types(called: Mapping[str, Any]) -> list[str]:
    types: Any = called.get("Input type")
    return [str(name) for name in cast("list[Any]", types)] if isinstance(types, list) else []


def _ranks(text: Any) -> tuple[int, ...]:
    if not isinstance(text, str):
        return ()
    try:
        return tuple(int(rank) for rank in json.loads(text))
    except (json.JSONDecodeError, TypeError, ValueError):
        return ()


def _world(events: TraceEvents) -> int:
    said: Any = events.metadata.get("distributedInfo")
    return int(cast("dict[str, Any]", said).get("world_size") or 0) if isinstance(said, dict) else 0


def annotated_collectives(events: TraceEvents) -> dict[str, int]:
    """How often the host called each kind of collective."""
    found: dict[str, int] = {}
    for index in np.nonzero(events.is_a(Category.ANNOTATION) & ~events.on_device)[0].tolist():
        name = events.name_of(index)
        if name.startswith("nccl:"):
            kind = collective_kind(name.removeprefix("nccl:"))
            found[kind] = found.get(kind, 0) + 1
    return found
