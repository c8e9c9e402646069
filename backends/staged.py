"""A program whose loops hand micro-batches from stage to stage, under another pipeline schedule than the one written.

Such a program runs all forward passes, then all backward passes, and its stages work through trips in which they have
no micro-batch. Here a trip of its forward and its backward loop is the cost of a micro-batch; a schedule puts these
together, and what is outside the loops stays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.device import System
from stablecast.backends.estimates import Estimates
from stablecast.backends.memory_margin import with_memory_margin
from stablecast.backends.prediction import Prediction, RoleTime
from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.backends.pricing import price
from stablecast.backends.schedule import PipelineTimeline, StageCost, Timeline, pipeline, schedule
from stablecast.ir.device_program import Body, Collective, DeviceProgram, Kernel, Loop, MicroBatches, Node
from stablecast.ir.errors import InputError
from stablecast.ir.scopes import parse_scope
from stablecast.ir.work import Work, total


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """`schedule`: one of `PIPELINE_SCHEDULES`. `chunks`: of each stage, for `interleaved`; 0 for those of the program.

    `speeds`: of stages that are slower or faster than the others.
    """

    schedule: str
    chunks: int = 0
    speeds: Mapping[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds of one trip, and of a hand-over; `weight_s`: what of the backward trip makes gradients of weights."""

    forward_s: float
    backward_s: float
    weight_s: float
    send_s: float


def predict_pipeline(
    program: DeviceProgram, system: System, settings: Settings, workload: str, plan: PipelinePlan
) -> Prediction:
    """The step of `program` with its micro-batches in the order of `plan`.

    Raises `InputError` for a program without such loops, or with some whose micro-batches cannot be told.
    """
    loops = _loops(program)
    passing = loops[0].micro_batches
    assert passing is not None
    costs = _costs(program, loops, system, settings)
    rounds, batches, stages = passing.rounds, passing.count, passing.stages
    chunks = (plan.chunks or rounds) if plan.schedule == "interleaved" else 1
    cost = StageCost(costs.forward_s * rounds, costs.backward_s * rounds, costs.weight_s * rounds)
    each = [replace(cost, speed=plan.speeds.get(stage, 1.0)) for stage in range(stages)]
    made = pipeline(each, batches, plan.schedule, chunks=chunks, send_s=costs.send_s)
    busy = predict_device_program(_without_hand_overs(program, passing), system, settings, workload)
    inside = batches * (cost.forward_s + cost.backward_s)
    return _prediction(busy, made, inside, cost, costs.send_s, program, loops, plan.speeds)


def _loops(program: DeviceProgram) -> list[Loop]:
    found = [node for node in program.body if isinstance(node, Loop) and node.micro_batches is not None]
    if not found:
        raise InputError(
            f"{program.name} has no pipeline: no loop hands micro-batches from stage to stage",
            "write it with shard_map and ppermute, or leave --pipeline out",
        )
    for loop in found:
        passing = loop.micro_batches
        if passing is None or not passing.by:
            raise InputError(f"the loop at {loop.location.source or loop.scope} hands on both ways: it is a schedule")
        if not passing.count:
            raise InputError(f"how many micro-batches go through the loop at {loop.location.source} cannot be told")
    return found


def _hands_on(node: Node, passing: MicroBatches) -> bool:
    return isinstance(node, Collective) and node.shift is not None and node.shift.axis == passing.axis


def _costs(program: DeviceProgram, loops: Sequence[Loop], system: System, settings: Settings) -> _Costs:
    estimates = price(program.table, system.device, settings.choice).estimates

    def seconds(body: Body) -> float:
        return _trip_s(program, body, estimates, system, settings)

    forward = backward = weight = send = 0.0
    for loop in loops:
        passing = loop.micro_batches
        assert passing is not None
        body = _dropped(loop.body, lambda node, axis=passing: _hands_on(node, axis))
        if passing.by > 0:
            forward += seconds(body)
        else:
            backward += seconds(body)
            weight += _weight_s(program, body, estimates, settings.loops)
        for node in loop.body:
            if isinstance(node, Collective) and _hands_on(node, passing):
                send = max(send, CollectiveModel(system).estimate(node).time_s)
    return _Costs(forward, backward, weight, send)


def _weight_s(program: DeviceProgram, body: Body, estimates: Estimates, loops: Mapping[str, int]) -> float:
    """Half of the products of a backward trip that are not recomputed: of each product one gradient is a weight's."""
    total = 0.0
    for node in body:
        if isinstance(node, Kernel):
            product = program.table.rows[node.row].matmul_flops > 0 and not parse_scope(node.scope).recomputed
            total += float(estimates.time_s[node.row]) / 2.0 if product else 0.0
        elif isinstance(node, Loop):
            trips = node.count if isinstance(node.count, int) else loops.get(node.count.name, node.count.default or 1)
            total += trips * _weight_s(program, node.body, estimates, loops)
    return total


def _trip_s(program: DeviceProgram, body: Body, estimates: Estimates, system: System, settings: Settings) -> float:
    one = replace(program, body=body)
    return schedule(one, estimates, system, settings.loops, settings.schedule).time_s


