"""The vector unit of a TPU: elementwise kernels, reductions with norms and softmax, and copies.

A register holds 8 sublanes x 128 lanes of 32 bits. Each cycle the unit starts `vpu_alus_per_lane` operations on every
lane, one transcendental on every lane (the extended unit, a register a cycle) and a few register loads and stores
(`vmem.registers`); a reduction along the lanes folds a register in log2(128) steps of its own. Operands come from the
device memory: VMEM bounds only what stays below its rate. Time = launch + (lanes^p + memory^p)^(1/p); f16, which the
unit converts on the way in and out, has its own sum of terms, calibrated on TPU v4.
"""

from math import log2
from typing import Final

import numpy as np

from stablecast.backends.analytical.constants import Constants
from stablecast.backends.device import Device
from stablecast.backends.estimates import FloatArray
from stablecast.backends.systolic.machine import LANES, SUBLANES, ArrayMachine
from stablecast.backends.systolic.rows import element_bytes, is_half
from stablecast.backends.systolic.time_map import Parts, p_norm
from stablecast.ir.kernels import KernelTable

VECTOR_TERMS: Final = ("launch", "in", "out", "flops", "transcendentals")
"""Terms of f16 kernels; `f16.vector.TERM` is the coefficient."""
_TILE: Final = SUBLANES * LANES
_REGISTER_BYTES: Final = 4.0 * _TILE
_LANE_STEPS: Final = log2(LANES)


def lane_rate(machine: ArrayMachine) -> float:
    """Elements a second of one operation a lane and cycle, over all cores."""
    return _TILE * machine.clock_hz * machine.cores


def tile_padding(elements: FloatArray) -> FloatArray:
    """Elements in whole registers over `elements`: at least one register, else none to speak of for large arrays."""
    return np.ceil(np.maximum(elements, 1.0) / _TILE) * _TILE / np.maximum(elements, 1.0)


def iterations(table: KernelTable) -> FloatArray:
    """Elements that a kernel visits: `elems`, or what it reads of one operand where that is more (`elems` may count
    the results of a reduction)."""
    read = table.bytes_read / (element_bytes(table.in_dtype) * np.maximum(table.inputs, 1))
    return np.maximum(np.maximum(table.elems, read), 1.0)


def vector_terms(table: KernelTable, device: Device, machine: ArrayMachine) -> FloatArray:
    """[rows, len(VECTOR_TERMS)]: 1 for the launch, then seconds of padded bytes in and out, lanes, extended unit."""
    padding = tile_padding(iterations(table))
    memory = machine.hbm_bytes_per_s
    return np.stack(
        [
            np.ones(len(table)),
            table.bytes_read * padding / memory,
            table.bytes_written * padding / memory,
            table.vector_flops * padding / device.vector_rate("f32").value,
            table.transcendentals * padding / lane_rate(machine),
        ],
        axis=1,
    )


def vector_parts(table: KernelTable, device: Device, machine: ArrayMachine, fit: Constants) -> Parts:
    """Seconds of every row of `table` on the vector unit."""
    terms = vector_terms(table, device, machine)
    launches = np.maximum(table.launches.astype(np.float64), 1.0)
    launch = fit["launch"] * launches
    reduced = table.reduced > 1
    rows = iterations(table) / np.maximum(table.reduced, 1)
    folded = np.where(reduced, rows * _LANE_STEPS * LANES, 0.0)
    lanes = terms[:, 3] / fit["vector.issue"] + folded / lane_rate(machine)
    compute = np.maximum(lanes, terms[:, 4] * fit["vector.transcendental"])
    hbm = (terms[:, 1] + terms[:, 2]) / fit["vector.memory"]
    vmem = fit["vmem.registers"] * _REGISTER_BYTES * machine.clock_hz * machine.cores
    memory = np.maximum(hbm, (table.bytes_read + table.bytes_written) / vmem)
    plain = Parts(launch + p_norm(compute, memory, fit["overlap"]), compute, memory, launch)
    half = is_half(table)
    if not half.any():
        return plain
    scaled = terms * np.array([fit[f"f16.vector.{name}"] for name in VECTOR_TERMS])
    start = scaled[:, 0] * launches
    moved, worked = scaled[:, 1] + scaled[:, 2], scaled[:, 3] + scaled[:, 4] + folded / lane_rate(machine)
    own = Parts(start + moved + worked, worked, moved, start)
    pairs = (
        (own.time, plain.time),
        (own.compute, plain.compute),
        (own.memory, plain.memory),
        (own.launch, plain.launch),
    )
    return Parts(*(np.where(half, first, second) for first, second in pairs))
