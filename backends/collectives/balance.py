"""Chunks of a collective over several dimensions, each starting on the dimension that is least loaded.

After "Themis: A Network Bandwidth-Aware Collective Scheduling Policy for Distributed Training of DL Models" (ISCA
2022): the baseline sends every chunk through the dimensions in the same order, so that the first one carries the whole
message and the others what it leaves. Here a chunk reduces first where the least is queued; a gather mirrors that.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from stablecast.backends.estimates import FloatArray

MOST_CHUNKS: Final = 64
"""Chunks that a message is cut into at most (the paper's default)."""

Flow = Callable[[int, float], float]
"""(dimension, bytes) -> seconds of flow of a chunk of so many bytes through it, latency aside."""


def balanced_loads(sizes: Sequence[int], flow: Flow, nbytes: float, chunks: int) -> FloatArray:
    """Seconds that each dimension is busy when chunks start on the one that is least loaded.

    `sizes`: members on each dimension; a chunk is smaller by that factor behind it. Equal loads go inwards out.
    """
    loads = np.zeros(len(sizes))
    for _ in range(chunks):
        left = nbytes / chunks
        for dim in sorted(range(len(sizes)), key=lambda one: (loads[one], one)):
            loads[dim] += flow(dim, left)
            left /= sizes[dim]
    return loads


def baseline_loads(sizes: Sequence[int], flow: Flow, nbytes: float, chunks: int) -> FloatArray:
    """The same where every chunk goes inwards out."""
    left = [nbytes / chunks / math.prod(sizes[:dim]) for dim in range(len(sizes))]
    return np.array([chunks * flow(dim, size) for dim, size in enumerate(left)])


def number_of_chunks(nbytes: float, grain_bytes: float) -> int:
    """Chunks of about `grain_bytes`, at most `MOST_CHUNKS`."""
    return max(1, min(MOST_CHUNKS, round(nbytes / grain_bytes)))
