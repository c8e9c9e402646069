"""Columns of a trace while it is being read."""

from array import array
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from stablecast.ir.trace_events import Category, TraceEvents


class EventBuilder:
    """Takes events one at a time, in any order, and keeps a few numbers of each.

    Times are given in seconds or microseconds relative to `origin`, which is the first time seen: large clock values
    are subtracted before they are rounded.
    """

    def __init__(self) -> None:
        self._start = array("d")
        self._duration = array("d")
        self._name = array("q")
        self._stream = array("q")
        self._category = array("q")
        self._correlation = array("q")
        self._device = array("q")
        self._nbytes = array("d")
        self._on_device = array("b")
        self._names: dict[str, int] = {}
        self._categories: dict[str, int] = {}
        self._args: dict[int, Mapping[str, Any]] = {}
        self._known_args: dict[str, Mapping[str, Any]] = {}
        self._streams: dict[Any, int] = {}
        self.origin: float | int | None = None
        self.stream_names: dict[int, str] = {}
        self.metadata: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._start)

    def since_origin(self, time: float) -> float:
        """`time` less the first time seen, in the same unit."""
        if self.origin is None:
            self.origin = time
        return float(time - self.origin)

    def stream(self, key: Any, name: str = "") -> int:
        """The number of the stream known by `key`; integers keep theirs where they are free."""
        number = self._streams.get(key)
        if number is None:
            taken = self.stream_names
            wanted: Any = cast("tuple[Any, ...]", key)[-1] if isinstance(key, tuple) else key
            number = wanted if isinstance(wanted, int) and wanted not in taken else 1_000_000_000 + len(self._streams)
            self._streams[key] = number
            taken[number] = name or str(wanted)
        elif name:
            self.stream_names[number] = name
        return number

    def add(
        self,
        name: str,
        start_s: float,
        duration_s: float,
        stream: int,
        category: Category,
        *,
        on_device: bool,
        device: int = -1,
        correlation: int = -1,
        nbytes: float = 0.0,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """One interval; equal `args` are kept once."""
        if args:
            key = repr(args)
            self._args[len(self._start)] = self._known_args.setdefault(key, args)
        self._start.append(start_s)
        self._duration.append(duration_s)
        self._name.append(self._names.setdefault(name, len(self._names)))
        self._stream.append(stream)
        self._category.append(self._categories.setdefault(category.value, len(self._categories)))
        self._on_device.append(on_device)
        self._device.append(device)
        self._correlation.append(correlation)
        self._nbytes.append(nbytes)

    def build(
        self,
        *,
        rank: int = 0,
        device: str = "",
        source: str = "",
        epoch_s: float = 0.0,
        damage: str = "",
        skipped: int = 0,
    ) -> TraceEvents:
        """The events in order of their start, the longer first where two start together; the first starts at 0."""
        start = np.frombuffer(self._start, dtype=np.float64) if len(self) else np.zeros(0)
        duration = np.frombuffer(self._duration, dtype=np.float64) if len(self) else np.zeros(0)
        order = np.lexsort((-duration, start))
        first = float(start[order[0]]) if len(start) else 0.0
        position = np.empty(len(order), dtype=np.int64)
        position[order] = np.arange(len(order))
        args = {int(position[index]): held for index, held in self._args.items()}

        def column(values: Iterable[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
            return np.asarray(values, dtype=np.int64)[order]

        return TraceEvents(
            start_s=start[order] - first,
            duration_s=duration[order],
            name=column(self._name),
            stream=column(self._stream),
            on_device=column(self._on_device).astype(np.bool_),
            names=tuple(self._names),
            rank=rank,
            device=device,
            source=source,
            args=args,
            category=column(self._category),
            categories=tuple(self._categories),
            correlation=column(self._correlation),
            device_index=column(self._device),
            nbytes=np.asarray(self._nbytes, dtype=np.float64)[order],
            stream_names=dict(self.stream_names),
            epoch_s=epoch_s + first,
            damage=damage,
            skipped=skipped,
            metadata=dict(self.metadata),
        )
