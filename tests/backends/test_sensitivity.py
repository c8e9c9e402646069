"""Halving a link's rate, doubling a message and going from 8 to 64 devices change the answer the right way, everywhere."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from stablecast.backends.astrasim import collective_cycles
from stablecast.backends.astrasim.files import network_dict, system_dict
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.device import Network, System
from stablecast.backends.predictor import PREDICTED, Settings, predict_device_program
from stablecast.backends.registry import Choice
from stablecast.backends.schedule import Contention
from stablecast.ir.device_program import Collective, DeviceProgram, Kernel
from stablecast.ir.groups import all_devices
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.ir.work import SymbolicWork

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Seconds = Callable[[str, int, System], float]


def calibrated(kind: str, nbytes: int, system: System) -> float:
    return float(CollectiveModel(system).times(kind, all_devices(system.count), np.array([float(nbytes)]))[0][0])


def reference(kind: str, nbytes: int, system: System) -> float:
    shard = nbytes // system.count if kind == "all_gather" else nbytes
    return collective_cycles(kind, shard, network_dict(system), system_dict(system)).cycles_max * 1e-9


def _step(kind: str, nbytes: int, system: System, mode: str, contention: Contention | None) -> float:
    table = KernelTable((KernelRow(elems=1 << 20, bytes_read=4e6, bytes_written=4e6),), np.ones(1))
    gather = kind == "all_gather"
    sizes = (nbytes // system.count if gather else nbytes, nbytes)
    node = Collective(kind, all_devices(system.count), *sizes, asynchronous=True, deps=(0,))
    program = DeviceProgram("step", (Kernel(0), node, Kernel(0), Kernel(0, deps=(1,))), table, SymbolicWork())
    settings = replace(PREDICTED, collectives=mode, contention=contention)
    return predict_device_program(program, system, Settings(Choice(), {}, settings), "").step_time_s


MODES: dict[str, Seconds] = {
    "calibrated": calibrated,
    "astra-sim": reference,
    "step": lambda kind, nbytes, system: _step(kind, nbytes, system, "calibrated", Contention()),
    "step without contention": lambda kind, nbytes, system: _step(kind, nbytes, system, "calibrated", None),
    "step by astra-sim": lambda kind, nbytes, system: _step(kind, nbytes, system, "astra-sim", None),
}


def halved(system: System) -> System:
    """Every link at half its rate, whatever libraries were measured on it."""
    dims = [
        replace(
            dim,
            bytes_per_s=replace(dim.bytes_per_s, value=dim.bytes_per_s.value / 2),
            pair_bytes_per_s=None
            if dim.pair_bytes_per_s is None
            else replace(dim.pair_bytes_per_s, value=dim.pair_bytes_per_s.value / 2),
        )
        for dim in system.network.dims
    ]
    return replace(system, network=Network(tuple(dims)))


COUNTS = {"h100-sxm": (8, 64), "mi300x": (8, 64), "a100-sxm-80gb": (8, 64), "tpu-v5p": (64, 512)}
"""A TPU slice of 8 has open axes, one of 64 closed ones with twice the links, which is rightly faster."""


@pytest.mark.parametrize("name", sorted(COUNTS))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", sorted(MODES))
def test_the_answer_changes_the_right_way(mode: str, kind: str, name: str) -> None:
    seconds, system = MODES[mode], Catalogue().resolve(f"{name}:{COUNTS[name][0]}")
    nbytes = 1 << 28
    plain = seconds(kind, nbytes, system)
    assert plain > 0
    assert plain < seconds(kind, nbytes, halved(system)) <= 2.5 * plain, "half the rate"
    assert plain < seconds(kind, 2 * nbytes, system) <= 2.5 * plain, "twice the message"
    assert plain < seconds(kind, nbytes, Catalogue().resolve(f"{name}:{COUNTS[name][1]}")), "8 times the devices"
