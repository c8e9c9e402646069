"""The JAX profiler's `xplane.pb`: planes of devices and host, each with lines of events.

Field numbers are those of `tsl/profiler/protobuf/xplane.proto`: XSpace.planes = 1, hostnames = 4; XPlane.name = 2,
lines = 3, event_metadata = 4, stat_metadata = 5, stats = 6; XLine.id = 1, name = 2, timestamp_ns = 3, events = 4,
display_name = 11; XEvent.metadata_id = 1, offset_ps = 2, duration_ps = 3, stats = 4; XEventMetadata.id = 1, name = 2,
display_name = 4, stats = 5; XStat.metadata_id = 1, double = 2, uint64 = 3, int64 = 4, str = 5, bytes = 6, ref = 7.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stablecast.frontends.traces.builder import EventBuilder
from stablecast.frontends.traces.lines import DEVICE_PROCESS, device_number, is_stream, line_category
from stablecast.frontends.traces.stream import GZIP_MAGIC, whole
from stablecast.frontends.traces.wire import WireError, fields, signed, varint
from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import Category, TraceEvents

_PICO: Final = 1e-12
_NANO: Final = 1e-9
_UNPACKED_LIMIT: Final = 4 << 30
_KEPT: Final = frozenset(
    {
        "hlo_category",
        "model_flops",
        "flops",
        "shape_with_layout",
        "tf_op",
        "source",
        "hlo_op",
        "hlo_module",
        "program_id",
        "run_id",
    }
)
_KEPT_OF_HOST: Final = frozenset({"hlo_op", "hlo_module", "step_num"})


@dataclass(slots=True)
class _Metadata:
    """What event metadata say: `name` (for TPUs the whole HLO line), `display` (its short name), stats."""

    name: str = ""
    display: str = ""
    stats: dict[str, Any] = field(default_factory=dict[str, Any])


def read_xplane(path: Path) -> TraceEvents:
    """All planes of the file, the first device's facts as its own. Raises `InputError` where no event was read."""
    builder = EventBuilder()
    facts: dict[str, Any] = {}
    damage = ""
    with _Bytes(path) as data:
        try:
            for number, value in _top(data):
                if number == 1:
                    damage = _plane(value, builder, facts) or damage
                elif number == 4:
                    facts.setdefault("hosts", []).append(value.decode(errors="replace"))
        except WireError as error:
            damage = f"the file breaks: {error}"
        damage = damage or data.damage
    if not len(builder):
        raise InputError(f"{path} holds no events" + (f": {damage}" if damage else ""))
    devices: dict[int, str] = facts.pop("device_names", {})
    builder.metadata.update(facts, devices=sorted(devices), device_names=devices)
    device = devices[min(devices)] if devices else ""
    epoch = float(builder.origin or 0) * _NANO
    return builder.build(device=device, source=str(path), epoch_s=epoch, damage=damage)


class _Bytes:
    """The file's bytes, mapped where it is not packed."""

    def __init__(self, path: Path) -> None:
        self.damage = ""
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        if self._file.read(2) == GZIP_MAGIC:
            self.content, self.damage = whole(path, _UNPACKED_LIMIT)
        else:
            size = self._file.seek(0, 2)
            if not size:
                self._file.close()
                raise InputError(f"{path} is empty")
            self.content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def __enter__(self) -> "_Bytes":
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self.content, mmap.mmap):
            self.content.close()
        self._file.close()


