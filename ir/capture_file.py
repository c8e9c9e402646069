"""The capture file: a zip of a JSON manifest and the modules' bytes. No pickle, nothing executed on reading."""

import io
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from stablecast.ir.allocations import allocations_of_json
from stablecast.ir.dtypes import dtype
from stablecast.ir.errors import InputError
from stablecast.ir.program import Argument, ArgumentKind, Axis, Mesh, Sharding, Stage
from stablecast.ir.schedule import Event, Launch, LaunchTable, Schedule
from stablecast.ir.types import Symbol, TensorType, TupleType, ValueType
from stablecast.ir.workload import FORMAT, Module, ModuleFormat, Phase, Role, Workload

MANIFEST = "manifest.json"
_MAGIC = "stablecast capture"
_DATE = (1980, 1, 1, 0, 0, 0)


def write(workload: Workload, path: Path) -> None:
    """Write `workload` to `path`, which appears only when complete. Raises `InputError` where it cannot be written."""
    data = to_bytes(workload)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}", "choose a folder that exists and is writable"
        ) from None
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def to_bytes(workload: Workload) -> bytes:
    """`workload` as the bytes of a capture file; equal workloads give equal bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        text = json.dumps(_manifest(workload), indent=1, sort_keys=True)
        archive.writestr(zipfile.ZipInfo(MANIFEST, _DATE), text, zipfile.ZIP_DEFLATED)
        for index, module in enumerate(workload.modules):
            archive.writestr(zipfile.ZipInfo(_member(index), _DATE), module.data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def read(path: Path) -> Workload:
    """The workload in the capture file `path`.

    Raises `InputError` for a file that is damaged, incomplete, not a capture, or of a newer format.
    """
    try:
        return from_bytes(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def from_bytes(data: bytes, source: str) -> Workload:
    """The workload in `data`; `source` names it in messages."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            manifest = json.loads(archive.read(MANIFEST))
            _check(manifest, source)
            modules = tuple(
                _read_module(entry, archive.read(_member(index))) for index, entry in enumerate(manifest["modules"])
            )
        return _workload(manifest, modules)
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, TypeError, EOFError, AttributeError) as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{source} is a damaged capture ({detail})", "capture the program again") from None


def _read_module(entry: Mapping[str, Any], data: bytes) -> Module:
    return Module(
        entry["name"],
        data,
        ModuleFormat(entry["format"]),
        tuple(_read_argument(argument) for argument in entry.get("args", ())),
        _read_schedule(entry.get("schedule")),
        _read_launches(entry.get("launches")),
        entry.get("metadata", {}),
    )


def _check(manifest: Mapping[str, Any], source: str) -> None:
    if not isinstance(manifest, Mapping) or manifest.get("kind") != _MAGIC:
        raise InputError(f"{source} is a zip file but not a stablecast capture", "make one with 'stablecast capture'")
    version = manifest["format"]
    if version > FORMAT:
        made_by = manifest.get("stablecast", "a newer stablecast")
        raise InputError(
            f"{source} has capture format {version}; this stablecast reads up to {FORMAT}",
            f"it was made by {made_by}: upgrade",
        )


def _member(index: int) -> str:
    return f"modules/{index}"


def _manifest(workload: Workload) -> dict[str, Any]:
    return {
        "kind": _MAGIC,
        "format": workload.format,
        "producer": dict(workload.producer),
        "stage": workload.stage.value,
        "num_replicas": workload.num_replicas,
        "num_partitions": workload.num_partitions,
        "modules": [_module(module) for module in workload.modules],
        "meshes": [asdict(mesh) for mesh in workload.meshes],
        "roles": [asdict(role) for role in workload.roles],
        "args": [_argument(argument) for argument in workload.args],
        "symbols": [asdict(symbol) for symbol in workload.symbols],
        "phases": [asdict(phase) for phase in workload.phases],
        "schedule": _schedule(workload.schedule),
        "launches": _launches(workload.launches),
        "source": workload.source,
        "platform": workload.platform,
        "notes": list(workload.notes),
        "metadata": dict(workload.metadata),
    }


def _module(module: Module) -> dict[str, Any]:
    held: dict[str, Any] = {"name": module.name, "format": module.format.value}
    if module.args or module.schedule or module.launches:
        held["args"] = [_argument(argument) for argument in module.args]
        held["schedule"] = _schedule(module.schedule)
        held["launches"] = _launches(module.launches)
        held["metadata"] = dict(module.metadata)
    return held


