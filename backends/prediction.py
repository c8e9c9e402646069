"""What a prediction says, as values; how it prints is in `prediction_text`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stablecast.backends.schedule.timeline import Timeline
from stablecast.ir.device_program import Unmodelled
from stablecast.ir.text import quantity
from stablecast.ir.throughput import Throughput
from stablecast.ir.work import Work

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Equal kernels of one scope: `count` runs in a step; times of all of them together, seconds.

    `basis`: where the time comes from (a `Source`), `backend`: who said it. `bound`: what limits it. `detail`: what
    that backend says beside, of one run: cycles, utilisation, mapping efficiency, ... of systolic arrays.
    """

    klass: str
    scope: str
    source: str
    count: float
    time_s: float
    low_s: float
    high_s: float
    basis: str
    shape: str
    bound: str = ""
    backend: str = ""
    matmul_flops: float = 0
    nbytes: float = 0
    detail: Mapping[str, float] = field(default_factory=dict[str, float])

    def to_dict(self) -> dict[str, Any]:
        extra = {"detail": dict(self.detail)} if self.detail else {}
        return {
            "class": self.klass,
            "scope": self.scope,
            "source": self.source,
            "count": _whole(self.count),
            "time_s": self.time_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "basis": self.basis,
            "shape": self.shape,
            "bound": self.bound,
            "backend": self.backend,
            **extra,
        }


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Equal collectives: `nbytes` of one device and run, `count` runs in a step, seconds of all together."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    nbytes: int
    count: float
    time_s: float
    low_s: float
    high_s: float
    exposed_s: float
    algorithm: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "group_size": self.group_size,
            "bytes": self.nbytes,
            "count": _whole(self.count),
            "time_s": self.time_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "exposed_s": self.exposed_s,
            "algorithm": self.algorithm,
        }


@dataclass(frozen=True, slots=True)
class RoleTime:
    """A role of a step (a pipeline stage, a straggler): seconds in kernels, in communication alone, and idle."""

    name: str
    speed: float
    compute_s: float
    exposed_communication_s: float
    idle_s: float
    peak_memory_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "speed": self.speed,
            "compute_s": self.compute_s,
            "exposed_communication_s": self.exposed_communication_s,
            "idle_s": self.idle_s,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


@dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """The step time of a workload on a system, with its range, parts, sources and assumptions.

    Times in seconds, sizes in bytes, FLOPs with 2 per multiply-add. `work`: of one device and step, after fusion.
    `mfu`: model FLOPs (no recomputation, no padding) over peak x time, `hfu`: executed FLOPs, both None without
    matrix work. `bound_s`: seconds by what limits them. `exposed_by_axis_s`: exposed communication by mesh axes.
    `reserved_memory_bytes`: what PyTorch's caching allocator has taken from the driver (`max_memory_reserved`), None
    where there is none. `memory_retries`: times a step that it must give back what it keeps to go on.
    `idle_s`: seconds in which a device does nothing (the bubble of a pipeline). `critical_s`: seconds of the critical
    path by scope. `roles`: of a step of several, the rest is that of the busiest. `tiers`: bytes in use
    and there are (None: not stated) by memory tier. `pipeline`: schedule, stages, micro-batches and their costs, where
    one was chosen. `complete` is False where something
    is not modelled or a loop's count is unknown; the time is then a lower bound. `error`: set in comparisons where this
    row has no time.
    """

    workload: str
    system: str
    devices: int
    mesh: Mapping[str, int]
    backend: str
    exec: str
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    compute_s: float
    exposed_communication_s: float
    peak_memory_bytes: int
    memory_bytes: int
    complete: bool
    unmodelled: tuple[Unmodelled, ...]
    work: Work
    mfu: float | None
    hfu: float | None
    memory_by_scope: Mapping[str, int]
    platform: str
    kernels: tuple[KernelTime, ...]
    collectives: tuple[CollectiveTime, ...]
    assumptions: tuple[str, ...]
    bound_s: Mapping[str, float] = field(default_factory=dict[str, float])
    backend_share: Mapping[str, float] = field(default_factory=dict[str, float])
    wall_s: float = 0.0
    error: str = ""
    exposed_by_axis_s: Mapping[str, float] = field(default_factory=dict[str, float])
    idle_s: float = 0.0
    critical_s: Mapping[str, float] = field(default_factory=dict[str, float])
    throughput: Throughput | None = None
    roles: tuple[RoleTime, ...] = ()
    tiers: Mapping[str, tuple[int, int | None]] = field(default_factory=dict[str, tuple[int, "int | None"]])
    pipeline: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timelines: tuple[Timeline, ...] = field(default=(), compare=False)
    reserved_memory_bytes: int | None = None
    memory_retries: int = 0

    @property
    def headroom_bytes(self) -> int:
        """Device memory that the step leaves free; negative where it does not fit."""
        return self.memory_bytes - self.peak_memory_bytes

    @property
    def items_per_s(self) -> float | None:
        """Tokens, images or samples a second (`throughput.unit`) over all devices."""
        if self.throughput is None or not self.step_time_s:
            return None
        return self.throughput.count / self.step_time_s

    @property
    def verdict(self) -> str:
        """Whether the step fits, with the numbers where it does not."""
        if self.fits:
            return "fits"
        for name, (used, room) in self.tiers.items():
            if room is not None and used > room:
                return f"does not fit in {name} (needs {quantity(used, 'B')}, has {quantity(room, 'B')})"
        needs, has = quantity(self.peak_memory_bytes, "B"), quantity(self.memory_bytes, "B")
        return f"does not fit on {self.system} (needs {needs}, has {has})"

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory, and what is offloaded within its tier."""
        held = all(room is None or used <= room for used, room in self.tiers.values())
        return held and self.peak_memory_bytes <= self.memory_bytes

    @property
    def bubble(self) -> float:
        """Share of the step in which devices do nothing, over all roles evenly."""
        idle = [role.idle_s for role in self.roles] or [self.idle_s]
        return sum(idle) / len(idle) / self.step_time_s if self.step_time_s else 0.0

    def to_perfetto(self, path: str | Path) -> None:
        """Write the step as a Perfetto trace, a track a stream and role (`pip install 'stablecast[perfetto]'`).

        Raises `InputError` where the perfetto package is missing or the system refuses the write.
        """
        from stablecast.backends.schedule.perfetto import write_perfetto

        write_perfetto(path, [entry for timeline in self.timelines for entry in timeline.slices])

    @property
    def bound(self) -> str:
        """What limits most of the step."""
        return max(self.bound_s, key=lambda name: self.bound_s[name]) if self.bound_s else ""

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `stablecast predict --json`."""
        return {
            "schema": SCHEMA,
            "workload": self.workload,
            "system": self.system,
            "devices": self.devices,
            "mesh": dict(self.mesh),
            "backend": self.backend,
            "exec": self.exec,
            "step_time_s": self.step_time_s,
            "step_time_low_s": self.step_time_low_s,
            "step_time_high_s": self.step_time_high_s,
            "compute_s": self.compute_s,
            "exposed_communication_s": self.exposed_communication_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "reserved_memory_bytes": self.reserved_memory_bytes,
            "memory_bytes": self.memory_bytes,
            "tiers": {name: {"bytes": used, "capacity": room} for name, (used, room) in self.tiers.items()},
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
            "throughput": self._throughput_dict(),
            "complete": self.complete,
            "unmodelled": [unmodelled_dict(entry) for entry in self.unmodelled],
            "work": self.work.to_dict(),
            "mfu": self.mfu,
            "hfu": self.hfu,
            "memory_by_scope": dict(self.memory_by_scope),
            "platform": self.platform,
            "bound": self.bound,
            "bound_s": dict(self.bound_s),
            "backend_share": dict(self.backend_share),
            "exposed_by_axis": dict(self.exposed_by_axis_s),
            "idle_s": self.idle_s,
            "bubble": self.bubble,
            "critical_path": [{"scope": scope, "time_s": time} for scope, time in self.critical_s.items()],
            "roles": [role.to_dict() for role in self.roles],
            "pipeline": dict(self.pipeline),
            "kernels": [kernel.to_dict() for kernel in self.kernels],
            "collectives": [collective.to_dict() for collective in self.collectives],
            "assumptions": list(self.assumptions),
            "wall_s": self.wall_s,
        }

    def _throughput_dict(self) -> dict[str, Any] | None:
        if self.throughput is None:
            return None
        return {"unit": self.throughput.unit, "per_step": self.throughput.count, "per_s": self.items_per_s}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_pandas(self) -> "pd.DataFrame":
        """One row a kernel and collective of a scope; needs pandas (`pip install 'stablecast[pandas]'`)."""
        from stablecast.backends.prediction_text import prediction_frame

        return prediction_frame(self)

    def to_csv(self) -> str:
        """The rows of `to_pandas` as CSV."""
        from stablecast.backends.prediction_text import prediction_csv

        return prediction_csv(self)

    def __repr__(self) -> str:
        from stablecast.backends.prediction_text import prediction_text

        return prediction_text(self)

    def _repr_html_(self) -> str:
        from stablecast.backends.prediction_text import prediction_html

        return prediction_html(self)


def unmodelled_dict(entry: Unmodelled) -> dict[str, Any]:
    return {
        "op": entry.op,
        "count": _whole(entry.count),
        "bytes": _whole(entry.nbytes),
        "share": entry.share,
        "reason": entry.reason,
    }


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value
