"""Algorithms by name, worked out by hand; measured curves; and the directions in which answers move."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.collectives import CollectiveModel, curves
from stablecast.backends.collectives.curves import Curve, Library, Links, Reference
from stablecast.backends.device import DimKind, Network, NetworkDim, Quantity, System
from stablecast.ir.device_program import Collective
from stablecast.ir.errors import InputError
from stablecast.ir.groups import all_devices, over_axes

CATALOGUE = Catalogue()
RATE, LATENCY, BYTES = 1e9, 1e-6, 8e6
UNIT_US = BYTES / RATE * 1e6
"""Microseconds of the message over one device's links."""


def switch(size: int, kind: DimKind = "switch", in_network: bool = False) -> System:
    """`size` devices at 1 GB/s and 1 us a step."""

    def quantity(value: float, unit: str) -> Quantity:
        return Quantity(value, unit, "test", "high")

    one, step, none = quantity(1.0, "1"), quantity(LATENCY, "s"), quantity(0.0, "s")
    dim = NetworkDim("d", kind, size, quantity(RATE, "B/s"), one, step, none, in_network=in_network)
    return System("test", CATALOGUE.device("h100-sxm"), size, Network((dim,)))


def microseconds(kind: str, algorithm: str, system: System) -> float:
    model = CollectiveModel(system, algorithm)
    found = model.estimate(Collective(kind, all_devices(system.count), int(BYTES), int(BYTES)))
    assert found.algorithm == {"nvls": "in-network"}.get(algorithm, algorithm)
    return found.time_s * 1e6


@pytest.mark.parametrize(
    ("kind", "algorithm", "steps", "volume"),
    [
        ("all_reduce", "ring", 14, 14 / 8),
        ("all_reduce", "direct", 14, 14 / 8),
        ("all_reduce", "halving-doubling", 6, 14 / 8),
        ("all_reduce", "double-binary-tree", 6, 2),
        ("all_reduce", "nvls", 2, 1),
        ("all_gather", "ring", 7, 7 / 8),
        ("all_gather", "halving-doubling", 3, 7 / 8),
        ("all_gather", "in-network", 2, 7 / 8),
        ("reduce_scatter", "double-binary-tree", 3, 1),
        ("all_to_all", "direct", 7, 7 / 8),
        ("all_to_all", "halving-doubling", 3, 1.5),
        ("all_to_all", "ring", 7, 3.5),
        ("collective_broadcast", "ring", 7, 1),
        ("collective_broadcast", "double-binary-tree", 3, 1),
        ("collective_broadcast", "halving-doubling", 6, 14 / 8),
        ("collective_broadcast", "direct", 7, 7),
    ],
)
def test_costs_of_eight_on_a_switch(kind: str, algorithm: str, steps: int, volume: float) -> None:
    assert microseconds(kind, algorithm, switch(8, in_network=True)) == pytest.approx(steps + volume * UNIT_US)


def test_halving_folds_what_is_no_power_of_two() -> None:
    # 6 devices: 2 steps each way and 2 to fold, 2 x 5/6 S and 2 S
    assert microseconds("all_reduce", "halving-doubling", switch(6)) == pytest.approx(6 + (10 / 6 + 2) * UNIT_US)


def test_direct_over_a_full_mesh_takes_one_step() -> None:
    assert microseconds("all_gather", "direct", switch(8, "fully_connected")) == pytest.approx(1 + 7 / 8 * UNIT_US)


def test_the_cheapest_is_chosen() -> None:
    system = switch(64)
    auto = {size: CollectiveModel(system).times("all_reduce", all_devices(64), np.array([size])) for size in (8.0, 1e9)}
    assert (auto[8.0][3], auto[1e9][3]) == ("double-binary-tree", "ring")
    for size, (time, _, _, _) in auto.items():
        for name in ("ring", "double-binary-tree"):
            by_name = CollectiveModel(system, name).times("all_reduce", all_devices(64), np.array([size]))[0]
            assert time[0] <= by_name[0]


