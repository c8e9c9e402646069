"""The arrays of a device: matrix units of TPUs, tensor cores of GPUs as arrays of equal rate.

A TPU is what its catalogue file says: `mxus_per_core` arrays of `mxu_dims` cells in each TensorCore. On v6e and v7x
counts, dimensions and clock give half the printed peak; the rate of a cell closes the gap, so that arrays times cells
times rate times clock is always the peak. A GPU's core (SM) multiplies `peak / (2 cores clock)` pairs a cycle; it is
taken as one output-stationary array of as many cells, the nearest to a square (1024 on A100: 32 x 32; LLMCompass,
ISCA 2024, takes four of 16 x 16).
"""

from dataclasses import dataclass
from typing import Final

from stablecast.backends.device import Device

_HALF_MODES: Final = ("bf16", "fp16")
SUBLANES: Final = 8
LANES: Final = 128


@dataclass(frozen=True, slots=True)
class ArrayMachine:
    """`cores` x `per_core` arrays of `rows` x `cols` cells; rates in Hz and bytes per second.

    `cell_flops`: FLOP/s of all cells together if each did one multiply-add a cycle. `local_bytes`: VMEM or shared
    memory of one core.
    """

    kind: str
    rows: int
    cols: int
    cores: int
    per_core: int
    clock_hz: float
    hbm_bytes_per_s: float
    local_bytes: float

    @property
    def arrays(self) -> int:
        """Arrays of the whole device."""
        return self.cores * self.per_core

    @property
    def cell_flops(self) -> float:
        return 2.0 * self.arrays * self.rows * self.cols * self.clock_hz


def array_machine(device: Device) -> ArrayMachine | None:
    """The arrays of `device`; None for a CPU, and where the catalogue lacks what is needed."""
    if device.cores is None or device.clock_hz is None:
        return None
    clock = (device.clock_matrix_hz or device.clock_hz).value
    local = device.shared_bytes_per_core.value if device.shared_bytes_per_core else 0.0
    memory = device.hbm_bytes_per_s.value
    cores = round(device.cores.value)
    if device.kind == "tpu":
        dims, units = device.labels.get("mxu_dims"), device.facts.get("mxus_per_core")
        if dims is None or units is None:
            return None
        rows, cols = (int(part) for part in dims.text.split("x"))
        return ArrayMachine("tpu", rows, cols, cores, round(units.value), clock, memory, local)
    peak = next((device.matrix_flops[mode].value for mode in _HALF_MODES if mode in device.matrix_flops), None)
    if device.kind != "gpu" or peak is None:
        return None
    cells = max(round(peak / (2.0 * cores * clock)), 1)
    cols = 1 << (max(cells.bit_length() - 1, 0) // 2)
    return ArrayMachine("gpu", max(round(cells / cols), 1), cols, cores, 1, clock, memory, local)
