"""Chunks on the least loaded dimension (Themis), against loads worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.collectives.balance import balanced_loads, baseline_loads, number_of_chunks
from stablecast.backends.device import Network, System
from stablecast.ir.errors import InputError
from stablecast.ir.groups import all_devices


def test_two_equal_dimensions_take_turns() -> None:
    """Of chunks of 1 B over 8 x 8 at 1 B/s, half go in first: 1 and 1/8 in turn instead of 1 and 1/8 always."""
    flow = lambda dim, nbytes: nbytes  # noqa: E731
    assert baseline_loads([8, 8], flow, 16.0, 16).tolist() == [16.0, 2.0]
    assert balanced_loads([8, 8], flow, 16.0, 16).tolist() == [9.0, 9.0]


def test_a_slow_dimension_is_left_to_the_last() -> None:
    """At an eighth of the rate the outer dimension is as loaded as the inner one: nothing to balance."""
    flow = lambda dim, nbytes: nbytes * (1.0, 8.0)[dim]  # noqa: E731
    assert balanced_loads([8, 8], flow, 16.0, 16).tolist() == baseline_loads([8, 8], flow, 16.0, 16).tolist()


def test_three_dimensions_of_the_paper() -> None:
    """Loads differ by no more than one chunk; the busiest has less than the first one of the baseline."""
    flow = lambda dim, nbytes: nbytes * (1.0, 2.0, 2.0)[dim]  # noqa: E731
    balanced = balanced_loads([4, 4, 4], flow, 64.0, 64)
    baseline = baseline_loads([4, 4, 4], flow, 64.0, 64)
    assert balanced.max() - balanced.min() <= 2.0
    assert balanced.max() < baseline.max()


def test_chunks() -> None:
    assert [number_of_chunks(size, 4.0) for size in (1.0, 8.0, 1e9)] == [1, 2, 64]


@pytest.fixture(scope="module")
def even() -> System:
    """64 GPUs whose two dimensions have the same rate."""
    system = Catalogue().resolve("a100-sxm-80gb:64")
    outer = system.network.dims[-1]
    plain = replace(outer.efficiency, value=1.0)
    rate = replace(outer.bytes_per_s, value=1e11)
    dims = [
        replace(
            outer, name=name, bytes_per_s=rate, efficiency=plain, efficiency_by_kind={}, library="", in_network=False
        )
        for name in ("inner", "outer")
    ]
    return replace(system, network=Network(tuple(dims)))


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_balanced_collective_is_never_slower(kind: str, even: System) -> None:
    nbytes = np.array([2.0**20, 2.0**26, 2.0**30])
    balanced = CollectiveModel(even, "themis").times(kind, all_devices(64), nbytes)
    baseline = CollectiveModel(even, "hierarchical").times(kind, all_devices(64), nbytes)
    assert balanced[3] == "themis"
    assert (balanced[0] <= baseline[0] * 1.001).all()
    assert baseline[0][2] / balanced[0][2] == pytest.approx(16 / 9, rel=0.05)


def test_where_there_is_nothing_to_balance(even: System) -> None:
    with pytest.raises(InputError, match="cannot go by 'themis'"):
        CollectiveModel(even, "themis").times("collective_broadcast", all_devices(64), np.array([1e6]))
