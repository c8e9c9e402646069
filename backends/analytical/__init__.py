"""The analytical backend: launch cost plus a roofline with tile, wave and efficiency terms, each constant sourced."""

from stablecast.backends.analytical.backend import AnalyticalBackend, uncovered_reasons

__all__ = ["AnalyticalBackend", "uncovered_reasons"]
