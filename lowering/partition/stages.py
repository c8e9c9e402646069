"""Pipelines written with `shard_map` and `ppermute`: which mesh axis counts their stages."""

from collections.abc import Iterator, Mapping

from stablecast.ir.attributes import Shift
from stablecast.ir.device_program import Body, Branch, Collective, DeviceProgram, Loop
from stablecast.ir.program import Block, Op, Program
from stablecast.ir.workload import Role


def stage_axes(program: Program) -> tuple[str, ...]:
    """Axes along which a partitioned program passes values from stage to stage.

    An axis counts stages where a loop shifts values along it by one and every argument that it splits is split by it
    on the leading dimension: parameters stacked by stage. (Ring attention shifts too, but splits a sequence.)
    """
    shifted = {op.attrs["shift"].axis for op in _in_loops(program.main.body, False) if _by_one(op)}
    return tuple(axis for axis in sorted(shifted) if _stacked(program, axis))


def stage_roles(program: DeviceProgram, module: str) -> tuple[Role, ...]:
    """One role a stage of the program's pipeline, all running `module`; empty where it has no pipeline or several."""
    axis = program.stage_axis
    places = range(_stages(program)) if axis else ()
    return tuple(Role(f"stage{place}", module, {axis: place}) for place in places)


def stage_note(program: DeviceProgram, loops: Mapping[str, int]) -> str:
    """What a prediction of a pipeline of equal programs counts; empty where there is no pipeline.

    A value takes as many trips as there are stages to pass a loop that shifts it once a trip and does not return it, so
    every stage is without one in all trips but those left. Where the ends meet, nothing follows.
    """
    axis = program.stage_axis
    if not axis:
        return ""
    stages = _stages(program)
    said = f"{stages} stages along {axis} run one program, as the loop in it moves values on"
    found = list(dict.fromkeys(_chains(program.body, axis, loops)))
    if len(found) != 1 or not found[0] or found[0] < stages:
        return f"{said}; they wait for each other as it makes them"
    idle = stages - 1
    share = f"{idle} of {found[0]} trips ({100 * idle / found[0]:.0f} %)"
    return f"{said}; in at least {share} a stage has no micro-batch and runs all the same: time, work and MFU count it"


def _stages(program: DeviceProgram) -> int:
    return next(mesh.axis_size(program.stage_axis) for mesh in program.meshes if program.stage_axis in dict(mesh.axes))


def _chains(body: Body, axis: str, loops: Mapping[str, int]) -> Iterator[int]:
    """Trips of every loop that shifts along `axis`; 0 where it is not one shift by one whose ends are apart."""
    for node in body:
        if isinstance(node, Branch):
            for one in node.bodies:
                yield from _chains(one, axis, loops)
        if not isinstance(node, Loop):
            continue
        inside = [inner.shift for inner in node.body if isinstance(inner, Collective) and inner.shift]
        shifts = [shift for shift in inside if shift.axis == axis]
        if shifts:
            count = node.count if isinstance(node.count, int) else loops.get(node.count.name, 0)
            yield count if len(shifts) == 1 and abs(shifts[0].by) == 1 and not shifts[0].cyclic else 0
        yield from _chains(node.body, axis, loops)


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
