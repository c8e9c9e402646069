"""Shapes, groups and old-style shardings by arithmetic."""

import itertools

import numpy as np
import pytest

from stablecast.ir.dtypes import dtype
from stablecast.ir.errors import InputError
from stablecast.ir.groups import from_lists, over_axes, over_parts
from stablecast.ir.hlo.groups import expand_device_ids
from stablecast.ir.program import Axis, Mesh, Sharding
from stablecast.ir.types import TensorType
from stablecast.lowering.partition import gspmd
from stablecast.lowering.partition.halo import Halo, rounds
from stablecast.lowering.partition.layout import Layout
from stablecast.lowering.partition.windows import Window

MESH = Mesh("mesh", (("x", 4), ("y", 6), ("z", 2)))
LAYOUT = Layout([MESH])


def test_local_shape_rounds_up() -> None:
    sharding = Sharding("mesh", ((Axis("x"),), (), (Axis("y", (2, 3)), Axis("z"))))
    local = LAYOUT.local(TensorType((10, 5, 13), dtype("f32")), sharding)
    assert str(local) == "f32[3,5,3]"
    assert LAYOUT.local(TensorType((10, 5, 13), dtype("f32")), sharding) is not None


def test_groups_over_part_of_an_axis() -> None:
    groups = LAYOUT.groups("mesh", [Axis("x", (2, 2))])
    assert (groups.count, groups.size) == (24, 2)
    assert groups.members(0) == (0, 12)
    assert groups.members(24) == (24, 36)
    assert groups.axes == ("x:(2)2",)


def test_parts_make_the_whole() -> None:
    whole = over_parts("m", (("x", 8), ("y", 3)), [("x", (1, 2)), ("x", (2, 4))])
    assert [set(group) for group in whole] == [set(group) for group in over_axes("m", (("x", 8), ("y", 3)), ["x"])]


@pytest.mark.parametrize("axes", [c for n in (1, 2, 3) for c in itertools.combinations("xyz", n)])
def test_device_lists_get_their_axes_back(axes: tuple[str, ...]) -> None:
    listed = from_lists(np.array(list(over_axes("mesh", MESH.axes, axes))))
    assert LAYOUT.named(listed).axes == axes


def test_groups_that_are_no_axes_stay_as_they_are() -> None:
    listed = from_lists(np.arange(48).reshape(16, 3))
    assert LAYOUT.named(listed).axes == ()


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("{replicated}", ((), ())),
        ("{devices=[2,8]<=[16]}", (("axis_0",), ("axis_1", "axis_2"))),
        ("{devices=[4,1,4]<=[2,2,4]T(1,0,2) last_tile_dim_replicate}", (("axis_1", "axis_0"), ())),
        ("{devices=[1,2,8]<=[8,2]T(1,0) last_tile_dims={replicated}}", ((), ("axis_2",))),
    ],
)
def test_gspmd_shardings_on_one_mesh(text: str, dims: tuple[tuple[str, ...], ...]) -> None:
    others = [
        "{devices=[2,8]<=[16]}",
        "{devices=[4,4]<=[2,2,4]T(1,0,2)}",
        "{devices=[1,2,8]<=[8,2]T(1,0) last_tile_dim_replicate}",
    ]
    tilings = [gspmd.parse(one, 16) for one in (*others, text)]
    mesh = gspmd.common_axes(tilings, 16)
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    found = gspmd.axes_of(tilings[-1], mesh) if tilings[-1].rank else ((), ())
    tiles = tilings[-1].tiles or (1, 1)
    assert [int(np.prod([sizes[axis] for axis in axes])) for axes in found] == list(tiles)
    assert len(found) == len(dims)


def test_listed_devices_are_read_in_order() -> None:
    listed = gspmd.parse("{devices=[2,4]0,2,4,6,1,3,5,7}", 8)
    assert listed.radices == gspmd.parse("{devices=[2,4]<=[4,2]T(1,0)}", 8).radices


@pytest.mark.parametrize("text", ["{devices=[2,4]0,3,1,2,4,5,6,7}", "{shard_as 1}", "{devices=[32]<=[32]}"])
def test_odd_gspmd_shardings_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        gspmd.parse(text, 8)


def test_tuple_shardings_are_split() -> None:
    assert gspmd.split_tuple("{{replicated}, {devices=[2,4]<=[8]}}") == ["{replicated}", "{devices=[2,4]<=[8]}"]


@pytest.mark.parametrize(
    ("window", "size", "results", "expected"),
    [
        (Window(3, 1, 1, 1), 8, 8, Halo(1, 1)),
        (Window(3, 2, 0, 1), 8, 4, Halo(0, 1)),
        (Window(2, 2), 8, 4, Halo(0, 0)),
        (Window(5, 1, 2, 2, 1, 2), 8, 8, Halo(2, 6)),
        (Window(64, 1, 63, 0), 8, 8, Halo(63, 0)),
    ],
)
def test_halo_of_a_window(window: Window, size: int, results: int, expected: Halo) -> None:
    assert window.around(8, size, results) == expected


def test_rounds_cover_what_every_device_needs() -> None:
    spans = rounds(8, 8, lambda k: 4 * k, lambda k: 4 * k + 4, 64)
    assert spans == [(0, 8), (4, 8)]


def test_mesh_groups_with_device_order_are_written_out() -> None:
    text = "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x"
    assert expand_device_ids(text) == "replica_groups={{0,1},{2,3}}, x"
    assert expand_device_ids("replica_groups=mesh['a'=2] {'a'}") == "replica_groups=mesh['a'=2] {'a'}"
