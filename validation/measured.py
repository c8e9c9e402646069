"""One model of a measured run, whichever profiler wrote it."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import DEVICE_WORK, TraceEvents
from stablecast.validation.host_work import host_work
from stablecast.validation.intervals import Intervals, clip, gaps, length, overlap, union
from stablecast.validation.kernel_names import COMPUTE, MeasuredClass, classify, classify_launched
from stablecast.validation.launches import IntArray, Launches, find_launches
from stablecast.validation.operators import class_of_operator
from stablecast.validation.steps import Step, Steps, find_steps

FloatArray = npt.NDArray[np.float64]
_CODES = tuple(MeasuredClass)


@dataclass(frozen=True, slots=True)
class NamedKernel:
    """All runs of one kernel name: class, runs, seconds."""

    name: str
    klass: MeasuredClass
    count: int
    time_s: float


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where one step's time went on the device, seconds.

    `window_s`: from its first device work to that of the next step. `busy_s`: some work runs; `compute_s`: some work
    other than communication; `communication_s`: some collective; `exposed_s`: a collective and nothing else; `idle_s`:
    nothing; `host_s`: the part of it in which the next work had not been launched yet.
    """

    window_s: float
    busy_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    idle_s: float
    host_s: float


@dataclass(frozen=True)
class MeasuredRun:
    """Device work of one device of a trace, with its steps, classes and launches.

    `work`: event indices of device work in order. `codes`: class of each, as an index into `MeasuredClass`. `step`:
    step of each, -1 outside of all. `op`: host operator that launched it, -1 where unknown.
    """

    events: TraceEvents
    device: int
    steps: tuple[Step, ...]
    step_basis: str
    work: IntArray
    codes: IntArray
    step: IntArray
    op: IntArray
    launches: Launches

    @property
    def step_times_s(self) -> FloatArray:
        """Duration of each step, as annotated."""
        return np.array([step.duration_s for step in self.steps])

    @property
    def mean_step_s(self) -> float:
        return float(self.step_times_s.mean())

    @property
    def median_step_s(self) -> float:
        return float(np.median(self.step_times_s))

    @property
    def typical_step(self) -> int:
        """The number of the step whose duration is nearest to the median."""
        return int(np.abs(self.step_times_s - self.median_step_s).argmin())

    @cached_property
    def start_s(self) -> FloatArray:
        return self.events.start_s[self.work]

    @cached_property
    def duration_s(self) -> FloatArray:
        return self.events.duration_s[self.work]

    def is_class(self, *classes: MeasuredClass) -> npt.NDArray[np.bool_]:
        """Mask over `work`."""
        return np.isin(self.codes, [_CODES.index(klass) for klass in classes])

    def klass(self, position: int) -> MeasuredClass:
        """The class of the work at `position`."""
        return _CODES[int(self.codes[position])]

    def name(self, position: int) -> str:
        """The kernel's name at `position` of `work`."""
        return self.events.name_of(int(self.work[position]))

    def op_name(self, position: int) -> str:
        """The host operator that launched the work at `position`, empty where unknown."""
        return self.events.name_of(int(self.op[position])) if self.op[position] >= 0 else ""

    def intervals(self, mask: npt.NDArray[np.bool_]) -> Intervals:
        """The time that the chosen work covers."""
        start = self.start_s[mask]
        return union(start, start + self.duration_s[mask])

    @cached_property
    def by_name(self) -> tuple[NamedKernel, ...]:
        """Kernels by name, the dearest first, whole trace."""
        numbers = self.events.name[self.work]
        found: list[NamedKernel] = []
        for number in sorted(set(map(int, numbers))):
            places = np.nonzero(numbers == number)[0]
            total = float(self.duration_s[places].sum())
            found.append(NamedKernel(self.events.names[number], self.klass(int(places[0])), len(places), total))
        return tuple(sorted(found, key=lambda kernel: -kernel.time_s))

    def class_times(self, step: int | None = None) -> Mapping[str, float]:
        """Seconds of device work by class, of one step or the mean over all steps."""
        chosen = self.step == step if step is not None else self.step >= 0
        share = 1 if step is not None else max(len(self.steps), 1)
        totals = np.bincount(self.codes[chosen], weights=self.duration_s[chosen], minlength=len(_CODES))
        return {klass.value: float(totals[code]) / share for code, klass in enumerate(_CODES) if totals[code] > 0}

    @cached_property
    def streams(self) -> Mapping[int, float]:
        """Busy seconds of each stream, whole trace."""
        numbers = self.events.stream[self.work]
        return {int(stream): length(self.intervals(numbers == stream)) for stream in np.unique(numbers)}

    @cached_property
    def parts(self) -> tuple[StepParts, ...]:
        """Each step's parts."""
        compute = self.intervals(self.is_class(*COMPUTE))
        talk = self.intervals(self.is_class(MeasuredClass.COMMUNICATION))
        both = union(np.append(compute[:, 0], talk[:, 0]), np.append(compute[:, 1], talk[:, 1]))
        waits = _host_bound(self, both)
        return tuple(_parts(window, compute, talk, both, waits) for window in self.windows)

    @cached_property
    def windows(self) -> tuple[tuple[float, float], ...]:
        """Each step on the device: from its first work to the first of the next step, the last to its own end."""
        firsts: list[float] = []
        ends: list[float] = []
        for number, step in enumerate(self.steps):
            mask = self.step == number
            start = self.start_s[mask]
            firsts.append(float(start.min()) if mask.any() else step.start_s)
            ends.append(float((start + self.duration_s[mask]).max()) if mask.any() else step.end_s)
        adjoin = all(b - a < 0.5 * (d - c) for (a, b), (c, d) in _neighbours(self.steps))
        if not adjoin:
            return tuple(zip(firsts, ends, strict=True))
        return tuple((first, max(later, first)) for first, later in zip(firsts, [*firsts[1:], ends[-1]], strict=True))

    def mean_parts(self) -> StepParts:
        """The mean over the steps."""
        return StepParts(*(float(np.mean(column)) for column in zip(*map(astuple, self.parts), strict=True)))


