"""`work` and `ops`."""

import json as jsonlib
from typing import Annotated

import typer

from stablecast.cli import options as opt
from stablecast.cli.app import app


@app.command()
@opt.grouped
def work(
    input: opt.Input,
    fused: Annotated[bool, typer.Option("--fused", help="Bytes after fusion into kernels.")] = False,
    padding: opt.Padding = "in",
    causal: opt.Causal = "full",
    counting: opt.CountingChoices = opt.CountingChoices(),
    source: opt.SourceChoices = opt.SourceChoices(),
    json: opt.Json = False,
) -> None:
    """FLOPs and bytes of one device and step, with the conventions that they are counted by."""
    from stablecast._predict import Session
    from stablecast.report.program import work_text

    conventions = counting.conventions(padding, causal)
    chosen = opt.make_options(source, counting, opt.ExecutionChoices(), conventions=conventions)
    with opt.progress(f"counting {input}"):
        counted = Session(input, chosen).work(fused=fused)
    typer.echo(jsonlib.dumps(counted, indent=2) if json else work_text(counted, input))


@app.command()
def ops(json: opt.Json = False) -> None:
    """The support matrix: every op, its work rule and kernel class."""
    from stablecast.ir.accounting.matrix import support_matrix
    from stablecast.report.program import ops_text

    rows = [row.to_dict() for row in support_matrix()]
    typer.echo(jsonlib.dumps({"schema": 1, "ops": rows}, indent=1) if json else ops_text(rows))
