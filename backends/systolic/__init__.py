"""Systolic arrays: cycles, stalls and traffic, exact to SCALE-Sim v3 on request and corrected by default.

Start at `run` (a .cfg and a topology to report files), `evaluate` (one layer), `evaluate_table` (a CSV of layers) or
`compute_cycles` and `estimate` (numpy arrays of matrix products).
"""

from stablecast.backends.systolic.config import SparsityConfig, SramBanks, SystolicConfig, read_config
from stablecast.backends.systolic.corrected import CORRECTIONS, Estimate, Memory, estimate
from stablecast.backends.systolic.cycles import compute_cycles, partitioned_cycles
from stablecast.backends.systolic.energy import Energy, energy
from stablecast.backends.systolic.geometry import DATAFLOWS, Dataflow
from stablecast.backends.systolic.layers import Layer, LayerKind
from stablecast.backends.systolic.layout import Layout, read_layout
from stablecast.backends.systolic.records import LayerReport
from stablecast.backends.systolic.runner import COMPAT, Compat, RunResult, evaluate, run
from stablecast.backends.systolic.table import evaluate_table
from stablecast.backends.systolic.topology import Topology, read_topology

__all__ = [
    "COMPAT",
    "CORRECTIONS",
    "DATAFLOWS",
    "Compat",
    "Dataflow",
    "Energy",
    "Estimate",
    "Layer",
    "LayerKind",
    "LayerReport",
    "Layout",
    "Memory",
    "RunResult",
    "SparsityConfig",
    "SramBanks",
    "SystolicConfig",
    "Topology",
    "compute_cycles",
    "energy",
    "estimate",
    "evaluate",
    "evaluate_table",
    "partitioned_cycles",
    "read_config",
    "read_layout",
    "read_topology",
    "run",
]
