"""What a timeline says, as values: the step, its kernels and collectives, and its slices on streams."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stablecast.ir.device_program import P2P, Collective


@dataclass(frozen=True, slots=True)
class KernelRuns:
    """Kernel nodes in issue order: row of the table, scope, source line, and runs in a step."""

    row: int
    scope: str
    source: str
    count: float


@dataclass(frozen=True, slots=True)
class CollectiveRuns:
    """One collective of the program: times of a single run in seconds, and runs in a step."""

    node: Collective | P2P
    count: float
    time_s: float
    low_s: float
    high_s: float
    algorithm: str
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Slice:
    """One node on one stream of one role, seconds from the start; `runs`: trips that it stands for."""

    role: str
    stream: str
    name: str
    begin_s: float
    end_s: float
    scope: str
    detail: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])
    runs: float = 1.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step of one device, as streams.

    `time_s`, `low_s`, `high_s`: the step. `compute_s`: kernels. `exposed_s`: time in which communication runs and no
    kernel does; `exposed_by_axis_s`: the same by mesh axes. `bound_s`: seconds of the step by what limits them.
    `idle_s`: time in which nothing runs (waiting for another role, above all). `critical_s`: seconds of the critical
    path by scope. `assumptions`: one sentence each. `make_slices`: gives `slices`.
    """

    time_s: float
    low_s: float
    high_s: float
    compute_s: float
    exposed_s: float
    kernels: tuple[KernelRuns, ...]
    collectives: tuple[CollectiveRuns, ...]
    bound_s: Mapping[str, float] = field(default_factory=dict[str, float])
    exposed_by_axis_s: Mapping[str, float] = field(default_factory=dict[str, float])
    idle_s: float = 0.0
    critical_s: Mapping[str, float] = field(default_factory=dict[str, float])
    assumptions: tuple[str, ...] = ()
    make_slices: Callable[[], Sequence[Slice]] = field(default=tuple, repr=False, compare=False)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Every node of the trips that were laid out."""
        return tuple(self.make_slices())

    def to_perfetto(self, path: str | Path) -> None:
        """Write the slices as a Perfetto trace, a track a stream (`pip install 'stablecast[perfetto]'`)."""
        from stablecast.backends.schedule.perfetto import write_perfetto

        write_perfetto(path, self.slices)
