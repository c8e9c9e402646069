"""Replica groups by arithmetic: who takes part in a collective, without a list of devices."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stablecast.ir.errors import InputError


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a collective over `count * size` devices.

    Canonical iota form (as HLO writes `[count,size]<=[dims]T(permutation)`): device ids 0..N-1 are laid out as an
    array of shape `dims`, transposed by `permutation`, flattened, and cut into `count` rows of `size`.
    `mesh`, `axes`: the named mesh and axes that gave these groups, where known. `ragged`: explicit member lists
    where the groups do not fit the form; then `dims` is empty.
    """

    count: int
    size: int
    dims: tuple[int, ...] = ()
    permutation: tuple[int, ...] = ()
    mesh: str = ""
    axes: tuple[str, ...] = ()
    ragged: tuple[tuple[int, ...], ...] = ()

    @property
    def num_devices(self) -> int:
        """Number of devices over all groups."""
        return sum(map(len, self.ragged)) if self.ragged else self.count * self.size

    def members(self, rank: int) -> tuple[int, ...]:
        """The group that device `rank` is in, in order. Raises `InputError` where it is in none."""
        if self.ragged:
            for group in self.ragged:
                if rank in group:
                    return group
            raise InputError(f"device {rank} is in no replica group of {self}")
        if not 0 <= rank < self.num_devices:
            raise InputError(f"device {rank} is in no replica group of {self}")
        start = self._position(rank) // self.size * self.size
        return tuple(self._device(position) for position in range(start, start + self.size))

    def _strides(self) -> list[int]:
        strides = [math.prod(self.dims[axis + 1 :]) for axis in range(len(self.dims))]
        return [strides[axis] for axis in self.permutation]

    def _position(self, rank: int) -> int:
        position = 0
        for axis, stride in zip(self.permutation, self._strides(), strict=True):
            position = position * self.dims[axis] + rank // stride % self.dims[axis]
        return position

    def _device(self, position: int) -> int:
        rank = 0
        for axis, stride in reversed(list(zip(self.permutation, self._strides(), strict=True))):
            position, index = divmod(position, self.dims[axis])
            rank += index * stride
        return rank

    @property
    def layout(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """Count, size, dims and permutation without dims of one, dims that stay neighbours put together.

        Equal for two groups in iota form with the same members in the same order.
        """
        kept = [axis for axis in self.permutation if self.dims[axis] > 1]
        runs: list[list[int]] = []
        for axis in kept:
            follows = runs and axis > runs[-1][-1] and all(size == 1 for size in self.dims[runs[-1][-1] + 1 : axis])
            if follows:
                runs[-1].append(axis)
            else:
                runs.append([axis])
        order = sorted(range(len(runs)), key=lambda run: runs[run][0])
        sizes = tuple(math.prod(self.dims[axis] for axis in runs[run]) for run in order)
        return self.count, self.size, sizes, tuple(order.index(run) for run in range(len(runs)))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Each group in turn (cost grows with the number of devices)."""
        if self.ragged:
            yield from self.ragged
            return
        for row in range(self.count):
            yield tuple(self._device(row * self.size + column) for column in range(self.size))

    def __str__(self) -> str:
        if self.ragged:
            return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in self.ragged) + "}"
        if self.permutation == tuple(range(len(self.dims))):
            return f"[{self.count},{self.size}]<=[{self.count * self.size}]"
        dims = ",".join(map(str, self.dims))
        return f"[{self.count},{self.size}]<=[{dims}]T({','.join(map(str, self.permutation))})"


def all_devices(count: int) -> Groups:
    """One group of all `count` devices."""
    return Groups(1, count, (count,), (0,))


def over_axes(mesh: str, axes: Sequence[tuple[str, int]], along: Sequence[str]) -> Groups:
    """Groups of the devices that differ only in their coordinates on the axes `along`.

    `axes`: name and size of every axis of the mesh, major to minor. `along`: in the order in which members are
    listed, major to minor. Raises `InputError` for an axis that the mesh does not have.
    """
    names = [name for name, _ in axes]
    for name in along:
        if name not in names:
            raise InputError(f"mesh '{mesh}' has no axis '{name}'", f"its axes are {', '.join(names)}")
    dims = tuple(size for _, size in axes)
    inner = [names.index(name) for name in along]
    outer = [axis for axis in range(len(dims)) if axis not in inner]
    size = math.prod(dims[axis] for axis in inner)
    return Groups(math.prod(dims) // size, size, dims, tuple(outer + inner), mesh, tuple(along))


def over_parts(
    mesh: str, axes: Sequence[tuple[str, int]], along: Sequence[tuple[str, tuple[int, int] | None]]
) -> Groups:
    """Groups of the devices that differ only along parts of axes.

    `along`: axis names, each with (pre_size, size) of the part as in Shardy's `"x":(1)2`, or None for the whole axis.
    Parts are named `x:(1)2`. Raises `InputError` as `over_axes` does.
    """
    pieces: list[tuple[str, int]] = []
    inside: dict[tuple[str, tuple[int, int] | None], list[str]] = {}
    for axis, size in axes:
        wanted = [given for given in along if given[0] == axis]
        for name, low, length in _cut(axis, size, wanted):
            pieces.append((name, length))
            for given in wanted:
                start, span = given[1] or (1, size)
                if start <= low and low * length <= start * span:
                    inside.setdefault(given, []).append(name)
    named = [name for given in along for name in inside.get(given, [given[0]])]
    return over_axes(mesh, pieces, list(dict.fromkeys(named)))


def _cut(axis: str, size: int, wanted: Sequence[tuple[str, tuple[int, int] | None]]) -> list[tuple[str, int, int]]:
    """Name, product of the sizes before it, and size of the pieces of `axis` between the boundaries of `wanted`."""
    cuts = {1, size}
    for _, part in wanted:
        if part is not None:
            cuts |= {part[0], part[0] * part[1]}
    ordered = sorted(cuts)
    if len(ordered) <= 2:
        return [(axis, 1, size)]
    pairs = itertools.pairwise(ordered)
    return [(f"{axis}:({low}){high // low}", low, high // low) for low, high in pairs]


def from_lists(groups: npt.ArrayLike) -> Groups:
    """Groups given as an array [count, size] of device ids (-1 pads ragged rows), in canonical form if there is one."""
    table = np.asarray(groups)
    if table.ndim != 2:
        raise InputError(f"replica groups must be a 2-D table, not of shape {table.shape}")
    table = table.astype(np.int64, copy=False)
    if table.size and (table < 0).any():
        return Groups(len(table), table.shape[1], ragged=tuple(tuple(int(i) for i in row if i >= 0) for row in table))
    found = _canonical(table)
    return found or Groups(len(table), table.shape[1], ragged=tuple(tuple(map(int, row)) for row in table))


def _canonical(table: npt.NDArray[np.int64]) -> Groups | None:
    """The iota form of `table`, by reading mixed-radix strides off the flattened ids; None if it has none."""
    flat = table.reshape(-1)
    radices = _radices(flat)
    if radices is None:
        return None
    strides = [stride for _, stride in radices]
    order = sorted(range(len(radices)), key=lambda axis: -strides[axis])
    dims = tuple(radices[axis][0] for axis in order)
    permutation = tuple(order.index(axis) for axis in range(len(radices)))
    return Groups(len(table), table.shape[1], dims, permutation)


def _radices(flat: npt.NDArray[np.int64]) -> list[tuple[int, int]] | None:
    """(size, stride) from major to minor such that position -> id is the mixed-radix walk; None if there is none."""
    total = len(flat)
    if total == 0 or flat[0] != 0:
        return None
    radices: list[tuple[int, int]] = []
    block = 1
    while block < total:
        stride = int(flat[block])
        if stride <= 0:
            return None
        heads = flat[::block]
        breaks = np.nonzero(heads != np.arange(len(heads)) * stride)[0]
        size = int(breaks[0]) if len(breaks) else len(heads)
        if size < 2 or total % (block * size):
            return None
        radices.insert(0, (size, stride))
        block *= size
    dims = sorted(radices, key=lambda radix: -radix[1])
    expected = total
    for size, stride in dims:
        expected //= size
        if stride != expected:
            return None
    shape, steps = [size for size, _ in radices] or [1], [stride for _, stride in radices] or [0]
    walk = sum(
        (np.arange(size) * step).reshape([-1 if axis == i else 1 for i in range(len(shape))])
        for axis, (size, step) in enumerate(zip(shape, steps, strict=True))
    )
    if not np.array_equal(np.asarray(walk).reshape(-1), flat):
        return None
    return radices or [(1, 1)]


def named(groups: Groups, mesh: str, axes: Sequence[tuple[str, int]]) -> Groups:
    """`groups` as those along axes of a mesh, where they are; unchanged where not, and where they name such already.

    `axes`: name and size of every axis, major to minor; devices are numbered in that order.
    """
    names = [name for name, size in axes if size > 1]
    known = bool(groups.axes) and set(groups.axes) <= set(names)
    if known or groups.ragged or groups.num_devices != math.prod(size for _, size in axes):
        return groups
    for count in range(1, len(names) + 1):
        for along in itertools.permutations(names, count):
            found = over_axes(mesh, axes, along)
            if found.layout == groups.layout:
                return found
    return groups
