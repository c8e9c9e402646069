"""Who is where: ranks of roles, peers along mesh axes and group numbers, all by arithmetic on whole arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups
from stablecast.ir.program import Mesh

IntArray = npt.NDArray[np.int64]

FLAT_AXIS = "rank"


@dataclass(frozen=True)
class Layout:
    """The ranks 0..N-1 on a mesh, major to minor."""

    mesh: Mesh

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @cached_property
    def _position(self) -> IntArray:
        """Position on the mesh of each rank."""
        if not self.mesh.device_ids:
            return np.arange(self.ranks)
        position = np.empty(self.ranks, dtype=np.int64)
        position[np.asarray(self.mesh.device_ids)] = np.arange(self.ranks)
        return position

    @cached_property
    def _rank(self) -> IntArray:
        return np.asarray(self.mesh.device_ids) if self.mesh.device_ids else np.arange(self.ranks)

    def _stride(self, axis: str) -> tuple[int, int]:
        """(size of the axis, ranks between neighbours along it); the flat axis counts all ranks."""
        size = self.ranks if axis == FLAT_AXIS and not self.has(axis) else self.mesh.axis_size(axis)
        names = [name for name, _ in self.mesh.axes]
        below = 1
        for name, extent in reversed(self.mesh.axes):
            if name == axis or axis not in names:
                break
            below *= extent
        return size, below

    def has(self, axis: str) -> bool:
        """Whether the mesh has an axis of that name."""
        return any(name == axis for name, _ in self.mesh.axes)

    def coordinate(self, axis: str) -> IntArray:
        """Of each rank, its coordinate along `axis`. Raises `InputError` for an unknown axis."""
        size, stride = self._stride(axis)
        return self._position // stride % size

    def peers(self, axis: str, shift: int) -> IntArray:
        """Of each rank, the rank `shift` places along `axis`, whose ends meet."""
        size, stride = self._stride(axis)
        here = self.coordinate(axis)
        return self._rank[self._position + ((here + shift) % size - here) * stride]

    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        return self._stride(axis)[0]

    def holders(self, coords: Mapping[str, int]) -> npt.NDArray[np.bool_]:
        """Of each rank, whether it has these coordinates. Raises `InputError` for a coordinate outside the mesh."""
        mask = np.ones(self.ranks, dtype=np.bool_)
        for axis, place in coords.items():
            if not 0 <= place < self.size(axis):
                raise InputError(f"coordinate {axis}={place} is outside the mesh {dict(self.mesh.axes)}")
            mask &= self.coordinate(axis) == place
        return mask


def layout_of(program: DeviceProgram, ranks: int | None) -> Layout:
    """The layout of all ranks that run `program`. Raises `InputError` where `ranks` is another number."""
    wanted = program.num_devices
    if ranks is not None and ranks < 1:
        raise InputError(f"{ranks} ranks cannot be written", "give the number of devices of the program")
    if ranks is not None and ranks != wanted:
        raise InputError(
            f"{ranks} ranks were asked for, but the program is written for {wanted}",
            f"say --ranks {wanted}, or capture the program for {ranks} (--mesh)",
        )
    mesh = next((mesh for mesh in program.meshes if mesh.size == wanted), None)
    return Layout(mesh or Mesh("devices", (("devices", wanted),)))


@dataclass(frozen=True)
class Partition:
    """Groups in use, numbered.

    `base`: number of the first group. `row`, `place`: of each rank its group and its place there, -1 where it is in
    none. `table[g]`: members of group g, -1 after the last of a shorter one. `everyone`: the one group of all ranks
    in order, which needs no name.
    """

    groups: Groups
    base: int
    table: IntArray
    row: IntArray
    place: IntArray
    everyone: bool

    @cached_property
    def names(self) -> list[str]:
        """Of each rank, the key of its group."""
        return [str(number) for number in (self.row + self.base).tolist()]

    def member(self, offset: int, *, relative: bool) -> IntArray:
        """Of each rank, the member of its group at `offset`: counted from its own place, or from the first."""
        sizes = (self.table >= 0).sum(axis=1)[self.row]
        column = (self.place + offset) % sizes if relative else np.full(len(self.row), offset)
        return self.table[self.row, column]


@dataclass
class GroupBook:
    """Numbers the groups of every partition of the ranks once, in the order in which they are met."""

    ranks: int
    partitions: list[Partition] = field(default_factory=list[Partition])
    _known: dict[Groups, int] = field(default_factory=dict[Groups, int])
    _tables: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _next: int = 1

    def number(self, groups: Groups, where: str = "") -> int:
        """Index of the partition that `groups` makes. Raises `InputError` for groups over other ranks than these."""
        found = self._known.get(groups)
        if found is None:
            found = self._known[groups] = self._add(groups, where)
        return found

    def _add(self, groups: Groups, where: str) -> int:
        table = _member_table(groups)
        high = int(table.max(initial=-1))
        if high >= self.ranks or (not groups.ragged and groups.num_devices != self.ranks):
            raise InputError(
                f"{where or 'a collective'} runs over {max(groups.num_devices, high + 1)} devices, "
                f"the program over {self.ranks}"
            )
        key = repr(table.shape).encode() + table.tobytes()
        if key in self._tables:
            return self._tables[key]
        row = np.full(self.ranks, -1, dtype=np.int64)
        place = np.full(self.ranks, -1, dtype=np.int64)
        there = table >= 0
        rows, columns = np.nonzero(there)
        row[table[there]], place[table[there]] = rows, columns
        everyone = len(table) == 1 and np.array_equal(table[0], np.arange(self.ranks))
        base = 0 if everyone else self._next
        self._next += 0 if everyone else len(table)
        self.partitions.append(Partition(groups, base, table, row, place, everyone))
        self._tables[key] = len(self.partitions) - 1
        return len(self.partitions) - 1

    def members(self, used: Iterable[tuple[int, npt.NDArray[np.bool_]]]) -> dict[str, list[int]]:
        """The group file; `used`: partitions with the ranks that issue something in them."""
        masks: dict[int, npt.NDArray[np.bool_]] = {}
        for number, mask in used:
            masks[number] = masks[number] | mask if number in masks else mask
        found: dict[str, list[int]] = {}
        for number in sorted(masks):
            partition = self.partitions[number]
            if partition.everyone:
                continue
            for index in np.unique(partition.row[masks[number]]).tolist():
                members = partition.table[index]
                found[str(partition.base + index)] = members[members >= 0].tolist()
        return found


def _member_table(groups: Groups) -> IntArray:
    if not groups.ragged:
        devices = np.arange(groups.num_devices).reshape(groups.dims or (groups.num_devices,))
        permutation = groups.permutation or (0,)
        return np.ascontiguousarray(devices.transpose(permutation).reshape(groups.count, groups.size))
    width = max(map(len, groups.ragged))
    return np.array([[*group, *[-1] * (width - len(group))] for group in groups.ragged], dtype=np.int64)


def check_agreement(
    book: GroupBook, roles: Sequence[tuple[str, npt.NDArray[np.bool_], Mapping[int, tuple[object, ...]]]]
) -> None:
    """Every member of a group issues the same collectives in it, in the same order.

    `roles`: name, ranks, and by partition what the role issues there. Raises `InputError` naming the two roles.
    """
    for number, partition in enumerate(book.partitions):
        distinct: dict[tuple[object, ...], int] = {}
        sequence = np.full(book.ranks, -1, dtype=np.int64)
        for _, mask, issued in roles:
            if number in issued:
                sequence[mask] = distinct.setdefault(issued[number], len(distinct))
        if (partition.row[sequence >= 0] < 0).any():
            rank = int(np.nonzero((sequence >= 0) & (partition.row < 0))[0][0])
            raise InputError(f"rank {rank} runs a collective over {partition.groups} and is in none of these groups")
        there = partition.table >= 0
        by_member = np.where(there, sequence[partition.table], -1)
        high = by_member.max(axis=1)
        low = np.where(there, by_member, high[:, None]).min(axis=1)
        if (low != high).any():
            row = int(np.nonzero(low != high)[0][0])
            members = partition.table[row][there[row]].tolist()
            names = sorted({name for name, mask, _ in roles for rank in members if mask[rank]})
            raise InputError(
                f"members {members[:8]} of a group do not issue the same collectives: roles {', '.join(names)}"
            )
