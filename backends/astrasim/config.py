"""ASTRA-sim's configuration files as values: network.yml, system.json, memory.json.

Units as in the files: bandwidth GiB/s (2^30, though the files say GB/s), latency and delays ns, local memory GB/s
(10^9), peak TFLOPS (10^12), remote memory B/ns.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

import yaml

from stablecast.ir.errors import InputError, near_names

Topology = Literal["Ring", "FullyConnected", "Switch"]
Backend = Literal["congestion_unaware", "congestion_aware"]
BACKENDS: Final = ("congestion_unaware", "congestion_aware")
TOPOLOGIES: Final = ("Ring", "FullyConnected", "Switch")
ALGORITHMS: Final = ("ring", "direct", "halvingDoubling", "doubleBinaryTree")
COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MEMORY_TYPES: Final = (
    "NO_MEMORY_EXPANSION",
    "PER_NPU_MEMORY_EXPANSION",
    "PER_NODE_MEMORY_EXPANSION",
    "MEMORY_POOL",
)
_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "intra-dimension-scheduling": ("FIFO",),
    "inter-dimension-scheduling": ("baseline",),
    "model-shared-bus": (0,),
    "boost-mode": (0,),
}


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """A network, dimension 0 first (the fastest varying digit of a rank).

    `bandwidth`: GiB/s of one link. `latency`: ns a hop; a Switch is two hops.
    """

    topology: tuple[str, ...]
    npus_count: tuple[int, ...]
    bandwidth: tuple[float, ...]
    latency: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.npus_count)

    @property
    def bytes_per_ns(self) -> tuple[float, ...]:
        """Rate of one link of each dimension."""
        return tuple(value * float(1 << 30) / 1e9 for value in self.bandwidth)


@dataclass(frozen=True, slots=True)
class Implementation:
    """A collective algorithm of one dimension.

    `name`: one of `ALGORITHMS`. `window`: messages in flight of `direct`, 0 for all. `flat`: one logical dimension
    over all ranks (spelled `oneRing`, `oneDirect`, `oneHalvingDoubling`). `traces`: prefix of a custom algorithm.
    """

    name: str
    window: int = 0
    flat: bool = False
    traces: str = ""


@dataclass(frozen=True, slots=True)
class SystemConfig:
    """system.json. `implementations` by collective (`COLLECTIVES`), one entry a dimension.

    `splits` is 0 where `preferred-dataset-splits` is absent, `peak_tflops` and `local_mem_gbps` where theirs are.
    """

    implementations: Mapping[str, tuple[Implementation, ...]] = field(
        default_factory=dict[str, tuple[Implementation, ...]]
    )
    splits: int = 0
    active_chunks: int = 1
    endpoint_delay_ns: int = 10
    local_mem_gbps: float = 0.0
    local_bw_aware: bool = False
    scheduling_policy: str = "LIFO"
    roofline: bool = False
    peak_tflops: float = 0.0
    replay_only: bool = False
    source: str = "system"

    def implementation(self, kind: str) -> tuple[Implementation, ...]:
        """The algorithms of collective `kind`. Raises `InputError` where the file names none."""
        found = self.implementations.get(kind)
        if not found:
            key = kind.replace("_", "-") + "-implementation"
            raise InputError(f"{self.source}: no {key}", f'add "{key}": ["ring"], one entry a network dimension')
        return found


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Remote memory: `kind` one of `MEMORY_TYPES`, latency in ns, rate in B/ns (0: not given)."""

    kind: str = "NO_MEMORY_EXPANSION"
    latency_ns: float = 0.0
    bytes_per_ns: float = 0.0
    npus_per_node: int = 1


def _load(path: Path, what: str) -> tuple[Mapping[str, Any], str]:
    try:
        text = path.read_text(encoding="utf-8")
        value: object = json.loads(text) if what != "network" else yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected an object with the keys of a {what} file")
    return cast(Mapping[str, Any], value), str(path)


def _source(source: "str | Path | Mapping[str, Any]", what: str) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, f"the {what} description"
    return _load(Path(source), what)


def _number(value: object, key: str, source: str, low: float = 0.0) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= low
    if not good:
        raise InputError(f"{source}: {key} is {value!r}, expected a number of at least {low:g}")
    return float(cast(float, value))


def _whole(value: object, key: str, source: str, low: int = 0) -> int:
    number = _number(value, key, source, low)
    if number != int(number):
        raise InputError(f"{source}: {key} is {value!r}, expected a whole number")
    return int(number)


def _items(content: Mapping[str, Any], key: str, source: str) -> Sequence[object]:
    value: object = content.get(key)
    if value is None:
        raise InputError(f"{source}: no {key}", f"add {key}: [ ... ], one entry a dimension")
    return cast(Sequence[object], value) if isinstance(value, list | tuple) else [value]


