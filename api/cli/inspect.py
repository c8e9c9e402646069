"""`work`, `ops` and `passes`."""

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


@app.command()
def passes(json: opt.Json = False) -> None:
    """Schedule passes for --pass, and those that each execution model takes for granted."""
    from stablecast.lowering.passes import DEFAULTS, pass_summaries

    found = pass_summaries()
    if json:
        rows = [{"name": name, "about": about} for name, about in found.items()]
        defaults = {model: list(names) for model, names in DEFAULTS.items()}
        typer.echo(jsonlib.dumps({"schema": 1, "passes": rows, "defaults": defaults}, indent=1))
        return
    width = max(map(len, found), default=0)
    typer.echo("\n".join(f"{name:{width}}  {about}" for name, about in found.items()))
    typer.echo("\ntaken for granted:")
    typer.echo("\n".join(f"  {model:{width}}  {', '.join(names)}" for model, names in DEFAULTS.items()))
