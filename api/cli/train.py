"""`train`: the learned models, anew from public measurements."""

import json as jsonlib
import time
from pathlib import Path
from typing import Annotated

import typer

from stablecast.cli import options as opt
from stablecast.cli.app import app
from stablecast.ir.errors import InputError


@app.command()
def train(
    data: Annotated[Path, typer.Option("--data", help="Folder of the measurements.")] = Path("../shared/data"),
    family: Annotated[
        list[str],
        typer.Option("--family", help="Only models of this kind, numeric family or both: matmul, fp32, matmul-fp32."),
    ] = [],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the models; those that ship if left out.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", metavar="FILE", help="Analytical constants to train on; today's if left out."),
    ] = None,
    date: Annotated[str, typer.Option("--date", help="Date that the cards state; today if left out.")] = "",
    json: opt.Json = False,
) -> None:
    """Train the models of the backend `learned` and write them, with a card each: data, splits, errors, domain.

    Reads training tables only: test tables and labels of whole models cannot be opened. Needs scikit-learn.
    """
    try:
        import sklearn  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise InputError("training needs scikit-learn", "pip install 'stablecast[learned]'") from None
    from stablecast.backends.learned.rates import MODELS
    from stablecast.validation.training.run import train as run_training

    if base is not None and not base.is_file():
        raise InputError(f"there is no file {base}", "the constants that a folder's models rest on are its base.yaml")
    started = time.perf_counter()
    folder = output or MODELS
    with opt.progress("training"):
        trained = run_training(data, family, folder, date, lambda text: typer.echo(text, err=True), base=base)
    if json:
        typer.echo(jsonlib.dumps(trained.to_dict()))
        return
    typer.echo(trained.summary())
    typer.echo(f"{len(trained.models)} models in {folder}, {time.perf_counter() - started:.0f} s")