def read_network(source: str | Path | Mapping[str, Any]) -> NetworkConfig:
    """network.yml, or its content. Raises `InputError` naming the file and the key."""
    content, name = _source(source, "network")
    topology = tuple(map(str, _items(content, "topology", name)))
    for entry in topology:
        if entry not in TOPOLOGIES:
            raise InputError(f"{name}: unknown topology '{entry}'", near_names(entry, TOPOLOGIES))
    sizes = tuple(_whole(value, "npus_count", name, 1) for value in _items(content, "npus_count", name))
    bandwidth = tuple(_number(value, "bandwidth", name) for value in _items(content, "bandwidth", name))
    latency = tuple(_number(value, "latency", name) for value in _items(content, "latency", name))
    if not len(topology) == len(sizes) == len(bandwidth) == len(latency):
        raise InputError(f"{name}: topology, npus_count, bandwidth and latency differ in length")
    if not all(bandwidth):
        raise InputError(f"{name}: a bandwidth of 0")
    return NetworkConfig(topology, sizes, bandwidth, latency)


_SPELLINGS: Final[Mapping[str, Implementation]] = {
    "ring": Implementation("ring"),
    "oneRing": Implementation("ring", flat=True),
    "halvingDoubling": Implementation("halvingDoubling"),
    "oneHalvingDoubling": Implementation("halvingDoubling", flat=True),
    "doubleBinaryTree": Implementation("doubleBinaryTree"),
}


def implementation(text: str, source: str = "system") -> Implementation:
    """One entry of an implementation list: `ring`, `direct`, `direct2` (a window of 2), `oneRing`, ..."""
    found = _SPELLINGS.get(text)
    if found is not None:
        return found
    for prefix, flat in (("direct", False), ("oneDirect", True)):
        window = text[len(prefix) :]
        if text.startswith(prefix) and (not window or (window.isdigit() and int(window) > 0)):
            return Implementation("direct", int(window or 0), flat)
    raise InputError(f"{source}: unknown collective algorithm '{text}'", near_names(text, (*_SPELLINGS, "direct")))


def _implementations(content: Mapping[str, Any], source: str) -> dict[str, tuple[Implementation, ...]]:
    found: dict[str, tuple[Implementation, ...]] = {}
    for kind in COLLECTIVES:
        key = kind.replace("_", "-") + "-implementation"
        if key in content:
            found[kind] = tuple(implementation(str(entry), source) for entry in _items(content, key, source))
        elif f"{key}-custom" in content:
            entries = _items(content, f"{key}-custom", source)
            found[kind] = tuple(Implementation("custom", traces=str(entry)) for entry in entries)
    return found


def read_system(source: str | Path | Mapping[str, Any]) -> SystemConfig:
    """system.json, or its content. Raises `InputError` naming the file and the key.

    Settings that this model does not have (logical buses, other orders within or between dimensions) are refused;
    keys that ASTRA-sim does not know either are passed over.
    """
    content, name = _source(source, "system")
    for key, allowed in _FIXED.items():
        if content.get(key, allowed[0]) not in allowed:
            raise InputError(f"{name}: {key} {content[key]!r} is not modelled", f"use {allowed[0]!r}")

    def number(key: str, default: float, low: float = 0.0) -> float:
        return _number(content[key], key, name, low) if key in content else default

    policy = str(content.get("scheduling-policy", "LIFO"))
    if policy not in ("LIFO", "FIFO", "EXPLICIT"):
        raise InputError(f"{name}: unknown scheduling-policy '{policy}'", "LIFO, FIFO or EXPLICIT")
    optimization = str(content.get("collective-optimization", "baseline"))
    if optimization not in ("baseline", "localBWAware"):
        raise InputError(f"{name}: unknown collective-optimization '{optimization}'", "baseline or localBWAware")
    return SystemConfig(
        implementations=_implementations(content, name),
        splits=int(number("preferred-dataset-splits", 0)),
        active_chunks=max(int(number("active-chunks-per-dimension", 1)), 1),
        endpoint_delay_ns=int(number("endpoint-delay", 10)),
        local_mem_gbps=number("local-mem-bw", 0.0),
        local_bw_aware=optimization == "localBWAware",
        scheduling_policy=policy,
        roofline=bool(number("roofline-enabled", 0)),
        peak_tflops=number("peak-perf", 0.0),
        replay_only=bool(number("replay-only", 0)),
        source=name,
    )


def read_memory(source: str | Path | Mapping[str, Any]) -> MemoryConfig:
    """memory.json (remote-memory configuration), or its content. Raises `InputError` naming the file and the key."""
    content, name = _source(source, "memory")
    kind = str(content.get("memory-type", ""))
    if kind not in MEMORY_TYPES:
        raise InputError(f"{name}: unknown memory-type '{kind}'", "known: " + ", ".join(MEMORY_TYPES))
    if kind == "NO_MEMORY_EXPANSION":
        return MemoryConfig()
    for key in ("remote-mem-latency", "remote-mem-bw"):
        if key not in content:
            raise InputError(f"{name}: {kind} needs {key}")
    per_node = 1
    if kind == "PER_NODE_MEMORY_EXPANSION":
        if "num-npus-per-node" not in content:
            raise InputError(f"{name}: {kind} needs num-npus-per-node")
        per_node = _whole(content["num-npus-per-node"], "num-npus-per-node", name, 1)
    rate = _number(content["remote-mem-bw"], "remote-mem-bw", name)
    if rate == 0.0:
        raise InputError(f"{name}: a remote-mem-bw of 0")
    return MemoryConfig(kind, _number(content["remote-mem-latency"], "remote-mem-latency", name), rate, per_node)
