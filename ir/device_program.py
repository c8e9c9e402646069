"""The program of one device: a graph of kernels, collectives and loops, which every backend prices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from stablecast.ir.allocations import Allocations
from stablecast.ir.attributes import Shift
from stablecast.ir.groups import Groups
from stablecast.ir.kernels import KernelTable
from stablecast.ir.program import Mesh
from stablecast.ir.schedule import Schedule
from stablecast.ir.types import UNKNOWN_LOCATION, Count, Location
from stablecast.ir.work import SymbolicWork

COPY_STREAM: Final = 2
"""The stream of copies that run beside kernels."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch (or `launch` launches) of the kernel in row `row` of the table.

    `ops`: numbers of the program's ops in it, in order. `deps`: indices of the nodes of the same body whose results
    it reads. `after`: nodes that a schedule puts before it without data between them. `held_bytes`: of results that are
    freed after their last reader. `ahead`: it needs parameters and counters only, so that it may run before the rest
    of its step, or trips before the rest of its trip. `origin`: which nodes it stands for, while a schedule pass is
    checked. `arguments`: of the step that it reads or overwrites, by number.
    """

    row: int
    ops: tuple[int, ...] = ()
    launch: int = 1
    scope: str = ""
    location: Location = UNKNOWN_LOCATION
    stream: int = 0
    deps: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    held_bytes: int = 0
    ahead: bool = False
    origin: tuple[int, ...] = ()
    arguments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as one device sees it.

    `kind`: StableHLO op name without dialect (`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`,
    `collective_broadcast`, `collective_permute`). `operand_bytes`, `result_bytes`: of one device. `merged`: program
    collectives that a combiner made one. `shift`: of a permutation that is one, how far along which axis. `held_bytes`,
    `ahead`, `origin`, `arguments`: as of a `Kernel`.
    """

    kind: str
    groups: Groups
    operand_bytes: int
    result_bytes: int
    reduce_op: str = ""
    dtype: str = ""
    channel: int = 0
    asynchronous: bool = False
    stream: int = 1
    scope: str = ""
    location: Location = UNKNOWN_LOCATION
    deps: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    merged: int = 1
    shift: Shift | None = None
    held_bytes: int = 0
    ahead: bool = False
    origin: tuple[int, ...] = ()
    arguments: tuple[int, ...] = ()

    @property
    def message_bytes(self) -> int:
        """The size that tables are made by: of an all-gather its result, else the operand of one device."""
        return self.result_bytes if self.kind == "all_gather" else self.operand_bytes


@dataclass(frozen=True, slots=True)
class P2P:
    """A send or receive, whose ends follow from one value; or a load from or store to a memory tier.

    `direction`: `send` or `recv`; `load` or `store` with the tier's name as `axis`. `shift`: peer coordinate minus own
    along `axis`. `tag` matches the two ends.
    """

    direction: str
    axis: str
    shift: int
    tag: int
    nbytes: int
    stream: int = 1
    scope: str = ""
    location: Location = UNKNOWN_LOCATION
    deps: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    held_bytes: int = 0
    origin: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """What a loop is in a pipeline: in each trip every stage works on one micro-batch and hands its result on.

    `axis`: mesh axis of the `stages`. `by`: 1 where results go to the next stage, -1 where gradients go back, 0 where
    both do. `cyclic`: the last stage sends to the first. `count`: micro-batches that go through, 0 where that cannot be
    told. `rounds`: times that each passes all stages. With a known count, `count * rounds + stages - 1` trips; stage s
    has no micro-batch in the first s and in the last `stages - 1 - s` of them (counted from the end that feeds).
    """

    axis: str
    stages: int
    by: int
    cyclic: bool = False
    count: int = 0
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Loop:
    """`body` runs `count` times, one trip after the other. `micro_batches`: of a loop that a pipeline runs through."""

    body: "Body"
    count: Count
    scope: str = ""
    location: Location = UNKNOWN_LOCATION
    deps: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    micro_batches: MicroBatches | None = None
    held_bytes: int = 0
    origin: tuple[int, ...] = ()
    arguments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Branch:
    """One of `bodies` runs. `probability`: of each, None where nobody said (reports then take the dearest)."""

    bodies: tuple["Body", ...]
    probability: tuple[float, ...] | None = None
    scope: str = ""
    location: Location = UNKNOWN_LOCATION
    deps: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    held_bytes: int = 0
    origin: tuple[int, ...] = ()
    arguments: tuple[int, ...] = ()


