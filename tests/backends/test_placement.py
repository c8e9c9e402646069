"""Mesh axes on network dimensions."""

import numpy as np
import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.collectives import CollectiveModel, spans
from stablecast.backends.device import System
from stablecast.backends.placement import dims_of, place
from stablecast.ir.device_program import P2P, Collective
from stablecast.ir.errors import InputError
from stablecast.ir.groups import over_axes

AXES = (("data", 8), ("model", 8))


@pytest.fixture(scope="module")
def system() -> System:
    return Catalogue().resolve("h100-sxm:64")


def dims(system: System, axis: str) -> list[str]:
    groups = over_axes("mesh", AXES, [axis])
    return [span.dim.name for span in spans(groups, system)]


def test_the_last_axis_lies_innermost(system: System) -> None:
    placed = place(AXES, {}, system)
    assert (dims(placed, "model"), dims(placed, "data")) == (["nvlink"], ["scale-out"])
    assert (dims(system, "model"), dims(system, "data")) == (["nvlink"], ["scale-out"])


def test_axes_where_they_are_put(system: System) -> None:
    placed = place(AXES, {"data": ["nvlink"], "model": ["scale-out"]}, system)
    assert (dims(placed, "model"), dims(placed, "data")) == (["scale-out"], ["nvlink"])
    assert dims(place(AXES, {"data": ["nvlink"]}, system), "model") == ["scale-out"]
    assert placed.placement is not None
    assert placed.placement.places(np.array([0, 1, 8, 9, 63, 64])).tolist() == [0, 8, 1, 9, 63, 64]


def test_faster_links_make_faster_collectives(system: System) -> None:
    reduce = Collective("all_reduce", over_axes("mesh", AXES, ["data"]), 1 << 28, 1 << 28)
    far = CollectiveModel(place(AXES, {}, system)).estimate(reduce).time_s
    near = CollectiveModel(place(AXES, {"data": ["nvlink"]}, system)).estimate(reduce).time_s
    assert near < far / 4
    send = P2P("send", "model", 1, 0, 1 << 28)
    inside = CollectiveModel(place(AXES, {}, system)).p2p(send).time_s
    outside = CollectiveModel(place(AXES, {"model": ["scale-out"]}, system)).p2p(send).time_s
    assert inside < outside / 4


def test_axes_that_share_a_dimension(system: System) -> None:
    axes = (("pipe", 4), ("data", 4), ("model", 4))
    placed = place(axes, {"pipe": ["scale-out"], "model": ["nvlink"]}, system)
    assert placed.placement is not None
    found = {axis: dims_of(placed.placement, axis, system.network.dims) for axis, _ in axes}
    assert found == {"pipe": ("scale-out",), "data": ("nvlink", "scale-out"), "model": ("nvlink",)}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"modle": ["nvlink"]}, "names no axis 'modle'"),
        ({"model": ["spine"]}, "'spine', which the network does not have"),
        ({"model": ["nvlink"], "data": ["nvlink"]}, "does not fit on nvlink, it reaches over scale-out"),
    ],
)
def test_what_cannot_be_placed(wanted: dict[str, list[str]], message: str, system: System) -> None:
    with pytest.raises(InputError, match=message):
        place(AXES, wanted, system)
