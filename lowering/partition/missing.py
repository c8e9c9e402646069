"""What Shardy leaves out."""
from collections.abc import Callable, Mapping
from stablecast.ir.program import Op
from stablecast.lowering.partition.site import Site

MODELS: Mapping[str, Callable[[Site], list[Op] | None]] = {}
