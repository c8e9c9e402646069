"""`work` and `ops`."""

import json as jsonlib
from typing import Annotated

import typer

from stablecast.cli import options as opt
from stablecast.cli.app import app


@app.command()
def work(
    input: opt.Input,
    fused: Annotated[bool, typer.Option("--fused", help="Bytes after fusion into kernels.")] = False,
    padding: opt.Padding = "in",
    causal: opt.Causal = "full",
    branch: opt.Branch = "max",
    loop: opt.Loop = [],
    dim: opt.Dim = [],
    rules: opt.Rules = [],
    mesh: opt.Mesh = [],
    platform: opt.For = "",
    args: opt.Args = "",
    arg: opt.Arg = [],
    settings: opt.Set = [],
    batch: opt.Batch = "",
    seq: opt.Seq = "",
    mode: opt.Mode = "",
    dtype: opt.Dtype = "",
    parallel: opt.Parallel = "",
    json: opt.Json = False,
) -> None:
    """FLOPs and bytes of one device and step, with the conventions that they are counted by."""
    from stablecast._predict import Session
    from stablecast.report.program import work_text

    conventions = opt.make_conventions(loop, dim, rules, padding, causal, branch)
    model = opt.model_settings(batch, seq, mode, dtype, parallel)
    chosen = opt.make_options("analytical", "auto", mesh, platform, args, arg, settings, conventions, model=model)
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
