"""Chrome trace JSON: PyTorch's Kineto (CUDA, ROCm) and the JAX profiler's `trace.json.gz`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from stablecast.frontends.traces.builder import EventBuilder
from stablecast.frontends.traces.json_scan import JsonScanner
from stablecast.frontends.traces.lines import DEVICE_PROCESS, device_number, is_stream, line_category
from stablecast.frontends.traces.stream import Pieces, text_pieces
from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import Category, TraceEvents

STREAMED: Final = ("traceEvents",)
_MICRO: Final = 1e-6

_KINETO: Final[Mapping[str, tuple[Category, bool]]] = {
    "kernel": (Category.KERNEL, True),
    "gpu_memcpy": (Category.MEMCPY, True),
    "gpu_memset": (Category.MEMSET, True),
    "cuda_sync": (Category.SYNC, True),
    "gpu_user_annotation": (Category.ANNOTATION, True),
    "mtia_ccp_events": (Category.KERNEL, True),
    "hpu_op": (Category.KERNEL, True),
    "xpu_runtime": (Category.RUNTIME, False),
    "cpu_op": (Category.OP, False),
    "operator": (Category.OP, False),
    "user_annotation": (Category.ANNOTATION, False),
    "cuda_runtime": (Category.RUNTIME, False),
    "cuda_driver": (Category.RUNTIME, False),
    "mtia_runtime": (Category.RUNTIME, False),
    "python_function": (Category.PYTHON, False),
    "overhead": (Category.OTHER, False),
    "Trace": (Category.OTHER, False),
}
"""Kineto's `cat` -> what it is, and whether it is on the device."""

_KEPT: Final = frozenset(
    {
        "Input Dims",
        "Input type",
        "Concrete Inputs",
        "Module Hierarchy",
        "Collective name",
        "In msg nelems",
        "Out msg nelems",
        "Group size",
        "dtype",
        "Process Group Name",
        "Process Group Ranks",
        "Process Group Description",
        "Src Rank",
        "Dst Rank",
        "Sequence number",
        "Fwd thread id",
        "grid",
        "block",
        "hlo_category",
        "hlo_op",
        "hlo_module",
        "long_name",
        "model_flops",
        "shape_with_layout",
        "tf_op",
        "source",
        "run_id",
        "kernel_details",
    }
)
"""Arguments worth their memory; numbers that have a column of their own are not among them."""

_FACTS: Final = ("distributedInfo", "traceName", "displayTimeUnit", "record_shapes", "schemaVersion", "otherData")
_RANK_IN_NAME: Final = re.compile(r"rank[_-]?(\d+)")


@dataclass(slots=True)
class _Lines:
    """Names of processes and threads, which may come before or after their events."""

    processes: dict[Any, str] = field(default_factory=dict[Any, str])
    threads: dict[tuple[Any, Any], str] = field(default_factory=dict[tuple[Any, Any], str])
    streamed: dict[Any, bool] = field(default_factory=dict[Any, bool])

    def take(self, event: Mapping[str, Any]) -> None:
        said: dict[str, Any] = event.get("args") or {}
        name = str(said.get("name", ""))
        if event.get("name") == "process_name":
            self.processes[event.get("pid")] = name
        elif event.get("name") == "thread_name":
            self.threads[event.get("pid"), event.get("tid")] = name

    def category(self, pid: Any, tid: Any) -> tuple[Category, bool]:
        """What an event without a Kineto category is, by the line it stands on."""
        process = self.processes.get(pid, "")
        if not DEVICE_PROCESS.match(process):
            return Category.OTHER, False
        thread = self.threads.get((pid, tid), "")
        category = line_category(thread)
        if category is Category.KERNEL and not is_stream(thread) and self._has_streams(pid):
            return Category.DERIVED, True
        return category, True

    def _has_streams(self, pid: Any) -> bool:
        if pid not in self.streamed:
            self.streamed[pid] = any(is_stream(name) for (owner, _), name in self.threads.items() if owner == pid)
        return self.streamed[pid]

    def label(self, pid: Any, tid: Any) -> str:
        process, thread = self.processes.get(pid, ""), self.threads.get((pid, tid), "")
        return " ".join(part for part in (process, thread) if part)


