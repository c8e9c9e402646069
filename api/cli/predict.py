"""`predict`, `compare`, `capture` and `run`."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stablecast.cli import options as opt
from stablecast.cli.app import app
from stablecast.ir.errors import IncompleteError, InputError

if TYPE_CHECKING:
    from stablecast.backends.prediction import Prediction

On = Annotated[
    str,
    typer.Option(
        "--on", metavar="NAME[:N]", help="Device, system or YAML file; without :N as many as the program has."
    ),
]
Many = Annotated[
    list[str], typer.Option("--on", metavar="NAME[:N]", help="A device, system or YAML file; give it several times.")
]
Backends = Annotated[list[str], typer.Option("--backend", help="A backend; give it several times.")]


@app.command()
@opt.grouped
def predict(
    input: opt.Input,
    on: On = "",
    backend: opt.Backend = "analytical",
    measured_gemm: opt.MeasuredGemm = [],
    calibration: opt.CalibrationFile = None,
    source: opt.SourceChoices = opt.SourceChoices(),
    counting: opt.CountingChoices = opt.CountingChoices(),
    execution: opt.ExecutionChoices = opt.ExecutionChoices(),
    timeline: opt.TimelineChoices = opt.TimelineChoices(),
    json: opt.Json = False,
    csv: opt.Csv = False,
    strict: opt.Strict = False,
    role: Annotated[
        list[str],
        typer.Option(
            "--role", metavar="INPUT", help="Capture of another rank of the step (a pipeline stage); repeat it."
        ),
    ] = [],
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE", help="Write the step as a Perfetto trace.")
    ] = None,
) -> None:
    """The step time of a program on a device or system, with its range, parts and sources.

    Without --on: work and kernels only.
    """
    opt.one_format(json, csv)
    from stablecast._predict import Session

    if perfetto is not None:
        opt.writable(perfetto)
    chosen = opt.make_options(source, counting, execution, backend, timeline=timeline)
    known = opt.catalogue(measured_gemm, calibration)
    session, *beside = (Session(one, chosen, known) for one in (input, *role))
    with opt.progress(f"predicting {input}"):
        if not on:
            from stablecast.report.program import program_dict, program_text

            lowered = session.lowered_alone()
            typer.echo(
                jsonlib.dumps(program_dict(lowered, session.name)) if json else program_text(lowered, session.name)
            )
            return
        prediction = session.predict(on, beside)
        if perfetto is not None:
            prediction.to_perfetto(perfetto)
    typer.echo(prediction.to_json() if json else prediction.to_csv().rstrip() if csv else repr(prediction))
    if strict and not (prediction.fits and prediction.complete):
        why = "is incomplete" if prediction.fits else f"does not fit on {prediction.system}"
        raise IncompleteError(f"the prediction {why}")


@app.command()
@opt.grouped
def compare(
    input: opt.Input,
    on: Many = [],
    backend: Backends = ["analytical"],
    source: opt.SourceChoices = opt.SourceChoices(),
    counting: opt.CountingChoices = opt.CountingChoices(),
    execution: opt.ExecutionChoices = opt.ExecutionChoices(),
    timeline: opt.TimelineChoices = opt.TimelineChoices(),
    json: opt.Json = False,
    csv: opt.Csv = False,
    strict: opt.Strict = False,
) -> None:
    """One program on several systems, and by several backends, in one table."""
    opt.one_format(json, csv)
    from stablecast._compare import compare as compare_all

    chosen = opt.make_options(source, counting, execution, timeline=timeline)
    with opt.progress(f"comparing {input}"):
        comparison = compare_all(input, on=on, backends=backend, options=chosen)
    typer.echo(comparison.to_json() if json else comparison.to_csv().rstrip() if csv else repr(comparison))
    if strict and (comparison.failed or not all(row.fits and row.complete for row in comparison.rows)):
        raise IncompleteError("a row does not fit, is incomplete or has no time")


@app.command()
@opt.grouped
def capture(
    input: opt.Input,
    output: Annotated[Path, typer.Option("--output", "-o", help="The capture file to write, step.sc.")],
    source: opt.SourceChoices = opt.SourceChoices(),
    json: opt.Json = False,
) -> None:
    """Keep a program as one small file that every command reads, with no need of the script or its packages."""
    from stablecast._capture import load
    from stablecast.ir import capture_file

    opt.writable(output)
    with opt.progress(f"capturing {input}"):
        made = load(
            input,
            source.arguments(),
            platform=source.platform or "cuda",
            mesh=source.mesh_axes(),
        )
        capture_file.write(made, output)
    if json:
        typer.echo(
            jsonlib.dumps(
                {
                    "schema": 1,
                    "output": str(output),
                    "bytes": output.stat().st_size,
                    "stage": made.stage.value,
                    "devices": made.num_devices,
                    "platform": made.platform,
                    "arguments": len(made.args),
                }
            )
        )
    else:
        typer.echo(f"{output}: {made!r}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A script with @stablecast.workload on its step functions.")],
    on: Many = [],
    backend: opt.Backend = "analytical",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the captures.")] = None,
    json: opt.Json = False,
) -> None:
    """Execute a script, capture every annotated function at its first call, and predict.

    Arguments after -- go to the script.
    """
    from stablecast._predict import Options, Session, platform_of
    from stablecast.backends.catalogue import Catalogue
    from stablecast.frontends.script import run_script
    from stablecast.ir import capture_file

    if not on:
        raise InputError("run needs a device to predict for", "give --on h100-sxm")
    catalogue = Catalogue()
    platform = platform_of(catalogue.resolve(on[0]).device)
    recorded = run_script(script, context.args, platform=platform)
    for name, why in recorded.failures.items():
        typer.echo(f"stablecast: {name} was called but not captured: {why}", err=True)
    if not recorded.workloads:
        raise InputError(f"{script} called no function with @stablecast.workload", "annotate its step function")
    predictions: list[Prediction] = []
    for name, workload in recorded.workloads.items():
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            capture_file.write(workload, output / f"{name}.sc")
        session = Session(workload, Options(backend=backend), catalogue)
        predictions += [session.predict(spec) for spec in on]
    if json:
        typer.echo(jsonlib.dumps({"schema": 1, "predictions": [prediction.to_dict() for prediction in predictions]}))
        return
    typer.echo("\n\n".join(map(repr, predictions)))