def _launches(table: LaunchTable | None) -> list[dict[str, Any]] | None:
    return [asdict(launch) for launch in table.launches] if table else None


def _schedule(schedule: Schedule | None) -> dict[str, Any] | None:
    if schedule is None:
        return None
    return {
        "stream_of": [[node, stream] for node, stream in schedule.stream_of.items()],
        "after": [[node, list(nodes)] for node, nodes in schedule.after.items()],
        "events": [[event.recorded, event.waiter] for event in schedule.events],
        "program_order": list(schedule.program_order),
        "host_syncs": list(schedule.host_syncs),
        "stream_names": list(schedule.stream_names),
        "allocations": None if schedule.allocations is None else asdict(schedule.allocations),
    }


def _argument(argument: Argument) -> dict[str, Any]:
    return {
        "name": argument.name,
        "type": _type(argument.type),
        "sharding": asdict(argument.sharding) if argument.sharding else None,
        "kind": argument.kind.value,
        "kept_index": argument.kept_index,
        "aliases_output": argument.aliases_output,
    }


def _type(kind: ValueType) -> Any:
    if isinstance(kind, TupleType):
        return {"tuple": [_type(part) for part in kind.parts]}
    return {"shape": list(kind.shape), "dtype": kind.dtype.name}


def _workload(manifest: Mapping[str, Any], modules: tuple[Module, ...]) -> Workload:
    return Workload(
        format=manifest["format"],
        producer=manifest["producer"],
        stage=Stage(manifest["stage"]),
        modules=modules,
        num_replicas=int(manifest["num_replicas"]),
        num_partitions=int(manifest["num_partitions"]),
        meshes=tuple(_read_mesh(mesh) for mesh in manifest["meshes"]),
        roles=tuple(Role(**role) for role in manifest["roles"]),
        args=tuple(_read_argument(argument) for argument in manifest["args"]),
        symbols=tuple(Symbol(**symbol) for symbol in manifest["symbols"]),
        phases=tuple(Phase(**phase) for phase in manifest["phases"]),
        schedule=_read_schedule(manifest["schedule"]),
        launches=_read_launches(manifest["launches"]),
        source=manifest["source"],
        platform=manifest["platform"],
        notes=tuple(manifest["notes"]),
        metadata=manifest["metadata"],
    )


def _read_mesh(mesh: Mapping[str, Any]) -> Mesh:
    return Mesh(mesh["name"], tuple((name, size) for name, size in mesh["axes"]), tuple(mesh["device_ids"]))


def _read_schedule(held: Mapping[str, Any] | None) -> Schedule | None:
    if held is None:
        return None
    return Schedule(
        dict(map(tuple, held["stream_of"])),
        {node: tuple(nodes) for node, nodes in held["after"]},
        tuple(Event(recorded, waiter) for recorded, waiter in held["events"]),
        tuple(held["program_order"]),
        tuple(held["host_syncs"]),
        tuple(held.get("stream_names", ())),
        allocations_of_json(held.get("allocations")),
    )


def _read_launches(held: list[dict[str, Any]] | None) -> LaunchTable | None:
    return None if held is None else LaunchTable(tuple(map(_read_launch, held)))


_LISTED = ("shapes", "dtypes", "ops", "view_ops", "result_shapes", "result_dtypes")


def _read_launch(held: dict[str, Any]) -> Launch:
    return Launch(**(held | {name: _tuples(held[name]) for name in _LISTED if name in held}))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, cast("list[Any]", value))) if isinstance(value, list) else value


def _read_argument(held: Mapping[str, Any]) -> Argument:
    sharding = held["sharding"]
    return Argument(
        held["name"],
        _read_type(held["type"]),
        _read_sharding(sharding) if sharding else None,
        ArgumentKind(held["kind"]),
        held["kept_index"],
        held["aliases_output"],
    )


def _read_type(held: Mapping[str, Any]) -> ValueType:
    if "tuple" in held:
        return TupleType(tuple(map(_read_type, held["tuple"])))
    return TensorType(tuple(held["shape"]), dtype(held["dtype"]))


def _read_sharding(held: Mapping[str, Any]) -> Sharding:
    def axes(listed: list[Any]) -> tuple[Axis, ...]:
        return tuple(Axis(axis["name"], tuple(axis["sub"]) if axis["sub"] else None) for axis in listed)

    return Sharding(
        held["mesh"],
        tuple(axes(dim) for dim in held["dims"]),
        tuple(held["open_dims"]),
        axes(held["replicated"]),
        axes(held["unreduced"]),
        held["gspmd"],
    )