def read_chrome(path: Path) -> TraceEvents:
    """The events of a Chrome trace, which may be cut off. Raises `InputError` where no event was read."""
    pieces = Pieces(path)
    scanner = JsonScanner(text_pieces(pieces), STREAMED)
    reader = _Reader()
    facts: dict[str, Any] = {}
    for key, value in scanner:
        if key == "traceEvents":
            if isinstance(value, dict):
                reader.take(cast("dict[str, Any]", value))
        else:
            facts[key] = value
    damage = "; ".join(part for part in (scanner.damage, pieces.damage) if part)
    if not len(reader.builder):
        raise InputError(f"{path} holds no trace events" + (f": {damage}" if damage else ""))
    return reader.build(path, facts, damage, scanner.skipped)


class _Reader:
    def __init__(self) -> None:
        self.builder = EventBuilder()
        self.lines = _Lines()
        self._open: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
        self._devices: set[int] = set()

    def take(self, event: dict[str, Any]) -> None:
        """One record of the file."""
        phase = event.get("ph")
        if phase == "X":
            self._complete(event, float(event.get("dur") or 0))
        elif phase == "M":
            self.lines.take(event)
        elif phase == "B":
            self._open.setdefault((event.get("pid"), event.get("tid")), []).append(event)
        elif phase == "E":
            waiting = self._open.get((event.get("pid"), event.get("tid")))
            if waiting:
                begun = waiting.pop()
                self._complete(begun, float(event.get("ts", 0)) - float(begun.get("ts", 0)))

    def _complete(self, event: dict[str, Any], duration_us: float) -> None:
        time = event.get("ts")
        if not isinstance(time, (int, float)):
            return
        pid, tid = event.get("pid"), event.get("tid")
        kind = event.get("cat")
        category, on_device = _KINETO.get(str(kind), (Category.OTHER, False)) if kind else self.lines.category(pid, tid)
        args: dict[str, Any] = event.get("args") or {}
        device = -1
        if on_device:
            device = _whole(args.get("device"), device_number(self.lines.processes.get(pid, ""), _whole(pid, 0)))
            self._devices.add(device)
        self.builder.add(
            str(event.get("name", "")),
            self.builder.since_origin(time) * _MICRO,
            duration_us * _MICRO,
            self.builder.stream((pid, tid)),
            category,
            on_device=on_device,
            device=device,
            correlation=_whole(args.get("correlation"), -1),
            nbytes=_moved(args),
            args={key: value for key, value in args.items() if key in _KEPT and value not in ("", None)},
        )

    def build(self, path: Path, facts: Mapping[str, Any], damage: str, skipped: int) -> TraceEvents:
        properties: list[dict[str, Any]] = facts.get("deviceProperties") or []
        metadata = self.builder.metadata
        metadata.update({key: facts[key] for key in _FACTS if key in facts})
        metadata["devices"] = sorted(self._devices)
        names = {int(entry.get("id", -1)): str(entry.get("name", "")) for entry in properties}
        metadata["device_names"] = names
        used = next((device for device in sorted(self._devices) if names.get(device)), -1)
        for pid, tid in self.lines.threads:
            self.builder.stream((pid, tid), self.lines.label(pid, tid))
        distributed: dict[str, Any] = facts.get("distributedInfo") or {}
        named = _RANK_IN_NAME.search(path.name)
        rank = _whole(distributed.get("rank"), int(named[1]) if named else 0)
        origin = float(self.builder.origin or 0) * _MICRO + float(facts.get("baseTimeNanoseconds") or 0) * 1e-9
        planes = (found[1] for name in self.lines.processes.values() if (found := DEVICE_PROCESS.match(name)))
        device = names.get(used, "") or next(planes, "")
        return self.builder.build(
            rank=rank, device=device, source=str(path), epoch_s=origin, damage=damage, skipped=skipped
        )


def _whole(value: Any, default: int) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return default


def _moved(args: Mapping[str, Any]) -> float:
    for key in ("bytes", "size", "bytes_accessed"):
        value = args.get(key)
        if value is not None:
            return float(_whole(value, 0))
    return 0.0


def looks_like(head: bytes) -> bool:
    """Whether a file that begins with `head` is a Chrome trace."""
    text = head.lstrip()
    if text.startswith(b"["):
        return b'"ph"' in head
    return text.startswith(b"{") and (
        b'"traceEvents"' in head or b'"schemaVersion"' in head or b'"deviceProperties"' in head
    )
