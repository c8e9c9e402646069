"""PyTorch execution traces: the operators of a run with shapes, types and dependencies but without times.

`read_et` gives their operators; `link` finds, for each of them, the event of a Kineto trace of the same run.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from stablecast.frontends.traces.json_scan import JsonScanner
from stablecast.frontends.traces.stream import Pieces, text_pieces
from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import Category, TraceEvents

_ROOT: Final = "[pytorch|profiler|execution_"
_EXACT_SHARE: Final = 0.9
_LONGER: Final = 1.5
_LENDING_SHARE: Final = 0.5
_LEAST_STRETCH: Final = 8
_NAMED: Final = (Category.OP, Category.ANNOTATION)
_MOST_PAIRS: Final = 4_000_000
_PROBE: Final = 2000


@dataclass(frozen=True, slots=True)
class EtOp:
    """One node of an execution trace.

    `parent`: id of the node that called it. `shapes`, `types`: of the inputs, then `out_shapes`, `out_types`,
    `out_values`. `values`: the inputs themselves (tensors as id, storage, offset, elements, bytes of one, device).
    `record`: the profiler's record function id, which counts calls.
    """

    id: int
    name: str
    parent: int
    thread: int
    record: int
    sequence: int
    schema: str
    shapes: tuple[Any, ...]
    types: tuple[str, ...]
    values: tuple[Any, ...]
    out_shapes: tuple[Any, ...]
    out_types: tuple[str, ...]
    out_values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutionTrace:
    """The operators of one rank in the order of their calls, and what the file says of itself."""

    ops: tuple[EtOp, ...]
    schema: str
    source: str = ""
    damage: str = ""

    def children(self) -> Mapping[int, list[EtOp]]:
        """Node id -> the nodes that it called."""
        found: dict[int, list[EtOp]] = {}
        for op in self.ops:
            found.setdefault(op.parent, []).append(op)
        return found


@dataclass(frozen=True, slots=True)
class Link:
    """Operators of an execution trace and the events of a Kineto trace that they are.

    `event_of`: node id -> index of the event. `share`: of the trace's operators, how many have one. `how`: `record`
    (the ids agree) or `order` (names in the order of calls, thread by thread).
    """

    event_of: Mapping[int, int]
    share: float
    how: str


def read_et(path: Path) -> ExecutionTrace:
    """The execution trace in `path` (schemas 1.0 to 1.1, Chakra's variants too).

    Raises `InputError` where no node was read.
    """
    pieces = Pieces(path)
    scanner = JsonScanner(text_pieces(pieces), ("nodes",))
    ops: list[EtOp] = []
    schema = ""
    for key, value in scanner:
        if key == "nodes" and isinstance(value, dict):
            ops.append(_op(cast("dict[str, Any]", value)))
        elif key == "schema":
            schema = str(value)
    damage = "; ".join(part for part in (scanner.damage, pieces.damage) if part)
    if not ops:
        raise InputError(f"{path} holds no nodes of an execution trace" + (f": {damage}" if damage else ""))
    ops.sort(key=lambda op: (op.record, op.id))
    return ExecutionTrace(tuple(ops), schema, str(path), damage)


def _op(node: Mapping[str, Any]) -> EtOp:
    attributes = {entry.get("name"): entry.get("value") for entry in node.get("attrs", ())}
    inputs: Any = node.get("inputs", [])
    outputs: Any = node.get("outputs", [])
    grouped = isinstance(inputs, dict)
    said: Mapping[str, Any] = attributes if grouped else node
    shapes: list[Any] = cast("dict[str, Any]", inputs)["shapes"] if grouped else node.get("input_shapes", [])
    types: list[Any] = cast("dict[str, Any]", inputs)["types"] if grouped else node.get("input_types", [])
    out_shapes: list[Any] = outputs["shapes"] if grouped else node.get("output_shapes", [])
    out_types: list[Any] = outputs["types"] if grouped else node.get("output_types", [])
    values: list[Any] = cast("dict[str, Any]", inputs)["values"] if grouped else cast("list[Any]", inputs)
    made: list[Any] = cast("dict[str, Any]", outputs)["values"] if grouped else cast("list[Any]", outputs)
    sequence = said.get("seq_id")
    return EtOp(
        id=int(node.get("id", 0)),
        name=str(node.get("name", "")),
        parent=int(node.get("ctrl_deps" if grouped else "parent") or 0),
        thread=int(said.get("tid") or 0),
        record=int(said.get("rf_id") or 0),
        sequence=-1 if sequence is None else int(sequence),
        schema=str(said.get("op_schema") or ""),
        shapes=tuple(shapes),
        types=tuple(map(str, types)),
        values=tuple(values),
        out_shapes=tuple(out_shapes),
        out_types=tuple(map(str, out_types)),
        out_values=tuple(made),
    )


def link(trace: ExecutionTrace, events: TraceEvents) -> Link:
    """Which event of `events` each operator is.

    The record function ids are used where they and the names agree; else names are aligned in the order of calls,
    thread by thread, so that operators which only one side has are left out. Two different runs give a small `share`.
    """
    ops = [op for op in trace.ops if not op.name.startswith(_ROOT)]
    host = np.nonzero(events.is_a(*_NAMED) & ~events.on_device)[0]
    by_record = {int(events.args_of(int(index)).get("Record function id", -1)): int(index) for index in host}
    exact = {op.id: by_record[op.record] for op in ops if op.record in by_record}
    names = {op.id: op.name for op in ops}
    right = sum(names[number] == events.name_of(event) for number, event in exact.items())
    if exact and right >= _EXACT_SHARE * len(ops):
        return Link(exact, right / len(ops), "record")
    found = _by_order(ops, host, events)
    return Link(found, len(found) / len(ops) if ops else 0.0, "order")


_LIST: Final = "TensorList"
"""Kineto's type of a list of tensors, whose shapes it does not always say."""

_INNER: Final = re.compile(r"(?:GenericList\[)?Tensor\(([^)]*)\)")


def with_shapes(trace: ExecutionTrace, events: TraceEvents) -> TraceEvents:
    """`events` whose operators carry the shapes, types and values of `trace`'s where they have none themselves.

    A host trace of one step lends them to every step of a longer run. Raises `InputError` where less than half of its
    operators are in `events`.
    """
    found = link(trace, events)
    if found.share < _LENDING_SHARE:
        raise InputError(
            f"{trace.source} and {events.source} are of different runs: "
            f"of the host trace's operators {found.share:.0%} are in the other",
            "give the host trace of the same run",
        )
    ops = {op.id: op for op in trace.ops}
    args = dict(events.args)
    for number, event in _repeats(trace, events, found).items():
        op = ops[event]
        said = {"Input Dims": list(op.shapes), "Input type": _kineto_types(op), "Concrete Inputs": list(op.values)}
        own = dict(args.get(number, {}))
        if _LIST in own.get("Input type", ()):
            own.pop("Input Dims", None)
            own.pop("Input type")
        args[number] = {**said, **own}
    return replace(events, args=args)


def _kineto_types(op: EtOp) -> list[str]:
    """`Tensor(float)`, and a list of such, as Kineto writes it: `float`."""
    return [inner[1] if (inner := _INNER.match(kind)) else kind for kind in op.types]


def _repeats(trace: ExecutionTrace, events: TraceEvents, found: Link) -> dict[int, int]:
    """Event -> operator, for the linked stretch and for every other one with the same names in the same order."""
    by_event = {event: number for number, event in found.event_of.items()}
    for thread in {int(events.stream[event]) for event in by_event}:
        places = np.nonzero(events.is_a(*_NAMED) & ~events.on_device & (events.stream == thread))[0]
        linked = [at for at, event in enumerate(places.tolist()) if event in by_event]
        if len(linked) < _LEAST_STRETCH or len(places) < _LONGER * len(linked):
            continue
        low, high = linked[0], linked[-1] + 1
        names = events.name[places]
        windows = np.lib.stride_tricks.sliding_window_view(names, high - low)
        for start in _like(windows, names[low:high]):
            for offset in range(high - low):
                lender = by_event.get(int(places[low + offset]))
                taker = int(places[start + offset])
                if lender is not None and names[start + offset] == names[low + offset]:
                    by_event.setdefault(taker, lender)
    return by_event


def _like(windows: np.ndarray[Any, np.dtype[np.int64]], wanted: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
    """Starts of stretches that agree with `wanted` in nearly all places and do not overlap, the best first."""
    blocks = [(windows[low : low + _PROBE] == wanted).mean(axis=1) for low in range(0, len(windows), _PROBE)]
    share = np.concatenate(blocks)
    chosen: list[int] = []
    for start in np.argsort(-share, kind="stable").tolist():
        if share[start] < _EXACT_SHARE:
            break
        if all(abs(start - other) >= len(wanted) for other in chosen):
            chosen.append(start)
    return chosen


def _by_order(ops: Sequence[EtOp], host: np.ndarray[Any, np.dtype[np.int64]], events: TraceEvents) -> dict[int, int]:
    """Threads are paired by how many names they share, the largest first; then aligned name by name."""
    ours: dict[int, list[EtOp]] = {}
    theirs: dict[int, list[int]] = {}
    for op in ops:
        ours.setdefault(op.thread, []).append(op)
    for index in host.tolist():
        theirs.setdefault(int(events.stream[index]), []).append(index)
    found: dict[int, int] = {}
    free = set(theirs)
    for thread in sorted(ours, key=lambda number: -len(ours[number])):
        calls = ours[thread]
        wanted = {op.name for op in calls}
        best = max(free, key=lambda number: _overlap(wanted, theirs[number], events), default=None)
        if best is None:
            break
        free.discard(best)
        found.update(_align(calls, theirs[best], events))
    return found


def _overlap(wanted: set[str], indices: Sequence[int], events: TraceEvents) -> float:
    return sum(events.name_of(index) in wanted for index in indices)


def _align(calls: Sequence[EtOp], indices: Sequence[int], events: TraceEvents) -> dict[int, int]:
    """Calls and events in order, with gaps; of a longer run, the stretch whose names fit best."""
    left, right = [op.name for op in calls], [events.name_of(index) for index in indices]
    if len(right) > _LONGER * len(left):
        first = _best_place(left, right)
        low = max(first - len(left) // 10, 0)
        right, indices = right[low : first + len(left) + len(left) // 10], indices[low:]
    if left == right:
        return {op.id: index for op, index in zip(calls, indices, strict=False)}
    if len(left) * len(right) > _MOST_PAIRS:
        return _greedy(calls, indices, right)
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    return {
        calls[block.a + step].id: indices[block.b + step]
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    }


def _best_place(left: Sequence[str], right: Sequence[str]) -> int:
    """Where `right` agrees with `left` in most places, laid on it without gaps."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys([*left, *right]))}
    wanted = np.array([numbers[name] for name in left[:_PROBE]])
    have = np.array([numbers[name] for name in right])
    windows = np.lib.stride_tricks.sliding_window_view(have, len(wanted))
    blocks = [(windows[low : low + _PROBE] == wanted).sum(axis=1) for low in range(0, len(windows), _PROBE)]
    return int(np.argmax(np.concatenate(blocks)))


def _greedy(calls: Sequence[EtOp], indices: Sequence[int], names: Sequence[str]) -> dict[int, int]:
    """The alignment for long traces: each call takes the next event of its name within a short way."""
    found: dict[int, int] = {}
    at = 0
    for op in calls:
        for step in range(at, min(at + 200, len(names))):
            if names[step] == op.name:
                found[op.id] = indices[step]
                at = step + 1
                break
    return found


def looks_like(head: bytes) -> bool:
    """Whether a file that begins with `head` is a PyTorch execution trace."""
    return head.lstrip().startswith(b"{") and b'"schema"' in head and b'"nodes"' in head


def et_events(trace: ExecutionTrace) -> TraceEvents:
    """The operators as host events of no duration, one a microsecond, so that a trace alone can be looked at."""
    from stablecast.frontends.traces.builder import EventBuilder

    builder = EventBuilder()
    for position, op in enumerate(trace.ops):
        args = {"Input Dims": list(op.shapes), "Input type": list(op.types)} if op.shapes else None
        stream = builder.stream(op.thread, f"thread {op.thread}")
        builder.add(op.name, position * 1e-6, 0.0, stream, Category.OP, on_device=False, args=args)
    builder.metadata.update(schema=trace.schema, timed=False)
    return builder.build(source=trace.source, damage=trace.damage)
