"""Meshes and shardings in numbers: local shapes, and the groups of devices along axes and parts of axes."""

import math
from collections.abc import Iterable, Sequence

from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups, over_parts
from stablecast.ir.program import Axis, Mesh, Sharding
from stablecast.ir.types import TensorType, ValueType

REPLICATED = Sharding()
"""The sharding of a value that every device holds whole."""


class Layout:
    """Local shapes and groups over the meshes of one program; equal questions are answered once."""

    def __init__(self, meshes: Iterable[Mesh]) -> None:
        self._meshes = {mesh.name: mesh for mesh in meshes}
        self._groups: dict[tuple[str, tuple[Axis, ...]], Groups] = {}
        self._types: dict[tuple[int, int], tuple[ValueType, Sharding, ValueType]] = {}
        self._interned: dict[ValueType, ValueType] = {}

    def mesh(self, name: str) -> Mesh:
        """The mesh called `name`; raises `InputError` where the program has none."""
        try:
            return self._meshes[name]
        except KeyError:
            raise InputError(f"the program shards over mesh '@{name}', which it does not define") from None

    def size(self, mesh: str, axes: Iterable[Axis]) -> int:
        """Number of parts that `axes` make together."""
        product = 1
        for axis in axes:
            product *= self.mesh(mesh).axis_size(axis.name) if axis.sub is None else axis.sub[1]
        return product

    def parts(self, sharding: Sharding, dim: int) -> int:
        """Number of parts that dimension `dim` is cut into."""
        axes = sharding.dims[dim] if dim < len(sharding.dims) else ()
        return self.size(sharding.mesh, axes) if axes else 1

    def shape(self, shape: Sequence[int], sharding: Sharding) -> tuple[int, ...]:
        """The shape of one device's part: each size over its parts, rounded up."""
        return tuple(-(-size // self.parts(sharding, dim)) for dim, size in enumerate(shape))

    def local(self, kind: ValueType, sharding: Sharding) -> ValueType:
        """The type of one device's part of a value; equal types are one object."""
        key = (id(kind), id(sharding))
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = (kind, sharding, self._local(kind, sharding))
        return found[2]

    def _local(self, kind: ValueType, sharding: Sharding) -> ValueType:
        if isinstance(kind, TensorType) and sharding.axes:
            kind = TensorType(self.shape(kind.shape, sharding), kind.dtype)
        return self.intern(kind)

    def intern(self, kind: ValueType) -> ValueType:
        """The one object that stands for types equal to `kind`."""
        return self._interned.setdefault(kind, kind)

    def groups(self, mesh: str, axes: Sequence[Axis]) -> Groups:
        """Groups of the devices that differ only along `axes`, which may be parts of mesh axes."""
        key = (mesh, tuple(axes))
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = self._make_groups(mesh, key[1])
        return found

    def _make_groups(self, name: str, axes: tuple[Axis, ...]) -> Groups:
        return over_parts(name, self.mesh(name).axes, [(axis.name, axis.sub) for axis in axes])

    def named(self, groups: Groups) -> Groups:
        """`groups` with the mesh and axes that they run over, where they are whole axes of a mesh of that size."""
        if groups.ragged or (groups.axes and groups.mesh in self._meshes):
            return groups
        for mesh in self._meshes.values():
            if mesh.size == groups.num_devices:
                axes = _covered(groups, mesh)
                if axes is not None:
                    return self.groups(mesh.name, axes)
        return groups


def _covered(groups: Groups, mesh: Mesh) -> tuple[Axis, ...] | None:
    """The axes of `mesh`, or parts of them, along which the members of each group differ; None if there are none."""
    strides = [math.prod(groups.dims[axis + 1 :]) for axis in range(len(groups.dims))]
    left, spans = groups.size, list[tuple[int, int]]()
    for axis in reversed(groups.permutation):
        if left == 1:
            break
        taken = min(groups.dims[axis], left)
        if left % taken:
            return None
        spans.append((strides[axis], strides[axis] * taken))
        left //= taken
    spans = _merged(spans)
    axes: list[Axis] = []
    end, covered = mesh.size, 1
    for axis, size in mesh.axes:
        start = end // size
        for low, high in spans:
            low, high = max(low, start), min(high, end)
            if low >= high:
                continue
            if low % start or end % high or high % low:
                return None
            whole = (low, high) == (start, end)
            axes.append(Axis(axis) if whole else Axis(axis, (end // high, high // low)))
            covered *= high // low
        end = start
    return tuple(axes) if covered == groups.size else None


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and merged[-1][1] == low:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return merged
