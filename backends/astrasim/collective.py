"""One collective in the reference mode, and tables of them."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from stablecast.backends.astrasim.config import (
    COLLECTIVES,
    Backend,
    NetworkConfig,
    SystemConfig,
    implementation,
    read_network,
    read_system,
)
from stablecast.backends.astrasim.custom import begin_custom
from stablecast.backends.astrasim.engine import Machine
from stablecast.backends.astrasim.isolated import Isolated
from stablecast.backends.astrasim.links import AwareLinks
from stablecast.backends.astrasim.plan import Plan
from stablecast.backends.astrasim.replay import Planner
from stablecast.ir.errors import InputError, near_names


@dataclass(frozen=True, slots=True)
class CollectiveCycles:
    """Cycles (1 ns each) until the last and the first rank has finished."""

    cycles_max: int
    cycles_min: int

    def to_dict(self) -> dict[str, int]:
        """The JSON object of `stablecast collective --mode astra-sim --json`."""
        return {"cycles_max": self.cycles_max, "cycles_min": self.cycles_min}


def collective_cycles(
    kind: str,
    nbytes: int,
    network: NetworkConfig | str | Path | Mapping[str, Any],
    system: SystemConfig | str | Path | Mapping[str, Any],
    groups: Sequence[Sequence[int]] | None = None,
    involved_dims: Sequence[bool] | None = None,
    backend: Backend = "congestion_unaware",
) -> CollectiveCycles:
    """What ASTRA-sim answers for one collective that all ranks begin at time 0.

    `kind`: all_reduce, all_gather, reduce_scatter or all_to_all. `nbytes`: of an all_gather what a rank contributes,
    of the others what it holds before. `groups`: disjoint communicator groups that all begin together; ranks in
    none are idle. `involved_dims`: one flag a network dimension. Raises `InputError` where ASTRA-sim stops or hangs.
    """
    name = kind.replace("-", "_").lower()
    if name not in COLLECTIVES:
        raise InputError(f"unknown collective '{kind}'", near_names(name, COLLECTIVES))
    net = network if isinstance(network, NetworkConfig) else read_network(network)
    sys = system if isinstance(system, SystemConfig) else read_system(system)
    aware = backend == "congestion_aware"
    if aware:
        AwareLinks(net)
    planner = Planner(net, sys, {})
    if groups is None:
        involved = None if involved_dims is None else tuple(map(bool, involved_dims))
        return _world(planner.make(name, nbytes, 0, involved), net, sys, aware)
    wanted = [tuple(map(int, group)) for group in groups]
    _check_groups(wanted, net.ranks)
    plans = [planner.make(name, nbytes, len(group) if len(group) < net.ranks else 0, (True,) * 10) for group in wanted]
    if len(wanted) == 1 and len(wanted[0]) == net.ranks:
        return _world(plans[0], net, sys, aware)
    if aware and net.topology[0] == "Ring":
        return _all(list(zip(plans, wanted, strict=True)), net, sys)
    alone = Isolated(net, sys, aware)
    ends = [end for plan, group in zip(plans, wanted, strict=True) for end in _group_ends(alone, plan, group)]
    return CollectiveCycles(max(ends), min(ends))


def _group_ends(alone: Isolated, plan: Plan, group: tuple[int, ...]) -> list[int]:
    if alone.uniform(plan, group):
        return [alone.together(plan, group)[0]]
    return [end for end, _ in alone.ends(plan, group, [0] * len(group))]


def _check_groups(groups: Sequence[tuple[int, ...]], ranks: int) -> None:
    seen: set[int] = set()
    if not groups:
        raise InputError("no communicator groups")
    for group in groups:
        if len(group) < 2:
            raise InputError(f"the group {list(group)} has one rank", "ASTRA-sim never ends such a collective")
        for rank in group:
            if not 0 <= rank < ranks:
                raise InputError(f"the group {list(group)} names rank {rank} of {ranks}")
            if rank in seen:
                raise InputError(f"rank {rank} is in two groups", "give groups without common ranks")
            seen.add(rank)


def _world(plan: Plan, network: NetworkConfig, system: SystemConfig, aware: bool) -> CollectiveCycles:
    alone = Isolated(network, system, aware, begin_custom(Path.cwd()))
    if alone.uniform(plan, None):
        time, _ = alone.together(plan, None)
        return CollectiveCycles(time, time)
    ends = [end for end, _ in alone.ends(plan, None, [0] * network.ranks)]
    return CollectiveCycles(max(ends), min(ends))


def _all(
    plans: Sequence[tuple[Plan, tuple[int, ...]]], network: NetworkConfig, system: SystemConfig
) -> CollectiveCycles:
    """All groups at once on links that they share."""
    machine = Machine(network, system, True, begin_custom(Path.cwd()))
    of_rank = {rank: (number, plan, group) for number, (plan, group) in enumerate(plans) for rank in group}
    ends: list[int] = []
    for rank in sorted(of_rank):
        number, plan, group = of_rank[rank]
        machine.ranks[rank].collective(plan, number, 0, group, (lambda _: ends.append(machine.queue.now), rank))
    machine.queue.run()
    if len(ends) < len(of_rank):
        raise InputError("a rank never ends", "ASTRA-sim would wait for ever")
    return CollectiveCycles(max(ends), min(ends))


_COLUMNS = (
    "backend", "topology", "npus", "bandwidth_GiBps", "latency_ns", "collective", "comm_size_bytes", "algorithm",
    "splits", "active_chunks", "endpoint_delay_ns", "local_mem_bw_GBps", "collective_optimization",
)  # fmt: skip


@lru_cache(maxsize=1024)
def _row_configs(key: tuple[str, ...]) -> tuple[NetworkConfig, SystemConfig]:
    topology, npus, bandwidth, latency, algorithm, splits, active, delay, memory, optimization = key
    network = read_network(
        {
            "topology": topology.split("|"),
            "npus_count": [int(value) for value in npus.split("|")],
            "bandwidth": [float(value) for value in bandwidth.split("|")],
            "latency": [float(value) for value in latency.split("|")],
        }
    )
    impls = tuple(implementation(entry) for entry in algorithm.split("|"))
    system = SystemConfig(
        dict.fromkeys(COLLECTIVES, impls),
        int(splits),
        max(int(active), 1),
        int(delay),
        float(memory or 0),
        optimization == "localBWAware",
    )
    return network, system


def _row_cycles(row: Mapping[str, str]) -> CollectiveCycles:
    network, system = _row_configs(tuple(row[name] for name in (*_COLUMNS[1:5], *_COLUMNS[7:])))
    backend = row["backend"] or "congestion_unaware"
    if backend not in ("congestion_unaware", "congestion_aware"):
        raise InputError(f"unknown backend '{backend}'", "congestion_unaware or congestion_aware")
    groups = json.loads(row["groups"]) if row.get("groups") else None
    flags = [flag == "1" for flag in row["involved_dim"].split("|")] if row.get("involved_dim") else None
    return collective_cycles(row["collective"], int(row["comm_size_bytes"]), network, system, groups, flags, backend)


def collective_table(text: str, source: str = "the table") -> str:
    """A CSV table of collectives with `predicted_max` and `predicted_min` beside each row.

    Columns: those of ASTRA-sim's golden table (`backend`, `topology`, `npus`, ...); lists separated by `|`; others are
    kept. Raises `InputError` naming the row.
    """
    reader = csv.DictReader(io.StringIO(text))
    names = list(reader.fieldnames or ())
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise InputError(f"{source}: no column {', '.join(missing)}")
    added = [name for name in ("predicted_max", "predicted_min") if name not in names]
    out = io.StringIO()
    writer = csv.DictWriter(out, [*names, *added], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for number, row in enumerate(reader, 2):
        try:
            cycles = _row_cycles(row)
        except InputError as error:
            raise InputError(f"{source}, line {number}: {error.message}", error.hint) from None
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{source}, line {number}: {' '.join(str(error).split())}") from None
        writer.writerow({**row, "predicted_max": cycles.cycles_max, "predicted_min": cycles.cycles_min})
    return out.getvalue()
