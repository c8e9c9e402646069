"""Every error that stablecast raises on purpose.

A message names the op or file and what is wrong; `hint` says what to do next. The command line prints both on
one line and leaves with `exit_code`; it never shows a traceback for these.
"""

import difflib
from collections.abc import Iterable


class StablecastError(Exception):
    """Base of all errors raised on purpose.

    `message`: what is wrong and where. `hint`: what to do next, may be empty.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class InputError(StablecastError):
    """The input, an option or a name is wrong (exit code 2)."""


class IncompleteError(StablecastError):
    """A prediction does not fit or is incomplete and `--strict` was given (exit code 3)."""

    exit_code = 3


class ToolError(StablecastError):
    """An external tool (compiler, profiler, child process) failed (exit code 4)."""

    exit_code = 4


def near_names(name: str, known: Iterable[str], limit: int = 4) -> str:
    """A hint that lists the names closest to `name`, or all of them where there are few."""
    names = sorted(known)
    lowered = name.lower()
    near = difflib.get_close_matches(lowered, names, n=limit, cutoff=0.5)
    near += [other for other in names if lowered and lowered in other and other not in near][: limit - len(near)]
    if near:
        return "did you mean " + ", ".join(near) + "?"
    if len(names) <= 8:
        return "known: " + ", ".join(names)
    return ""
