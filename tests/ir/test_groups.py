"""Replica groups by arithmetic agree with the lists they stand for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups, all_devices, from_lists, named, over_axes


@pytest.mark.parametrize(
    ("table", "form"),
    [
        ([[0, 1, 2, 3]], "[1,4]<=[4]"),
        ([[0, 2], [1, 3]], "[2,2]<=[2,2]T(1,0)"),
        ([[0], [1]], "[2,1]<=[2]"),
        ([[0, 4, 1, 5], [2, 6, 3, 7]], "[2,4]<=[2,4]T(1,0)"),
        ([[0, 3], [1, 2]], "{{0,3},{1,2}}"),
        ([[0, 1, -1], [2, 3, 4]], "{{0,1},{2,3,4}}"),
    ],
)
def test_lists_become_their_canonical_form(table: list[list[int]], form: str) -> None:
    groups = from_lists(table)
    assert str(groups) == form
    assert [list(group) for group in groups] == [[member for member in row if member >= 0] for row in table]


@settings(deadline=None)
@given(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4), st.randoms())
def test_groups_over_mesh_axes_are_the_transposed_device_array(sizes: list[int], random: object) -> None:
    names = [f"axis{index}" for index in range(len(sizes))]
    along = [name for name in names if random.random() < 0.6] or names[:1]  # type: ignore[attr-defined]
    groups = over_axes("mesh", list(zip(names, sizes, strict=True)), along)
    inner = [names.index(name) for name in along]
    order = [axis for axis in range(len(sizes)) if axis not in inner] + inner
    devices = np.arange(np.prod(sizes)).reshape(sizes).transpose(order).reshape(groups.count, groups.size)
    assert [list(group) for group in groups] == devices.tolist()
    for rank in range(groups.num_devices):
        assert rank in groups.members(rank)
    assert [list(group) for group in from_lists(devices)] == devices.tolist()


def test_membership_costs_no_list_of_devices() -> None:
    groups = over_axes("mesh", [("data", 16384), ("model", 8)], ["data"])
    assert groups.size == 16384
    assert groups.count == 8
    assert groups.members(131071)[-1] == 131071


def test_unknown_axis_and_foreign_device_are_errors() -> None:
    with pytest.raises(InputError, match="no axis 'expert'"):
        over_axes("mesh", [("data", 2)], ["expert"])
    with pytest.raises(InputError, match="device 4 is in no replica group"):
        all_devices(4).members(4)
    with pytest.raises(InputError, match="device 9"):
        Groups(2, 2, ragged=((0, 1), (2, 3))).members(9)


@settings(deadline=None)
@given(st.permutations([("a", 2), ("b", 3), ("c", 1), ("d", 4)]), st.integers(1, 4), st.data())
def test_named_groups_are_found_from_their_iota_form(
    axes: list[tuple[str, int]], count: int, data: st.DataObject
) -> None:
    along = data.draw(st.permutations([name for name, _ in axes]))[:count]
    meant = over_axes("mesh", axes, along)
    plain = from_lists(np.array([list(row) for row in meant]))
    found = named(plain, "mesh", axes)
    assert list(found) == list(meant)
    assert plain.layout == meant.layout
    if meant.size > 1:
        assert set(found.axes) == {name for name in along if dict(axes)[name] > 1}