def _top(data: _Bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of the whole file; one plane is in memory at a time."""
    content, at, size = data.content, 0, len(data.content)
    while at < size:
        start = at
        window = content[at : at + 20]
        key, used = varint(window, 0)
        if key & 7 != 2:
            raise WireError(f"wire type {key & 7} is not expected", start)
        length, used = varint(window, used)
        at += used
        yield key >> 3, content[at : min(at + length, size)]
        if at + length > size:
            raise WireError(f"a plane of {length:,} bytes is cut off", start)
        at += length


def _plane(data: bytes, builder: EventBuilder, facts: dict[str, Any]) -> str:
    """Add the events of one plane; the damage, if it is cut off."""
    name, lines, damage = "", list[bytes](), ""
    metadata: list[bytes] = []
    stat_names: dict[int, str] = {}
    stats: list[bytes] = []
    try:
        for number, value in fields(data):
            if isinstance(value, int):
                continue
            if number == 2:
                name = value.decode(errors="replace")
            elif number == 3:
                lines.append(value)
            elif number == 4:
                metadata.append(value)
            elif number == 5:
                _stat_name(value, stat_names)
            elif number == 6:
                stats.append(value)
    except WireError as error:
        damage = f"plane '{name}' breaks: {error}"
    events = _event_metadata(metadata, stat_names)
    device = DEVICE_PROCESS.match(name)
    number = device_number(name, 0)
    if device:
        said = dict(filter(None, (_stat(stat, stat_names) for stat in stats)))
        facts.setdefault("device_names", {})[number] = str(said.get("device_type_string", device[1]))
        facts.setdefault("plane_stats", {})[number] = {
            key: value for key, value in said.items() if not isinstance(value, bytes)
        }
    parsed = [_line_head(line) for line in lines]
    has_streams = any(is_stream(line) for line, _, _ in parsed)
    for (line, line_id, zero_ns), content in zip(parsed, lines, strict=True):
        category = line_category(line) if device else Category.OTHER
        if has_streams and category is Category.KERNEL and not is_stream(line):
            category = Category.DERIVED
        stream = builder.stream((name, line_id), f"{name} {line}")
        _line_events(content, builder, _Line(category, bool(device), number, stream, zero_ns), events, stat_names)
    return damage


@dataclass(frozen=True, slots=True)
class _Line:
    category: Category
    on_device: bool
    device: int
    stream: int
    zero_ns: int


def _line_head(data: bytes) -> tuple[str, int, int]:
    name, number, zero = "", 0, 0
    for field_number, value in _safe(data):
        if field_number in (2, 11) and isinstance(value, bytes):
            name = value.decode(errors="replace") or name
        elif field_number == 1 and isinstance(value, int):
            number = signed(value)
        elif field_number == 3 and isinstance(value, int):
            zero = signed(value)
    return name, number, zero


def _line_events(
    data: bytes, builder: EventBuilder, line: _Line, events: Mapping[int, _Metadata], stat_names: Mapping[int, str]
) -> None:
    zero_s = builder.since_origin(line.zero_ns) * _NANO
    nothing = _Metadata()
    for number, value in _safe(data):
        if number != 4 or not isinstance(value, bytes):
            continue
        offset = duration = key = 0
        said: dict[str, Any] = {}
        for part, content in _safe(value):
            if isinstance(content, int):
                if part == 1:
                    key = content
                elif part == 2:
                    offset = signed(content)
                elif part == 3:
                    duration = signed(content)
            elif part == 4:
                stat = _stat(content, stat_names)
                if stat and stat[0] in (_KEPT if line.on_device else _KEPT_OF_HOST):
                    said[stat[0]] = stat[1]
        about = events.get(key, nothing)
        kept = {name: held for name, held in about.stats.items() if name in _KEPT} if line.on_device else {}
        if line.on_device and about.display and about.name != about.display:
            kept["long_name"] = about.name
        builder.add(
            about.display or about.name,
            zero_s + offset * _PICO,
            duration * _PICO,
            line.stream,
            Category.ANNOTATION if "step_num" in said else line.category,
            on_device=line.on_device,
            device=line.device if line.on_device else -1,
            nbytes=float(about.stats.get("bytes_accessed") or 0),
            args=kept | said,
        )


def _event_metadata(entries: list[bytes], stat_names: Mapping[int, str]) -> dict[int, _Metadata]:
    found: dict[int, _Metadata] = {}
    for entry in entries:
        number, about = 0, _Metadata()
        for part, value in _safe(entry):
            if part == 1 and isinstance(value, int):
                number = value
            elif part == 2 and isinstance(value, bytes):
                for key, content in _safe(value):
                    if key == 2 and isinstance(content, bytes):
                        about.name = content.decode(errors="replace")
                    elif key == 4 and isinstance(content, bytes):
                        about.display = content.decode(errors="replace")
                    elif key == 5 and isinstance(content, bytes):
                        about.stats.update(filter(None, [_stat(content, stat_names)]))
        found[number] = about
    return found


def _stat_name(entry: bytes, names: dict[int, str]) -> None:
    number, name = 0, ""
    for part, value in _safe(entry):
        if part == 1 and isinstance(value, int):
            number = value
        elif part == 2 and isinstance(value, bytes):
            name = next(
                (str(text, errors="replace") for key, text in _safe(value) if key == 2 and isinstance(text, bytes)), ""
            )
    names[number] = name


def _stat(data: bytes, names: Mapping[int, str]) -> tuple[str, Any] | None:
    name: str = ""
    found: Any = None
    for part, value in _safe(data):
        if part == 1 and isinstance(value, int):
            name = names.get(value, "")
        elif part == 2 and isinstance(value, bytes):
            (found,) = struct.unpack("<d", value)
        elif part in (3, 4) and isinstance(value, int):
            found = signed(value) if part == 4 else value
        elif part == 5 and isinstance(value, bytes):
            found = value.decode(errors="replace")
        elif part == 6:
            found = value
        elif part == 7 and isinstance(value, int):
            found = names.get(value, "")
    return (name, found) if name else None


def _safe(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The whole fields of a message that may be cut off."""
    try:
        yield from fields(data)
    except WireError:
        return


def looks_like(head: bytes) -> bool:
    """Whether a file that begins with `head` is an XSpace: a length-delimited plane first, with an id or a name."""
    if not head.startswith(b"\x0a") or len(head) < 8:
        return False
    try:
        length, at = varint(head, 1)
    except WireError:
        return False
    return length > 4 and head[at] in (0x08, 0x12, 0x1A)
