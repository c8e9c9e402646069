"""What the lines of a JAX profile hold, by the names that the profiler gives them."""

import re
from collections.abc import Mapping
from typing import Final

from stablecast.ir.trace_events import Category

DEVICE_PROCESS: Final = re.compile(r"/device:(TPU|GPU|CUSTOM|CPU):(\d+)")
"""Planes and processes that are a device; `/host:CPU` is the host."""

_LINES: Final[Mapping[str, Category]] = {
    "XLA Ops": Category.KERNEL,
    "XLA Modules": Category.MODULE,
    "Steps": Category.STEP,
    "Async XLA Ops": Category.ASYNC,
    "XLA TraceMe": Category.SYNC,
    "Overlay": Category.DERIVED,
    "Framework Ops": Category.DERIVED,
    "Framework Name Scope": Category.DERIVED,
    "Source code": Category.DERIVED,
    "Source": Category.DERIVED,
    "TensorFlow Name Scope": Category.DERIVED,
    "TensorFlow Ops": Category.DERIVED,
    "Launch Stats": Category.DERIVED,
    "SparseCore Ops": Category.KERNEL,
}
_STREAM: Final = re.compile(r"Stream #(\d+)")
_STREAM_KINDS: Final[Mapping[str, Category]] = {
    "MemcpyH2D": Category.MEMCPY,
    "MemcpyD2H": Category.MEMCPY,
    "MemcpyD2D": Category.MEMCPY,
    "MemcpyP2P": Category.MEMCPY,
    "Memset": Category.MEMSET,
}


def line_category(name: str) -> Category:
    """The category of the events on line `name` of a device: `Stream #13(Compute)` and `XLA Ops` hold kernels."""
    if _STREAM.match(name):
        kinds = name[name.find("(") + 1 : -1].split(",") if "(" in name else []
        found = {_STREAM_KINDS[kind] for kind in kinds if kind in _STREAM_KINDS}
        only = len(found) == 1 and all(kind in _STREAM_KINDS for kind in kinds)
        return found.pop() if only else Category.KERNEL
    return _LINES.get(name, Category.DERIVED)


def is_stream(name: str) -> bool:
    """Whether `name` is a stream of a GPU; `XLA Ops` is then a second view of the same kernels."""
    return _STREAM.match(name) is not None


def device_number(process: str, default: int) -> int:
    """3 of `/device:TPU:3`; `default` for any other name."""
    found = DEVICE_PROCESS.match(process)
    return int(found[2]) if found else default
