"""How TPU compilers write collectives that run beside kernels, and buffers that are there already.

A collective that runs beside kernels is a fusion that starts it, fusions of other work that drive it on (they hold the
same collective once more, and hand its operand, result and state on), and one that ends it. Newer chips call it on a
core of its own. A reduce-scatter is a fusion of an all-reduce and slices.
"""

from dataclasses import dataclass
from enum import Enum

from stablecast.ir.hlo.ops import COLLECTIVES, op_name
from stablecast.ir.hlo.syntax import Computation, Instruction

NAMED_AGAIN = ("ConcatBitcast",)
"""Custom calls that give another name to what lies there."""
NOTHING = ("AllocateBuffer", "PrepareAsyncCallStart", "PrepareAsyncCallDone")
"""Custom calls whose results hold nothing yet."""
_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_CHAIN = "chain_id="


class Part(Enum):
    """What a fusion is to the collective inside it."""

    START = "start"
    DRIVES = "drives"
    DONE = "done"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class FusedCollective:
    """A collective inside a fusion. `operands`: places of its operands among the fusion's parameters, all of these
    where it works on what the fusion made."""

    part: Part
    instruction: Instruction
    operands: tuple[int, ...]


def fused_collective(computation: Computation) -> FusedCollective | None:
    """The collective in the computation of a fusion, None where there is none."""
    held = next((one for one in computation.instructions if op_name(one.opcode) in COLLECTIVES), None)
    if held is None:
        return None
    places = {one.name: int(one.operands[0]) for one in computation.instructions if one.opcode == "parameter"}
    if all(name in places for name in held.operands):
        operands = tuple(places[name] for name in held.operands)
    else:
        operands = tuple(sorted(places.values()))
    root = computation.root.rest
    if _START in root:
        return FusedCollective(Part.START, held, operands)
    if _DONE in root:
        return FusedCollective(Part.DONE, held, operands)
    return FusedCollective(Part.DRIVES if _CHAIN in held.rest else Part.WHOLE, held, operands)
