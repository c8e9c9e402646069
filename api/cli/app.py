"""The application, its error handling and exit codes."""

import gc
import sys
from typing import Any

import typer

from stablecast.ir.errors import StablecastError

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""click's base of all usage errors, which typer carries inside or beside it depending on its version."""
EPILOG = (
    "Exit codes: 0 done; 2 the input or a name is wrong; 3 does not fit or incomplete with --strict; "
    "4 an external tool failed; 130 interrupted."
)

app = typer.Typer(
    name="stablecast",
    help="Predict how long a JAX or PyTorch program takes on GPUs and TPUs that nobody has to own.",
    epilog=EPILOG,
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
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Predict how long a JAX or PyTorch program takes on GPUs and TPUs that nobody has to own."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; leaves with a documented exit code and, for errors made on purpose, one line."""
    gc.disable()
    _load_commands()
    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(_run(given or ["--help"]))


def _run(arguments: list[str]) -> int:
    try:
        result: Any = app(arguments, prog_name="stablecast", standalone_mode=False)
    except StablecastError as error:
        print(f"stablecast: {error}", file=sys.stderr)
        return error.exit_code
    except _USAGE_ERROR as error:
        print(f"stablecast: {_one_line(error)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("stablecast: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    return int(result) if isinstance(result, int) else 0


def _one_line(error: Any) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{text}; see '{context.command_path} --help'" if context is not None else text


def _load_commands() -> None:
    """Importing the modules registers their commands."""
    from stablecast.cli import chakra, hardware, inspect, kernel, network, predict, scalesim, train, validate  # noqa: F401  # pyright: ignore[reportUnusedImport]
