"""The command line: a thin shell over the library. Everything heavy is imported inside the commands."""

from stablecast.cli.app import main

__all__ = ["main"]
