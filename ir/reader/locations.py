"""Scope path and source line of MLIR locations."""

from functools import lru_cache
from typing import Any

from stablecast.ir.mlir import bindings
from stablecast.ir.types import UNKNOWN_LOCATION, Location


class LocationReader:
    """Decodes locations, each distinct one once.

    The outermost name of a location is the scope; names below it are the functions of the call stack, whose
    innermost frame outside of installed packages gives file and line. `source`: name of the module, for places in its
    own text.
    """

    def __init__(self, source: str) -> None:
        self._ir = bindings()
        self._line: Any = self._ir.FileLineColLoc
        self._source = source
        self._known: dict[Any, Location] = {}
        self._frames: dict[Any, tuple[str, int]] = {}

    def __call__(self, location: Any) -> Location:
        if isinstance(location, self._line):
            return Location("", *self._place(location))
        key = location.attr
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._decode(location)
        return found

    def _decode(self, location: Any) -> Location:
        ir = self._ir
        if isinstance(location, ir.NameLoc):
            file, line = self._frame(location.child_loc)
            return Location(location.name_str, file, line)
        if isinstance(location, ir.CallSiteLoc):
            callee, caller = self._decode(location.callee), self._decode(location.caller)
            return Location(join_scopes(caller.scope, callee.scope), callee.file, callee.line)
        if isinstance(location, ir.FusedLoc):
            parts = [self._decode(part) for part in location.locations]
            return next((part for part in parts if part.scope), parts[0] if parts else UNKNOWN_LOCATION)
        if isinstance(location, ir.FileLineColLoc):
            return Location("", *self._place(location))
        return UNKNOWN_LOCATION

    def _frame(self, location: Any) -> tuple[str, int]:
        key = location.attr
        found = self._frames.get(key)
        if found is None:
            found = self._frames[key] = self._decode_frame(location)
        return found

    def _place(self, location: Any) -> tuple[str, int]:
        """File and line; the text of the module itself goes by the name that it was read under."""
        filename = location.filename
        return (self._source if filename == "-" else filename), location.start_line

    def _decode_frame(self, location: Any) -> tuple[str, int]:
        ir = self._ir
        if isinstance(location, ir.FileLineColLoc):
            return self._place(location)
        if isinstance(location, ir.NameLoc):
            return self._frame(location.child_loc)
        if isinstance(location, ir.CallSiteLoc):
            inner = self._frame(location.callee)
            if inner[0] and not _installed(inner[0]):
                return inner
            outer = self._frame(location.caller)
            return outer if outer[0] and (not inner[0] or not _installed(outer[0])) else inner
        if isinstance(location, ir.FusedLoc):
            return next((frame for frame in map(self._frame, location.locations) if frame[0]), ("", 0))
        return "", 0


@lru_cache(maxsize=1024)
def _installed(file: str) -> bool:
    """Whether `file` belongs to an installed package rather than to the user."""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.replace("\\", "/").split("/"))


def join_scopes(outer: str, inner: str) -> str:
    """`inner` as seen from a call in `outer`; left alone where it already is the whole path."""
    if not outer:
        return inner
    if not inner:
        return outer
    root = outer.split("/", 1)[0]
    return inner if inner == root or inner.startswith(root + "/") else f"{outer}/{inner}"
