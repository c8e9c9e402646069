"""Slices as a Perfetto trace: a process a role, a track a stream, opened at ui.perfetto.dev."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stablecast.ir.chakra.files import os_failure, temporary_beside
from stablecast.ir.errors import InputError

if TYPE_CHECKING:
    from stablecast.backends.schedule.timeline import Slice

_SEQUENCE: Final = 1


def write_perfetto(path: str | Path, slices: Sequence["Slice"]) -> None:
    """Write `slices` to `path`, which appears only when complete; times in whole ns.

    Raises `InputError` where the perfetto package is not installed or the system refuses the write.
    """
    target = Path(path)
    data = perfetto_bytes(slices)
    part = temporary_beside(target)
    try:
        part.write_bytes(data)
        os.replace(part, target)
    except OSError as error:
        raise os_failure(target, error) from None
    finally:
        part.unlink(missing_ok=True)


def perfetto_bytes(slices: Sequence["Slice"]) -> bytes:
    """The trace as bytes. Raises `InputError` where the perfetto package is not installed."""
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError:
        raise InputError("a Perfetto trace needs the perfetto package", "pip install 'stablecast[perfetto]'") from None

    builder = TraceProtoBuilder()
    tracks = _describe(builder, slices)
    first = builder.trace.packet[0] if builder.trace.packet else builder.add_packet()
    first.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    for entry in sorted(slices, key=lambda one: one.begin_s):
        track = tracks[(entry.role, entry.stream)]
        begin = builder.add_packet()
        begin.timestamp, begin.trusted_packet_sequence_id = round(entry.begin_s * 1e9), _SEQUENCE
        event = begin.track_event
        event.type, event.track_uuid, event.name = TrackEvent.TYPE_SLICE_BEGIN, track, entry.name
        details = {"scope": entry.scope, **entry.detail}
        if entry.runs != 1.0:
            details["trips"] = entry.runs
        for name, value in details.items():
            _annotate(event.debug_annotations.add(), name, value)
        end = builder.add_packet()
        end.timestamp, end.trusted_packet_sequence_id = round(entry.end_s * 1e9), _SEQUENCE
        end.track_event.type, end.track_event.track_uuid = TrackEvent.TYPE_SLICE_END, track
    return bytes(builder.serialize())


def _annotate(annotation: "object", name: str, value: str | int | float) -> None:
    setattr(annotation, "name", name)  # noqa: B010
    field = "string_value" if isinstance(value, str) else "int_value" if isinstance(value, int) else "double_value"
    setattr(annotation, field, value)


def _describe(builder: "object", slices: Sequence["Slice"]) -> dict[tuple[str, str], int]:
    """A process track for each role, below it a track for each stream; track numbers by role and stream."""
    add = getattr(builder, "add_packet")  # noqa: B009
    roles: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    for entry in slices:
        if entry.role not in roles:
            number = roles[entry.role] = len(roles) + 1
            packet = add()
            packet.trusted_packet_sequence_id = _SEQUENCE
            packet.track_descriptor.uuid = number
            packet.track_descriptor.process.pid = number
            packet.track_descriptor.process.process_name = entry.role or "device"
        key = (entry.role, entry.stream)
        if key not in tracks:
            tracks[key] = 1_000_000 + len(tracks)
            packet = add()
            packet.trusted_packet_sequence_id = _SEQUENCE
            packet.track_descriptor.uuid = tracks[key]
            packet.track_descriptor.parent_uuid = roles[entry.role]
            packet.track_descriptor.name = entry.stream
    return tracks
