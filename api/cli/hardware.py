"""`hardware list | show | check`."""

import json as jsonlib
from typing import Annotated

import typer

from stablecast.cli import options as opt
from stablecast.cli.app import app
from stablecast.ir.errors import InputError

hardware = typer.Typer(name="hardware", help="The hardware catalogue: every value with unit and source.")
app.add_typer(hardware, name="hardware")


@hardware.command("list")
def list_devices(json: opt.Json = False) -> None:
    """Every device with its main figures."""
    from stablecast.backends.catalogue import Catalogue, format_list

    rows = Catalogue().list_rows()
    typer.echo(jsonlib.dumps({"schema": 1, "devices": rows}, indent=1) if json else format_list(rows))


@hardware.command()
def show(name: Annotated[str, typer.Argument(help="A device, system or YAML file.")], json: opt.Json = False) -> None:
    """Everything that is known of a device or system, with units and sources."""
    from stablecast.backends.catalogue import Catalogue, format_show

    shown = Catalogue().show_dict(name)
    typer.echo(jsonlib.dumps({"schema": 1, **shown}, indent=1) if json else format_show(shown))


@hardware.command()
def check(json: opt.Json = False) -> None:
    """Check every file of the catalogue: schema, sources, closure of the figures."""
    from stablecast.backends.catalogue import Catalogue

    faults = Catalogue().check()
    if json:
        typer.echo(jsonlib.dumps({"schema": 1, "ok": not faults, "faults": faults}, indent=1))
    else:
        typer.echo("\n".join(faults) if faults else "the catalogue has no faults")
    if faults:
        raise InputError(f"the hardware catalogue has {len(faults)} fault(s)")
