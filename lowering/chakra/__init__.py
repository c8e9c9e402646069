"""Chakra emission: a device program to the traces of all its ranks."""

from stablecast.lowering.chakra.emit import RolePart, emit
from stablecast.lowering.chakra.nodes import COMM_TYPES
from stablecast.lowering.chakra.options import EmitOptions, MemoryNodes, Order, Target
from stablecast.lowering.chakra.report import ClassCount, EmitReport, RoleCount

__all__ = [
    "COMM_TYPES",
    "ClassCount",
    "EmitOptions",
    "EmitReport",
    "MemoryNodes",
    "Order",
    "RoleCount",
    "RolePart",
    "Target",
    "emit",
]
