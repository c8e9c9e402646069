"""Pipelines written with `shard_map` and `ppermute`: which mesh axis counts their stages."""

from collections.abc import Iterator

from stablecast.ir.attributes import Shift
from stablecast.ir.program import Block, Op, Program
from stablecast.ir.workload import Role


def stage_axes(program: Program) -> tuple[str, ...]:
    """Axes along which a partitioned program passes values from stage to stage.

    An axis counts stages where a loop shifts values along it by one and every argument that it splits is split by it
    on the leading dimension: parameters stacked by stage. (Ring attention shifts too, but splits a sequence.)
    """
    shifted = {op.attrs["shift"].axis for op in _in_loops(program.main.body, False) if _by_one(op)}
    return tuple(axis for axis in sorted(shifted) if _stacked(program, axis))


def stage_roles(program: Program, module: str) -> tuple[Role, ...]:
    """One role a stage of the program's pipeline, all running `module`; empty where it has no pipeline or several."""
    axes = stage_axes(program)
    if len(axes) != 1:
        return ()
    size = next(mesh.axis_size(axes[0]) for mesh in program.meshes if axes[0] in dict(mesh.axes))
    return tuple(Role(f"stage{place}", module, {axes[0]: place}) for place in range(size))


def _by_one(op: Op) -> bool:
    shift = op.attrs.get("shift")
    return op.name == "stablehlo.collective_permute" and isinstance(shift, Shift) and abs(shift.by) == 1


def _in_loops(block: Block, inside: bool) -> Iterator[Op]:
    for op in block.ops:
        if inside:
            yield op
        for region in op.regions:
            yield from _in_loops(region, inside or op.name == "stablehlo.while")


def _stacked(program: Program, axis: str) -> bool:
    found = False
    for argument in program.main.arguments:
        dims = argument.sharding.dims if argument.sharding is not None else ()
        places = [dim for dim, axes in enumerate(dims) if any(held.name == axis for held in axes)]
        if places and places != [0]:
            return False
        found = found or bool(places)
    return found
