"""Order that data dependencies do not show: streams, events, waits, and the launches of an eager run."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """

    stream_of: Mapping[int, int] = field(default_factory=dict[int, int])
    after: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    events: tuple[Event, ...] = ()
    program_order: tuple[int, ...] = ()
    host_syncs: tuple[int, ...] = ()
    stream_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """One ATen call as dispatched: op, shapes and dtypes of its operands, stream, module path, source line.

    `ops`: the StableHLO ops that it became, as places among the ops of the entry function. `result_shapes`,
    `result_dtypes`: of its results. `group`: name of the process group of a collective. `is_view`: it launches no
    kernel. `host`: it works on host memory only.
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


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """Every launch in order. Functional StableHLO cannot give this back, so it travels with the capture."""

    launches: tuple[Launch, ...] = ()

    def __len__(self) -> int:
        return len(self.launches)
