"""Our systems in ASTRA-sim's file formats: network.yml, system.json, memory.json.

Both sides differ in what a dimension's rate means. Ours is all links of a device together, one way; ASTRA-sim's is
one link: of a closed ring half of it, of a fully connected dimension of n devices a (n - 1)-th, of a switch the whole.
The rate written is what large messages reach (`bytes_per_s` x `efficiency`), in GiB/s; the latency is that of a hop,
half a step of an algorithm through a switch. A fat tree is a switch whose rate is what crosses it.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import yaml

from stablecast.backends.device import NetworkDim, System
from stablecast.ir.errors import InputError

ENDPOINT_DELAY_NS: Final = 10
SPLITS: Final = 4
HOST_LATENCY_NS: Final = 1000
"""Assumed latency of a load from host memory over PCIe (general knowledge, about a microsecond)."""

_TOPOLOGY: Final[Mapping[str, str]] = {
    "switch": "Switch",
    "pcie_tree": "Switch",
    "fat_tree": "Switch",
    "fully_connected": "FullyConnected",
    "ring": "Ring",
    "torus": "Ring",
}
_PEAK_ORDER: Final = ("bf16", "fp16", "tf32", "fp32")


def _dims(system: System) -> tuple[NetworkDim, ...]:
    return tuple(dim for dim in system.network.dims if dim.size > 1)


def _link_bytes_per_s(dim: NetworkDim) -> float:
    rate = dim.bytes_per_s.value * dim.efficiency.value
    if dim.kind in ("ring", "torus") and dim.wrapped and dim.size > 2:
        return rate / 2.0
    if dim.kind == "fully_connected":
        return rate / (dim.size - 1)
    return rate


def _hop_ns(dim: NetworkDim) -> float:
    hops = 2.0 if _TOPOLOGY[dim.kind] == "Switch" else 1.0
    return dim.latency_s.value * 1e9 / hops


def network_dict(system: System) -> dict[str, Any]:
    """The content of network.yml, innermost dimension first; dimensions of one device are left out."""
    dims = _dims(system)
    if not dims:
        raise InputError(f"{system.name}: one device has no network for ASTRA-sim", "ask for more devices")
    return {
        "topology": [_TOPOLOGY[dim.kind] for dim in dims],
        "npus_count": [dim.size for dim in dims],
        "bandwidth": [round(_link_bytes_per_s(dim) / float(1 << 30), 6) for dim in dims],
        "latency": [round(_hop_ns(dim), 3) for dim in dims],
    }


def network_yaml(system: System) -> str:
    """network.yml of `system`. Raises `InputError` for a system of one device.

    An axis without its wrap-around link has no counterpart in ASTRA-sim and is written as a closed Ring.
    """
    lines = (yaml.safe_dump({key: value}, default_flow_style=None) for key, value in network_dict(system).items())
    return "".join(lines)


def _peak_tflops(system: System) -> float:
    device = system.device
    for math_mode in _PEAK_ORDER:
        peak = device.matrix_flops.get(math_mode)
        if peak is not None:
            return peak.value / 1e12
    return device.vector_rate("f32").value / 1e12


def system_dict(system: System, *, roofline: bool = False) -> dict[str, Any]:
    """The content of system.json; direct algorithms in fully connected dimensions, rings in the others."""
    algorithms = ["direct" if dim.kind == "fully_connected" else "ring" for dim in _dims(system)]
    return {
        "scheduling-policy": "LIFO",
        "endpoint-delay": ENDPOINT_DELAY_NS,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": SPLITS,
        "all-reduce-implementation": algorithms,
        "all-gather-implementation": algorithms,
        "reduce-scatter-implementation": algorithms,
        "all-to-all-implementation": algorithms,
        "collective-optimization": "localBWAware",
        "local-mem-bw": round(system.device.hbm_bytes_per_s.value / 1e9, 6),
        "boost-mode": 0,
        "roofline-enabled": int(roofline),
        "peak-perf": round(_peak_tflops(system), 6),
    }


def system_json(system: System, *, roofline: bool = False) -> str:
    """system.json of `system`.

    `roofline`: let ASTRA-sim time compute nodes from `num_ops` and `tensor_size`; else it takes the trace's durations.
    One chunk is active a dimension: with more, the congestion-unaware backend multiplies the bandwidth.
    """
    return json.dumps(system_dict(system, roofline=roofline), indent=1) + "\n"


def memory_dict(system: System, *, remote: bool = False) -> dict[str, Any]:
    """The content of memory.json."""
    if not remote:
        return {"memory-type": "NO_MEMORY_EXPANSION"}
    host = system.device.host_bytes_per_s
    if host is None:
        raise InputError(f"device {system.device.name} states no rate to its host", "leave remote memory out")
    return {
        "memory-type": "PER_NPU_MEMORY_EXPANSION",
        "remote-mem-latency": HOST_LATENCY_NS,
        "remote-mem-bw": round(host.value / 1e9, 6),
    }


def memory_json(system: System, *, remote: bool = False) -> str:
    """memory.json: no remote memory, or with `remote` the host's memory at each device's own rate to it."""
    return json.dumps(memory_dict(system, remote=remote)) + "\n"
