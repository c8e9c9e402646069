"""Which host event launched which device event, and what encloses it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stablecast.ir.trace_events import Category, TraceEvents
from stablecast.validation.operators import owns_launches

IntArray = npt.NDArray[np.int64]
_HOST = (Category.OP, Category.ANNOTATION, Category.RUNTIME, Category.PYTHON)
_SLACK_S = 1e-9


@dataclass(frozen=True, slots=True)
class Launches:
    """Links of a trace; every array has an entry an event, -1 where there is none.

    `parent`: the host event that encloses a host event. `launch`: the runtime call of a device event. `op`: the
    innermost framework operator around that call, or the one around it that owns all that is launched inside.
    """

    parent: IntArray
    launch: IntArray
    op: IntArray

    def above(self, event: int) -> Iterator[int]:
        """Host events from `event` (a host event) outwards, itself first."""
        while event >= 0:
            yield event
            event = int(self.parent[event])


def find_launches(events: TraceEvents) -> Launches:
    """Launches by correlation number, enclosing events by nesting on each host thread."""
    size = len(events)
    parent = np.full(size, -1, dtype=np.int64)
    host = np.nonzero(events.is_a(*_HOST) & ~events.on_device)[0]
    for thread in np.unique(events.stream[host]):
        _nest(host[events.stream[host] == thread], events, parent)
    launch = _by_correlation(events)
    op = np.full(size, -1, dtype=np.int64)
    is_op = events.is_a(Category.OP)
    known: dict[int, int] = {}
    owner = _owners(events, parent)
    for index in np.nonzero(launch >= 0)[0].tolist():
        found = _nearest(int(launch[index]), parent, is_op, known)
        op[index] = owner.get(found, found)
    return Launches(parent, launch, op)


def _owners(events: TraceEvents, parent: IntArray) -> dict[int, int]:
    """Host event -> the outermost operator around it that owns what is launched inside; none for most events."""
    names = [number for number, name in enumerate(events.names) if owns_launches(name)]
    owning = np.isin(events.name, names) & ~events.on_device
    if not owning.any():
        return {}
    found: dict[int, int] = {}
    for index in np.nonzero((parent >= 0) | owning)[0].tolist():
        above = int(parent[index])
        if above in found:
            found[index] = found[above]
        elif owning[index]:
            found[index] = index
    return found


def _nest(indices: IntArray, events: TraceEvents, parent: IntArray) -> None:
    starts, ends = events.start_s[indices].tolist(), events.end_s[indices].tolist()
    stack: list[tuple[int, float]] = []
    for index, start, end in zip(indices.tolist(), starts, ends, strict=True):
        while stack and (stack[-1][1] <= start + _SLACK_S and stack[-1][1] < end):
            stack.pop()
        if stack:
            parent[index] = stack[-1][0]
        stack.append((index, end))


def _by_correlation(events: TraceEvents) -> IntArray:
    launch = np.full(len(events), -1, dtype=np.int64)
    numbered = events.correlation >= 0
    runtime = np.nonzero(events.is_a(Category.RUNTIME) & numbered)[0]
    device = np.nonzero(events.on_device & numbered)[0]
    if not len(runtime) or not len(device):
        return launch
    order = runtime[np.argsort(events.correlation[runtime], kind="stable")]
    keys = events.correlation[order]
    place = np.minimum(np.searchsorted(keys, events.correlation[device]), len(keys) - 1)
    hit = keys[place] == events.correlation[device]
    launch[device[hit]] = order[place[hit]]
    return launch


def _nearest(start: int, parent: IntArray, wanted: npt.NDArray[np.bool_], known: dict[int, int]) -> int:
    """The first event from `start` outwards that is `wanted`."""
    at, way = start, list[int]()
    while at >= 0 and not wanted[at] and at not in known:
        way.append(at)
        at = int(parent[at])
    found = known.get(at, at)
    known.update((index, found) for index in way)
    return found


def scope_path(events: TraceEvents, launches: Launches, event: int, skip: Sequence[str] = ()) -> str:
    """The user's annotations around host event `event`, outermost first, joined by `/`; or its module hierarchy."""
    parts: list[str] = []
    annotation = events.is_a(Category.ANNOTATION)
    for index in launches.above(event):
        modules = events.args_of(index).get("Module Hierarchy")
        if modules:
            return str(modules).replace(".", "/")
        name = events.name_of(index)
        if annotation[index] and not name.startswith(tuple(skip)):
            parts.append(name.strip("# "))
    return "/".join(reversed(parts))
