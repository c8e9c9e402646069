"""From StableHLO modules to the typed program."""

from stablecast.ir.reader.dynamic import bind_dimensions, dynamic_dimensions
from stablecast.ir.reader.module import read

__all__ = ["bind_dimensions", "dynamic_dimensions", "read"]
