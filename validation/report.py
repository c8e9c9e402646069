"""A prediction laid beside a measured run: step, parts, classes, layers, and the largest differences with reasons."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stablecast.backends.device import System
from stablecast.backends.prediction import Prediction, unmodelled_dict
from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.backends.pricing import price
from stablecast.ir.device_program import DeviceProgram
from stablecast.validation.graph import GraphCheck, check_graph
from stablecast.validation.items import Item, measured_items, predicted_items
from stablecast.validation.kernel_names import MeasuredClass
from stablecast.validation.match import Matching, match
from stablecast.validation.measured import MeasuredRun, StepParts

if TYPE_CHECKING:
    import pandas as pd

SCHEMA: Final = 1
LARGEST: Final = 20
MAX_LAYERS: Final = 32
_NEAR: Final = 0.1


@dataclass(frozen=True, slots=True)
class Share:
    """Times of one class or layer on both sides, seconds of a step, and how many items each side has."""

    name: str
    measured_s: float
    predicted_s: float
    measured_count: int
    predicted_count: int

    @property
    def error(self) -> float | None:
        return self.predicted_s / self.measured_s - 1.0 if self.measured_s > 0 else None

    def to_dict(self, key: str) -> dict[str, Any]:
        return {
            key: self.name,
            "measured_s": self.measured_s,
            "predicted_s": self.predicted_s,
            "measured_count": self.measured_count,
            "predicted_count": self.predicted_count,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """One of the largest differences: both times (0 where a side has nothing), how it was matched, and a reason."""

    klass: str
    scope: str
    measured: str
    predicted: str
    measured_s: float
    predicted_s: float
    how: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "class": self.klass,
            "scope": self.scope,
            "measured": self.measured,
            "predicted": self.predicted,
            "measured_s": self.measured_s,
            "predicted_s": self.predicted_s,
            "matched_by": self.how,
            "reason": self.reason,
        }


@dataclass(frozen=True, repr=False)
class ValidationReport:
    """A measured run and what was predicted for it; times in seconds of one step.

    `run`, `step`: the measurement and the number of its typical step, to which items belong. `prediction`, `matching`,
    `graph`: the prediction and its comparison, None where nothing was predicted. `waiting_s`: of that step, how long
    its collectives waited for other ranks, which is in no class; None where other ranks were not at hand.
    """

    run: MeasuredRun
    step: int
    prediction: Prediction | None
    matching: Matching | None
    graph: GraphCheck | None
    classes: tuple[Share, ...]
    layers: tuple[Share, ...]
    largest: tuple[Difference, ...]
    waiting_s: float | None = None

    @property
    def device_s(self) -> tuple[float, float]:
        """Device time of the typical step and of the prediction: sums over kernels and collectives, without waits."""
        return sum(share.measured_s for share in self.classes), sum(share.predicted_s for share in self.classes)

    @property
    def parts(self) -> StepParts:
        """Parts of the typical step."""
        return self.run.parts[self.step]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `stablecast validate --json`."""
        run, predicted = self.run, self.prediction
        return {
            "schema": SCHEMA,
            "trace": run.events.source,
            "device": run.events.device,
            "rank": run.events.rank,
            "steps": len(run.steps),
            "step_basis": run.step_basis,
            "step_times_s": [float(time) for time in run.step_times_s],
            "measured_step_s": run.mean_step_s,
            "measured_median_step_s": run.median_step_s,
            "predicted_step_s": predicted.step_time_s if predicted else None,
            "predicted_low_s": predicted.step_time_low_s if predicted else None,
            "predicted_high_s": predicted.step_time_high_s if predicted else None,
            "system": predicted.system if predicted else None,
            "backend": predicted.backend if predicted else None,
            "matched_share": self.matching.matched_share if self.matching else None,
            "predicted_matched_share": self.matching.predicted_share if self.matching else None,
            "measured_device_s": self.device_s[0],
            "predicted_device_s": self.device_s[1] if predicted else None,
            "waiting_s": self.waiting_s,
            "measured_parts": _parts_dict(self.parts),
            "predicted_parts": _predicted_parts(predicted),
            "classes": [share.to_dict("class") for share in self.classes],
            "layers": [share.to_dict("scope") for share in self.layers],
            "largest": [difference.to_dict() for difference in self.largest],
            "graph": self.graph.to_dict() if self.graph else None,
            "streams": [
                {"stream": run.events.stream_names.get(stream, str(stream)), "busy_s": busy}
                for stream, busy in run.streams.items()
            ],
            "damage": run.events.damage,
            "complete": predicted.complete if predicted else None,
            "unmodelled": [unmodelled_dict(entry) for entry in predicted.unmodelled] if predicted else [],
            "assumptions": list(predicted.assumptions) if predicted else [],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_pandas(self) -> "pd.DataFrame":
        """One row an item: both sides, matched or not; needs pandas (`pip install 'stablecast[pandas]'`)."""
        from stablecast.validation.report_text import report_frame

        return report_frame(self)

    def to_html(self) -> str:
        """A page of its own with both timelines under each other."""
        from stablecast.validation.report_html import report_html

        return report_html(self)

    def __repr__(self) -> str:
        from stablecast.validation.report_text import report_text

        return report_text(self)

    def _repr_html_(self) -> str:
        return self.to_html()


def _parts_dict(parts: StepParts) -> dict[str, float]:
    return {name: getattr(parts, name) for name in StepParts.__slots__}


def _predicted_parts(predicted: Prediction | None) -> dict[str, float] | None:
    if predicted is None:
        return None
    talk = sum(collective.time_s for collective in predicted.collectives)
    return {
        "window_s": predicted.step_time_s,
        "busy_s": predicted.step_time_s - predicted.idle_s,
        "compute_s": predicted.compute_s,
        "communication_s": talk,
        "exposed_s": predicted.exposed_communication_s,
        "idle_s": predicted.idle_s,
        "host_s": 0.0,
    }


def validate(
    run: MeasuredRun,
    program: DeviceProgram | None = None,
    system: System | None = None,
    settings: Settings | None = None,
    workload: str = "program",
    waits_s: Mapping[int, float] | None = None,
) -> ValidationReport:
    """Lay the prediction for `program` on `system` beside `run`; without a program, only the run is described.

    The typical step of the run, the one nearest to the median, is matched item by item. `waits_s`: by position in the
    run's work, how long a collective waited for other ranks.
    """
    step = run.typical_step
    measured = measured_items(run, step, waits_s)
    inside = np.nonzero(run.step == step)[0].tolist()
    waiting = sum(waits_s.get(position, 0.0) for position in inside) if waits_s else None
    if program is None or system is None or settings is None:
        classes = _measured_classes(run, step)
        return ValidationReport(run, step, None, None, None, classes, _layers(measured, ()), (), waiting)
    prediction = predict_device_program(program, system, settings, workload)
    priced = price(program.table, system.device, settings.choice)
    predicted = predicted_items(program, priced, system, settings.loops)
    together = measured_items(run, step, waits_s, gradients_apart=False)
    if _nearer(together, measured, predicted):
        measured = together
    matching = match(measured, predicted)
    return ValidationReport(
        run,
        step,
        prediction,
        matching,
        check_graph(matching),
        _shares(measured, predicted, lambda item: item.klass.value),
        layers_of(matching),
        largest_of(matching, aligned=waiting is not None),
        waiting,
    )


def _nearer(one: Sequence[Item], other: Sequence[Item], predicted: Sequence[Item]) -> bool:
    """Whether `one` has more nearly as many convolutions as `predicted`: eager calls hold both gradients."""

    def count(items: Sequence[Item]) -> float:
        return sum(item.count for item in items if item.klass is MeasuredClass.CONVOLUTION)

    return abs(count(one) - count(predicted)) < abs(count(other) - count(predicted))


def _measured_classes(run: MeasuredRun, step: int) -> tuple[Share, ...]:
    """By the class of every kernel, where nothing is to be matched."""
    times = run.class_times(step)
    inside = run.step == step
    counts = {name: int((inside & run.is_class(MeasuredClass(name))).sum()) for name in times}
    return tuple(
        Share(name, time, 0.0, counts[name], 0) for name, time in sorted(times.items(), key=lambda pair: -pair[1])
    )


def _shares(measured: Sequence[Item], predicted: Sequence[Item], key: Callable[[Item], str]) -> tuple[Share, ...]:
    sums: dict[str, list[float]] = {}
    for side, items in enumerate((measured, predicted)):
        for item in items:
            held = sums.setdefault(key(item), [0.0, 0.0, 0.0, 0.0])
            held[side] += item.time_s
            held[2 + side] += item.count * item.parts
    shares = [Share(name, a, b, int(c), int(d)) for name, (a, b, c, d) in sums.items()]
    return tuple(sorted(shares, key=lambda share: -max(share.measured_s, share.predicted_s)))


def layers_of(matching: Matching) -> tuple[Share, ...]:
    """By layer of the program, where either side has scopes: what is matched counts where the prediction has it.

    Paths are cut to the depth at which no more than `MAX_LAYERS` are left.
    """
    measured, predicted = list(matching.measured), list(matching.predicted)
    for pair in matching.pairs:
        ours, theirs = measured[pair.measured], predicted[pair.predicted]
        measured[pair.measured] = replace(ours, scope=theirs.scope or ours.scope)
        predicted[pair.predicted] = replace(theirs, scope=theirs.scope or ours.scope)
    return _layers(measured, predicted)


def _layers(measured: Sequence[Item], predicted: Sequence[Item]) -> tuple[Share, ...]:
    paths = {tuple(item.scope.split("/")) for item in (*measured, *predicted)}
    depth = max(map(len, paths), default=0)
    while depth > 1 and len({path[:depth] for path in paths}) > MAX_LAYERS:
        depth -= 1
    shares = _shares(measured, predicted, lambda item: "/".join(item.scope.split("/")[:depth]))
    return shares if any(share.name for share in shares) else ()


def largest_of(matching: Matching, *, aligned: bool = False) -> tuple[Difference, ...]:
    """Equal differences put together, the largest first; `aligned`: waits for other ranks are known and left out."""
    found: dict[tuple[str, ...], list[float]] = {}
    for pair in matching.pairs:
        ours, theirs = matching.measured[pair.measured], matching.predicted[pair.predicted]
        key = (
            ours.klass.value,
            theirs.scope or ours.scope,
            ours.label,
            theirs.label,
            pair.how,
            _reason(ours, theirs, aligned),
        )
        _add(found, key, ours.time_s, theirs.time_s)
    for index in matching.only_measured:
        item = matching.measured[index]
        _add(found, (item.klass.value, item.scope, item.label, "", "", _lone_measured(item)), item.time_s, 0.0)
    for index in matching.only_predicted:
        item = matching.predicted[index]
        reason = "not in the trace: the compiler or library fused or left it out there, or it runs under another class"
        _add(found, (item.klass.value, item.scope, "", item.label, "", reason), 0.0, item.time_s)
    listed = [
        Difference(klass, scope, ours, theirs, a, b, how, reason)
        for (klass, scope, ours, theirs, how, reason), (a, b) in found.items()
    ]
    return tuple(sorted(listed, key=lambda entry: -abs(entry.measured_s - entry.predicted_s))[:LARGEST])


def _add(
    found: dict[tuple[str, ...], list[float]], key: tuple[str, ...], measured_s: float, predicted_s: float
) -> None:
    held = found.setdefault(key, [0.0, 0.0])
    held[0] += measured_s
    held[1] += predicted_s


def _reason(ours: Item, theirs: Item, aligned: bool) -> str:
    """What the model can say about a pair; `aligned`: collectives are without what they waited for other ranks."""
    ratio = theirs.time_s / ours.time_s if ours.time_s > 0 else 0.0
    if abs(ratio - 1.0) <= _NEAR:
        return "agrees within 10 %"
    if ours.is_collective:
        hidden = 1.0 - ours.exposed_s / ours.time_s if ours.time_s else 0.0
        overlapped = f"; {hidden:.0%} of it is overlapped" if hidden > _NEAR else ""
        if ours.nbytes and theirs.nbytes and ours.nbytes != theirs.nbytes:
            return f"messages differ: {ours.nbytes:,.0f} and {theirs.nbytes:,.0f} B" + overlapped
        slower = "the link is slower than assumed"
        waits = slower if aligned else f"the measured time includes waiting for other ranks, or {slower}"
        return (waits if ratio < 1.0 else "the link is faster than assumed, or the message is split") + overlapped
    if ours.parts != theirs.parts:
        return f"fusion: {ours.parts} kernels ran where {theirs.parts} {'is' if theirs.parts == 1 else 'are'} predicted"
    if ours.shape and theirs.shape and ours.shape != theirs.shape:
        return "other sizes: matched by its place, not by its shape"
    bound = f" ({theirs.bound}-bound)" if theirs.bound else ""
    if theirs.bound == "launch":
        return (
            "launch cost: the kernel is shorter than the launch that is assumed"
            if ratio > 1
            else "efficiency of a short kernel"
        )
    return f"efficiency: the kernel reaches {ratio:.2g} x the rate that the model expects{bound}"


def _lone_measured(item: Item) -> str:
    if item.klass in (MeasuredClass.MEMCPY, MeasuredClass.MEMSET):
        return "a copy or fill that the program does not ask for"
    return "not predicted: the prediction fused it, left it out, or gave it another class"
