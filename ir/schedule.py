"""Order that data dependencies do not show: streams, events, waits, and the launches of an eager run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stablecast.ir.allocations import Allocations


@dataclass(frozen=True, slots=True)
class Event:
    """`waiter` may not start before `recorded` is done (a CUDA event, or a compiler's control dependency)."""

    recorded: int
    waiter: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What PyTorch's streams and waits, or a compiler's schedule, say about order.

    Node numbers are indices into the launches or nodes that it belongs to. `stream_of`: node -> stream, 0 where
    absent. `after`: node -> nodes that must be done before. `program_order`: the order in which the host issues.
    `host_syncs`: nodes after which the host waits for the device. `stream_names`: of the streams, by number.
    `allocations`: the memory that the step asks for, where known.
    """

    stream_of: Mapping[int, int] = field(default_factory=dict[int, int])
    after: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    events: tuple[Event, ...] = ()
    program_order: tuple[int, ...] = ()
    host_syncs: tuple[int, ...] = ()
    stream_names: tuple[str, ...] = ()
    allocations: Allocations | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One ATen call as dispatched: op, shapes and dtypes of its operands, stream, module path, source line.

    `op`: with namespace and overload, `aten.mm.default`. `shapes`, `dtypes`: of its tensor operands in the order of
    the call, lists laid flat. `ops`: the StableHLO ops that it became. `view_ops`: those of them that stand for
    views, memory which eager reads or writes in place (a transposed weight, a slice of a buffer). `result_shapes`,
    `result_dtypes`: of its results. `group`: name of the process group of a collective. `is_view`: it launches no
    kernel (views, allocations, waits). `host`: it works on host memory only. `module_path`: phase (`forward`,
    `backward`, `optimizer`, `step`) and path of the module.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    stream: int = 0
    module_path: str = ""
    source: str = ""
    ops: tuple[int, ...] = ()
    result_shapes: tuple[tuple[int, ...], ...] = ()
    result_dtypes: tuple[str, ...] = ()
    group: str = ""
    is_view: bool = False
    host: bool = False
    view_ops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """Every launch in order. Functional StableHLO cannot give this back, so it travels with the capture.

    How ops link: `Launch.ops` holds places in `ir.reader.read(workload.module("main").data).main.body.ops`, the entry
    function as captured, before any pass. Each op of the entry belongs to one launch at most; launches and their ops
    ascend together, so that `ops` is a contiguous run. An op that belongs to none re-arranges results after the last
    call. A fused op is one launch and one `stablehlo.composite`, a fused or foreach optimiser one launch and one
    composite or chain a parameter. A constant belongs to the first launch that uses it. A launch
    without `ops`, or with none but `view_ops`, does what the functional program has no need of: results that nobody
    reads, copies between tensors of one type, FSDP's copies out of its buffer; unless `is_view` it runs a kernel,
    which its shapes and dtypes describe. Launch numbers are the node numbers of `Schedule`.
    """

    launches: tuple[Launch, ...] = ()

    def __len__(self) -> int:
        return len(self.launches)

    def launch_of_op(self) -> dict[int, int]:
        """Place of an op in the entry function -> number of the launch that it belongs to."""
        return {op: number for number, launch in enumerate(self.launches) for op in launch.ops}
