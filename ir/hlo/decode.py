"""Shapes and attributes of HLO text as plain values."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np

from stablecast.ir import groups
from stablecast.ir.attributes import ConvDims, Dense, DotDims, GatherDims, ScatterDims
from stablecast.ir.dtypes import DTypeKind, dtype
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups
from stablecast.ir.hlo.syntax import split
from stablecast.ir.types import TensorType

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_PLACED = re.compile(r"[a-z][a-z0-9]*\[[^\]]*\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_OFF_CHIP = ("0", "5")
"""Memory spaces of TPU layouts that are not on chip: device memory and the host's."""
_DTYPES = {"pred": "i1", "opaque": "token"}
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"mesh\[(?P<axes>[^\]]*)\] ?\{(?P<along>[^}]*)\}$")
SMALL = 64
"""Constants of up to this many elements keep their values."""


@lru_cache(maxsize=65536)
def leaves(shape: str) -> tuple[TensorType, ...]:
    """The tensors in a shape, those of nested tuples in order; layouts and memory spaces are dropped."""
    return tuple(_array(match[1], match[2]) for match in _ARRAY.finditer(shape))


@lru_cache(maxsize=65536)
def on_chip(shape: str) -> tuple[int, ...]:
    """Which of the `leaves` of a shape lie in memory on chip, as layouts of TPU compilers say."""
    if "S(" not in shape:
        return ()
    spaces = [_SPACE.search(match[1] or "") for match in _PLACED.finditer(shape)]
    return tuple(place for place, space in enumerate(spaces) if space and space[1] not in _OFF_CHIP)


@lru_cache(maxsize=65536)
def _array(name: str, dims: str) -> TensorType:
    try:
        sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",")) if dims else ()
    except ValueError:
        raise InputError(f"'{name}[{dims}]' is no shape", "is the text damaged?") from None
    return TensorType(sizes, dtype(_dtype(name)))


def _dtype(name: str) -> str:
    if name in _DTYPES:
        return _DTYPES[name]
    if name[0] == "s" and name[1:].isdigit():
        return "i" + name[1:]
    if name[0] == "u" and name[1:].isdigit():
        return "u" + "i" + name[1:]
    return name


def parts(shape: str) -> list[str]:
    """The shapes that a tuple shape holds; a shape that is no tuple is its only part."""
    return [part.strip() for part in split(shape[1:-1])] if shape.startswith("(") else [shape]


def ints(text: str) -> tuple[int, ...]:
    """`{1,0}` or `1,0`."""
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def dot_dims(attrs: Mapping[str, str]) -> DotDims:
    """The dimension numbers of a dot."""
    names = ("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims")
    return DotDims(*(ints(attrs.get(name, "")) for name in names))


def precision(attrs: Mapping[str, str]) -> tuple[str, ...]:
    """`operand_precision={highest,default}` in capitals, as StableHLO writes them."""
    return tuple(part.strip().upper() for part in attrs.get("operand_precision", "").strip("{}").split(",") if part)


def conv_dims(labels: str) -> ConvDims:
    """`b01f_o01i->b01f` as dimension numbers. Raises `InputError` where it is none."""
    match = re.fullmatch(r"(\w+)_(\w+)->(\w+)", labels)
    if match is None:
        raise InputError(f"'{labels}' are no dimension labels of a convolution")
    lhs, rhs, out = match.groups()
    spatial = [[text.index(str(axis)) for axis in range(len(text) - 2)] for text in (lhs, rhs, out)]
    return ConvDims(
        lhs.index("b"),
        lhs.index("f"),
        tuple(spatial[0]),
        rhs.index("i"),
        rhs.index("o"),
        tuple(spatial[1]),
        out.index("b"),
        out.index("f"),
        tuple(spatial[2]),
    )


