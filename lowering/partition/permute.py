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
    """Axes along which some source and its target differ, and the shift if all move equally far along one such axis.

    Either all devices move and the ends meet, or all that have a place to move to.
    """
    axes: list[str] = []
    shift: Shift | None = None
    stride = mesh.size
    for axis, size in mesh.axes:
        stride //= size
        steps = (pairs[:, 1] // stride % size) - (pairs[:, 0] // stride % size)
        if steps.any():
            axes.append(axis)
            shift = _shift(axis, size, steps, mesh.size)
    return axes, shift if len(axes) == 1 else None


def _shift(axis: str, size: int, steps: IntArray, devices: int) -> Shift | None:
    if len(np.unique(steps % size)) != 1:
        return None
    if len(steps) == devices:
        step = int(steps[0] % size)
        return Shift(axis, step if step <= size // 2 else step - size, cyclic=True)
    step = int(steps[0])
    chain = (steps == step).all() and len(steps) == devices // size * (size - abs(step))
    return Shift(axis, step, cyclic=False) if chain else None
