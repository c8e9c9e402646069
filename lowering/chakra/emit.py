"""`emit`: the Chakra traces of all ranks of a device program."""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stablecast.ir.chakra import (
    CountingWriter,
    NodeType,
    PrefixWriter,
    TarWriter,
    TraceMetadata,
    TraceSink,
    TraceTemplate,
    collective_name,
)
from stablecast.ir.chakra.program_file import (
    PROGRAM_FORMAT,
    VERSION,
    collective_to_json,
    groups_to_json,
    program_path,
    program_to_json,
)
from stablecast.ir.device_program import Collective, DeviceProgram
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import FloatArray
from stablecast.lowering.chakra.layout import GroupBook, Layout, check_agreement, layout_of
from stablecast.lowering.chakra.nodes import RoleNodes, TagBook, role_nodes
from stablecast.lowering.chakra.options import EmitOptions, Target
from stablecast.lowering.chakra.report import ClassCount, EmitReport, RoleCount, count_classes
from stablecast.lowering.chakra.unroll import Unrolled, unroll

METADATA = TraceMetadata("0.0.4")
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RolePart:
    """Ranks that run one program.

    `durations_s`: seconds of each row of the program's table, None to leave times to the consumer. `coords`: mesh axis
    -> coordinate, as in `Role`; axes not named run over their whole size. `speed`: of these devices relative to the
    others. `ranks`: for traces made elsewhere, the ranks themselves in place of `coords`.
    """

    name: str
    program: DeviceProgram
    durations_s: FloatArray | None = None
    coords: Mapping[str, int] = field(default_factory=dict[str, int])
    speed: float = 1.0
    ranks: Sequence[int] = ()


def emit(
    program: DeviceProgram | Sequence[RolePart],
    durations_s: FloatArray | None,
    out: str | Path,
    *,
    ranks: int | None = None,
    options: EmitOptions | None = None,
    files: Mapping[str, bytes] | None = None,
    notes: Mapping[str, object] | None = None,
) -> EmitReport:
    """Write `<out>.<rank>.et` for every rank, `comm_group.json`, `<out>.program.json` and, last, the manifest.

    `program`: one program that all ranks run, with `durations_s` of the rows of its table (None: consumers time
    compute by work and bytes), or the roles. `ranks`: must be the number of devices of the program. `files`: further
    files to put beside the traces. `notes`: further entries of the manifest. Raises `InputError` where ranks, roles
    or groups do not fit each other, for an existing prefix without `overwrite`, and for a disk that is full; nothing
    is then left under a final name.
    """
    parts = [RolePart("main", program, durations_s)] if isinstance(program, DeviceProgram) else list(program)
    chosen = options or EmitOptions()
    emission = _Emission(parts, ranks, chosen)
    started = time.perf_counter()
    with _sink(out, chosen) as sink:
        counts = emission.write(sink)
        for name, data in (files or {}).items():
            sink.write_file(name, data)
        report = emission.report(sink, counts, out)
        sink.notes.update({**report.to_json(), **(notes or {})})
    return report.timed(time.perf_counter() - started)


def _sink(out: str | Path, options: EmitOptions) -> TraceSink:
    if options.target is Target.TAR:
        return TarWriter(out, overwrite=options.overwrite)
    if options.target is Target.DRY_RUN:
        return CountingWriter(out)
    return PrefixWriter(out, overwrite=options.overwrite)


@dataclass(slots=True)
class _Variant:
    """Ranks whose files differ in values of holes only."""

    template: TraceTemplate
    nodes: RoleNodes
    ranks: int = 0
    nbytes: int = 0


