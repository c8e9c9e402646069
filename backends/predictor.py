"""DeviceProgram x System -> Prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from stablecast.backends.device import Device, MemoryTier, System
from stablecast.backends.memory_margin import with_memory_margin
from stablecast.backends.prediction import CollectiveTime, KernelTime, Prediction, RoleTime
from stablecast.backends.pricing import Priced, price
from stablecast.backends.registry import Choice
from stablecast.backends.schedule import (
    CollectiveRuns,
    Contention,
    KernelRuns,
    RoleInput,
    ScheduleSettings,
    Timeline,
    schedule_roles,
)
from stablecast.ir.device_program import P2P, DeviceProgram
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelTable
from stablecast.ir.scopes import family, parse_scope
from stablecast.lowering.caching_allocator import replay, workspace_bytes

PREDICTED: Final = ScheduleSettings(contention=Contention())
"""What predictions take for granted unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to predict: backends by class, trip counts that the program leaves open, and how streams behave.

    `expandable`: PyTorch's allocator runs with `expandable_segments:True`.
    """

    choice: Choice
    loops: Mapping[str, int]
    schedule: ScheduleSettings = PREDICTED
    expandable: bool = False


@dataclass(frozen=True, slots=True)
class ProgramRole:
    """Devices that run one program: their coordinates on mesh axes, and how fast they are (0.5: half as fast).

    `ranks`: where they do not follow from coordinates.
    """

    name: str
    program: DeviceProgram
    coords: Mapping[str, int] = field(default_factory=dict[str, int])
    speed: float = 1.0
    ranks: tuple[int, ...] = ()


def predict_device_program(program: DeviceProgram, system: System, settings: Settings, workload: str) -> Prediction:
    """The step time of `program` on every device of `system` at once.

    `workload`: its name in reports. Raises `InputError` where the device has no peak for a product's math mode.
    """
    return predict_roles([ProgramRole("", program)], system, settings, workload)


def predict_roles(roles: Sequence[ProgramRole], system: System, settings: Settings, workload: str) -> Prediction:
    """The step time of roles that run at once and wait for one another's messages.

    All but the step and the roles' own times is that of the busiest role. Raises `InputError` as
    `predict_device_program` does, for receives without their send and for roles that wait for each other for ever.
    """
    priced: dict[int, Priced] = {}
    for role in roles:
        if id(role.program) not in priced:
            priced[id(role.program)] = price(role.program.table, system.device, settings.choice)
    inputs = [
        RoleInput(role.name, role.program, priced[id(role.program)].estimates, role.coords, role.speed, role.ranks)
        for role in roles
    ]
    timelines = schedule_roles(inputs, system, settings.loops, settings.schedule)
    busiest = max(roles, key=lambda role: timelines[role.name].compute_s + timelines[role.name].exposed_s)
    timeline = timelines[busiest.name]
    times = tuple(_role_time(role, timelines[role.name]) for role in roles) if len(roles) > 1 else ()
    made = _prediction(busiest.program, system, settings, workload, priced[id(busiest.program)], timeline)
    said = made.assumptions
    if times:
        said = (*said, f"{len(times)} roles run at once; all but the step is of the busiest ({busiest.name})")
    peak = max(buffers.peak_bytes if (buffers := role.program.buffers) else 0 for role in roles)
    every = tuple(timelines.values())
    made = replace(made, roles=times, peak_memory_bytes=peak, assumptions=said, timelines=every)
    return with_memory_margin(_with_reserved(made, roles, system.device, settings))


def _with_reserved(made: Prediction, roles: Sequence[ProgramRole], device: Device, settings: Settings) -> Prediction:
    """`made` with what PyTorch's allocator reserves on the device of the role that takes most."""
    asked = {id(role.program): one for role in roles if (one := role.program.allocations) is not None}
    room, workspace = int(device.memory_bytes.value), workspace_bytes(device.architecture)
    found = [replay(one, room, expandable=settings.expandable, workspace=workspace) for one in asked.values()]
    if not found:
        return made
    most = max(found, key=lambda one: one.reserved)
    return replace(made, reserved_memory_bytes=most.reserved, memory_retries=most.retries)


