"""What a caller of emission chooses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stablecast.ir.chakra.algorithms import CollectiveAlgorithm


class MemoryNodes(StrEnum):
    """Which MEM_LOAD and MEM_STORE nodes to write.

    `step`: the arguments are loaded before the step and the results stored after it. `kernel`: what each kernel reads
    and writes. Both are transfers with remote memory for consumers.
    """

    NONE = "none"
    STEP = "step"
    KERNEL = "kernel"


class Order(StrEnum):
    """Which dependencies to write: `data` only, or also those between neighbours on one `stream`."""

    DATA = "data"
    STREAM = "stream"


class Target(StrEnum):
    """Where the files go: a folder, one tar file, or nowhere but into the counts."""

    FILES = "files"
    TAR = "tar"
    DRY_RUN = "dry-run"


@dataclass(frozen=True, slots=True)
class EmitOptions:
    """How to write a trace.

    `max_unroll`: trips of a loop that are written out, None for all. `loops`: trip counts that the program leaves
    open. `algorithms`: by collective kind, the algorithm that it is expanded into. `reduce_bytes_per_s`: rate at which
    the local steps of an algorithm run, for their durations.
    """

    overwrite: bool = False
    target: Target = Target.FILES
    max_unroll: int | None = None
    memory: MemoryNodes = MemoryNodes.NONE
    order: Order = Order.DATA
    loops: Mapping[str, int] = field(default_factory=dict[str, int])
    algorithms: Mapping[str, CollectiveAlgorithm] = field(default_factory=dict[str, CollectiveAlgorithm])
    reduce_bytes_per_s: float | None = None
