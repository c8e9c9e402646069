"""Chakra traces through the network model: what ASTRA-sim's analytical backend answers for the same files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stablecast.backends.astrasim.config import (
    BACKENDS,
    Backend,
    MemoryConfig,
    NetworkConfig,
    SystemConfig,
    read_memory,
    read_network,
    read_system,
)
from stablecast.backends.astrasim.fast import FastReplay, UnsuitedError, stuck_message
from stablecast.backends.astrasim.isolated import Isolated
from stablecast.backends.astrasim.issue import Issuer
from stablecast.backends.astrasim.links import AwareLinks
from stablecast.backends.astrasim.programs import Act, Programs, RankProgram, Step
from stablecast.backends.astrasim.replay import Groups, Planner, Replay
from stablecast.backends.astrasim.roles import RoleFinder
from stablecast.ir.chakra import find_traces, node_type_name, read_comm_groups
from stablecast.ir.chakra.surroundings import find_group_file
from stablecast.ir.errors import InputError, near_names


@dataclass(frozen=True, slots=True)
class RankCycles:
    """One rank: cycles (1 ns each) until it finished, and those of them without its compute nodes."""

    rank: int
    cycles: int
    exposed_communication: int

    def to_dict(self) -> dict[str, int]:
        """One entry of `ranks` in the JSON of `stablecast simulate`."""
        return {"rank": self.rank, "cycles": self.cycles, "exposed_communication": self.exposed_communication}


@dataclass(frozen=True, slots=True, repr=False)
class SimulationResult:
    """What ASTRA-sim prints of a run, by rank.

    `roles`: number of distinct behaviours among the ranks, where they were found. `events`: issue and end of every
    node by rank as (cycle, "issue" or "callback", node), where they were asked for.
    """

    ranks: tuple[RankCycles, ...]
    backend: str
    roles: int | None = None
    events: tuple[tuple[tuple[int, str, Step], ...], ...] = ()

    @property
    def cycles(self) -> int:
        """Cycles until the last rank has finished."""
        return max(rank.cycles for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `stablecast simulate --json`."""
        return {"ranks": [rank.to_dict() for rank in self.ranks]}

    def log_text(self) -> str:
        """The run as lines of a log: ASTRA-sim's closing lines, and before them the events where they were kept.

        Event lines are those that Chakra's timeline visualiser reads (`issue,x=rank,x=cycle,x=id,x=name`).
        """
        lines = [
            (time, rank, f"{what},sys->id={rank},tick={time},node->id={step.id},node->name={_visible_name(step)}")
            for rank, events in enumerate(self.events)
            for time, what, step in events
        ]
        text = [line for _, _, line in sorted(lines, key=lambda entry: entry[:2])]
        text += [
            f"sys[{rank}] finished, {cycles} cycles, exposed communication {exposed} cycles."
            for rank, cycles, exposed in ((one.rank, one.cycles, one.exposed_communication) for one in self.ranks)
        ]
        return "\n".join(text) + "\n"

    def __repr__(self) -> str:
        first, last = min(self.ranks, key=lambda rank: rank.cycles), max(self.ranks, key=lambda rank: rank.cycles)
        roles = f", {self.roles} roles" if self.roles is not None else ""
        return (
            f"{len(self.ranks)} ranks{roles}, {self.backend}\n"
            f"  last   rank {last.rank}: {last.cycles:,} cycles, {last.exposed_communication:,} exposed\n"
            f"  first  rank {first.rank}: {first.cycles:,} cycles, {first.exposed_communication:,} exposed"
        )


def _visible_name(step: Step) -> str:
    kind = node_type_name(step.type)
    name = step.name.replace(",", ";").replace("=", ":")
    return name if kind in name else f"{kind}_{name}" if name else kind


