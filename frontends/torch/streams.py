"""Streams and events that only keep the order they stand for: what the device's own API would have said."""

import contextlib
from collections.abc import Generator
from typing import Any

from stablecast.frontends.torch.private import torch


class Timeline:
    """Which stream is current, what was issued on each, and who waits for whom.

    `after`: call -> calls that must be done before it, beside those on its own stream. `names`: of streams by number.
    """

    def __init__(self) -> None:
        self.names: list[str] = ["main"]
        self.after: dict[int, tuple[int, ...]] = {}
        self.syncs: list[int] = []
        self.stack: list[Stream] = []
        self.recorder: Any = None
        self.stack.append(Stream(_timeline=self, _number=0))
        self._last: dict[int, int] = {}
        self._pending: dict[int, set[int]] = {}

    @property
    def current(self) -> "Stream":
        return self.stack[-1]

    def new(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def event(self) -> "Event":
        """A new event of this timeline."""
        made = Event()
        made.timeline = self
        return made

    def last(self, stream: int) -> int:
        """The last call issued on a stream, -1 if there is none."""
        return self._last.get(stream, -1)

    def wait(self, stream: int, call: int) -> None:
        """What comes next on `stream` waits for `call`."""
        if call >= 0:
            self._pending.setdefault(stream, set()).add(call)

    def issued(self, stream: int, call: int) -> None:
        """`call` was issued on `stream`."""
        waits = self._pending.pop(stream, None)
        if waits:
            self.after[call] = tuple(sorted(waits))
        self._last[stream] = call

    def synchronise(self) -> None:
        """The host waits for everything issued so far."""
        if self.recorder is not None and self.recorder.calls:
            self.syncs.append(len(self.recorder.calls) - 1)


class Stream:
    """Stands for `torch.cuda.Stream`."""

    timeline: Timeline

    def __init__(self, *_: Any, _timeline: Timeline | None = None, _number: int | None = None, **__: Any) -> None:
        self.line = _timeline if _timeline is not None else type(self).timeline
        self.number = self.line.new(f"stream{len(self.line.names)}") if _number is None else _number
        self.stream_id = self.number
        self.device = torch.device("cpu")
        self.cuda_stream = self.number

    def wait_stream(self, other: "Stream") -> None:
        self.line.wait(self.number, self.line.last(other.number))

    def wait_event(self, event: "Event") -> None:
        self.line.wait(self.number, event.call)

    def record_event(self, event: "Event | None" = None) -> "Event":
        made = event if event is not None else self.line.event()
        made.record(self)
        return made

    def synchronize(self) -> None:
        self.line.synchronise()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        self.line.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.line.stack.pop()


class Event:
    """Stands for `torch.cuda.Event`."""

    timeline: Timeline

    def __init__(self, *_: Any, **__: Any) -> None:
        self.call = -1

    def record(self, stream: Stream | None = None) -> None:
        line = self.timeline
        self.call = line.last((stream or line.current).number)

    def wait(self, stream: Stream | None = None) -> None:
        line = self.timeline
        line.wait((stream or line.current).number, self.call)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.timeline.synchronise()

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


def classes(timeline: Timeline) -> tuple[type[Stream], type[Event]]:
    """Stream and event classes bound to a timeline."""
    return type("Stream", (Stream,), {"timeline": timeline}), type("Event", (Event,), {"timeline": timeline})


def stream_context(timeline: Timeline) -> Any:
    """Stands for `torch.cuda.stream`."""

    @contextlib.contextmanager
    def stream(chosen: Stream | None) -> Generator[None, None, None]:
        timeline.stack.append(chosen if chosen is not None else timeline.current)
        try:
            yield
        finally:
            timeline.stack.pop()

    return stream
