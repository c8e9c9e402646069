"""Pipelines written with `shard_map` and `ppermute`: which mesh axis counts their stages."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from stablecast.ir.attributes import Shift
from stablecast.ir.device_program import DeviceProgram, Loop, MicroBatches
from stablecast.ir.program import Block, Op, Program
from stablecast.ir.types import as_tensor
from stablecast.ir.workload import Role


def stage_axes(program: Program) -> tuple[str, ...]:
    """Axes along which a partitioned program passes values from stage to stage.

    An axis counts stages where a loop shifts values along it by one and every argument that it splits is split by it
    on the leading dimension: parameters stacked by stage. (Ring attention shifts too, but splits a sequence.)
    """
    shifted = {op.attrs["shift"].axis for op in _in_loops(program.main.body, False) if _by_one(op)}
    return tuple(axis for axis in sorted(shifted) if _stacked(program, axis))


def micro_batch_loops(program: Program, axis: str) -> dict[int, MicroBatches]:
    """The loops of a partitioned program that hand values on along `axis` each trip, by their first result."""
    stages = next(mesh.axis_size(axis) for mesh in program.meshes if axis in dict(mesh.axes))
    found: dict[int, MicroBatches] = {}
    for op in _loops(program.main.body):
        body = op.regions[1]
        shifts = {inner.attrs["shift"] for inner in body.ops if _by_one(inner)}
        along = [shift for shift in shifts if shift.axis == axis]
        if along:
            by = along[0].by if len(along) == 1 else 0
            passing = MicroBatches(axis, stages, by, any(shift.cyclic for shift in along))
            found[op.result] = _counted(passing, op) if by and isinstance(op.count, int) else passing
    return found


def _counted(passing: MicroBatches, op: Op) -> MicroBatches:
    """`passing` with the micro-batches that go through `op`.

    A value takes as many trips as there are stages. Where the ends do not meet, all trips but `stages - 1` send one in;
    where they meet, a value may go round: what the loop takes out of an array by its first dimension tells how many.
    """
    entering = int(op.count) - (passing.stages - 1) if isinstance(op.count, int) else 0
    if entering < 1:
        return passing
    if not passing.cyclic:
        return replace(passing, count=entering)
    fed = {as_tensor(inner.operand_types[0]).shape[0] for inner in op.regions[1].ops if _takes_one(inner)}
    fitting = [count for count in fed if count <= entering and entering % count == 0 and (count > 1 or entering == 1)]
    whole = max(fitting, default=0)
    return replace(passing, count=whole, rounds=entering // whole) if whole else passing


def _takes_one(op: Op) -> bool:
    """Whether `op` takes one entry of the first dimension of an array, or changes it."""
    if op.name not in ("stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"):
        return False
    part = op.result_type if op.name == "stablehlo.dynamic_slice" else op.operand_types[1]
    return as_tensor(op.operand_types[0]).rank > 1 and as_tensor(part).shape[0] == 1


def stage_roles(program: DeviceProgram, module: str) -> tuple[Role, ...]:
    """One role a stage of the program's pipeline, all running `module`; empty where it has no pipeline or several."""
    axis = program.stage_axis
    places = range(program.num_stages) if axis else ()
    return tuple(Role(f"stage{place}", module, {axis: place}) for place in places)


def stage_note(program: DeviceProgram, loops: Mapping[str, int]) -> str:
    """What a prediction of a pipeline of equal programs counts; empty where there is no pipeline.

    `loops`: trips of loops that the program leaves open.
    """
    axis = program.stage_axis
    if not axis:
        return ""
    stages = program.num_stages
    said = f"{stages} stages along {axis} run one program, as the loop in it moves values on"
    trips = {_trips_of_known(loop, loops) for loop in program.pipeline_loops()}
    known = trips.pop() if len(trips) == 1 else 0
    if not known:
        return f"{said}; they wait for each other as it makes them"
    idle = stages - 1
    share = f"{idle} of {known} trips ({100 * idle / known:.0f} %)"
    return f"{said}; in at least {share} a stage has no micro-batch and runs all the same: time, work and MFU count it"


def _trips_of_known(loop: Loop, loops: Mapping[str, int]) -> int:
    """Trips of a loop of which it is known how many send a micro-batch in; 0 of another."""
    passing = loop.micro_batches
    if passing is None or not passing.by or (passing.cyclic and not passing.count):
        return 0
    trips = loop.count if isinstance(loop.count, int) else loops.get(loop.count.name, 0)
    return trips if trips >= passing.stages else 0


def _by_one(op: Op) -> bool:
    shift = op.attrs.get("shift")
    return op.name == "stablehlo.collective_permute" and isinstance(shift, Shift) and abs(shift.by) == 1


def _in_loops(block: Block, inside: bool) -> Iterator[Op]:
    for op in block.ops:
        if inside:
            yield op
        for region in op.regions:
            yield from _in_loops(region, inside or op.name == "stablehlo.while")


def _loops(block: Block) -> Iterator[Op]:
    for op in block.ops:
        if op.name == "stablehlo.while":
            yield op
        for region in op.regions:
            yield from _loops(region)


def _stacked(program: Program, axis: str) -> bool:
    found = False
    for argument in program.main.arguments:
        dims = argument.sharding.dims if argument.sharding is not None else ()
        places = [dim for dim, axes in enumerate(dims) if any(held.name == axis for held in axes)]
        if places and places != [0]:
            return False
        found = found or bool(places)
    return found