def _role_time(role: ProgramRole, timeline: Timeline) -> RoleTime:
    buffers = role.program.buffers
    return RoleTime(
        role.name,
        role.speed,
        timeline.compute_s,
        timeline.exposed_s,
        timeline.idle_s,
        buffers.peak_bytes if buffers else 0,
    )


def _prediction(
    program: DeviceProgram, system: System, settings: Settings, workload: str, priced: Priced, timeline: Timeline
) -> Prediction:
    device, buffers = system.device, program.buffers
    work, _ = program.work.evaluate(settings.loops)
    flops = _matrix_flops(program.table, timeline.kernels)
    return Prediction(
        workload=workload,
        system=system.name,
        devices=system.count,
        mesh={name: size for mesh in program.meshes for name, size in mesh.axes},
        backend=str(settings.choice),
        exec=program.exec_model,
        step_time_s=timeline.time_s,
        step_time_low_s=timeline.low_s,
        step_time_high_s=timeline.high_s,
        compute_s=timeline.compute_s,
        exposed_communication_s=timeline.exposed_s,
        peak_memory_bytes=buffers.peak_bytes if buffers else 0,
        memory_bytes=int(device.memory_bytes.value),
        complete=program.complete,
        unmodelled=program.unmodelled,
        work=work,
        mfu=_utilisation(program.model_flops or flops.model, device, timeline.time_s),
        hfu=_utilisation(flops.executed, device, timeline.time_s),
        memory_by_scope=_memory(program),
        platform=program.platform,
        kernels=kernel_times(program.table, timeline.kernels, priced),
        collectives=collective_times(timeline.collectives),
        assumptions=_assumptions(program, system, priced, timeline),
        bound_s=timeline.bound_s,
        backend_share=_shares(timeline, priced),
        exposed_by_axis_s=timeline.exposed_by_axis_s,
        idle_s=timeline.idle_s,
        critical_s=timeline.critical_s,
        tiers={name: (used, _room(system.tier(name))) for name, used in program.offloaded.items()},
    )


def _room(tier: MemoryTier) -> int | None:
    return None if tier.nbytes is None else int(tier.nbytes.value)


@dataclass(frozen=True, slots=True)
class _MatrixFlops:
    """By math mode: `executed`, and of these `model`: without recomputation and padding."""

    executed: Mapping[str, float]
    model: Mapping[str, float]


def _matrix_flops(table: KernelTable, runs: Sequence[KernelRuns]) -> _MatrixFlops:
    executed: dict[str, float] = {}
    model: dict[str, float] = {}
    for run in runs:
        row = table.rows[run.row]
        if row.matmul_flops:
            executed[row.math] = executed.get(row.math, 0.0) + row.matmul_flops * run.count
            useful = 0.0 if parse_scope(run.scope).recomputed else row.useful_flops
            model[row.math] = model.get(row.math, 0.0) + useful * run.count
    return _MatrixFlops(executed, model)


def _utilisation(flops: Mapping[str, float], device: Device, time_s: float) -> float | None:
    """Share of the step that these FLOPs need at peak, each math mode by its own peak."""
    if not flops or time_s <= 0:
        return None
    return sum(amount / _peak(device, math) for math, amount in flops.items() if amount) / time_s


_PASSES = {"bf16x3": ("bf16", 3), "bf16x6": ("bf16", 6), "tf32x3": ("tf32", 3)}


def _peak(device: Device, math: str) -> float:
    base, passes = _PASSES.get(math, (math, 1))
    try:
        return device.matmul_rate(base).value / passes
    except InputError:
        return max(rate.value for rate in device.vector_flops.values())


def _memory(program: DeviceProgram) -> dict[str, int]:
    buffers = program.buffers
    if buffers is None:
        return {}
    return {
        "arguments": buffers.argument_bytes,
        "outputs": buffers.output_bytes - buffers.alias_bytes,
        "temporaries": buffers.temp_bytes,
        **buffers.by_scope,
    }


