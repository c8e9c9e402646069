"""The short ways and the machine that follows every message agree, on networks and traces drawn at random."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from stablecast.backends.astrasim import MemoryConfig, NetworkConfig, SystemConfig
from stablecast.backends.astrasim.config import Backend, Implementation, implementation
from stablecast.backends.astrasim.isolated import Isolated
from stablecast.backends.astrasim.programs import Programs, RankProgram
from stablecast.backends.astrasim.replay import Groups, Planner
from stablecast.backends.astrasim.simulate import simulate_programs
from stablecast.ir.chakra import CollectiveType, Node, collective_node, comp_node, encode_trace, recv_node, send_node
from stablecast.ir.errors import InputError

KINDS = {
    "all_reduce": CollectiveType.ALL_REDUCE,
    "all_gather": CollectiveType.ALL_GATHER,
    "reduce_scatter": CollectiveType.REDUCE_SCATTER,
    "all_to_all": CollectiveType.ALL_TO_ALL,
}
BYTES = (1001, 12345, 1 << 14, 1 << 20)


@dataclass(frozen=True)
class Scene:
    """A network, a system and disjoint groups that halve the ranks."""

    network: NetworkConfig
    system: SystemConfig
    groups: Groups


def draw_scene(rng: random.Random) -> Scene:
    dims = rng.choice([(4,), (6,), (8,), (4, 2), (2, 4), (2, 2, 2)])
    network = NetworkConfig(
        tuple(rng.choice(["Ring", "Switch", "FullyConnected"]) for _ in dims),
        dims,
        tuple(rng.choice([50.0, 100.0, 400.0]) for _ in dims),
        tuple(rng.choice([500.0, 250.0, 936.25]) for _ in dims),
    )
    system = SystemConfig(
        {kind: tuple(draw_algorithm(rng, kind, size, len(dims)) for size in dims) for kind in KINDS},
        splits=rng.choice([1, 2, 4]),
        active_chunks=rng.choice([1, 1, 2]),
        endpoint_delay_ns=rng.choice([1, 10, 100]),
        local_mem_gbps=rng.choice([0.0, 50.0, 1600.0]),
        local_bw_aware=rng.random() < 0.7,
    )
    ranks = list(range(network.ranks))
    if rng.random() < 0.5:
        rng.shuffle(ranks)
    half = len(ranks) // 2
    parts = (ranks[:half], ranks[half:]) if rng.random() < 0.5 else (ranks[::2], ranks[1::2])
    return Scene(network, system, {1: tuple(parts[0]), 2: tuple(parts[1])})


def draw_algorithm(rng: random.Random, kind: str, size: int, dims: int) -> Implementation:
    names = ["ring", "direct", "direct2"]
    half = size if dims > 1 else size // 2
    if kind != "all_to_all" and size & (size - 1) == 0 and half & (half - 1) == 0:
        names.append("halvingDoubling")
    return implementation(rng.choice(names))


def draw_traces(rng: random.Random, ranks: int, groups: Groups) -> list[list[Node]]:
    """One pattern for all ranks; compute times may differ by rank, collectives and transfers are chained."""
    group_of = {rank: str(key) for key, members in groups.items() for rank in members}
    skew = rng.choice([0, 1, 2])
    traces: list[list[Node]] = [[] for _ in range(ranks)]
    chained, recent = -1, list[int]()
    for number in range(rng.randint(3, 20)):
        what, nbytes = rng.choice(["work", "work", "send", *KINDS]), rng.choice(BYTES)
        grouped, micros = rng.random() < 0.4, rng.choice([1, 5, 20])
        deps = {node for node in recent[-4:] if rng.random() < 0.3}
        if what != "work" and chained >= 0:
            deps.add(chained)
        at, ordered = len(traces[0]), sorted(deps)
        for rank, trace in enumerate(traces):
            if what == "work":
                lasting = micros * (1 + (rank if skew == 2 else rank % 2 if skew else 0))
                trace.append(comp_node(at, "w", 1, 1, ordered, lasting))
            elif what == "send":
                trace.append(send_node(at, "s", (rank + 1) % ranks, number, nbytes, ordered))
                trace.append(recv_node(at + 1, "r", (rank - 1) % ranks, number, nbytes, ordered))
            else:
                group = group_of[rank] if grouped else ""
                trace.append(collective_node(at, "c", KINDS[what], nbytes, group, ordered))
        recent += range(at, len(traces[0]))
        chained = chained if what == "work" else at
    return traces


def read_back(traces: Sequence[Sequence[Node]], system: SystemConfig, folder: Path) -> list[RankProgram]:
    reader = Programs(system)
    programs: list[RankProgram] = []
    for rank, nodes in enumerate(traces):
        path = folder / f"t.{rank}.et"
        path.write_bytes(encode_trace(nodes))
        programs.append(reader.read(rank, path))
    return programs


def answer(
    scene: Scene, programs: Sequence[RankProgram], reference: bool, backend: Backend = "congestion_unaware"
) -> list[int] | str:
    try:
        result = simulate_programs(
            programs, scene.network, scene.system, MemoryConfig(), scene.groups, backend, reference=reference
        )
    except InputError:
        return "never ends"
    return [rank.cycles for rank in result.ranks]


@pytest.mark.parametrize("part", range(4))
def test_traces(part: int, tmp_path: Path) -> None:
    for seed in range(part * 20, part * 20 + 20):
        rng = random.Random(seed)
        scene = draw_scene(rng)
        programs = read_back(draw_traces(rng, scene.network.ranks, scene.groups), scene.system, tmp_path)
        assert answer(scene, programs, False) == answer(scene, programs, True), seed


def test_traces_on_shared_links(tmp_path: Path) -> None:
    for seed in range(120):
        rng = random.Random(seed)
        scene = draw_scene(rng)
        if len(scene.network.npus_count) == 1:
            programs = read_back(draw_traces(rng, scene.network.ranks, scene.groups), scene.system, tmp_path)
            short = answer(scene, programs, False, "congestion_aware")
            assert short == answer(scene, programs, True, "congestion_aware"), seed


def test_members_that_begin_at_different_times() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        scene = draw_scene(rng)
        planner = Planner(scene.network, scene.system, scene.groups)
        alone = Isolated(scene.network, scene.system)
        kind, nbytes = rng.choice(list(KINDS)), rng.choice(BYTES)
        members = scene.groups[1] if len(scene.groups[1]) > 1 else None
        plan = planner.make(kind, nbytes, len(members) if members else 0, None)
        starts = [rng.choice([0, 7, 3000, 40000]) for _ in range(len(members) if members else scene.network.ranks)]
        first = min(starts)
        followed = alone.follow(plan, members, [start - first for start in starts])
        ends = alone.ends(plan, members, starts)
        assert [end for end, _ in ends] == [end + first for end, _ in followed], seed
