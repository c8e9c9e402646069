"""Pipelines of stages over micro-batches: GPipe, 1F1B, interleaved 1F1B, zero-bubble.

Equal stages of p, m micro-batches, forward f, backward b (of which w for the weights), no transfer time:

    gpipe, 1f1b     (m + p - 1) (f + b)
    interleaved     m (f + b) + (p - 1) (f + b) / v        v chunks a stage
    zero-bubble     m (f + b) + (p - 1) (f + b - 2 w)      ZB-H1 of "Zero Bubble Pipeline Parallelism", f = b - w = w

With a transfer of s between stages, short beside a pass, GPipe takes 2 (p - 1) s more: there and back once, as later
micro-batches are under way meanwhile. 1F1B takes 2 (p - 1 + (m - 2) - floor((m - 2) / p)) s more: its first stage holds
p micro-batches and waits for the first of them to come back, so that every p of them show 2 (p - 1) transfers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from stablecast.backends.schedule.timeline import Slice
from stablecast.ir.errors import InputError, near_names

Pass = Literal["forward", "backward", "weight"]
PIPELINE_SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one micro-batch on a stage.

    `forward_s`, `backward_s` (whole), `weight_s`: the part of the backward pass that computes weight gradients, which
    zero-bubble puts off. `speed`: 0.5 for a straggler that takes twice as long.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """A pass of one micro-batch over one chunk of a stage."""

    kind: Pass
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """A step of `step_s` seconds.

    `tasks`: (task, begin, end) by stage. `in_flight`: most micro-batches (of chunks) that each stage holds at once.
    """

    schedule: str
    step_s: float
    tasks: tuple[tuple[tuple[Task, float, float], ...], ...]
    in_flight: tuple[int, ...]

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Seconds of the step in which each stage does nothing."""
        return tuple(self.step_s - sum(end - begin for _, begin, end in stage) for stage in self.tasks)

    @property
    def bubble_share(self) -> float:
        """Idle share of all stages together."""
        return sum(self.bubble_s) / (self.step_s * len(self.tasks)) if self.step_s else 0.0

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The tasks, for `to_perfetto`."""
        return tuple(
            Slice(f"stage {number}", "compute", f"{task.kind} {task.micro_batch}", begin, end, "", _detail(task))
            for number, stage in enumerate(self.tasks)
            for task, begin, end in stage
        )


def _detail(task: Task) -> dict[str, str | int | float]:
    return {"micro_batch": task.micro_batch, "chunk": task.chunk}


@dataclass(slots=True)
class _Run:
    """Stages under way: `ends` of what has been done, by (stage, task)."""

    stages: Sequence[StageCost]
    send_s: float
    chunks: int
    split: bool
    ends: dict[tuple[int, Task], float] = field(default_factory=dict[tuple[int, Task], float])

    def cost(self, stage: int, task: Task) -> float:
        given = self.stages[stage]
        if task.kind == "forward":
            time = given.forward_s
        elif task.kind == "weight":
            time = given.weight_s
        else:
            time = given.backward_s - (given.weight_s if self.split else 0.0)
        return time / self.chunks / given.speed

    def needs(self, stage: int, task: Task) -> list[tuple[int, Task]]:
        """What must have ended before, as (stage, task); from another stage it takes a transfer."""
        last, batch, chunk = len(self.stages) - 1, task.micro_batch, task.chunk
        if task.kind == "weight":
            return [(stage, Task("backward", batch, chunk))]
        if task.kind == "forward":
            if stage:
                return [(stage - 1, task)]
            return [(last, Task("forward", batch, chunk - 1))] if chunk else []
        own = (stage, Task("forward", batch, chunk))
        if stage < last:
            return [own, (stage + 1, task)]
        return [own, (0, Task("backward", batch, chunk + 1))] if chunk + 1 < self.chunks else [own]

    def ready(self, stage: int, task: Task) -> float | None:
        """When the task can begin, None where something it needs has not been done."""
        time = 0.0
        for other, needed in self.needs(stage, task):
            end = self.ends.get((other, needed))
            if end is None:
                return None
            time = max(time, end + (self.send_s if other != stage else 0.0))
        return time


def pipeline(
    stages: Sequence[StageCost],
    micro_batches: int,
    schedule: str = "1f1b",
    *,
    chunks: int = 1,
    send_s: float = 0.0,
) -> PipelineTimeline:
    """The step of a pipeline. `chunks`: of each stage, for `interleaved`; `send_s`: a transfer between stages, seconds.

    Transfers do not hold a stage up. Raises `InputError` for an unknown schedule, and for numbers that do not fit it.
    """
    if schedule not in PIPELINE_SCHEDULES:
        raise InputError(f"unknown pipeline schedule '{schedule}'", near_names(schedule, PIPELINE_SCHEDULES))
    if not stages or micro_batches < 1:
        raise InputError("a pipeline needs stages and micro-batches")
    if schedule == "interleaved":
        if chunks < 2 or micro_batches % len(stages):
            raise InputError(
                f"interleaved with {chunks} chunks a stage, {micro_batches} micro-batches over {len(stages)} stages",
                "it takes at least 2 chunks, and micro-batches that are a multiple of the stages",
            )
    elif chunks != 1:
        raise InputError(f"{schedule} takes one chunk a stage", "use interleaved")
    orders = [_ORDERS[schedule](stage, len(stages), micro_batches, chunks) for stage in range(len(stages))]
    return _finish(schedule, _in_order(_Run(stages, send_s, chunks, schedule == "zero-bubble"), orders))


Done = list[list[tuple[Task, float, float]]]


def _finish(schedule: str, tasks: Done) -> PipelineTimeline:
    step = max(end for stage in tasks for _, _, end in stage)
    return PipelineTimeline(schedule, step, tuple(map(tuple, tasks)), tuple(_in_flight(stage) for stage in tasks))


def _in_flight(tasks: Sequence[tuple[Task, float, float]]) -> int:
    """Most chunks of micro-batches that have been put forward and not been through their last pass."""
    last: Mapping[tuple[int, int], int] = {
        (task.micro_batch, task.chunk): number for number, (task, _, _) in enumerate(tasks)
    }
    held = most = 0
    for number, (task, _, _) in enumerate(tasks):
        held += task.kind == "forward"
        most = max(most, held)
        held -= last[(task.micro_batch, task.chunk)] == number
    return most


def _gpipe(_stage: int, _stages: int, batches: int, _chunks: int) -> list[Task]:
    return [Task("forward", batch) for batch in range(batches)] + [Task("backward", batch) for batch in range(batches)]


def _one_f_one_b(stage: int, stages: int, batches: int, _chunks: int) -> list[Task]:
    return _alternate(
        [Task("forward", batch) for batch in range(batches)],
        [Task("backward", batch) for batch in range(batches)],
        stages - stage - 1,
    )


def _interleaved(stage: int, stages: int, batches: int, chunks: int) -> list[Task]:
    def place(number: int) -> tuple[int, int]:
        turn, inside = divmod(number, stages * chunks)
        return turn * stages + inside % stages, inside // stages

    places = [place(number) for number in range(batches * chunks)]
    forward = [Task("forward", batch, chunk) for batch, chunk in places]
    backward = [Task("backward", batch, chunks - 1 - chunk) for batch, chunk in places]
    return _alternate(forward, backward, (stages - stage - 1) * 2 + (chunks - 1) * stages)


def _zero_bubble(stage: int, stages: int, batches: int, _chunks: int) -> list[Task]:
    """Stage number `stage` puts off as many weight passes, so that all stages hold equally many micro-batches."""
    ahead = min(stages - stage - 1, batches)
    late = min(stage, batches - ahead)
    order = [Task("forward", batch) for batch in range(ahead)]
    for number in range(batches):
        if ahead + number < batches:
            order.append(Task("forward", ahead + number))
        order.append(Task("backward", number))
        if number >= late:
            order.append(Task("weight", number - late))
    return order + [Task("weight", batch) for batch in range(batches - late, batches)]


def _alternate(forward: list[Task], backward: list[Task], warm_up: int) -> list[Task]:
    ahead = min(warm_up, len(forward))
    order = forward[:ahead]
    for number, task in enumerate(forward[ahead:]):
        order += [task, backward[number]]
    return order + backward[len(forward) - ahead :]


_ORDERS: Final[Mapping[str, Callable[[int, int, int, int], list[Task]]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}


def _in_order(run: _Run, orders: Sequence[Sequence[Task]]) -> Done:
    done: Done = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while len(done[stage]) < len(order):
                task = order[len(done[stage])]
                ready = run.ready(stage, task)
                if ready is None:
                    break
                begin = max(ready, done[stage][-1][2] if done[stage] else 0.0)
                end = run.ends[(stage, task)] = begin + run.cost(stage, task)
                done[stage].append((task, begin, end))
                moved = True
    if any(len(tasks) < len(order) for tasks, order in zip(done, orders, strict=True)):
        raise InputError("the stages of this pipeline wait for one another")
    return done