Node = Kernel | Collective | P2P | Loop | Branch
Body = tuple[Node, ...]
"""Nodes in issue order; `deps` and `after` are indices into the same tuple."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Device memory of a step.

    `argument_bytes`, `output_bytes`, `alias_bytes` (outputs that take over an argument), `temp_bytes` (largest total
    of live intermediates); `by_scope`: bytes at the peak by scope.
    """

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    by_scope: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


@dataclass(frozen=True, slots=True)
class ArgumentBuffer:
    """An argument of the step on one device. `overwritten`: a result takes over its buffer."""

    name: str
    nbytes: int
    overwritten: bool = False


@dataclass(frozen=True, slots=True)
class Unmodelled:
    """An op that no rule covers: how often it runs, the bytes it moves, and its share of the program's bytes."""

    op: str
    count: float
    nbytes: float
    share: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """One role's device.

    `body`: nodes in issue order. `table`: the distinct kernels. `work`: FLOPs and bytes of a step, after fusion.
    `model_flops`: matrix FLOPs without recomputation and padding by math mode, where a frontend knows them better than
    the scopes of the kernels tell; `exec_model`: what one launch is (`xla`, `eager`, ...). `complete` is False where
    `unmodelled` ops or unknown counts leave the total a lower bound. `stage_axis`: mesh axis along which the stages of
    a pipeline lie that all run this program, empty where there is none. `arguments`: of the step, where known.
    `recorded`: streams and events are those of a recorded run. `offloaded`: bytes of arguments by memory tier.
    `allocations`: what the step asks of PyTorch's allocator, where a capture saw that.
    """

    name: str
    body: Body
    table: KernelTable
    work: SymbolicWork
    num_devices: int = 1
    meshes: tuple[Mesh, ...] = ()
    exec_model: str = "xla"
    platform: str = ""
    model_flops: Mapping[str, float] | None = None
    buffers: Buffers | None = None
    schedule: Schedule | None = None
    unmodelled: tuple[Unmodelled, ...] = ()
    complete: bool = True
    notes: tuple[str, ...] = ()
    stage_axis: str = ""
    arguments: tuple[ArgumentBuffer, ...] = ()
    recorded: bool = False
    offloaded: Mapping[str, int] = field(default_factory=dict[str, int])
    allocations: Allocations | None = None

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline along `stage_axis`; 1 where there is none."""
        sizes = (mesh.axis_size(self.stage_axis) for mesh in self.meshes if self.stage_axis in dict(mesh.axes))
        return next(sizes, 1) if self.stage_axis else 1

    def pipeline_loops(self) -> Iterator[Loop]:
        """The loops over micro-batches of its pipeline, in order: forward, then backward, in a training step."""
        yield from _pipeline_loops(self.body)

    def collectives(self) -> Iterator[tuple[Collective, Count]]:
        """Every collective with the trips of the loops around it (unknown counts as their symbol)."""
        yield from _collectives(self.body, 1)


def _collectives(body: Body, count: Count) -> Iterator[tuple[Collective, Count]]:
    for node in body:
        if isinstance(node, Collective):
            yield node, count
        elif isinstance(node, Loop):
            inner = node.count * count if isinstance(node.count, int) and isinstance(count, int) else node.count
            yield from _collectives(node.body, inner)
        elif isinstance(node, Branch):
            for branch in node.bodies:
                yield from _collectives(branch, count)


def _pipeline_loops(body: Body) -> Iterator[Loop]:
    for node in body:
        if isinstance(node, Loop):
            if node.micro_batches is not None:
                yield node
            yield from _pipeline_loops(node.body)
        elif isinstance(node, Branch):
            for branch in node.bodies:
                yield from _pipeline_loops(branch)
