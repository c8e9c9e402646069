"""Traces through the reference machine: every rank, every message."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stablecast.backends.astrasim.algorithms import begin
from stablecast.backends.astrasim.config import Implementation, MemoryConfig, NetworkConfig, SystemConfig
from stablecast.backends.astrasim.custom import begin_custom
from stablecast.backends.astrasim.engine import Machine
from stablecast.backends.astrasim.issue import Issuer
from stablecast.backends.astrasim.memory import RemoteMemory
from stablecast.backends.astrasim.plan import Plan, group_plan, world_plan
from stablecast.backends.astrasim.programs import Act, RankProgram, Step
from stablecast.ir.errors import InputError

Groups = dict[int, tuple[int, ...]]
_RING = Implementation("ring")


class Planner:
    """Plans of collectives, and the members of groups."""

    def __init__(self, network: NetworkConfig, system: SystemConfig, groups: Groups) -> None:
        self.network, self.system, self.groups = network, system, groups
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def members(self, rank: int, step: Step) -> tuple[int, ...] | None:
        """The group of a collective in list order, None for all ranks. Raises `InputError` where it cannot run."""
        if step.group == 0:
            return None
        members = self.groups.get(step.group)
        where = f"rank {rank} {step}"
        if members is None:
            raise InputError(f"{where}: there is no group {step.group}", "name it in the group file (--group-file)")
        if rank not in members:
            raise InputError(f"{where}: the rank is not in group {step.group}")
        if len(members) == 1:
            raise InputError(f"{where}: group {step.group} has one rank", "ASTRA-sim never ends such a collective")
        if max(members) >= self.network.ranks:
            raise InputError(f"{where}: group {step.group} names rank {max(members)} of {self.network.ranks}")
        return None if len(members) == self.network.ranks else members

    def plan(self, rank: int, step: Step, members: tuple[int, ...] | None) -> Plan:
        """How a collective is cut. Raises `InputError` naming rank and node where ASTRA-sim stops or hangs."""
        size = len(members) if members else 0
        involved = step.involved if step.group == 0 else (True,) * 10
        key = (step.kind, step.nbytes, size, involved)
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        try:
            plan = self._plans[key] = self.make(step.kind, step.nbytes, size, involved)
        except InputError as error:
            raise InputError(f"rank {rank} {step}: {error.message}", error.hint) from None
        return plan

    def make(self, kind: str, nbytes: int, members: int, involved: tuple[bool, ...] | None) -> Plan:
        """The plan of a group of `members`, of all ranks where 0."""
        network, system = self.network, self.system
        impls = system.implementation(kind)
        if members:
            one = len(network.npus_count) == 1
            impl = impls[0] if one else _RING
            return group_plan(kind, nbytes, network.ranks, members, system.splits, impl)
        return world_plan(kind, nbytes, network, system.splits, impls, not system.local_bw_aware, involved)


class Replay:
    """All ranks' nodes through a `Machine`."""

    def __init__(
        self,
        network: NetworkConfig,
        system: SystemConfig,
        memory: MemoryConfig,
        groups: Groups,
        programs: Sequence[RankProgram],
        aware: bool,
        folder: Path | None = None,
    ) -> None:
        self.planner = Planner(network, system, groups)
        custom = begin_custom(folder) if folder else begin
        self.machine = Machine(network, system, aware, custom)
        self.memory = RemoteMemory(memory, self._after, self._end)
        self.issuers = [Issuer(rank, program, self._start) for rank, program in enumerate(programs)]
        self._counters: list[dict[int, int]] = [{} for _ in programs]

    def run(self, keep: bool = False) -> list[Issuer]:
        """Serve all events; ranks whose `finished_at` is -1 never ended. With `keep` each has its events."""
        for issuer in self.issuers:
            issuer.keep = keep
            issuer.issue(0)
        self.machine.queue.run()
        return self.issuers

    def _after(self, rank: int, delay: int, action: Callable[[Any], None], key: Any) -> None:
        self.machine.ranks[rank].after(delay, action, key)

    def _end(self, key: tuple[int, int]) -> None:
        issuer = self.issuers[key[0]]
        now = self.machine.queue.now
        issuer.release(key[1], now)
        issuer.issue(now)

    def _start(self, issuer: Issuer, index: int) -> None:
        step, rank = issuer.steps[index], issuer.rank
        done = (self._end, (rank, index))
        if step.act is Act.WAIT:
            self.machine.ranks[rank].after(max(step.time_ns, 0), *done)
        elif step.act is Act.MEMORY:
            self.memory.request(rank, index, step.nbytes, str(step))
        elif step.act is Act.COLLECTIVE:
            self._collective(issuer, step, done)
        else:
            self._p2p(rank, step, done)

    def _collective(self, issuer: Issuer, step: Step, done: Any) -> None:
        rank = issuer.rank
        members = self.planner.members(rank, step)
        plan = self.planner.plan(rank, step, members)
        counters = self._counters[rank]
        first = counters.get(step.group, 0)
        counters[step.group] = first + plan.streams
        issuer.issued.setdefault(step.group, []).append(step)
        self.machine.ranks[rank].collective(plan, step.group, first, members, done)

    def _p2p(self, rank: int, step: Step, done: Any) -> None:
        messages, ranks = self.machine.messages, self.machine.network.ranks
        if step.peer == rank:
            raise InputError(f"rank {rank} {step}: it sends to or receives from itself")
        if not 0 <= step.peer < ranks:
            raise InputError(f"rank {rank} {step}: its peer {step.peer} is none of {ranks} ranks")
        tag = ("p2p", step.tag)
        if step.act is Act.SEND:
            messages.send(tag, rank, step.peer, step.nbytes, done)
        else:
            messages.receive(tag, step.peer, rank, step.nbytes, done)