def window(text: str, rank: int) -> dict[str, Any]:
    """`{size=3x3 stride=2x2 pad=1_1x1_1 lhs_dilate=.. rhs_dilate=..}`: one entry for each of `rank` dimensions."""
    fields = dict(part.split("=", 1) for part in text.strip("{}").split() if "=" in part)

    def each(name: str, default: int) -> tuple[int, ...]:
        return tuple(int(size) for size in fields[name].split("x")) if name in fields else (default,) * rank

    pads = fields.get("pad")
    padding = tuple(tuple(int(n) for n in pair.split("_")) for pair in pads.split("x")) if pads else ((0, 0),) * rank
    return {
        "size": each("size", 1),
        "stride": each("stride", 1),
        "padding": padding,
        "lhs_dilation": each("lhs_dilate", 1),
        "rhs_dilation": each("rhs_dilate", 1),
        "reversal": each("rhs_reversal", 0),
    }


def gather_dims(attrs: Mapping[str, str]) -> GatherDims:
    """The dimension numbers of a gather."""
    return GatherDims(
        ints(attrs.get("offset_dims", "")),
        ints(attrs.get("collapsed_slice_dims", "")),
        ints(attrs.get("operand_batching_dims", "")),
        ints(attrs.get("start_indices_batching_dims", "")),
        ints(attrs.get("start_index_map", "")),
        int(attrs.get("index_vector_dim", 0)),
    )


def scatter_dims(attrs: Mapping[str, str]) -> ScatterDims:
    """The dimension numbers of a scatter."""
    return ScatterDims(
        ints(attrs.get("update_window_dims", "")),
        ints(attrs.get("inserted_window_dims", "")),
        ints(attrs.get("input_batching_dims", "")),
        ints(attrs.get("scatter_indices_batching_dims", "")),
        ints(attrs.get("scatter_dims_to_operand_dims", "")),
        int(attrs.get("index_vector_dim", 0)),
    )


@lru_cache(maxsize=4096)
def replica_groups(text: str) -> Groups | None:
    """Groups in any of the four forms that HLO has; None for `{}`, which stands for all devices."""
    iota = _IOTA.match(text)
    if iota is not None:
        shape, dims = ints(iota[1]), ints(iota[2])
        order = ints(iota[3]) if iota[3] else tuple(range(len(dims)))
        return Groups(shape[0], shape[1] if len(shape) > 1 else 1, dims, order)
    mesh = _MESH.match(text)
    if mesh is not None:
        axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh["axes"])]
        found = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh["along"])
        return groups.over_parts("mesh", axes, [(name, (int(a), int(b)) if b else None) for name, a, b in found])
    rows = [ints(row) for row in re.findall(r"\{([\d,\s]+)\}", text)]
    if not rows:
        return None
    width = max(map(len, rows))
    return groups.from_lists(np.array([row + (-1,) * (width - len(row)) for row in rows]))


def pairs(text: str) -> tuple[tuple[int, int], ...]:
    """`{{0,1},{1,0}}` as source and target of each pair."""
    numbers = ints(text)
    return tuple(zip(numbers[::2], numbers[1::2], strict=False))


def literal(text: str, kind: TensorType) -> Dense:
    """A constant; only scalars and small tensors keep their values."""
    if kind.elements > SMALL or "..." in text:
        return Dense(None, splat=False)
    words = re.findall(r"[^\s,{}]+", text)
    if kind.elements != len(words) or kind.dtype.is_complex:
        return Dense(None, splat=False)
    values = tuple(_number(word, kind) for word in words)
    return Dense(values[:1], splat=True) if len(set(values)) == 1 else Dense(values, splat=False)


def _number(word: str, kind: TensorType) -> Any:
    if kind.dtype.kind is DTypeKind.BOOL:
        return word in ("true", "1")
    try:
        return float(word) if kind.dtype.is_float else int(word)
    except ValueError:
        return word


@lru_cache(maxsize=4096)
def backend_config(text: str) -> Mapping[str, Any]:
    """The backend configuration as JSON, printed plainly or as a quoted string; empty where it is none."""
    try:
        held: Any = json.loads(text)
        held = json.loads(held) if isinstance(held, str) else held
    except ValueError:
        return {}
    return cast("dict[str, Any]", held) if isinstance(held, dict) else {}


def nested(held: Mapping[str, Any], *path: str) -> Any:
    """The value under `path`, None where a key is absent."""
    found: Any = held
    for name in path:
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return found


def numbers(values: Sequence[Any] | None) -> tuple[int, ...]:
    """`["1", "0"]` as integers, as JSON of 64-bit protocol fields writes them."""
    return tuple(int(value) for value in values or ())