class _Emission:
    def __init__(self, parts: Sequence[RolePart], ranks: int | None, options: EmitOptions) -> None:
        if not parts:
            raise InputError("there is no program to write")
        self._parts = parts
        self._options = options
        self._layout = layout_of(parts[0].program, ranks)
        self._masks = _role_masks(parts, self._layout)
        self._book = GroupBook(self._layout.ranks)
        self._tags = TagBook()
        self._unrolled = _unrolled(parts, options)
        self._nodes = [self._role(index, {}) for index in range(len(parts))]
        check_agreement(
            self._book,
            [(part.name, mask, made.issued) for part, mask, made in zip(parts, self._masks, self._nodes, strict=True)],
        )
        self._check_messages()
        self._check_algorithms()
        self._variants: dict[tuple[int, tuple[int, ...]], _Variant] = {}

    def _role(self, index: int, places: Mapping[int, int]) -> RoleNodes:
        part, unrolled = self._parts[index], self._unrolled[index]
        durations = _durations(part)
        return role_nodes(
            part.program, unrolled, durations, self._layout, self._book, self._tags, self._options, places, part.coords
        )

    def _check_messages(self) -> None:
        """Every send of a role has its receive at the role that it goes to, of the same size."""
        layout = self._layout
        role_of = np.zeros(layout.ranks, dtype=np.int64)
        first: list[int] = []
        for index, mask in enumerate(self._masks):
            role_of[mask] = index
            first.append(int(np.argmax(mask)))
        held = [set(made.messages) for made in self._nodes]
        for index, made in enumerate(self._nodes):
            for sends, axis, forward, tag, nbytes in made.messages:
                peer = int(role_of[layout.peers(axis, forward if sends else -forward)[first[index]]])
                if (not sends, axis, forward, tag, nbytes) not in held[peer]:
                    one, other = ("send", "receive") if sends else ("receive", "send")
                    raise InputError(
                        f"role {self._parts[index].name} has a {one} of {nbytes} bytes along {axis} without a "
                        f"{other} of that size in role {self._parts[peer].name}"
                    )

    def _check_algorithms(self) -> None:
        """Each algorithm has a collective to stand for."""
        used = {node.kind for made in self._nodes for node in made.expanded}
        for kind, algorithm in self._options.algorithms.items():
            if kind not in used:
                raise InputError(
                    f"{algorithm.name} is for {kind} in groups of {algorithm.size}, of which the program has none"
                )

    def write(self, sink: TraceSink) -> dict[str, int]:
        """Write ranks, groups and programs; gives the number of groups."""
        for index, mask in enumerate(self._masks):
            for rank, variant, data in self._rendered(index, np.nonzero(mask)[0]):
                variant.ranks += 1
                variant.nbytes += len(data)
                sink.write_rank(rank, data, variant.template.nodes)
        used = [(number, mask) for made, mask in zip(self._nodes, self._masks, strict=True) for number in made.issued]
        members = self._book.members(used)
        sink.write_groups(members)
        sink.write_file(program_path(sink.prefix).name, self._program_file())
        return {"groups": len(members)}

    def _rendered(self, index: int, ranks: npt.NDArray[np.int64]) -> Iterator[tuple[int, _Variant, bytes]]:
        """(rank, variant, bytes) of the ranks of a role."""
        expanded = self._expanded_partitions(index)
        places = [self._book.partitions[number].place[ranks].tolist() for number in expanded]
        keys = list(zip(*places, strict=True)) if places else [()] * len(ranks)
        listed = ranks.tolist()
        for key in dict.fromkeys(keys):
            variant = self._variant(index, expanded, key)
            chosen = [rank for rank, own in zip(listed, keys, strict=True) if own == key] if expanded else listed
            names = variant.template.holes
            columns = [_picked(variant.nodes.columns[name], chosen) for name in names]
            render = variant.template.render
            rows = zip(*columns, strict=True) if columns else itertools.repeat(())
            for rank, values in zip(chosen, rows, strict=False):
                yield rank, variant, render(dict(zip(names, values, strict=True)))

    def _expanded_partitions(self, index: int) -> list[int]:
        groups = [node.groups for node in self._nodes[index].expanded]
        return sorted({self._book.number(held) for held in groups})

    def _variant(self, index: int, expanded: Sequence[int], key: tuple[int, ...]) -> _Variant:
        found = self._variants.get((index, key))
        if found is None:
            made = self._role(index, dict(zip(expanded, key, strict=True))) if expanded else self._nodes[index]
            found = _Variant(TraceTemplate.build(made.nodes, made.holes, METADATA), made)
            self._variants[index, key] = found
        return found

    def _program_file(self) -> bytes:
        roles = [
            {
                "name": part.name,
                "coords": dict(part.coords),
                "first_rank": int(np.argmax(mask)),
                "ranks": int(mask.sum()),
                "timed": part.durations_s is not None,
                "speed": part.speed,
                "expanded": [collective_to_json(node, self._book.number(node.groups)) for node in made.expanded],
                "program": program_to_json(part.program),
            }
            for part, made, mask in zip(self._parts, self._nodes, self._masks, strict=True)
        ]
        content = {
            "format": PROGRAM_FORMAT,
            "version": VERSION,
            "partitions": [
                {"base": partition.base, **groups_to_json(partition.groups)} for partition in self._book.partitions
            ],
            "roles": roles,
        }
        return json.dumps(content).encode()

    def report(self, sink: TraceSink, counts: Mapping[str, int], out: str | Path) -> EmitReport:
        """What was written."""
        roles: list[RoleCount] = []
        classes: dict[tuple[str, str], ClassCount] = {}
        for index, part in enumerate(self._parts):
            variants = [variant for (own, _), variant in self._variants.items() if own == index]
            made = variants[0].nodes
            ranks = sum(variant.ranks for variant in variants)
            roles.append(
                RoleCount(
                    part.name,
                    ranks,
                    len(made.nodes),
                    made.trips,
                    sum(variant.nbytes for variant in variants) / ranks,
                    sum(node.duration_micros for node in made.nodes if node.type == NodeType.COMP) * 1e-6,
                    _exact_seconds(self._unrolled[index], part),
                )
            )
            for variant in variants:
                count_classes(classes, variant.nodes.nodes, variant.ranks, collective_name)
        notes = [note for unrolled in self._unrolled for note in unrolled.notes]
        return EmitReport(
            str(out),
            self._layout.ranks,
            sink.nodes,
            sink.bytes,
            counts["groups"],
            tuple(roles),
            tuple(classes[key] for key in sorted(classes)),
            tuple(dict.fromkeys([*notes, *self._collective_notes()])),
            self._options.target.value,
        )

    def _collective_notes(self) -> list[str]:
        collectives = [step.node for made in self._unrolled for step in made.steps if isinstance(step.node, Collective)]
        notes: list[str] = []
        permutations = [node for node in collectives if node.kind == "collective_permute"]
        if any(node.shift is None for node in permutations):
            notes.append("permutations that are no shift are written as one place along their group, ends joined")
        if any(_joins_ends(part, made) for part, made in zip(self._parts, self._unrolled, strict=True)):
            notes.append("permutations whose ends do not meet are written with their ends joined")
        for kind, algorithm in self._options.algorithms.items():
            left = sorted({node.groups.size for node in collectives if node.kind == kind} - {algorithm.size})
            if left:
                sizes = ", ".join(map(str, left))
                notes.append(f"{kind} in groups of {sizes} stays as it is, {algorithm.name} is for {algorithm.size}")
        return notes