def _neighbours(steps: tuple[Step, ...]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Gaps between successive steps, each with the step before it."""
    return [((a.end_s, b.start_s), (a.start_s, a.end_s)) for a, b in pairwise(steps)]


def _parts(
    window: tuple[float, float], compute: Intervals, talk: Intervals, both: Intervals, waits: Intervals
) -> StepParts:
    low, high = window
    inside, spoken = clip(compute, low, high), clip(talk, low, high)
    busy, worked, talked = length(clip(both, low, high)), length(inside), length(spoken)
    exposed = talked - overlap(inside, spoken)
    return StepParts(high - low, busy, worked, talked, exposed, high - low - busy, length(clip(waits, low, high)))


def _host_bound(run: MeasuredRun, busy: Intervals) -> Intervals:
    """Parts of the device's idle time before the launch of what comes next."""
    if not len(busy):
        return busy
    idle = gaps(busy, float(busy[0, 0]), float(busy[-1, 1]))
    starts: list[float] = run.start_s.tolist()
    launch = run.launches.launch[run.work]
    found: list[tuple[float, float]] = []
    for low, high in idle.tolist():
        position = bisect_left(starts, high - 1e-12)
        if position < len(starts) and launch[position] >= 0:
            launched = float(run.events.start_s[launch[position]])
            if launched > low:
                found.append((low, min(launched, high)))
    return np.array(found).reshape(-1, 2)


def measure(events: TraceEvents, *, device: int | None = None, step: str = "") -> MeasuredRun:
    """The run that `events` recorded, as seen by one device.

    `device`: its number, by default the first with work. `step`: the annotation that marks a step, where the trace has
    unusual ones. Where no device worked, the processor's own operators are its work. Raises `InputError` where the
    trace holds no work of that device.
    """
    if not (events.on_device & events.is_a(*DEVICE_WORK)).any():
        events = host_work(events)
    busy = events.on_device & events.is_a(*DEVICE_WORK)
    devices = np.unique(events.device_index[busy]).tolist()
    if not devices and len(events) and not events.duration_s.any():
        raise InputError(
            f"{events.source} says what was called and not how long it took",
            "give the Kineto trace of the run, and this one with --host-trace; `predict` takes it alone",
        )
    if not devices:
        raise InputError(f"{events.source} holds no work of a device", "profile with device activities switched on")
    chosen = devices[0] if device is None else device
    if chosen not in devices:
        raise InputError(f"{events.source} has no device {chosen}", f"it has {devices}")
    work = np.nonzero(busy & (events.device_index == chosen))[0]
    launches = find_launches(events)
    steps = find_steps(events, chosen, step)
    op = launches.op[work]
    codes = np.array(
        [_CODES.index(_class_of(events, int(w), int(o))) for w, o in zip(work, op, strict=True)], dtype=np.int64
    )
    return MeasuredRun(
        events, chosen, steps.steps, steps.basis, work, codes, _assign(events, steps, work, launches), op, launches
    )


def _class_of(events: TraceEvents, event: int, op: int) -> MeasuredClass:
    args = events.args.get(event)
    category = str(args.get("hlo_category", "")) if args else ""
    if op >= 0 and events.name[event] == events.name[op]:
        return class_of_operator(events.name_of(op))
    if op >= 0 and not category:
        return classify_launched(events.name_of(event), events.name_of(op))
    return classify(events.name_of(event), category)


def _assign(events: TraceEvents, steps: Steps, work: IntArray, launches: Launches) -> IntArray:
    """Step of each device event: by its launch where steps are the host's, else by its start."""
    times = events.start_s[work].copy()
    if steps.on_host:
        launched = launches.launch[work] >= 0
        times[launched] = events.start_s[launches.launch[work][launched]]
    starts = np.array([step.start_s for step in steps.steps])
    ends = np.array([step.end_s for step in steps.steps])
    place = np.searchsorted(starts, times + 1e-12, side="right") - 1
    inside = (place >= 0) & (times < ends[np.maximum(place, 0)] + 1e-12)
    return np.where(inside, place, -1)
