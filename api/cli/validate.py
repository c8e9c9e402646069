"""`validate` and `accuracy`: predictions against measurements."""

import json as jsonlib
from functools import reduce
from pathlib import Path
from typing import Annotated

import typer

from stablecast.cli import options as opt
from stablecast.cli.app import app
from stablecast.ir.errors import InputError

_LOG = Path("docs") / "accuracy_log.csv"
_SUITES = (
    "One, several with commas, or all: neusight, hespas, tpu-v4, tpu-steps, vtrain, torchtitan, gemm, collectives, "
    "timm, deepbench, vidur, llmcompass."
)
Traces = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE...", help="A measured trace (Kineto, xplane.pb, Chakra, nsys, CSV; .gz too), or one a rank."
    ),
]


@app.command()
@opt.grouped
def validate(
    traces: Traces,
    workload: Annotated[
        str, typer.Option("--workload", help="What was run: a capture, a StableHLO or HLO file, or script.py:function.")
    ] = "",
    on: Annotated[str, typer.Option("--on", metavar="NAME[:N]", help="The device or system that it ran on.")] = "",
    backend: opt.Backend = "analytical",
    source: opt.SourceChoices = opt.SourceChoices(),
    counting: opt.CountingChoices = opt.CountingChoices(),
    execution: opt.ExecutionChoices = opt.ExecutionChoices(),
    step: Annotated[
        str, typer.Option("--step", help="The annotation that marks a step, where it has an unusual name.")
    ] = "",
    device: Annotated[
        int | None, typer.Option("--device", help="Which device of the trace; the first with work if left out.")
    ] = None,
    host_trace: Annotated[
        str,
        typer.Option("--host-trace", metavar="ET", help="PyTorch execution trace of the run: shapes for the trace."),
    ] = "",
    graph: Annotated[
        bool, typer.Option("--graph", help="Only compare the graphs; exit with 3 and --strict where they differ.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--html", help="Write a page with both timelines.")] = None,
    json: opt.Json = False,
    strict: opt.Strict = False,
) -> None:
    """A measured trace beside the prediction of what was run: step, parts, classes, layers, largest differences.

    With --on alone: the program is rebuilt from the trace's own operators and shapes. Without either: what the trace
    says. Steps are found by annotation, by compiled module or by repetition.
    """
    from stablecast._predict import Session
    from stablecast._validate import validate as run_validation
    from stablecast.ir.errors import IncompleteError

    if graph and not on:
        raise InputError("--graph compares with a prediction", "give --on, and --workload where there is one")
    session = None
    if workload:
        session = Session(workload, opt.make_options(source, counting, execution, backend))
    with opt.progress(f"reading {traces[0]}"):
        report = run_validation(
            *traces, workload=session, on=on, backend=backend, device=device, step=step, host_trace=host_trace
        )
    if output is not None:
        opt.write_text(output, report.to_html())
    if graph and report.graph is not None:
        from stablecast.validation.report_text import graph_text

        answer = {"schema": 1, "graph": report.graph.to_dict()}
        typer.echo(jsonlib.dumps(answer) if json else graph_text(report))
    else:
        typer.echo(report.to_json() if json else repr(report))
    if strict and report.graph is not None and not report.graph.ok:
        raise IncompleteError("the predicted graph differs from the one that ran")


@app.command()
def accuracy(
    suite: Annotated[str, typer.Option("--suite", metavar="SUITE", help=_SUITES)] = "all",
    data: Annotated[Path, typer.Option("--data", help="Folder of the measurements.")] = Path("../shared/data"),
    backend: opt.Backend = "analytical",
    others: Annotated[
        str,
        typer.Option("--beside", metavar="BACKENDS", help="More backends, with commas, shown as peers."),
    ] = "",
    measured_gemm: opt.MeasuredGemm = [],
    calibration: opt.CalibrationFile = None,
    rows: Annotated[
        int, typer.Option("--rows", help="Rows to score of one table and device; larger tables are thinned.")
    ] = 4000,
    picture: Annotated[Path | None, typer.Option("--plot", help="Write a scatter plot (SVG).")] = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Where looks at test sets are logged; docs/accuracy_log.csv if it is there."),
    ] = None,
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """How far predictions are from public measurements, a table a suite, peers' own predictions beside them."""
    opt.one_format(json, csv)
    from stablecast.backends.learned.calibration import calibrations
    from stablecast.validation.accuracy import append_log, beside, run_accuracy, scatter

    if rows < 1:
        raise InputError(f"--rows is {rows}", "give a whole number from 1 up")
    target = log or (_LOG if _LOG.is_file() else None)
    given = calibrations(measured_gemm, calibration)
    with opt.progress(f"scoring {suite}") as tell:
        names = [backend, *(name.strip() for name in others.split(",") if name.strip())]
        reports = [run_accuracy(suite, data, name, rows, calibrations=given, progress=tell) for name in names]
    if target is not None:
        for scored in reports:
            append_log(scored, target)
    report = reduce(beside, reports)
    if picture is not None:
        opt.write_text(picture, scatter(report.rows))
    typer.echo(report.to_json() if json else report.to_csv().rstrip() if csv else repr(report))
