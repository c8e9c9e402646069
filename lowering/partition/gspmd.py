"""Old-style shardings (`{devices=[2,8]<=[16]}`) as axes of one mesh."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stablecast.ir import groups
from stablecast.ir.errors import InputError

Radix = tuple[int, int]
"""Size and stride of one digit of a device id, major to minor in the order in which tiles are laid out."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A sharding of one tensor: `tiles` per dimension, then sizes of the subgroup dimensions.

    `manual_subgroups`: which of these are manual: shapes are one device's along them already; the others replicate.
    `replicated`: every device holds all of it. `manual`: shapes are one device's along all axes.
    """

    tiles: tuple[int, ...] = ()
    subgroups: tuple[int, ...] = ()
    radices: tuple[Radix, ...] = ()
    replicated: bool = False
    manual: bool = False
    manual_subgroups: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.tiles)


@dataclass(frozen=True, slots=True)
class DeviceAxes:
    """Axes of a mesh over all devices, major to minor: `names`, `sizes`, `strides`."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def split_tuple(text: str) -> list[str]:
    """The element shardings of `{{...}, {...}}`; one sharding gives itself."""
    text = text.strip()
    if not text.startswith("{{"):
        return [text]
    parts, depth, start = list[str](), 0, 1
    for index, letter in enumerate(text[1:-1], start=1):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:-1].strip())
    return [part for part in (re.sub(r"/\*.*?\*/", "", part).strip() for part in parts) if part]


def parse(text: str, num_devices: int) -> Tiling:
    """One sharding in HLO's notation; raises `InputError` for a form that has no tiles on a common mesh."""
    body = text.strip().removeprefix("{").removesuffix("}").strip()
    if body.startswith(("replicated", "maximal")) or not body:
        return Tiling(replicated=True)
    if body.startswith("manual"):
        return Tiling(manual=True)
    found = re.match(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))?", body)
    if found is None:
        raise InputError(f"sharding '{text[:80]}' is of no known form", "export the program with Shardy")
    tiles = _numbers(found[1])
    radices = _radices(found, text)
    kinds = _subgroup_kinds(body[found.end() :], text)
    if math.prod(size for size, _ in radices) != math.prod(tiles) or math.prod(tiles) > num_devices:
        raise InputError(f"sharding '{text[:80]}' does not fit {num_devices} devices")
    cut = len(tiles) - len(kinds)
    manual = tuple(place for place, kind in enumerate(kinds) if kind == "manual")
    return Tiling(tiles[:cut], tiles[cut:], radices, manual_subgroups=manual)


def _subgroup_kinds(rest: str, text: str) -> list[str]:
    if "last_tile_dim_replicate" in rest:
        return ["replicated"]
    found = re.search(r"last_tile_dims=\{([^}]*)\}", rest)
    kinds = [kind.strip() for kind in found[1].split(",")] if found else []
    unknown = set(kinds) - {"manual", "replicated"}
    if unknown:
        raise InputError(f"sharding '{text[:80]}' has {unknown.pop()} subgroups", "export the program with Shardy")
    return kinds


def _radices(found: re.Match[str], text: str) -> tuple[Radix, ...]:
    if found[2]:
        dims = _numbers(found[2])
        order = _numbers(found[3]) if found[3] else tuple(range(len(dims)))
    else:
        listed = groups.from_lists([_numbers(found[4] or "0")])
        if listed.ragged:
            raise InputError(f"the device list of sharding '{text[:80]}' is in no regular order")
        dims, order = listed.dims, listed.permutation
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    return tuple((dims[axis], strides[axis]) for axis in order if dims[axis] > 1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def common_axes(tilings: Iterable[Tiling], num_devices: int) -> DeviceAxes:
    """The coarsest mesh on which every tiling is a choice of whole axes.

    Raises `InputError` where there is none: tilings that cut the devices at incompatible places.
    """
    cuts = {1, num_devices}
    for tiling in tilings:
        for size, stride in tiling.radices:
            cuts |= {stride, stride * size}
        cuts |= _tile_cuts(tiling)
    ordered = sorted(cuts, reverse=True)
    for outer, inner in pairwise(ordered):
        if outer % inner:
            raise InputError("the shardings of the module cut its devices at places that no one mesh has")
    sizes = tuple(outer // inner for outer, inner in pairwise(ordered))
    return DeviceAxes(tuple(f"axis_{index}" for index in range(len(sizes))), sizes, tuple(ordered[1:]))


def _tile_cuts(tiling: Tiling) -> set[int]:
    """Strides at which a tile boundary falls inside a radix."""
    cuts: set[int] = set()
    pending = list(tiling.radices)
    for tile in reversed((*tiling.tiles, *tiling.subgroups)):
        while tile > 1 and pending:
            size, stride = pending.pop()
            taken = math.gcd(size, tile)
            if taken not in (size, tile):
                raise InputError("the shardings of the module cut its devices at places that no one mesh has")
            tile //= taken
            if taken < size:
                pending.append((size // taken, stride * taken))
                cuts.add(stride * taken)
    return cuts


def axes_of(tiling: Tiling, mesh: DeviceAxes) -> tuple[tuple[str, ...], ...]:
    """For each dimension of the tensor the axes of `mesh` that split it, major to minor."""
    return _all_axes(tiling, mesh)[: tiling.rank]


def manual_axes_of(tiling: Tiling, mesh: DeviceAxes) -> tuple[str, ...]:
    """The axes along which shapes are one device's already, in the order of `mesh`."""
    if tiling.manual:
        return mesh.names
    groups = _all_axes(tiling, mesh)[tiling.rank :]
    manual = {axis for place in tiling.manual_subgroups for axis in groups[place]}
    return tuple(axis for axis in mesh.names if axis in manual)


def _all_axes(tiling: Tiling, mesh: DeviceAxes) -> tuple[tuple[str, ...], ...]:
    """The axes of each dimension and each subgroup."""
    digits: list[int] = []
    for size, stride in tiling.radices:
        digits += [
            index for index, at in enumerate(mesh.strides) if stride <= at < stride * size and mesh.sizes[index] > 1
        ]
    result: list[tuple[str, ...]] = []
    for tile in (*tiling.tiles, *tiling.subgroups):
        taken: list[str] = []
        while tile > 1:
            index = digits.pop(0)
            tile //= mesh.sizes[index]
            taken.append(mesh.names[index])
        result.append(tuple(taken))
    return tuple(result)


def describe(mesh: DeviceAxes) -> str:
    """The body of an `sdy.mesh` attribute."""
    return ", ".join(f'"{name}"={size}' for name, size in zip(mesh.names, mesh.sizes, strict=True))


def sharding_text(dims: Sequence[Sequence[str]], open_dims: Sequence[int]) -> str:
    """An `#sdy.sharding` over `@mesh`; `open_dims` may be split further."""
    parts: list[str] = []
    for index, axes in enumerate(dims):
        inside = [f'"{axis}"' for axis in axes] + (["?"] if index in open_dims else [])
        parts.append("{" + ", ".join(inside) + "}")
    return f"#sdy.sharding<@mesh, [{', '.join(parts)}]>"
