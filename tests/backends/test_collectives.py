"""Costs of collectives worked out by hand, on ideal links and on the catalogue's systems."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.collectives import KINDS, CollectiveModel, collective_time, spans
from stablecast.backends.device import DimKind, Network, NetworkDim, Quantity, System
from stablecast.ir.device_program import P2P, Collective
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups, all_devices, over_axes

GIB = 2**30
CATALOGUE = Catalogue()
SYSTEMS = {name: CATALOGUE.resolve(name) for name in ("a100-sxm-40gb:4", "h100-sxm:8", "h100-sxm:16", "tpu-v5p:64")}


def quantity(value: float, unit: str) -> Quantity:
    return Quantity(value, unit, "test", "high")


def ideal(
    sizes: Sequence[int], rate: float = 450e9, kind: DimKind = "switch", wrapped: bool = True, latency_s: float = 0.0
) -> System:
    """Dimensions of the given sizes, all at `rate`, efficiency 1."""
    dims = tuple(
        NetworkDim(
            name=f"d{index}",
            kind=kind,
            size=size,
            bytes_per_s=quantity(rate, "B/s"),
            efficiency=quantity(1.0, "1"),
            latency_s=quantity(latency_s, "s"),
            base_latency_s=quantity(0.0, "s"),
            wrapped=wrapped,
        )
        for index, size in enumerate(sizes)
    )
    return System("ideal", CATALOGUE.device("h100-sxm"), math.prod(sizes), Network(dims))


def microseconds(kind: str, nbytes: float, system: System, groups: Groups | None = None) -> float:
    chosen = groups or all_devices(system.count)
    return collective_time(Collective(kind, chosen, int(nbytes), int(nbytes)), system).time_s * 1e6


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("all_reduce", 8, 4175.7),
        ("all_reduce", 2, 2386.1),
        ("all_gather", 8, 2087.8),
        ("reduce_scatter", 8, 2087.8),
        ("all_to_all", 8, 2087.8),
        ("collective_broadcast", 8, 2386.1),
    ],
)
def test_bus_factors(kind: str, ranks: int, expected: float) -> None:
    assert microseconds(kind, GIB, ideal([ranks])) == pytest.approx(expected, abs=0.05)


def test_all_gather_is_sized_by_its_result() -> None:
    gather = Collective("all_gather", all_devices(8), GIB // 8, GIB)
    assert collective_time(gather, ideal([8])).time_s == pytest.approx(2087.8e-6, rel=1e-4)


def test_latency_counts_steps() -> None:
    system = ideal([8], latency_s=1e-6)
    assert microseconds("all_reduce", 0, system) == pytest.approx(14)
    assert microseconds("all_gather", 0, system) == pytest.approx(7)
    closed = ideal([8], kind="ring", latency_s=1e-6)
    assert microseconds("all_gather", 0, closed) == pytest.approx(4)


def test_hierarchy_scatters_inside_before_it_reduces_outside() -> None:
    # inside: 3/4 S twice; outside: all-reduce of a fourth of S over 2; 256 chunks, of the shorter flow one counts
    system = ideal([4, 2], rate=1e9)
    assert microseconds("all_reduce", GIB, system) == pytest.approx((0.75 + 0.75 + 0.25 / 256) * GIB / 1e3)
    assert microseconds("all_gather", GIB, system) == pytest.approx((0.75 + 0.125 / 256) * GIB / 1e3)
    # a single chunk has nothing to overlap
    assert microseconds("all_gather", 2**20, system) == pytest.approx((0.75 + 0.125) * 2**20 / 1e3)
    assert collective_time(Collective("all_reduce", all_devices(8), 1, 1), system).algorithm == "hierarchical"


def test_torus_uses_all_axes_at_once() -> None:
    system = ideal([4, 4], rate=1e9, kind="torus")
    assert microseconds("all_gather", 1e9, system) == pytest.approx(15 / 16 / 2 * 1e6)
    assert collective_time(Collective("all_gather", all_devices(16), 1, 1), system).algorithm == "torus-multi-ring"


def test_part_of_a_closed_ring_is_a_line() -> None:
    system = ideal([8], rate=2e9, kind="torus")
    inner, strided = over_axes("m", [("a", 2), ("b", 4)], ["b"]), over_axes("m", [("a", 4), ("b", 2)], ["a"])
    assert [span.bytes_per_s for span in spans(inner, system)] == [1e9]
    # every second device: a closed ring of 4, whose links the other group shares
    assert [(span.closed, span.bytes_per_s) for span in spans(strided, system)] == [(True, 1e9)]


def test_all_to_all_on_a_ring_crosses_a_fourth_of_it() -> None:
    assert microseconds("all_to_all", 1e9, ideal([16], rate=1e9, kind="ring")) == pytest.approx(4e6)


def test_fully_connected_group_has_the_links_to_its_members() -> None:
    system = ideal([8], rate=7e9, kind="fully_connected")
    pair = over_axes("m", [("a", 4), ("b", 2)], ["b"])
    assert microseconds("all_gather", 1e9, system, pair) == pytest.approx(0.5e6)
    assert microseconds("all_gather", 1e9, system) == pytest.approx(0.125e6)


def test_groups_on_the_outer_dimension_only() -> None:
    system = ideal([4, 2], rate=1e9)
    outer = over_axes("m", [("node", 2), ("gpu", 4)], ["node"])
    assert [(span.dim.name, span.size) for span in spans(outer, system)] == [("d1", 2)]


def test_ragged_groups_take_the_largest() -> None:
    ragged = Groups(2, 3, ragged=((0, 1, 2), (3,)))
    assert [span.size for span in spans(ragged, ideal([4]))] == [3]


def test_one_device_needs_no_time() -> None:
    single = collective_time(Collective("all_reduce", all_devices(1), GIB, GIB), CATALOGUE.resolve("h100-sxm"))
    assert (single.time_s, single.algorithm) == (0.0, "none")


def test_a_group_outside_the_system() -> None:
    with pytest.raises(InputError, match="16 devices does not fit system ideal of 8"):
        microseconds("all_reduce", 1, ideal([8]), all_devices(16))


def test_unknown_kind() -> None:
    with pytest.raises(InputError, match="unknown collective 'reduce'"):
        microseconds("reduce", 1, ideal([8]))


def test_small_all_reduce_on_a100_takes_its_latency() -> None:
    # measured on 4 A100: 14.7 to 16.0 us at 8 kB (aiconfigurator and LLMCompass)
    assert 12 < microseconds("all_reduce", 8192, SYSTEMS["a100-sxm-40gb:4"]) < 25


def test_large_all_reduce_on_a100() -> None:
    # measured on 4 A100 with NVLink: 7,219 us (LLMCompass), 7,430 us (aiconfigurator, scaled)
    assert microseconds("all_reduce", GIB, SYSTEMS["a100-sxm-40gb:4"]) == pytest.approx(7300, rel=0.1)


def test_send_and_receive() -> None:
    found = CollectiveModel(SYSTEMS["h100-sxm:16"]).p2p(P2P("send", "pipe", 1, 0, 10**6))
    assert 20e-6 < found.low_s <= found.time_s <= found.high_s
    alone = CollectiveModel(CATALOGUE.resolve("h100-sxm")).p2p(P2P("send", "pipe", 1, 0, 10**6))
    assert alone.time_s == 0.0


@given(
    kind=st.sampled_from(KINDS),
    system=st.sampled_from(sorted(SYSTEMS)),
    nbytes=st.integers(1, 10**9),
    factor=st.floats(1.0, 100.0),
)
@settings(max_examples=200, deadline=None)
def test_more_bytes_take_longer_and_ranges_hold(kind: str, system: str, nbytes: int, factor: float) -> None:
    model, groups = CollectiveModel(SYSTEMS[system]), all_devices(SYSTEMS[system].count)
    time, low, high, _ = model.times(kind, groups, np.array([nbytes, nbytes * factor]))
    assert time[1] >= time[0] > 0
    assert (low <= time).all()
    assert (time <= high).all()


@given(kind=st.sampled_from(KINDS), nbytes=st.integers(1, 10**9), factor=st.floats(1.0, 10.0))
@settings(max_examples=100, deadline=None)
def test_faster_links_are_not_slower(kind: str, nbytes: int, factor: float) -> None:
    system = SYSTEMS["h100-sxm:8"]
    dims = [replace(dim, bytes_per_s=dim.bytes_per_s.scaled(factor, "test")) for dim in system.network.dims]
    faster = replace(system, network=Network(tuple(dims)))
    assert microseconds(kind, nbytes, faster) <= microseconds(kind, nbytes, system)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_more_devices_take_longer(kind: str) -> None:
    assert microseconds(kind, GIB, CATALOGUE.resolve("h100-sxm:64")) > microseconds(kind, GIB, SYSTEMS["h100-sxm:8"])


def test_pod_size_groups_are_quick() -> None:
    system = ideal([32, 64, 64], kind="torus")
    assert microseconds("all_reduce", GIB, system) > 0


def test_small_messages_of_large_groups_go_by_a_tree() -> None:
    """A few bytes over thousands of devices take log2 n steps, not n; large messages still go round the ring."""
    system = CATALOGUE.resolve("h100-sxm:4096")
    groups = all_devices(4096)
    small = collective_time(Collective("all_reduce", groups, 4, 4), system)
    assert small.time_s < 1e-3
    times = [collective_time(Collective("all_reduce", groups, size, size), system).time_s for size in (4, 2**20, 2**30)]
    assert times == sorted(times)
