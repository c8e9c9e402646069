"""How a step is laid out in time: the choices of a prediction, and how they are written on the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stablecast.backends.collectives import AUTO
from stablecast.backends.device import System
from stablecast.backends.placement import dims_of
from stablecast.backends.predictor import PREDICTED
from stablecast.backends.schedule import ScheduleSettings
from stablecast.backends.schedule.settings import Collectives
from stablecast.backends.staged import PipelinePlan
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import InputError, near_names

MODES: Final[tuple[Collectives, ...]] = ("calibrated", "astra-sim")


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    """How the step is laid out in time.

    `contention`: whether running collectives take cores, memory and links. `passes`: schedule passes in order, as
    `NAME` or `NAME=VALUE`; None for those of the execution model (`lowering.passes.default_passes`). `placed`: mesh
    axis -> network dimensions, for axes that should not lie innermost first. `pipeline`: schedule of its micro-batches,
    empty for the one that the program is written in. `speeds`: of ranks that are slower or faster than the others.
    `collectives`: `calibrated` or `astra-sim`. `incast`: what the busiest receiver of an all-to-all gets over the mean.
    `algorithm`: of collectives, for those that can go by it.
    """

    contention: bool = True
    passes: tuple[str, ...] | None = None
    placed: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    pipeline: str = ""
    speeds: Mapping[int, float] = field(default_factory=dict[int, float])
    collectives: str = "calibrated"
    incast: float = 1.0
    algorithm: str = AUTO

    @property
    def settings(self) -> ScheduleSettings:
        """The same as settings of a schedule. Raises `InputError` for an unknown mode or an incast below 1."""
        if self.collectives not in MODES:
            raise InputError(f"unknown mode '{self.collectives}' of collectives", near_names(self.collectives, MODES))
        if not 1.0 <= self.incast < float("inf"):
            raise InputError(f"--incast {self.incast:g}: the busiest receiver gets at least the mean", "1 or more")
        contention = PREDICTED.contention if self.contention else None
        return replace(
            PREDICTED, contention=contention, collectives=self.collectives, incast=self.incast, algorithm=self.algorithm
        )


def pipeline_plan(options: TimelineOptions, program: DeviceProgram) -> PipelinePlan:
    """`1f1b`, or `interleaved=2` with the chunks of a stage, as a plan; raises `InputError` for what is no number."""
    name, _, chunks = options.pipeline.partition("=")
    if chunks and not (chunks.isascii() and chunks.isdigit()):
        raise InputError(f"--pipeline '{options.pipeline}' has no number of chunks", "write interleaved=2")
    return PipelinePlan(name, int(chunks or 0), _stage_speeds(program, options.speeds))


def _stage_speeds(program: DeviceProgram, speeds: Mapping[int, float]) -> dict[int, float]:
    """The speed of each stage that has a rank with one of its own: that of its slowest."""
    mesh = next((mesh for mesh in program.meshes if program.stage_axis in dict(mesh.axes)), None)
    found: dict[int, float] = {}
    for rank, speed in speeds.items() if mesh else ():
        left = rank
        for name, size in reversed(mesh.axes if mesh else ()):
            if name == program.stage_axis:
                found[left % size] = min(speed, found.get(left % size, speed))
            left //= size
    return found


def parse_speeds(texts: Sequence[str]) -> dict[int, float]:
    """`5=0.8` as rank -> speed; raises `InputError` for anything else."""
    found: dict[int, float] = {}
    for part in (part for text in texts for part in text.split(",") if part):
        rank, _, speed = part.partition("=")
        try:
            found[int(rank)] = float(speed)
        except ValueError:
            raise InputError(f"--slow '{part}' is not rank=speed", "write --slow 5=0.8 for a rank 20 % slow") from None
        if not 0.0 < found[int(rank)] < float("inf"):
            raise InputError(f"--slow '{part}': a speed is more than zero")
    return found


def map_note(system: System) -> str:
    """Which axis lies where, for networks of several dimensions."""
    if system.placement is None or len(system.network.dims) < 2:
        return ""
    parts = [
        f"{axis} on {'+'.join(dims_of(system.placement, axis, system.network.dims))}"
        for axis, size in system.placement.axes
        if size > 1
    ]
    return f"mesh axes on network dimensions: {', '.join(parts)} (--map chooses)"


def parse_map(text: str) -> dict[str, tuple[str, ...]]:
    """`model=nvlink,data=spine` or `data=nvlink+spine` as axis -> dimensions; raises `InputError` for anything else."""
    found: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        axis, equals, dims = part.partition("=")
        names = tuple(filter(None, (name.strip() for name in dims.split("+"))))
        if not equals or not axis.strip() or not names:
            raise InputError(f"--map '{part}' is not axis=dimension", "write --map model=nvlink,data=scale-out")
        found[axis.strip()] = names
    return found
