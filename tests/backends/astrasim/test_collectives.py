"""One collective: values worked out by hand from the closed forms, ASTRA-sim's own answers, and refusals."""

import csv
import io
from pathlib import Path

import pytest

from stablecast.backends.astrasim import (
    CollectiveCycles,
    NetworkConfig,
    SystemConfig,
    collective_cycles,
    collective_table,
    read_network,
    read_system,
)
from stablecast.backends.astrasim.algorithms import trees
from stablecast.backends.astrasim.config import COLLECTIVES, Implementation, implementation
from stablecast.backends.astrasim.isolated import Isolated
from stablecast.backends.astrasim.plan import world_plan
from stablecast.ir.errors import InputError

MIB = 1 << 20


def system(*algorithms: str, splits: int = 1, memory: float = 0.0, active: int = 1, aware: bool = True) -> SystemConfig:
    impls = tuple(implementation(name) for name in algorithms or ("ring",))
    return SystemConfig(dict.fromkeys(COLLECTIVES, impls), splits, active, 10, memory, aware)


def network(topology: str = "Ring", npus: int = 4, bandwidth: float = 50.0, latency: float = 500.0) -> NetworkConfig:
    return NetworkConfig((topology,), (npus,), (bandwidth,), (latency,))


def message(nbytes: float, hops: int = 1) -> int:
    return int(hops * 500.0 + nbytes / (50.0 * 2**30 / 1e9))


def test_ring_by_its_closed_form() -> None:
    """2 (n - 1) messages of D / n, 2 n - 1 endpoint delays, n - 1 reductions of two reads and a write."""
    part = MIB // 4
    expected = 6 * message(part) + 7 * 10 + 3 * 3 * int(part / 100.0)
    got = collective_cycles("all_reduce", MIB, network(), system(memory=100.0))
    assert got == CollectiveCycles(expected, expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("reduce_scatter", 3 * message(MIB / 4) + 4 * 10),
        ("all_gather", 3 * message(MIB) + 4 * 10),
        ("all_to_all", 6 * message(MIB / 4) + 7 * 10),
        ("all-reduce", 6 * message(MIB / 4) + 7 * 10),
    ],
)
def test_ring_kinds(kind: str, expected: int) -> None:
    assert collective_cycles(kind, MIB, network(), system()).cycles_max == expected


def test_direct_waits_for_the_farthest() -> None:
    """On a ring of 8 the farthest rank is 4 hops away; an all-to-all is one such message between two delays."""
    got = collective_cycles("all_to_all", MIB, network(npus=8), system("direct"))
    assert got.cycles_max == message(MIB / 8, 4) + 2 * 10


def test_halving_doubling_halves_the_message() -> None:
    """Distances 1 and 2 with D/2 and D/4 and back; both are one hop through a fully connected network."""
    expected = 2 * (message(MIB / 2) + message(MIB / 4)) + 5 * 10
    got = collective_cycles("all_reduce", MIB, network("FullyConnected"), system("halvingDoubling"))
    assert got.cycles_max == expected


def test_double_binary_tree_goes_up_and_down() -> None:
    """n = 2^k, one chunk: 2 k messages of the whole, 2 k - 1 reductions, a delay before and after (rule 10)."""
    expected = 2 * 3 * message(MIB, 2) + 5 * (10 + 3 * int(MIB / 100.0)) + 2 * 10
    got = collective_cycles("all_reduce", MIB, network("Switch", 8), system("doubleBinaryTree", memory=100.0))
    assert got.cycles_max == expected
    assert got.cycles_min < expected


def test_the_two_trees_mirror_each_other() -> None:
    last, first = trees(8)
    assert last[7] == (-1, (3,))
    assert first[0] == (-1, (4,))
    assert [parent for parent, _ in first] == [-1 if p < 0 else 7 - p for p, _ in reversed(last)]


