"""Memory that XLA laid out, as the `buffer-assignment` file beside a dump says."""

import re
from collections.abc import Iterator

from stablecast.ir.device_program import Buffers

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*)$", re.MULTILINE)


def read_assignment(text: str) -> Buffers | None:
    """The memory of a step in XLA's buffer assignment, None where the text holds none.

    Parameters that are live out are outputs which take over an argument; constants and thread-local buffers do not
    count, everything else that no argument or result lives in is temporary.
    """
    found = list(_allocations(text))
    if not found:
        return None
    argument = sum(size for size, marks in found if "parameter" in marks)
    output = sum(size for size, marks in found if "maybe-live-out" in marks)
    alias = sum(size for size, marks in found if "parameter" in marks and "maybe-live-out" in marks)
    idle = ("parameter", "maybe-live-out", "constant", "thread-local")
    temp = sum(size for size, marks in found if not any(mark in marks for mark in idle))
    return Buffers(argument, output, alias, temp)


def _allocations(text: str) -> Iterator[tuple[int, str]]:
    for match in _ALLOCATION.finditer(text):
        yield int(match[1]), match[2]