def kernel_times(table: KernelTable, runs: Sequence[KernelRuns], priced: Priced) -> tuple[KernelTime, ...]:
    """Kernels of equal row, source line and scope family put together, the dearest first."""
    counts: dict[tuple[int, str, str], float] = {}
    labels: dict[tuple[int, str, str], list[str]] = {}
    for run in runs:
        label = parse_scope(run.scope).label
        key = (run.row, family(label), run.source if label else "")
        counts[key] = counts.get(key, 0.0) + run.count
        held = labels.setdefault(key, [])
        if len(held) < 2 and label not in held:
            held.append(label)
    result = [_kernel_time(table, key, counts[key], labels[key], priced) for key in counts]
    return tuple(sorted(result, key=lambda kernel: -kernel.time_s))


def _kernel_time(
    table: KernelTable,
    key: tuple[int, str, str],
    count: float,
    labels: list[str],
    priced: Priced,
) -> KernelTime:
    number, group, source = key
    estimates = priced.estimates
    row = table.rows[number]
    return KernelTime(
        klass=str(row.klass),
        scope=labels[0] if len(labels) == 1 else group,
        source=_short_source(source),
        count=count,
        time_s=float(estimates.time_s[number]) * count,
        low_s=float(estimates.low_s[number]) * count,
        high_s=float(estimates.high_s[number]) * count,
        basis=str(estimates.source[number]),
        shape=row.shape,
        bound=str(estimates.bound[number]),
        backend=str(priced.backend[number]),
        matmul_flops=row.matmul_flops * count,
        nbytes=(row.bytes_read + row.bytes_written) * count,
        detail=priced.detail_of(number),
    )


def _short_source(source: str) -> str:
    path, colon, line = source.rpartition(":")
    return f"{Path(path).name}:{line}" if colon else source


def collective_times(runs: Sequence[CollectiveRuns]) -> tuple[CollectiveTime, ...]:
    """Equal collectives put together, the dearest first."""
    found: dict[tuple[str, tuple[str, ...], int, int, str], list[float]] = {}
    for run in runs:
        node = run.node
        if isinstance(node, P2P):
            key = (node.direction, (node.axis,), 2, node.nbytes, run.algorithm)
        else:
            key = (node.kind, node.groups.axes, node.groups.size, node.message_bytes, run.algorithm)
        sums = found.setdefault(key, [0.0] * 5)
        parts = (1.0, run.time_s, run.low_s, run.high_s, run.exposed_s)
        for index, part in enumerate(parts):
            sums[index] += part * run.count
    result = [
        CollectiveTime(kind, axes, size, nbytes, sums[0], sums[1], sums[2], sums[3], sums[4], algorithm)
        for (kind, axes, size, nbytes, algorithm), sums in found.items()
    ]
    return tuple(sorted(result, key=lambda collective: -collective.time_s))


def _shares(timeline: Timeline, priced: Priced) -> dict[str, float]:
    times: dict[str, float] = {}
    for run in timeline.kernels:
        name = str(priced.backend[run.row])
        times[name] = times.get(name, 0.0) + float(priced.estimates.time_s[run.row]) * run.count
    total = sum(times.values())
    return {name: time / total for name, time in sorted(times.items())} if total else {}


def _assumptions(program: DeviceProgram, system: System, priced: Priced, timeline: Timeline) -> tuple[str, ...]:
    device = system.device
    said = [
        f"{program.exec_model} kernels for {program.platform or 'any platform'}; the host never holds the device up"
    ]
    maths = sorted({row.math for row in program.table.rows if row.matmul_flops})
    for math in maths:
        base, passes = _PASSES.get(math, (math, 1))
        said.append(_peak_assumption(device, math, base, passes))
    memory = device.hbm_bytes_per_s
    said.append(f"device memory {memory} peak ({_origin(memory.source, memory.doubtful, memory.confidence)})")
    if timeline.collectives:
        said += list(timeline.assumptions)
        said += list(system.notes)
    said += list(priced.assumptions)
    said += list(program.notes)
    return tuple(dict.fromkeys(said))


def _peak_assumption(device: Device, math: str, base: str, passes: int) -> str:
    try:
        peak = device.matmul_rate(base)
    except InputError:
        return f"{math} products run on the vector lanes of {device.name}"
    many = f" in {passes} passes" if passes > 1 else ""
    return f"{math}{many}: {peak} dense peak ({_origin(peak.source, peak.doubtful, peak.confidence)})"


def _origin(source: str, doubtful: bool, confidence: str) -> str:
    return f"{source}, {confidence} confidence" if doubtful else source
