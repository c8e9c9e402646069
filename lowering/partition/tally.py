"""What a partitioned program sends and multiplies: collectives by kind and axes, bytes on the wire, matrix FLOPs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stablecast.ir.accounting import Context
from stablecast.ir.groups import Groups, all_devices
from stablecast.ir.program import Block, Mesh, Op, Program
from stablecast.lowering.partition.layout import Layout
from stablecast.lowering.partition.permute import with_groups

COLLECTIVES = frozenset(
    f"stablehlo.{kind}"
    for kind in (
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"),
        "collective_broadcast",
    )
)
_PRODUCTS = frozenset({"stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution", "chlo.ragged_dot"})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one `kind` over `axes` in a step: how many, their operand and result bytes, bytes on the wire."""

    kind: str
    axes: str
    count: int
    operand_bytes: int
    result_bytes: int
    wire_bytes: float


@dataclass(frozen=True, slots=True)
class Tally:
    """Everything that one device sends and multiplies in a step; branches are summed, unknown loops count once."""

    traffic: tuple[Traffic, ...]
    matmul_flops: float

    @property
    def wire_bytes(self) -> float:
        return sum(line.wire_bytes for line in self.traffic)


def wire_bytes(kind: str, size: int, operand: int, result: int) -> float:
    """Bytes that one device sends in a ring over `size` devices; a permutation sends its operand once."""
    share = (size - 1) / size
    if kind == "all_reduce":
        return 2 * share * operand
    if kind == "all_gather":
        return share * result
    if kind in ("reduce_scatter", "all_to_all"):
        return share * operand
    return float(operand)


def tally(program: Program, meshes: Iterable[Mesh] = ()) -> Tally:
    """The tally of `program`; groups that carry no axes are named after those of `meshes` that they run over."""
    meshes = tuple(meshes)
    layout = Layout(meshes)
    devices = max([program.num_devices, *(mesh.size for mesh in meshes)])
    context = Context(program)
    lines: dict[tuple[str, str], list[float]] = {}
    flops = 0.0
    for op, runs in _runs(program, program.main.body, 1):
        if op.name in _PRODUCTS:
            flops += context.work(op).matmul_flops * runs
        elif op.name in COLLECTIVES:
            groups = with_groups(op.attrs, layout, meshes, devices).get("replica_groups")
            if not isinstance(groups, Groups):
                groups = all_devices(devices)
            if groups.size == 1:
                continue
            kind = op.name.removeprefix("stablehlo.")
            operand = sum(part.nbytes for part in op.operand_types)
            result = sum(part.nbytes for part in op.result_types)
            sums = lines.setdefault((kind, _label(layout.named(groups))), [0, 0, 0, 0.0])
            for place, amount in enumerate((1, operand, result, wire_bytes(kind, groups.size, operand, result))):
                sums[place] += amount * runs
    found = tuple(
        Traffic(kind, axes, int(count), int(operand), int(result), wire)
        for (kind, axes), (count, operand, result, wire) in sorted(lines.items())
    )
    return Tally(found, flops)


def _label(groups: Groups) -> str:
    return ",".join(sorted(groups.axes)) if groups.axes else str(groups)


def _runs(program: Program, block: Block, runs: int) -> Iterator[tuple[Op, int]]:
    """Every op with how often it runs, calls followed."""
    for op in block.ops:
        yield op, runs
        if op.name == "stablehlo.while":
            trips = op.count if isinstance(op.count, int) else 1
            yield from _runs(program, op.regions[1], runs * trips)
        elif op.name in ("stablehlo.case", "stablehlo.if"):
            for region in op.regions:
                yield from _runs(program, region, runs)
        elif op.callee in program.functions and not op.regions:
            yield from _runs(program, program.functions[op.callee].body, runs)
