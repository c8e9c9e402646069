"""The file `<prefix>.program.json` beside a trace: what its nodes do not say of the programs that it was made from."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

from stablecast.ir.allocations import allocations_of_json
from stablecast.ir.device_program import ArgumentBuffer, Buffers, Collective, DeviceProgram, Unmodelled
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.ir.program import Mesh
from stablecast.ir.types import Symbol
from stablecast.ir.work import SymbolicWork, Work

PROGRAM_FORMAT = "stablecast-chakra-program"
VERSION = 1

_DEFAULT_ROW = KernelRow()
_ROW_FIELDS = tuple(field.name for field in fields(KernelRow))
_COLLECTIVE_FIELDS = (
    *("kind", "operand_bytes", "result_bytes", "reduce_op", "dtype", "channel", "asynchronous", "stream", "scope"),
    "merged",
)


def program_path(prefix: Path) -> Path:
    """Where that file of a prefix lies."""
    return prefix.with_name(prefix.name + ".program.json")


def row_to_json(row: KernelRow) -> dict[str, Any]:
    """The fields of a row that are not the default ones."""
    values = {name: getattr(row, name) for name in _ROW_FIELDS}
    kept = {name: value for name, value in values.items() if value != getattr(_DEFAULT_ROW, name)}
    return {name: str(value) if name == "klass" else value for name, value in kept.items()}


def groups_to_json(groups: Groups) -> dict[str, Any]:
    """Groups as they are written, by arithmetic where they are."""
    return {name: value for name, value in asdict(groups).items() if value not in ("", ())}


def groups_of_json(held: Mapping[str, Any]) -> Groups:
    """Groups from what `groups_to_json` made."""
    return Groups(
        held["count"],
        held["size"],
        tuple(held.get("dims", ())),
        tuple(held.get("permutation", ())),
        held.get("mesh", ""),
        tuple(held.get("axes", ())),
        tuple(map(tuple, held.get("ragged", ()))),
    )


def collective_to_json(node: Collective, partition: int) -> dict[str, Any]:
    """A collective; `partition`: number of its groups."""
    return {**{name: getattr(node, name) for name in _COLLECTIVE_FIELDS}, "partition": partition}


def collective_of_json(held: Mapping[str, Any], groups: Groups) -> Collective:
    """A collective from what `collective_to_json` made."""
    return Collective(groups=groups, **{name: held[name] for name in _COLLECTIVE_FIELDS})


def program_to_json(program: DeviceProgram) -> dict[str, Any]:
    """Everything of a program but its body."""
    return {
        "name": program.name,
        "rows": [row_to_json(row) for row in program.table.rows],
        "count": program.table.count.tolist(),
        "work": [
            {"symbols": [asdict(symbol) for symbol in key], "work": list(work.parts)}
            for key, work in program.work.terms.items()
        ],
        "num_devices": program.num_devices,
        "meshes": [asdict(mesh) for mesh in program.meshes],
        "exec_model": program.exec_model,
        "platform": program.platform,
        "model_flops": None if program.model_flops is None else dict(program.model_flops),
        "buffers": None if program.buffers is None else asdict(program.buffers),
        "unmodelled": [asdict(entry) for entry in program.unmodelled],
        "complete": program.complete,
        "notes": list(program.notes),
        "stage_axis": program.stage_axis,
        "recorded": program.recorded,
        "offloaded": dict(program.offloaded),
        "allocations": None if program.allocations is None else asdict(program.allocations),
        "arguments": [[one.name, one.nbytes, int(one.overwritten)] for one in program.arguments],
    }


def program_of_json(held: Mapping[str, Any], body: tuple[Any, ...], where: str) -> DeviceProgram:
    """A program from what `program_to_json` made and its body. Raises `InputError` for a file of another shape."""
    import numpy as np

    try:
        rows = tuple(KernelRow(**row) for row in held["rows"])
        terms = {tuple(Symbol(**symbol) for symbol in term["symbols"]): Work(*term["work"]) for term in held["work"]}
        return DeviceProgram(
            name=held["name"],
            body=body,
            table=KernelTable(rows, np.array(held["count"], dtype=np.float64)),
            work=SymbolicWork(terms),
            num_devices=held["num_devices"],
            meshes=_meshes(held["meshes"]),
            exec_model=held["exec_model"],
            platform=held["platform"],
            model_flops=held["model_flops"],
            buffers=None if held["buffers"] is None else Buffers(**held["buffers"]),
            unmodelled=tuple(Unmodelled(**entry) for entry in held["unmodelled"]),
            complete=held["complete"],
            notes=tuple(held["notes"]),
            stage_axis=held.get("stage_axis", ""),
            recorded=bool(held.get("recorded", False)),
            offloaded=held.get("offloaded", {}),
            allocations=allocations_of_json(held.get("allocations")),
            arguments=tuple(ArgumentBuffer(one[0], one[1], bool(one[2])) for one in held.get("arguments", ())),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{where}: not a program file of this version ({error})") from None


def _meshes(held: Sequence[Mapping[str, Any]]) -> tuple[Mesh, ...]:
    return tuple(Mesh(mesh["name"], tuple(map(tuple, mesh["axes"])), tuple(mesh["device_ids"])) for mesh in held)


def read_program_file(path: Path) -> Mapping[str, Any]:
    """The content of the file. Raises `InputError` where it is not one of a version that this stablecast reads."""
    import json

    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object")
    found = cast(Mapping[str, Any], content)
    if found.get("format") != PROGRAM_FORMAT or found.get("version") != VERSION:
        raise InputError(f"{path}: not a {PROGRAM_FORMAT} of version {VERSION}")
    return found
