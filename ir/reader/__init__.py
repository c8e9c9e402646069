"""From StableHLO modules to the typed program."""

from stablecast.ir.reader.module import read

__all__ = ["read"]
