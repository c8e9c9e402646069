"""Alpha-beta costs of collective algorithms on one dimension of n devices.

time = base latency + steps x latency + volume x S / B, with S bytes (of an all-gather its result, else the operand of
one device) and B the rate of one device times its efficiency. Steps and volume, L = ceil(log2 n):

    algorithm            all_reduce          all_gather, reduce_scatter   all_to_all        broadcast
    ring                 2(n-1), 2(n-1)/n    n-1, (n-1)/n                 n-1, (n-1)/2      n-1, 1 (pipelined)
    direct               2p,     2(n-1)/n    p,   (n-1)/n                 p,   (n-1)/n      p,   n-1
    halving-doubling     2L,     2(n-1)/n    L,   (n-1)/n                 L,   L/2          2L,  2(n-1)/n
    double-binary-tree   2L,     2           L,   1                       -                 L,   1
    in-network           2,      1           2,   (n-1)/n                 -                 2,   1

p: 1 where a link joins each pair, n-1 where a device sends to one peer after the other. Halving-doubling of n that is
no power of two folds the rest in first: 2 more steps and 2 S of an all-reduce, else 1 and S (Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005). Double binary trees keep both links of
every device busy (Sanders, Speck and Traeff, 2009). In-network: switches add up and multicast (NVLS, SHARP). A closed
ring goes both ways and needs half the steps. An all-to-all over a physical ring of n crosses n/4 links a byte.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

from stablecast.backends.collectives.spans import Span
from stablecast.backends.estimates import FloatArray

Steps = tuple[float, float]
"""Steps and volume, in multiples of S / B."""
TREE_FROM: Final = 16
"""Groups larger than this, and any over links that nobody measured, may go by a tree; the latencies of the others were
fitted with what ran there."""

_REDUCING: Final = ("all_reduce", "all_gather", "reduce_scatter", "collective_broadcast")
_EVERY: Final = (*_REDUCING, "all_to_all")


def _ring(kind: str, n: int, span: Span) -> Steps:
    steps = math.ceil((n - 1) / 2) if span.closed else n - 1
    if kind == "all_to_all":
        return steps, n / 4 if span.is_ring else (n - 1) / 2
    volume = {"all_reduce": 2.0 * (n - 1) / n, "collective_broadcast": 1.0}.get(kind, (n - 1) / n)
    return (2 if kind == "all_reduce" else 1) * steps, volume


def _direct(kind: str, n: int, span: Span) -> Steps:
    posts = 1 if span.dim.kind == "fully_connected" else n - 1
    volume = {"all_reduce": 2.0 * (n - 1) / n, "collective_broadcast": n - 1.0}.get(kind, (n - 1) / n)
    return (2 if kind == "all_reduce" else 1) * posts, volume


def _halving(kind: str, n: int, _: Span) -> Steps:
    log = math.floor(math.log2(n)) if kind != "all_to_all" else math.ceil(math.log2(n))
    if kind == "all_to_all":
        return log, log / 2
    double = 2 if kind in ("all_reduce", "collective_broadcast") else 1
    fold = 0 if n & (n - 1) == 0 else double
    return double * log + fold, double * (n - 1) / n + fold


def _tree(kind: str, n: int, _: Span) -> Steps:
    double = 2 if kind == "all_reduce" else 1
    return double * math.ceil(math.log2(n)), double


def _in_network(kind: str, n: int, _: Span) -> Steps:
    return 2, 1.0 if kind in ("all_reduce", "collective_broadcast") else (n - 1) / n


_COSTS: Final[Mapping[str, tuple[Callable[[str, int, Span], Steps], tuple[str, ...]]]] = {
    "ring": (_ring, _EVERY),
    "direct": (_direct, _EVERY),
    "halving-doubling": (_halving, _EVERY),
    "double-binary-tree": (_tree, _REDUCING),
    "in-network": (_in_network, _REDUCING),
}
SINGLE: Final = tuple(_COSTS)
"""Algorithms within one dimension."""
OVER_DIMENSIONS: Final = ("hierarchical", "torus-multi-ring", "themis")
ALIASES: Final = {"nvls": "in-network", "sharp": "in-network", "tree": "double-binary-tree"}


def possible(kind: str, span: Span) -> tuple[str, ...]:
    """Names of the algorithms that can run `kind` on the dimension of `span`."""
    if span.is_ring:
        return ("ring",)
    return tuple(
        name for name, (_, kinds) in _COSTS.items() if kind in kinds and (name != "in-network" or span.dim.in_network)
    )


def offered(kind: str, span: Span) -> tuple[str, ...]:
    """Those that a communication library chooses from by itself."""
    if span.is_ring:
        return ("ring",)
    if kind == "all_to_all" or span.dim.kind == "fully_connected":
        return ("direct",)
    names = ["ring"]
    if kind in _REDUCING and (span.size > TREE_FROM or (span.doubtful and span.size > 2)):
        names.append("double-binary-tree")
    if span.dim.in_network and kind == "all_reduce" and span.size > 2:
        names.append("in-network")
    return tuple(names)


def latency_and_transfer(name: str, kind: str, span: Span, nbytes: FloatArray) -> tuple[float, FloatArray]:
    """Seconds before data flow, and seconds of the flow, of algorithm `name`."""
    steps, volume = _COSTS[name][0](kind, span.size, span)
    dim = span.dim
    return dim.base_latency_s.value + steps * dim.latency_s.value, volume * nbytes / _rate(name, kind, span, volume)


def _rate(name: str, kind: str, span: Span, volume: float) -> float:
    """The rate of large messages. Where switches reduce, the measured all-reduce efficiency (stated for the volume of a
    ring) is theirs, and other algorithms reach that of a reduce-scatter."""
    if kind != "all_reduce" or not span.dim.in_network or kind not in span.dim.efficiency_by_kind:
        return span.rate(kind)
    if name == "in-network":
        return span.rate(kind) * volume / (2.0 * (span.size - 1) / span.size)
    return span.rate("reduce_scatter")


def cost(name: str, kind: str, span: Span, nbytes: FloatArray) -> FloatArray:
    """Seconds of algorithm `name`, one of `possible(kind, span)`."""
    latency, transfer = latency_and_transfer(name, kind, span, nbytes)
    return latency + transfer
