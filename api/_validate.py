"""`validate`: a measured trace, alone or beside the prediction of a workload."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from stablecast._predict import Options, Session, Source, split_system
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.predictor import Settings
from stablecast.backends.registry import parse_choice
from stablecast.frontends.traces import read_ranks
from stablecast.frontends.traces.pytorch_et import read_et, with_shapes
from stablecast.ir.errors import InputError
from stablecast.validation.from_trace import trace_program
from stablecast.validation.measured import MeasuredRun, measure
from stablecast.validation.ranks import AlignedRanks, align, waits_s
from stablecast.validation.report import ValidationReport
from stablecast.validation.report import validate as lay_beside


def measured_runs(
    traces: Sequence[str | Path], device: int | None, step: str, host_trace: str | Path = ""
) -> tuple[MeasuredRun, ...]:
    """The runs of one or several ranks; `host_trace`: the execution trace that lends its shapes to all of them."""
    ranks = read_ranks(traces)
    if host_trace:
        lender = read_et(Path(host_trace))
        ranks = tuple(with_shapes(lender, events) for events in ranks)
    return tuple(measure(events, device=device, step=step) for events in ranks)


def validate(
    *traces: str | Path,
    workload: Source | Session | None = None,
    on: str = "",
    backend: str = "analytical",
    device: int | None = None,
    step: str = "",
    host_trace: str | Path = "",
) -> ValidationReport:
    """Lay the prediction of `workload` on `on` beside a measured trace.

    Without a workload but with `on`, the program is rebuilt from the operators and shapes of the trace, for that
    device; without either, the run is described.

    `traces`: one file, or one a rank (the slowest one is reported). `workload`: a `Workload`, a `DeviceProgram`, or
    what the command line takes as INPUT. `device`: which device of the trace. `step`: the annotation that marks a step.
    `host_trace`: the PyTorch execution trace of the run, for shapes that the trace lacks. Raises `InputError` for what
    cannot be read.
    """
    if not traces:
        raise InputError("no trace is given")
    runs = measured_runs(traces, device, step, host_trace)
    run = max(runs, key=lambda found: found.median_step_s)
    waits = waits_s(runs, run)
    if workload is None:
        return _from_its_own_shapes(run, on, backend, waits) if on else lay_beside(run, waits_s=waits)
    if not on:
        raise InputError("a workload needs a device to be predicted on", "give --on h100-sxm")
    session = workload if isinstance(workload, Session) else Session(workload, Options(backend=backend))
    system = session.system(on)
    program = session.scheduled(session.device_program(system.device))
    settings = Settings(parse_choice(session.options.backend), session.options.conventions.loops)
    return lay_beside(run, program, system, settings, session.name, waits)


def _from_its_own_shapes(run: MeasuredRun, on: str, backend: str, waits: Mapping[int, float]) -> ValidationReport:
    catalogue = Catalogue()
    name, count = split_system(on)
    program = trace_program(run, run.typical_step, catalogue.resolve(name).device)
    system = catalogue.resolve(on if count is not None else f"{name}:{program.num_devices}")
    return lay_beside(run, program, system, Settings(parse_choice(backend), {}), run.events.source, waits)


def aligned(traces: Sequence[str | Path], device: int | None = None, step: str = "") -> AlignedRanks:
    """Several ranks of one run on one clock."""
    return align(measured_runs(traces, device, step))
