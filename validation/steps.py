"""Steps of a measured run: where one begins and ends, by annotation, by compiled module, or by repetition."""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import DEVICE_WORK, Category, TraceEvents

IntArray = npt.NDArray[np.int64]

STEP_NAMES: Final = re.compile(
    r"^(ProfilerStep#\d+|(train|eval|valid|test)?[ _]?(step|iteration|iter)[ _#:]*\d*)$", re.IGNORECASE
)
"""Annotations that mark a whole step."""

MARKS: Final = (
    re.compile(r"^enumerate\(DataLoader\)#"),
    re.compile(r"^Optimizer\.zero_grad#"),
    re.compile(r"^Optimizer\.step#"),
)
"""Annotations that occur once a step, in this order of preference: a step lasts from one to the next."""

_SAME_SHARE: Final = 0.95
_CANDIDATES: Final = 200


@dataclass(frozen=True, slots=True)
class Step:
    """One step, seconds of the trace's clock: on the host where it is annotated there, else on the device."""

    name: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in order, how they were found (`basis`), and whether their times are the host's (`on_host`)."""

    steps: tuple[Step, ...]
    basis: str
    on_host: bool


def find_steps(events: TraceEvents, device: int, name: str = "") -> Steps:
    """The steps of the run on `device`.

    `name`: an annotation to go by; without it whole-step annotations come first, then XLA modules, marks that occur
    once a step, and repetition of the kernels' order. Where nothing repeats, the device's whole activity is one step.
    Raises `InputError` where `name` is not in the trace.
    """
    if name:
        found = _named(events, name)
        if found is None:
            raise InputError(f"no annotation '{name}' is in {events.source}")
        return found
    return (
        _annotated(events)
        or _device_steps(events, device)
        or _modules(events, device)
        or _marked(events)
        or _repeated(events, device)
        or _whole(events, device)
    )


def _spans(events: TraceEvents, indices: IntArray) -> tuple[Step, ...]:
    return tuple(
        Step(events.name_of(index), float(events.start_s[index]), float(events.end_s[index]))
        for index in indices.tolist()
    )


def _annotated(events: TraceEvents) -> Steps | None:
    names = np.array([STEP_NAMES.match(name) is not None for name in events.names], dtype=np.bool_)
    numbered = np.zeros(len(events), dtype=np.bool_)
    numbered[[index for index, args in events.args.items() if "step_num" in args]] = True
    mask = (
        (names[events.name] | numbered)
        & events.is_a(Category.ANNOTATION, Category.OTHER)
        & ~events.on_device
        & (events.duration_s > 0)
    )
    indices = _outermost(events, np.nonzero(mask)[0])
    work = events.start_s[events.on_device & events.is_a(*DEVICE_WORK)]
    launches = events.is_a(Category.RUNTIME)
    busy = [
        index
        for index in indices.tolist()
        if _inside(events.start_s[launches], events, index) or _inside(work, events, index)
    ]
    return Steps(_spans(events, np.array(busy)), "annotation", True) if busy else None


def _inside(times: npt.NDArray[np.float64], events: TraceEvents, index: int) -> bool:
    return bool(((times >= events.start_s[index]) & (times < events.end_s[index])).any())


def _outermost(events: TraceEvents, indices: IntArray) -> IntArray:
    """Those that do not lie within one before them."""
    kept: list[int] = []
    end = -1.0
    for index in indices.tolist():
        if events.start_s[index] >= end - 1e-9:
            kept.append(index)
            end = float(events.end_s[index])
    return np.array(kept, dtype=np.int64)


def _named(events: TraceEvents, name: str) -> Steps | None:
    names = np.array([known == name or known.startswith(name + "#") for known in events.names], dtype=np.bool_)
    indices = np.nonzero(names[events.name] & (events.duration_s > 0))[0]
    on_host = indices[~events.on_device[indices]]
    chosen = on_host if len(on_host) else indices
    if not len(chosen):
        return None
    return Steps(_spans(events, _outermost(events, chosen)), f"annotation {name}", bool(len(on_host)))


def _device_steps(events: TraceEvents, device: int) -> Steps | None:
    indices = np.nonzero(events.is_a(Category.STEP) & (events.device_index == device))[0]
    return Steps(_spans(events, indices), "steps of the device", False) if len(indices) else None


def _modules(events: TraceEvents, device: int) -> Steps | None:
    """Runs of the compiled module that takes most of the time."""
    indices = np.nonzero(events.is_a(Category.MODULE) & (events.device_index == device))[0]
    if not len(indices):
        return None
    names = events.name[indices]
    totals = np.bincount(names, weights=events.duration_s[indices])
    chosen = indices[names == int(totals.argmax())]
    return Steps(_spans(events, chosen), f"runs of module {events.name_of(int(chosen[0]))}", False)


def _marked(events: TraceEvents) -> Steps | None:
    annotation = events.is_a(Category.ANNOTATION) & ~events.on_device
    for mark in MARKS:
        names = np.array([mark.match(name) is not None for name in events.names], dtype=np.bool_)
        indices = _outermost(events, np.nonzero(names[events.name] & annotation)[0])
        if len(indices) < 3:
            continue
        starts = events.start_s[indices]
        last = float(events.end_s[events.on_device | events.is_a(Category.RUNTIME)].max())
        ends = np.append(starts[1:], max(last, float(events.end_s[indices[-1]])))
        steps = tuple(
            Step(f"step {number}", float(a), float(b)) for number, (a, b) in enumerate(zip(starts, ends, strict=True))
        )
        return Steps(steps, f"from one {events.name_of(int(indices[0]))} to the next", True)
    return None


def _repeated(events: TraceEvents, device: int) -> Steps | None:
    """Equal sequences of kernels: the smallest period by which nearly all names repeat."""
    kernels = np.nonzero(events.is_a(Category.KERNEL) & events.on_device & (events.device_index == device))[0]
    names = events.name[kernels]
    period = repetition(names)
    if not period:
        return None
    first = (len(names) % period) if len(names) % period else 0
    starts = kernels[first::period]
    begins = events.start_s[starts]
    ends = np.append(begins[1:], float(events.end_s[kernels].max()))
    steps = tuple(
        Step(f"step {number}", float(a), float(b)) for number, (a, b) in enumerate(zip(begins, ends, strict=True))
    )
    return Steps(steps, f"repetition of {period} kernels", False)


def repetition(names: IntArray) -> int:
    """The smallest period of a sequence that repeats at least three times, 0 where there is none."""
    size = len(names)
    if size < 3:
        return 0
    anchors, counts = np.unique(names[size // 3 :], return_counts=True)
    periods: set[int] = set()
    for anchor in anchors[np.argsort(counts, kind="stable")][:_CANDIDATES].tolist():
        places = np.nonzero(names == anchor)[0]
        periods.update(np.diff(places).tolist()[-3:])
        if len(places) >= 3:
            periods.add(int(places[-1] - places[-3]))
    for period in sorted(periods):
        compared = max(2 * period, size // 2)
        if 3 * period <= size and float((names[period:] == names[:-period])[-compared:].mean()) >= _SAME_SHARE:
            return period
    return 0


def _whole(events: TraceEvents, device: int) -> Steps:
    mask = events.on_device & events.is_a(*DEVICE_WORK) & (events.device_index == device)
    if not mask.any():
        raise InputError(f"{events.source} holds no work of a device", "profile with device activities switched on")
    start, end = float(events.start_s[mask].min()), float(events.end_s[mask].max())
    return Steps((Step("whole trace", start, end),), "the whole trace, as nothing repeats", False)