def _unrolled(parts: Sequence[RolePart], options: EmitOptions) -> list[Unrolled]:
    """The steps of each part, made once for parts that share program and durations."""
    made: dict[tuple[int, int, float], Unrolled] = {}
    keys = [(id(part.program), id(part.durations_s), part.speed) for part in parts]
    for part, key in zip(parts, keys, strict=True):
        if key not in made:
            made[key] = unroll(part.program, _durations(part), options.loops, options.max_unroll)
    return [made[key] for key in keys]


def _joins_ends(part: RolePart, made: Unrolled) -> bool:
    """Whether a shift whose ends are apart is written for ranks at both of them."""
    shifts = [step.node.shift for step in made.steps if isinstance(step.node, Collective)]
    return any(shift is not None and not shift.cyclic and shift.axis not in part.coords for shift in shifts)


def _picked(column: Sequence[str] | npt.NDArray[np.int64], ranks: list[int]) -> Sequence[str] | list[int]:
    if isinstance(column, np.ndarray):
        return column[ranks].tolist()
    return [column[rank] for rank in ranks]


def _durations(part: RolePart) -> FloatArray | None:
    if part.durations_s is None:
        return None
    if len(part.durations_s) != len(part.program.table):
        raise InputError(
            f"role {part.name}: {len(part.durations_s)} durations for {len(part.program.table)} distinct kernels"
        )
    return part.durations_s / part.speed


def _exact_seconds(unrolled: Unrolled, part: RolePart) -> float:
    durations = _durations(part)
    if durations is None:
        return 0.0
    rows = [(getattr(step.node, "row", -1), step.trips) for step in unrolled.steps]
    return float(sum(durations[row] * trips for row, trips in rows if row >= 0))


def _listed(ranks: Sequence[int], layout: Layout) -> BoolArray:
    if min(ranks) < 0 or max(ranks) >= layout.ranks:
        raise InputError(f"a role names rank {max(ranks)} of {layout.ranks}")
    mask = np.zeros(layout.ranks, dtype=np.bool_)
    mask[list(ranks)] = True
    return mask


def _role_masks(parts: Sequence[RolePart], layout: Layout) -> list[BoolArray]:
    """Ranks of each role. Raises `InputError` unless every rank has exactly one."""
    owners = np.zeros(layout.ranks, dtype=np.int64)
    masks: list[BoolArray] = []
    for part in parts:
        if part.program.num_devices != layout.ranks:
            raise InputError(
                f"role {part.name} is written for {part.program.num_devices} devices, role {parts[0].name} for "
                f"{layout.ranks}"
            )
        if part.speed <= 0:
            raise InputError(f"role {part.name} has speed {part.speed}")
        masks.append(_listed(part.ranks, layout) if part.ranks else layout.holders(part.coords))
        owners += masks[-1]
        if not masks[-1].any():
            raise InputError(f"role {part.name} holds no rank")
    if (owners != 1).any():
        rank = int(np.argmax(owners != 1))
        raise InputError(f"rank {rank} has {int(owners[rank])} roles", "every rank must have exactly one")
    return masks