@pytest.mark.parametrize(("kind", "algorithm"), [("all_to_all", "double-binary-tree"), ("all_reduce", "nvls")])
def test_what_cannot_run_there_is_an_error(kind: str, algorithm: str) -> None:
    with pytest.raises(InputError, match=f"{kind} cannot go by '{algorithm}' here"):
        microseconds(kind, algorithm, switch(8))


def test_unknown_algorithm() -> None:
    with pytest.raises(InputError, match="unknown algorithm 'rings'"):
        CollectiveModel(switch(2), "rings")


def test_a_flat_ring_carries_a_share_over_every_rail() -> None:
    # 2 nodes of 8: each of 8 channels takes 2 x 15/16 of an eighth outwards
    system = CATALOGUE.resolve("h100-sxm:16")
    inner, outer = system.network.dims
    nbytes = np.array([2.0**34])
    time = CollectiveModel(system, "ring").times("all_reduce", all_devices(16), nbytes)[0]
    rates = inner.bytes_per_s.value * inner.efficiency_for("all_reduce").value, outer.bytes_per_s.value * 0.85
    expected = max(15 / 8 * nbytes[0] / rates[0], 15 / 8 * nbytes[0] / 8 / rates[1])
    assert time[0] == pytest.approx(expected, rel=0.01)


def test_a_curve_goes_through_its_points_and_stays_monotone() -> None:
    points = np.array([1e3, 2e3, 4e3, 8e3, 16e3]), np.array([5e-6, 5e-6, 6e-6, 11e-6, 12e-6])
    curve = Curve.through(*points)
    assert curve.time(points[0]) == pytest.approx(points[1])
    dense = curve.time(np.geomspace(10, 1e6, 500))
    assert (np.diff(dense) >= -1e-15).all()
    assert curve.time(np.array([1.0, 32e3])) == pytest.approx([5e-6, 24e-6])


def reference(rate: float, clock: float, latency_s: float) -> Reference:
    """Times latency + bytes / rate."""
    sizes = np.geomspace(1e2, 1e11, 200)
    return Reference(
        "r", Links(rate, clock, 1, False), "test", {"all_gather": {2: Curve.through(sizes, latency_s + sizes / rate)}}
    )


def test_links_that_nobody_measured_follow_from_the_data_sheet() -> None:
    known = reference(100e9, 2e9, 10e-6)
    library = Library("test", (known,), 1.0, (1.0, 1.0), (1.0, 1.0))
    target = Links(200e9, 1e9, 1, False)
    found = library.time("all_gather", 2, target, target, np.array([1e2, 1e9]))
    assert found == pytest.approx([20e-6 + 1e2 / 200e9, 20e-6 + 1e9 / 200e9], rel=1e-3)


def test_the_nearest_reference_decides() -> None:
    near, far = reference(100e9, 2e9, 10e-6), reference(400e9, 2e9, 40e-6)
    library = Library("test", (near, far), 1.0, (1.0, 1.0), (1.0, 1.0))
    target = Links(100e9, 2e9, 1, False)
    assert library.time("all_gather", 2, target, target, np.array([1e2]))[0] == pytest.approx(10e-6, rel=0.01)


def test_groups_between_and_above_the_measured_sizes() -> None:
    library = curves.read_libraries()["nccl"]
    known = next(r for r in library.references if r.name == "h100-sxm")
    times = [known.time("all_gather", size, np.array([1e3, 1e8])) for size in (2, 3, 4, 6, 8, 16)]
    for before, after in itertools.pairwise(times):
        assert (after > before).all()


def test_shipped_curves_rise() -> None:
    sizes = np.geomspace(1, 1e11, 300)
    for library in curves.read_libraries().values():
        for known in library.references:
            for by_size in known.curves.values():
                for curve in by_size.values():
                    assert (np.diff(curve.time(sizes)) >= -1e-15).all()


