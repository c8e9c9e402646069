"""Collectives of a device program as ASTRA-sim would time them on one of our systems."""

from dataclasses import replace

import numpy as np

from stablecast.backends.astrasim.config import NetworkConfig, SystemConfig, read_network, read_system
from stablecast.backends.astrasim.files import network_dict, system_dict
from stablecast.backends.astrasim.isolated import Isolated
from stablecast.backends.astrasim.replay import Planner
from stablecast.backends.collectives import CollectiveEstimate
from stablecast.backends.device import System
from stablecast.ir.device_program import P2P, Collective
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups

_STEPS = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("all_to_all",),
    "collective_broadcast": ("reduce_scatter", "all_gather"),
}


class ReferenceModel:
    """Prices collectives as `CollectiveModel` does, by the congestion-unaware reference; no range.

    The network and the system file are those that `files` writes. ASTRA-sim has no broadcast: it is a scatter (timed as
    a reduce-scatter) and an all-gather. A permute is one message. Raises `InputError` for a system of one device.
    """

    def __init__(self, system: System) -> None:
        self.network: NetworkConfig = read_network(network_dict(system))
        self.config: SystemConfig = replace(read_system(system_dict(system)), source=system.name)
        self._placement = system.placement
        self._isolated = Isolated(self.network, self.config)
        self._planner = Planner(self.network, self.config, {})
        self._known: dict[tuple[str, int, Groups], float] = {}

    def estimate(self, collective: Collective) -> CollectiveEstimate:
        """Seconds of `collective` for the group of device 0, begun by all members together."""
        operand = collective.operand_bytes
        key = (collective.kind, operand, collective.groups)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._seconds(collective.kind, operand, collective.groups)
        return CollectiveEstimate(found, found, found, "astra-sim")

    def p2p(self, p2p: P2P, groups: Groups | None = None) -> CollectiveEstimate:
        """Seconds of one message: to the next member of `groups`, else along the outermost dimension."""
        placed = self._placement
        if placed is not None and p2p.axis in dict(placed.axes):
            target = int(placed.neighbours(p2p.axis, p2p.shift)[1])
        else:
            target = groups.members(0)[1] if groups else self.network.ranks // self.network.npus_count[-1]
        seconds = self._isolated.between(0, target, max(p2p.nbytes, 1)) * 1e-9
        return CollectiveEstimate(seconds, seconds, seconds, "astra-sim")

    def _seconds(self, kind: str, nbytes: int, groups: Groups) -> float:
        members = groups.members(0) if not groups.ragged else max(groups.ragged, key=len)
        if self._placement is not None:
            members = tuple(map(int, self._placement.places(np.asarray(members, dtype=np.int64))))
        if len(members) < 2:
            return 0.0
        if max(members) >= self.network.ranks:
            raise InputError(
                f"a collective over device {max(members)} does not fit {self.config.source} of {self.network.ranks}"
            )
        if kind == "collective_permute":
            return self._isolated.between(members[0], members[1], max(nbytes, 1)) * 1e-9
        steps = _STEPS.get(kind)
        if steps is None:
            raise InputError(f"unknown collective '{kind}'", "known: " + ", ".join((*_STEPS, "collective_permute")))
        total = 0
        for step in steps:
            size = nbytes // len(members) if kind == "collective_broadcast" and step == "all_gather" else nbytes
            total += self._cycles(step, max(size, self.config.splits), members)
        return total * 1e-9

    def _cycles(self, kind: str, nbytes: int, members: tuple[int, ...]) -> int:
        whole = len(members) == self.network.ranks
        group = None if whole else members
        plan = self._planner.make(kind, nbytes, 0 if whole else len(members), (True,) * len(self.network.npus_count))
        if self._isolated.uniform(plan, group):
            return self._isolated.together(plan, group)[0]
        return max(end for end, _ in self._isolated.ends(plan, group, [0] * len(members)))
