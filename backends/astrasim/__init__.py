"""ASTRA-sim's analytical backend, cycle for cycle: its file formats, its collectives, its traces.

Everything here answers what ASTRA-sim answers (1 cycle = 1 ns); the calibrated model of collectives is
`stablecast.backends.collectives`.
"""

from stablecast.backends.astrasim.collective import CollectiveCycles, collective_cycles, collective_table
from stablecast.backends.astrasim.config import (
    Implementation,
    MemoryConfig,
    NetworkConfig,
    SystemConfig,
    read_memory,
    read_network,
    read_system,
)
from stablecast.backends.astrasim.files import memory_json, network_yaml, system_json
from stablecast.backends.astrasim.model import ReferenceModel
from stablecast.backends.astrasim.simulate import RankCycles, SimulationResult, simulate

__all__ = [
    "CollectiveCycles",
    "Implementation",
    "MemoryConfig",
    "NetworkConfig",
    "RankCycles",
    "ReferenceModel",
    "SimulationResult",
    "SystemConfig",
    "collective_cycles",
    "collective_table",
    "memory_json",
    "network_yaml",
    "read_memory",
    "read_network",
    "read_system",
    "simulate",
    "system_json",
]