def _dropped(body: Body, gone: Callable[[Node], bool]) -> Body:
    """`body` without some nodes; what waited for one waits for what that waited for."""
    place: dict[int, tuple[int, ...]] = {}
    nodes: list[Node] = []
    for index, node in enumerate(body):
        deps = tuple(sorted({new for dep in node.deps for new in place[dep]}))
        after = tuple(sorted({new for dep in node.after for new in place[dep]}))
        if gone(node):
            place[index] = tuple(sorted({*deps, *after}))
        else:
            place[index] = (len(nodes),)
            nodes.append(replace(node, deps=deps, after=after))
    return tuple(nodes)


def _without_hand_overs(program: DeviceProgram, passing: MicroBatches) -> DeviceProgram:
    """`program` with as many trips as a stage has micro-batches."""
    nodes: list[Node] = []
    for node in program.body:
        if isinstance(node, Loop) and node.micro_batches is not None:
            inner = _dropped(node.body, lambda one: _hands_on(one, passing))
            nodes.append(replace(node, body=inner, count=passing.count * passing.rounds))
        else:
            nodes.append(node)
    return replace(program, body=tuple(nodes))


def _kept_bytes(program: DeviceProgram) -> int:
    """Buffers that the first loop fills trip by trip: what it is given and nobody computed."""
    first = next(node for node in program.body if isinstance(node, Loop) and node.micro_batches is not None)
    given = [program.body[dep] for dep in first.deps]
    return sum(node.held_bytes for node in given if isinstance(node, Kernel) and node.ahead and not node.deps)


def _work(program: DeviceProgram, busy: Prediction) -> Work:
    """What a stage does for its own micro-batches, without trips in which it has none."""
    runs = [run for timeline in busy.timelines for run in timeline.kernels]
    kernels = total(program.table.rows[run.row].work * run.count for run in runs)
    moved = Work()
    for timeline in busy.timelines:
        for run in timeline.collectives:
            if isinstance(run.node, Collective):
                read, written = run.node.operand_bytes * run.count, run.node.result_bytes * run.count
                moved = moved + Work(bytes_read=read, bytes_written=written)
    return kernels + moved


def _prediction(
    busy: Prediction,
    made: PipelineTimeline,
    inside_s: float,
    cost: StageCost,
    send_s: float,
    program: DeviceProgram,
    loops: Sequence[Loop],
    speeds: Mapping[int, float],
) -> Prediction:
    outside = max(busy.step_time_s - inside_s, 0.0)
    step = outside + made.step_s
    ratio = step / busy.step_time_s if busy.step_time_s else 1.0
    idle = made.bubble_s
    held, trips = _kept_bytes(program), max(loop.count if isinstance(loop.count, int) else 1 for loop in loops)
    chunks = max(task.chunk for task, _, _ in made.tasks[0]) + 1
    peaks = [busy.peak_memory_bytes - round(held * max(1.0 - most / chunks / trips, 0.0)) for most in made.in_flight]
    roles = tuple(
        RoleTime(f"stage{number}", speeds.get(number, 1.0), busy.compute_s, busy.exposed_communication_s, waits, peak)
        for number, (waits, peak) in enumerate(zip(idle, peaks, strict=True))
    )
    stages, batches = len(made.tasks), loops[0].micro_batches.count if loops[0].micro_batches else 0
    trace = Timeline(made.step_s, made.step_s, made.step_s, 0.0, 0.0, (), (), make_slices=lambda: made.slices)
    shrink = busy.step_time_s / step if step else 1.0
    staged = replace(
        busy,
        step_time_s=step,
        step_time_low_s=busy.step_time_low_s * ratio,
        step_time_high_s=busy.step_time_high_s * ratio,
        mfu=None if busy.mfu is None else busy.mfu * shrink,
        hfu=None if busy.hfu is None else busy.hfu * shrink,
        peak_memory_bytes=max(peaks),
        idle_s=sum(idle) / len(idle),
        bound_s={**busy.bound_s, "idle": busy.bound_s.get("idle", 0.0) + sum(idle) / len(idle)},
        critical_s={**busy.critical_s, "pipeline bubble": max(made.step_s - inside_s, 0.0)},
        roles=roles,
        timelines=(trace,),
        work=_work(program, busy),
        assumptions=(*busy.assumptions, *_said(made, batches, chunks, cost)),
        pipeline={
            "schedule": made.schedule,
            "stages": stages,
            "micro_batches": batches,
            "chunks": chunks,
            "forward_s": cost.forward_s,
            "backward_s": cost.backward_s,
            "weight_s": cost.weight_s,
            "send_s": send_s,
            "step_s": made.step_s,
            "bubble": made.bubble_share,
            "in_flight": list(made.in_flight),
        },
    )
    return with_memory_margin(staged)


def _said(made: PipelineTimeline, batches: int, chunks: int, cost: StageCost) -> tuple[str, ...]:
    parts = f" of {chunks} chunks" if chunks > 1 else ""
    return (
        f"{made.schedule} over {len(made.tasks)} stages{parts} and {batches} micro-batches: bubble "
        f"{made.bubble_share:.1%} of the pipeline; hand-overs hold no stage up",
        "micro-batches in flight take memory in proportion to what the program's own loop keeps of its trips",
        *(["gradients of weights take half of the backward products (assumption)"] if cost.weight_s else []),
    )