@pytest.mark.parametrize(
    ("system", "kind", "nbytes", "measured_us"),
    [
        ("h100-sxm:8", "all_reduce", 2**20, 25.4),
        ("h200-sxm:8", "all_gather", 2**29, 1395.0),
        ("b200-sxm:4", "reduce_scatter", 2**25, 70.6),
        ("a100-sxm-80gb:2", "all_to_all", 2**23, 56.0),
        ("gb200:72", "all_gather", 603979776, 1053.5),
        ("mi355x:8", "all_reduce", 2**30, 4695.8),
    ],
)
def test_measured_devices_answer_with_their_own_curve(system: str, kind: str, nbytes: int, measured_us: float) -> None:
    found = CATALOGUE.resolve(system)
    estimate = CollectiveModel(found).estimate(Collective(kind, all_devices(found.count), nbytes, nbytes))
    assert estimate.time_s * 1e6 == pytest.approx(measured_us, rel=0.05)
    assert estimate.low_s < estimate.time_s < estimate.high_s


def test_a_pair_of_a_mesh_has_one_link() -> None:
    # XLA's table: four pairs of eight MI355X, 1 GiB
    pair = over_axes("m", [("a", 4), ("b", 2)], ["b"])
    found = CollectiveModel(CATALOGUE.resolve("mi355x:8")).times("all_gather", pair, np.array([2.0**30]))[0]
    assert found[0] * 1e6 == pytest.approx(8155.3, rel=0.02)


def test_a_named_algorithm_keeps_its_cost_over_the_librarys_choice() -> None:
    system, sizes = CATALOGUE.resolve("h100-sxm:8"), np.array([1e3, 1e6, 1e9])
    auto = CollectiveModel(system).times("all_reduce", all_devices(8), sizes)[0]
    tree = CollectiveModel(system, "tree").times("all_reduce", all_devices(8), sizes)[0]
    assert (tree != auto).any()
    assert np.isfinite(tree).all()


@pytest.mark.parametrize(
    "name", ["a100-sxm-80gb:16", "h100-sxm:64", "tpu-v5e:64", "mi300x:16", "gb200:144", "tpu-v3:32"]
)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"])
def test_answers_move_the_right_way(name: str, kind: str) -> None:
    system = CATALOGUE.resolve(name)
    groups = all_devices(system.count)
    nbytes = np.array([1e9, 2e9])
    time = CollectiveModel(system).times(kind, groups, nbytes)[0]
    assert time[1] > time[0]
    for index in range(len(system.network.dims)):
        dims = list(system.network.dims)
        pair = dims[index].pair_bytes_per_s
        dims[index] = replace(
            dims[index],
            bytes_per_s=dims[index].bytes_per_s.scaled(0.5, "half"),
            pair_bytes_per_s=pair.scaled(0.5, "half") if pair else None,
        )
        slower = CollectiveModel(replace(system, network=Network(tuple(dims)))).times(kind, groups, nbytes)[0]
        assert (slower >= time).all()
    assert math.prod(dim.size for dim in system.network.dims) == system.count


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm", "b200-sxm", "mi300x"])
def test_sixty_four_take_longer_than_eight(kind: str, name: str) -> None:
    few, many = (
        CollectiveModel(CATALOGUE.resolve(f"{name}:{count}")).times(kind, all_devices(count), np.array([1e9]))[0][0]
        for count in (8, 64)
    )
    assert many > few


SPINE = """
device: h100-sxm
count: 64
dims:
  - {name: nvlink, kind: switch, size_max: 8, rate: 450 GB/s, efficiency: 1, latency: 0 us, base_latency: 0 us}
  - {name: rail, kind: fat_tree, size_max: 4, rate: 50 GB/s, efficiency: 1, latency: 0 us, base_latency: 0 us}
  - {name: spine, kind: fat_tree, rate: 50 GB/s, oversubscription: %s, penalty: %s, efficiency: 1, latency: 0 us,
     base_latency: 0 us}
"""


def test_oversubscription_and_flow_control_slow_the_spine(tmp_path: Path) -> None:
    rates: list[float] = []
    for factor, penalty in ((1, 0), (4, 0), (4, 0.2)):
        path = tmp_path / "cluster.yaml"
        path.write_text(SPINE % (factor, penalty), encoding="utf-8")
        spine = Catalogue().resolve(str(path)).network.dims[-1]
        rates.append(spine.bytes_per_s.value * spine.efficiency_for("all_reduce").value)
    assert rates == pytest.approx([50e9, 12.5e9, 10e9])