def simulate(
    prefix: str | Path,
    network: NetworkConfig | str | Path | Mapping[str, Any],
    system: SystemConfig | str | Path | Mapping[str, Any],
    memory: MemoryConfig | str | Path | Mapping[str, Any] | None = None,
    group_file: str | Path | None = None,
    backend: Backend = "congestion_unaware",
    *,
    events: bool = False,
    reference: bool = False,
) -> SimulationResult:
    """What ASTRA-sim's analytical backend answers for the traces `<prefix>.<rank>.et`.

    `network`, `system`, `memory`: values, paths or parsed content of ASTRA-sim's files. `group_file`: communicator
    groups; where none is given, those that lie beside the traces; a path with "empty" in it: none. `events`: keep when
    each node was issued and ended. `reference`: follow every message of every rank, also where roles would do. Raises
    `InputError` naming rank and node where ASTRA-sim stops, hangs or drops nodes.
    """
    if backend not in BACKENDS:
        raise InputError(f"unknown backend '{backend}'", near_names(backend, BACKENDS))
    net = network if isinstance(network, NetworkConfig) else read_network(network)
    sys = system if isinstance(system, SystemConfig) else read_system(system)
    mem = MemoryConfig() if memory is None else memory if isinstance(memory, MemoryConfig) else read_memory(memory)
    files = find_traces(prefix)
    if files.single:
        files = find_traces(files.prefix)
    programs = _read_programs(files.prefix, files.ranks, net.ranks, sys)
    named = find_group_file(files) if group_file is None else group_file
    groups = {} if named is None or "empty" in str(group_file) else _read_groups(named)
    return simulate_programs(programs, net, sys, mem, groups, backend, files.folder, events=events, reference=reference)


def _read_programs(prefix: Path, paths: Mapping[int, Path], ranks: int, system: SystemConfig) -> list[RankProgram]:
    missing = [rank for rank in range(ranks) if rank not in paths]
    if missing:
        raise InputError(
            f"{prefix}: no trace of rank {missing[0]}", f"the network has {ranks} ranks, {len(paths)} traces are there"
        )
    reader = Programs(system)
    return [reader.read(rank, paths[rank]) for rank in range(ranks)]


def _read_groups(path: str | Path) -> Groups:
    groups = read_comm_groups(Path(path))
    if groups.problems:
        raise InputError(f"{path}: {groups.problems[0]}")
    return {int(key): members for key, members in groups.members.items()}


def simulate_programs(
    programs: Sequence[RankProgram],
    network: NetworkConfig,
    system: SystemConfig,
    memory: MemoryConfig,
    groups: Groups,
    backend: Backend = "congestion_unaware",
    folder: Path | None = None,
    *,
    events: bool = False,
    reference: bool = False,
) -> SimulationResult:
    """`simulate` for traces that have been read. `folder`: where custom algorithms are looked for."""
    aware = backend == "congestion_aware"
    if aware:
        AwareLinks(network)
    custom = any(impl.traces for impls in system.implementations.values() for impl in impls)
    if not (custom or reference):
        isolated = Isolated(network, system, aware)
        finder = RoleFinder(Planner(network, system, groups), isolated)
        shared = memory.kind in ("MEMORY_POOL", "PER_NODE_MEMORY_EXPANSION")
        roles = finder.find(programs, apart=shared)
        try:
            issuers = FastReplay(roles, isolated, memory).run(events)
        except UnsuitedError:
            pass
        else:
            return _result(issuers, programs, backend, len(roles.views))
    issuers = Replay(network, system, memory, groups, programs, aware, folder or Path.cwd()).run(events)
    _check_finished(issuers, groups, network.ranks)
    return _result(issuers, programs, backend, None)


def _result(
    issuers: Sequence[Issuer], programs: Sequence[RankProgram], backend: str, roles: int | None
) -> SimulationResult:
    ranks = tuple(
        RankCycles(rank, issuer.finished_at, issuer.finished_at - issuer.program.shape.compute_ns)
        for rank, issuer in enumerate(issuers)
    )
    events = tuple(
        tuple((time, what, program.steps[index]) for time, what, index in issuer.events)
        for issuer, program in zip(issuers, programs, strict=True)
    )
    return SimulationResult(ranks, backend, roles, events if any(events) else ())


def _check_finished(issuers: Sequence[Issuer], groups: Groups, ranks: int) -> None:
    for issuer in issuers:
        if issuer.left:
            raise InputError(*_why_stuck(issuer, issuers, groups, ranks))


def _why_stuck(issuer: Issuer, issuers: Sequence[Issuer], groups: Groups, ranks: int) -> tuple[str, str]:
    step = issuer.stuck()
    active = step in [issuer.steps[index] for index in issuer.active]
    if active and step.act is Act.COLLECTIVE:
        number = len(issuer.issued[step.group]) - 1
        for rank in groups.get(step.group, range(ranks)):
            begun = issuers[rank].issued.get(step.group, [])
            if len(begun) <= number:
                return f"rank {issuer.rank} {step} never ends: rank {rank} does not begin it", ""
            other = begun[number]
            if (other.kind, other.nbytes) != (step.kind, step.nbytes):
                return (
                    f"rank {issuer.rank} {step} of {step.nbytes} bytes meets {other.kind} of {other.nbytes} bytes "
                    f"on rank {rank}",
                    "members of a group must issue the same collectives in the same order",
                )
    return stuck_message(issuer.rank, step, active)
