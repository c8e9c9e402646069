"""Where an op comes from: phase, module path, ATen name, and the line of user code."""

import os
import sys
from types import CodeType, FrameType
from typing import Any

from stablecast.frontends.torch.graph import Place
from stablecast.frontends.torch.private import backward_node, sequence_number, torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NO_FRAME = ("", 0)
REMATERIALISED = "rematted_computation"
"""Scope of recomputation, by the name that lowering knows."""

_library: dict[CodeType, bool] = {}


def _is_library(code: CodeType) -> bool:
    found = _library.get(code)
    if found is None:
        name = code.co_filename
        found = name.startswith((_TORCH, _OURS, "<")) or name.endswith("contextlib.py")
        _library[code] = found
    return found


def is_users(file: str) -> bool:
    """Whether a source file is neither torch's nor made up at run time."""
    return not file.startswith((_TORCH, "<"))


def user_frame() -> tuple[str, int]:
    """File and line of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if not _is_library(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return _NO_FRAME


def in_library(*parts: str) -> bool:
    """Whether a frame of torch under one of these folders is on the stack before any user frame."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    folders = tuple(_TORCH + part for part in parts)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(folders):
            return True
        if not _is_library(frame.f_code):
            return False
        frame = frame.f_back
    return False


class Places:
    """Numbers places. `modules`: path of the module that runs now; `optimizer`: inside an optimiser's step.

    `line`: file and line to give in place of the running frame's, for graphs that were written elsewhere.
    """

    def __init__(self) -> None:
        self.table: list[Place] = [Place("", "", 0)]
        self.modules: list[str] = []
        self.optimizer = 0
        self.line: tuple[str, int] | None = None
        self._known: dict[Place, int] = {self.table[0]: 0}
        self._origin: dict[int, tuple[str, str, int]] = {}
        self._last: tuple[str, str, int] = ("", "", 0)

    def here(self, info: Any) -> int:
        """The place of an op that is dispatched now."""
        node = backward_node()
        if node is None:
            module = self.modules[-1] if self.modules else ""
            file, line = self.line or user_frame()
            if self.optimizer:
                phase = "optimizer"
            elif not self.modules and not torch.is_grad_enabled():
                phase = "step"
            else:
                phase = "forward"
                self._origin[sequence_number() - 1] = (module, file, line)
        else:
            phase, module, file, line = self._backward(node)
        scope = "/".join(part for part in (phase, module, info.name) if part)
        return self._number(Place(scope, file, line))

    def renamed(self, number: int, name: str) -> int:
        """Place `number` with the op `name` in place of its own."""
        place = self.table[number]
        path = place.scope.rpartition("/")[0]
        return self._number(place._replace(scope=f"{path}/{name}" if path else name))

    def _number(self, place: Place) -> int:
        number = self._known.get(place)
        if number is None:
            number = self._known[place] = len(self.table)
            self.table.append(place)
        return number

    def _backward(self, node: Any) -> tuple[str, str, str, int]:
        if self.modules:
            file, line = user_frame()
            origin = (self.modules[-1], file, line)
            self._origin[sequence_number() - 1] = origin
            return (f"backward/{REMATERIALISED}", *origin)
        origin = self._origin.get(node._sequence_nr())
        if origin is None:
            origin = self._last
        self._last = origin
        return ("backward", *origin)