def test_chunks_run_one_after_the_other_in_a_queue() -> None:
    one = collective_cycles("all_reduce", MIB // 4, network(), system()).cycles_max
    assert collective_cycles("all_reduce", MIB, network(), system(splits=4)).cycles_max == 4 * one
    assert collective_cycles("all_reduce", MIB, network(), system(splits=4, active=4)).cycles_max == one


def test_two_dimensions_scatter_and_gather_around_the_last() -> None:
    net = NetworkConfig(("Ring", "Switch"), (4, 2), (50.0, 50.0), (500.0, 500.0))
    sub = MIB // 4
    inner = 3 * message(MIB / 4) + 4 * 10
    outer = 2 * message(sub / 2, 2) + 3 * 10
    assert collective_cycles("all_reduce", MIB, net, system("ring", "ring")).cycles_max == 2 * inner + outer
    assert collective_cycles(
        "all_reduce", MIB, net, system("ring", "ring"), involved_dims=[False, True]
    ).cycles_max == (2 * message(MIB / 2, 2) + 3 * 10)


def test_groups_have_a_fixed_delay_and_their_own_distances() -> None:
    sys = SystemConfig(dict.fromkeys(COLLECTIVES, (Implementation("ring"),)), 1, 1, 77, 0.0, True)
    near = collective_cycles("all_reduce", MIB, network(), sys, [[0, 1], [2, 3]])
    far = collective_cycles("all_reduce", MIB, network(), sys, [[0, 2], [1, 3]])
    assert near.cycles_max == 2 * message(MIB / 2) + 3 * 10
    assert far.cycles_max == 2 * message(MIB / 2, 2) + 3 * 10
    assert collective_cycles("all_reduce", MIB, network(), sys, [[3, 1, 0, 2]]) == collective_cycles(
        "all_reduce", MIB, network(), sys
    )


def test_links_are_shared_in_the_aware_backend() -> None:
    """Each of 7 messages waits for those before it on the one link to the switch."""
    net = network("Switch", 8)
    part = MIB / 8
    busy = int(part / net.bytes_per_ns[0])
    got = collective_cycles("all_to_all", MIB, net, system("direct"), backend="congestion_aware")
    assert got.cycles_max == 6 * busy + 2 * message(part) + 2 * 10
    alone = collective_cycles("all_to_all", MIB, net, system("direct"))
    assert got.cycles_max > alone.cycles_max


@pytest.mark.parametrize("topology", ["Ring", "Switch", "FullyConnected"])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_the_answer_moves_the_right_way(topology: str, kind: str) -> None:
    base = collective_cycles(kind, MIB, network(topology, 8), system()).cycles_max
    assert collective_cycles(kind, MIB, network(topology, 8, bandwidth=25.0), system()).cycles_max > base
    assert collective_cycles(kind, 2 * MIB, network(topology, 8), system()).cycles_max > base
    assert collective_cycles(kind, MIB, network(topology, 64), system()).cycles_max > base


def test_one_rank_stands_for_all_exactly() -> None:
    """The short way and the machine that follows every message agree."""
    net = NetworkConfig(("Ring", "FullyConnected", "Switch"), (4, 2, 4), (50.0, 400.0, 25.0), (500.0, 250.0, 936.25))
    sys = system("halvingDoubling", "direct", "ring", splits=4, memory=1600.0, active=2)
    plan = world_plan("all_reduce", 3 * MIB, net, 4, sys.implementation("all_reduce"), False, None)
    alone = Isolated(net, sys)
    ends = alone.follow(plan, None, [0] * net.ranks)
    assert {end for end, _ in ends} == {alone.together(plan, None)[0]}


@pytest.mark.parametrize(
    ("kind", "nbytes", "npus", "algorithm", "words"),
    [
        ("all_reduce", MIB, 6, "halvingDoubling", "powers of two"),
        ("all_reduce", MIB, 6, "doubleBinaryTree", "powers of two"),
        ("all_to_all", MIB, 4, "halvingDoubling", "no all_to_all"),
        ("broadcast", MIB, 4, "ring", "unknown collective"),
    ],
)
def test_what_astra_sim_cannot_run_is_refused(kind: str, nbytes: int, npus: int, algorithm: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        collective_cycles(kind, nbytes, network(npus=npus), system(algorithm))


def test_more_refusals() -> None:
    with pytest.raises(InputError, match="never ends"):
        collective_cycles("all_gather", 1, network(), system(splits=4))
    with pytest.raises(InputError, match="preferred-dataset-splits"):
        collective_cycles("all_reduce", MIB, network(), system(splits=0))
    with pytest.raises(InputError, match="one rank"):
        collective_cycles("all_reduce", MIB, network(), system(), [[0], [1, 2]])
    with pytest.raises(InputError, match="two groups"):
        collective_cycles("all_reduce", MIB, network(), system(), [[0, 1], [1, 2]])
    with pytest.raises(InputError, match="first 4"):
        collective_cycles(
            "all_reduce", MIB, NetworkConfig(("Ring",) * 5, (2,) * 5, (50.0,) * 5, (5.0,) * 5), system(*["ring"] * 5)
        )
    with pytest.raises(InputError, match="no all-reduce-implementation"):
        collective_cycles("all_reduce", MIB, network(), SystemConfig(splits=1))
    net = NetworkConfig(("Ring", "Ring"), (4, 4), (50.0, 50.0), (5.0, 5.0))
    with pytest.raises(InputError, match="one dimension"):
        collective_cycles("all_reduce", MIB, net, system("ring", "ring"), backend="congestion_aware")


def test_every_row_of_the_golden_table(shared_data: Path) -> None:
    text = (shared_data / "astrasim_golden" / "collectives.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(collective_table(text))))
    wrong = [
        row["id"]
        for row in rows
        if (row["predicted_max"], row["predicted_min"]) != (row["cycles_max"], row["cycles_min"])
    ]
    assert not wrong
    assert len(rows) == 367


def test_a_table_names_the_line_at_fault() -> None:
    header = (
        "backend,topology,npus,bandwidth_GiBps,latency_ns,collective,comm_size_bytes,algorithm,splits,active_chunks,"
        "endpoint_delay_ns,local_mem_bw_GBps,collective_optimization,groups,involved_dim\n"
    )
    good = "congestion_unaware,Ring,4,50,500,all_reduce,1048576,ring,1,1,10,100,baseline,,\n"
    bad = good.replace("all_reduce", "all_reduced")
    out = collective_table(header + good)
    expected = collective_cycles("all_reduce", MIB, network(), system(memory=100.0)).cycles_max
    assert out.splitlines()[1].endswith(f",{expected},{expected}")
    with pytest.raises(InputError, match="line 3: unknown collective"):
        collective_table(header + good + bad)
    with pytest.raises(InputError, match=r"line 2: .*invalid literal"):
        collective_table(header + good.replace("1048576", "many"))
    with pytest.raises(InputError, match="no column backend"):
        collective_table("a,b\n1,2\n")


def test_descriptions_as_mappings() -> None:
    net = {"topology": ["Ring"], "npus_count": [4], "bandwidth": [50.0], "latency": [500.0]}
    sys = {"preferred-dataset-splits": 1, "all-reduce-implementation": ["ring"]}
    direct = collective_cycles("all_reduce", MIB, read_network(net), read_system(sys))
    assert collective_cycles("all_reduce", MIB, net, sys) == direct
