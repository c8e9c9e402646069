"""How a collective is cut: chunks, and the phases of a chunk over the dimensions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from stablecast.backends.astrasim.config import Implementation, NetworkConfig, SystemConfig
from stablecast.ir.errors import InputError

LOCAL_DELAY_NS: Final = 10
"""Endpoint delay inside a communicator group, whatever the system file says."""
DEFAULT_DIMS: Final = 4
"""Dimensions that a collective without `involved_dim` covers."""


class StuckError(InputError):
    """Chunks of a collective wait for one another in different dimensions; `rank` is one that never ends."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"rank {rank} never ends: chunks wait for one another in different dimensions",
            "raise active-chunks-per-dimension to preferred-dataset-splits",
        )
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Phase:
    """One algorithm over one dimension: `nbytes` a rank holds when it begins."""

    kind: str
    dim: int
    size: int
    nbytes: int
    impl: Implementation


@dataclass(frozen=True, slots=True)
class Plan:
    """`streams` equal chunks, each of which passes through `phases`.

    `local`: inside a communicator group (fixed endpoint delay). `dims`: sizes of the logical dimensions.
    """

    streams: int
    phases: tuple[Phase, ...]
    dims: tuple[int, ...]
    local: bool = False


def chunks(kind: str, nbytes: int, ranks: int, splits: int) -> tuple[int, int]:
    """(bytes of a chunk, number of chunks). Raises `InputError` where ASTRA-sim divides by zero or never ends."""
    if splits < 1:
        raise InputError("the system has no preferred-dataset-splits", "add it: ASTRA-sim divides by it")
    chunk = nbytes // splits
    if kind != "all_gather" and chunk < ranks:
        return ranks, splits
    if chunk == 0:
        raise InputError(f"an all_gather of {nbytes} bytes in {splits} splits never ends in ASTRA-sim")
    return chunk, math.ceil(nbytes / chunk)


@lru_cache(maxsize=4096)
def world_plan(
    kind: str,
    nbytes: int,
    network: NetworkConfig,
    splits: int,
    impls: tuple[Implementation, ...],
    baseline: bool,
    involved: tuple[bool, ...] | None,
) -> Plan:
    """The plan over all ranks. `involved`: flags by dimension, None where the node has none."""
    dims = _logical_dims(network, impls)
    if involved is None:
        involved = (True,) * DEFAULT_DIMS
    used = [dim for dim, size in enumerate(dims) if size > 1 and dim < len(involved) and involved[dim]]
    if not used:
        raise InputError(f"{kind}: no network dimension is involved", "ASTRA-sim would wait for ever")
    if len(dims) > len(involved) == DEFAULT_DIMS:
        raise InputError(f"{kind} on {len(dims)} dimensions without involved_dim covers the first {DEFAULT_DIMS} only")
    chunk, streams = chunks(kind, nbytes, network.ranks, splits)
    return Plan(streams, _phases(kind, chunk, dims, used, impls, baseline), dims)


def group_plan(kind: str, nbytes: int, ranks: int, members: int, splits: int, impl: Implementation) -> Plan:
    """The plan of a communicator group of `members` out of `ranks`: one ring in list order."""
    if impl.name == "doubleBinaryTree":
        raise InputError("doubleBinaryTree in a communicator group", "ASTRA-sim crashes on it: use ring or direct")
    chunk, streams = chunks(kind, nbytes, ranks, splits)
    return Plan(streams, (_phase(kind, 0, members, chunk, impl),), (members,), local=True)


def _logical_dims(network: NetworkConfig, impls: Sequence[Implementation]) -> tuple[int, ...]:
    if impls and impls[0].flat:
        return (network.ranks,)
    if len(impls) > len(network.npus_count):
        raise InputError(f"{len(impls)} algorithms for {len(network.npus_count)} network dimensions")
    return network.npus_count[: len(impls)]


def _phases(
    kind: str, chunk: int, dims: Sequence[int], used: Sequence[int], impls: Sequence[Implementation], baseline: bool
) -> tuple[Phase, ...]:
    steps = [(kind, dim) for dim in (reversed(used) if kind == "all_gather" else used)]
    if kind == "all_reduce" and not baseline:
        inner = used[:-1]
        steps = [("reduce_scatter", dim) for dim in inner] + [("all_reduce", used[-1])]
        steps += [("all_gather", dim) for dim in reversed(inner)]
    found: list[Phase] = []
    for step, dim in steps:
        phase = _phase(step, dim, dims[dim], chunk, impls[dim])
        found.append(phase)
        chunk = size_after(phase)
    return tuple(found)


def _phase(kind: str, dim: int, size: int, nbytes: int, impl: Implementation) -> Phase:
    power = size & (size - 1) == 0
    if impl.name in ("halvingDoubling", "doubleBinaryTree") and not power:
        raise InputError(f"{impl.name} over {size} ranks", "it takes powers of two: use ring or direct")
    if impl.name == "halvingDoubling" and kind == "all_to_all":
        raise InputError("halvingDoubling has no all_to_all", "use ring or direct")
    return Phase(kind, dim, size, nbytes, impl)


def size_after(phase: Phase) -> int:
    """Bytes of the chunk when a phase is done."""
    if phase.impl.name in ("doubleBinaryTree", "custom"):
        return phase.nbytes
    if phase.kind == "reduce_scatter":
        return phase.nbytes // phase.size
    return phase.nbytes * phase.size if phase.kind == "all_gather" else phase.nbytes


def reduction_ns(nbytes: int, system: SystemConfig) -> int:
    """Folding a received message in: two reads and one write of local memory, each whole ns."""
    return 3 * int(nbytes / system.local_mem_gbps) if system.local_mem_gbps else 0
