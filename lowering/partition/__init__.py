"""From the program of a whole mesh to the program of one device."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stablecast.lowering.partition.program import partition
    from stablecast.lowering.partition.shardy import Worker, start_worker

__all__ = ["Worker", "partition", "start_worker"]


def __getattr__(name: str) -> Any:
    if name == "partition":
        from stablecast.lowering.partition.program import partition

        return partition
    if name in ("Worker", "start_worker"):
        from stablecast.lowering.partition import shardy

        return getattr(shardy, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
