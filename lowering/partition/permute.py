"""Collectives that programs write themselves: permutations as groups and shifts, device lists as mesh axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stablecast.ir.attributes import Shift
from stablecast.ir.groups import Groups, all_devices
from stablecast.ir.program import Axis, Mesh
from stablecast.lowering.partition.layout import Layout

IntArray = npt.NDArray[np.int64]


def with_groups(
    attrs: Mapping[str, Any], layout: Layout, meshes: Sequence[Mesh], num_devices: int
) -> Mapping[str, Any]:
    """`attrs` of a collective with groups over named axes, and the shift of a permutation."""
    groups = attrs.get("replica_groups")
    if isinstance(groups, Groups):
        return {**attrs, "replica_groups": layout.named(groups)}
    pairs = attrs.get("source_target_pairs")
    if not pairs:
        return attrs
    kept = {name: value for name, value in attrs.items() if name != "source_target_pairs"}
    table = np.asarray(pairs, dtype=np.int64)
    for mesh in meshes:
        if mesh.size == num_devices:
            axes, shift = _moves(table, mesh)
            found = layout.groups(mesh.name, [Axis(axis) for axis in axes])
            return {**kept, "replica_groups": found, **({"shift": shift} if shift else {})}
    return {**kept, "replica_groups": all_devices(num_devices), "source_target_pairs": pairs}


def _moves(pairs: IntArray, mesh: Mesh) -> tuple[list[str], Shift | None]:
    """Axes along which some source and its target differ, and the common shift if there is one such axis."""
    axes: list[str] = []
    shift: Shift | None = None
    stride = mesh.size
    for axis, size in mesh.axes:
        stride //= size
        steps = (pairs[:, 1] // stride % size) - (pairs[:, 0] // stride % size)
        if steps.any():
            axes.append(axis)
            distinct = np.unique(steps % size)
            if len(distinct) == 1:
                step = int(distinct[0])
                shift = Shift(axis, step if step <= size // 2 else step - size, len(pairs) == mesh.size)
    return axes, shift if len(axes) == 1 else None
