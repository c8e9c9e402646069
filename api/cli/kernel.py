"""`kernel`: the time of one kernel by its sizes, or of a table of them."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from stablecast.cli import options as opt
from stablecast.cli.app import app
from stablecast.ir.errors import InputError


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def kernel(
    context: typer.Context,
    kind: Annotated[
        str,
        typer.Argument(
            help="matmul, conv2d, elementwise, reduce, softmax, layernorm, attention, moe, embedding or copy."
        ),
    ] = "",
    on: Annotated[str, typer.Option("--on", help="A device.")] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="Element type of the operands.")] = "bf16",
    backend: opt.Backend = "analytical",
    measured_gemm: opt.MeasuredGemm = [],
    calibration: opt.CalibrationFile = None,
    table: Annotated[
        Path | None, typer.Option("--table", help="CSV with a row a kernel; its time is written beside it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the table goes; standard output if left out.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """The time of one kernel: stablecast kernel matmul --m 4096 --n 4096 --k 4096 --dtype bf16 --on h100-sxm."""
    if not on:
        raise InputError("kernel needs a device", "give --on h100-sxm")
    from stablecast._kernel import kernel_table, kernel_time, parse_sizes

    known = opt.catalogue(measured_gemm, calibration)
    if table is not None:
        text = kernel_table(table, kind, on, dtype, backend, known)
        if output is None:
            typer.echo(text.rstrip())
        else:
            opt.write_text(output, text)
        return
    if not kind:
        raise InputError(
            "kernel needs a kind",
            "matmul, conv2d, elementwise, reduce, softmax, layernorm, attention, moe, embedding or copy",
        )
    answer = kernel_time(kind, parse_sizes(context.args), on, dtype, backend, known)
    typer.echo(jsonlib.dumps(answer.to_dict()) if json else str(answer))
