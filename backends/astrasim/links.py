"""Times of single messages in ASTRA-sim's two analytical network backends (rules 1 and 2 of its behaviour)."""

from math import prod
from typing import Protocol

from stablecast.backends.astrasim.config import NetworkConfig
from stablecast.ir.errors import InputError


class Paths(Protocol):
    """Links that messages do not share."""

    def between(self, source: int, target: int, nbytes: int) -> int: ...


class Routes(Paths, Protocol):
    """FIFO links that messages share: the links passed, ns a message keeps one, ns until it has delivered."""

    def route(self, source: int, target: int) -> tuple[int, ...]: ...

    def busy(self, nbytes: int) -> int: ...

    def delivery(self, nbytes: int) -> int: ...


class UnawareLinks:
    """Congestion-unaware: floor(hops x latency + bytes / rate) over the first dimension in which two ranks differ."""

    def __init__(self, network: NetworkConfig) -> None:
        self.network = network
        self._rates = network.bytes_per_ns
        self._strides = tuple(prod(network.npus_count[:dim]) for dim in range(len(network.npus_count)))
        self._hops: dict[tuple[int, int], tuple[int, int]] = {}
        self._times: dict[tuple[int, int, int], int] = {}

    def hops(self, source: int, target: int) -> tuple[int, int]:
        """(dimension, hops) of a message."""
        key = (source, target)
        found = self._hops.get(key)
        if found is None:
            found = self._hops[key] = self._find(source, target)
        return found

    def _find(self, source: int, target: int) -> tuple[int, int]:
        network = self.network
        for dim, (size, stride) in enumerate(zip(network.npus_count, self._strides, strict=True)):
            left, right = source // stride % size, target // stride % size
            if left != right:
                return dim, ring_hops(network.topology[dim], size, left, right)
        raise InputError(f"rank {source} sends to itself")

    def time(self, dim: int, hops: int, nbytes: int) -> int:
        """ns of a message of `nbytes` over `hops` hops of dimension `dim`."""
        key = (dim, hops, nbytes)
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = int(hops * self.network.latency[dim] + nbytes / self._rates[dim])
        return found

    def between(self, source: int, target: int, nbytes: int) -> int:
        """ns of a message from one rank to another."""
        dim, hops = self.hops(source, target)
        return self.time(dim, hops, nbytes)


def ring_hops(topology: str, size: int, left: int, right: int) -> int:
    """Hops between two places of a dimension."""
    if topology == "FullyConnected":
        return 1
    if topology == "Switch":
        return 2
    ahead = abs(right - left)
    return min(ahead, size - ahead)


class AwareLinks:
    """Congestion-aware, one dimension: store and forward over FIFO links.

    A link is busy floor(bytes / rate) and delivers after floor(latency + bytes / rate). `free` holds when each
    link is free again.
    """

    def __init__(self, network: NetworkConfig) -> None:
        if len(network.npus_count) != 1:
            raise InputError("the congestion_aware backend takes networks of one dimension", "use congestion_unaware")
        self.topology, self.size = network.topology[0], network.npus_count[0]
        if self.topology == "Ring" and self.size <= 2:
            raise InputError("the congestion_aware backend takes no Ring of 2", "use congestion_unaware")
        self._rate, self._latency = network.bytes_per_ns[0], network.latency[0]
        self._routes: dict[tuple[int, int], tuple[int, ...]] = {}

    def busy(self, nbytes: int) -> int:
        """ns that a message keeps a link."""
        return int(nbytes / self._rate)

    def delivery(self, nbytes: int) -> int:
        """ns after which a link has delivered a message."""
        return int(self._latency + nbytes / self._rate)

    def between(self, source: int, target: int, nbytes: int) -> int:
        """ns of a message over links that nothing else uses."""
        return len(self.route(source, target)) * self.delivery(nbytes)

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """Numbers of the links passed: of a Ring 2 r clockwise and 2 r + 1 anticlockwise out of rank r."""
        key = (source, target)
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = self._find(source, target)
        return found

    def _find(self, source: int, target: int) -> tuple[int, ...]:
        n = self.size
        if source == target:
            raise InputError(f"rank {source} sends to itself")
        if self.topology == "FullyConnected":
            return (source * n + target,)
        if self.topology == "Switch":
            return (source, n + target)
        ahead = (target - source) % n
        if ahead <= n - ahead:
            return tuple(2 * ((source + step) % n) for step in range(ahead))
        return tuple(2 * ((source - step) % n) + 1 for step in range(n - ahead))
