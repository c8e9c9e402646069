"""HLO text as compilers print it, and the typed program in it."""

from stablecast.ir.hlo.program import is_scheduled, read_hlo

__all__ = ["is_scheduled", "read_hlo"]
