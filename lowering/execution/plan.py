"""What the passes of an execution model work on, and the registry that they are named in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stablecast.ir.errors import InputError
from stablecast.ir.schedule import LaunchTable
from stablecast.lowering.graph import Graph
from stablecast.lowering.group import Group
from stablecast.lowering.multi_output import XLA_MERGES, Merger, MergeRules
from stablecast.lowering.target import Target


@dataclass(slots=True)
class Plan:
    """The kernels of a block in the making.

    `launches`: ATen calls as dispatched, for the entry of a PyTorch capture. `ready_made`: the producer has fused
    already. `flash`: recognised attention becomes one kernel. `claimed`: node -> root of the kernel that a pass gave it
    to, which later passes leave alone. `groups`: kernels by root. `ordered`: the result, in issue order.
    """

    graph: Graph
    target: Target
    launches: LaunchTable | None = None
    ready_made: bool = False
    flash: bool = False
    claimed: dict[int, int] = field(default_factory=dict[int, int])
    groups: dict[int, Group] = field(default_factory=dict[int, Group])
    ordered: list[Group] = field(default_factory=list[Group])
    _merger: Merger | None = None

    def merger(self, rules: MergeRules = XLA_MERGES, fences: Sequence[int] = ()) -> Merger:
        """What merges the kernels of `groups`, none across `fences`; one for all passes."""
        if self._merger is None:
            self._merger = Merger(self.graph, self.groups, rules, fences)
        return self._merger


PlanPass = Callable[[Plan], None]


@dataclass(frozen=True, slots=True)
class NamedPass:
    """A pass under its name; `summary` is what documents and `--print-after` say of it."""

    name: str
    summary: str
    run: PlanPass


PASSES: dict[str, NamedPass] = {}


def plan_pass(name: str, summary: str) -> Callable[[PlanPass], PlanPass]:
    """Registers the decorated function as the pass `name`; a name that is taken is an `InputError`."""

    def register(run: PlanPass) -> PlanPass:
        if name in PASSES:
            raise InputError(f"there is a pass '{name}' already")
        PASSES[name] = NamedPass(name, summary, run)
        return run

    return register
