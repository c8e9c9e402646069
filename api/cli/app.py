"""The application, its error handling and exit codes."""

import gc
import sys
from typing import Any

import click
import typer

from stablecast.ir.errors import StablecastError

EPILOG = "Exit codes: 0 done; 2 the input or a name is wrong; 3 does not fit or incomplete with --strict; 4 an external tool failed; 130 interrupted."

app = typer.Typer(
    name="stablecast",
    help="Predict how long a JAX or PyTorch program takes on GPUs and TPUs that nobody has to own.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from stablecast import __version__

        typer.echo(f"stablecast {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")) -> None:
    """Predict how long a JAX or PyTorch program takes on GPUs and TPUs that nobody has to own."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; leaves with a documented exit code and, for errors made on purpose, one line."""
    gc.disable()
    _load_commands()
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        result: Any = app(arguments, standalone_mode=False)
    except StablecastError as error:
        print(f"stablecast: {error}", file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        print(f"stablecast: {_one_line(error)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.exceptions.Abort):
        print("stablecast: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    return int(result) if isinstance(result, int) else 0


def _one_line(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{text}; see '{context.command_path} --help'" if context is not None else text


def _load_commands() -> None:
    """Importing the modules registers their commands."""
    from stablecast.cli import hardware, inspect, kernel, predict  # noqa: F401  # pyright: ignore[reportUnusedImport]
