"""SCALE-Sim's topology CSV files, read leniently."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from stablecast.backends.systolic.layers import Layer, LayerKind
from stablecast.ir.errors import InputError

_CONV_FIELDS = (
    "IFMAP height",
    "IFMAP width",
    "filter height",
    "filter width",
    "channels",
    "number of filters",
    "stride",
)
_GEMM_FIELDS = ("M", "N", "K")
_EXTRA = re.compile(r"[^a-z0-9]+")
_EXTRA_FIELDS = {
    "batch": ("batch",),
    "batchsize": ("batch",),
    "stridew": ("stride_w",),
    "stridewidth": ("stride_w",),
    "pad": ("pad_h", "pad_w"),
    "padding": ("pad_h", "pad_w"),
    "padh": ("pad_h",),
    "paddingheight": ("pad_h",),
    "padw": ("pad_w",),
    "paddingwidth": ("pad_w",),
    "dilation": ("dilation_h", "dilation_w"),
    "dilationh": ("dilation_h",),
    "dilationheight": ("dilation_h",),
    "dilationw": ("dilation_w",),
    "dilationwidth": ("dilation_w",),
    "groups": ("groups",),
}
_FROM_ZERO = ("pad_h", "pad_w")


@dataclass(frozen=True, slots=True)
class Topology:
    """Layers in order, and what was passed over or is not part of SCALE-Sim's format."""

    name: str
    kind: LayerKind
    layers: tuple[Layer, ...]
    notes: tuple[str, ...] = ()


def read_topology(path: str | Path, kind: LayerKind | None = None) -> Topology:
    """Read a topology; `kind` None takes it from the header (columns M, N, K make it gemm).

    Conv rows: name, ifmap h, w, filter h, w, channels, filters, stride[, N:M]; gemm rows: name, M, N, K[, N:M]. The
    trailing comma may be missing, rows may be blank or hold a title only. Columns past these are read when the header
    names them: batch, stride w, padding, dilation, groups (h and w apart if wished); any other is noted and passed
    over. Raises InputError with file, line and field.
    """
    path = Path(path)
    rows = _rows(path)
    if not rows:
        raise InputError(f"{path}: no rows", "allowed: a header line, then one layer a line")
    header = rows[0][1]
    if kind is None:
        kind = "gemm" if [_plain(cell) for cell in header[1:4]] == ["m", "n", "k"] else "conv"
    reader = _Reader(path, kind, header)
    if len(header) > 3 and all(cell.isdecimal() for cell in header[1:4]):
        reader.notes.append(f"line {rows[0][0]} holds numbers but is taken as the header, as SCALE-Sim does")
    layers = [layer for number, cells in rows[1:] if (layer := reader.layer(number, cells)) is not None]
    if not layers:
        raise InputError(f"{path}: no layer below the header", "allowed: a header line, then one layer a line")
    return Topology(path.stem, kind, tuple(layers), tuple(reader.notes))


def depthwise_as_scalesim(layer: Layer) -> tuple[Layer, ...]:
    """SCALE-Sim's reading of a layer with "DP" in its name: one layer per channel, each with all filters."""
    if "DP" not in layer.name:
        return (layer,)
    return tuple(replace(layer, name=f"{layer.name}Channel_{channel}", channels=1) for channel in range(layer.channels))


def depthwise(layer: Layer) -> Layer:
    """True depthwise form of a layer with "DP" in its name: one group per channel, `filters` filters in each."""
    if "DP" not in layer.name or layer.groups > 1:
        return layer
    return replace(layer, groups=layer.channels, filters=layer.filters * layer.channels)


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}", "give a topology CSV file") from error
    lines = text.splitlines()
    tabs = bool(lines) and "\t" in lines[0] and "," not in lines[0]
    found: list[tuple[int, list[str]]] = []
    for number, cells in enumerate(csv.reader(lines, delimiter="\t" if tabs else ","), start=1):
        stripped = [cell.strip() for cell in cells]
        while stripped and not stripped[-1]:
            stripped.pop()
        if stripped:
            found.append((number, stripped))
    return found


def _plain(cell: str) -> str:
    return _EXTRA.sub("", cell.lower())


class _Reader:
    """Reads the rows of one file; collects notes."""

    def __init__(self, path: Path, kind: LayerKind, header: list[str]) -> None:
        self.path = path
        self.kind = kind
        self.fields = _GEMM_FIELDS if kind == "gemm" else _CONV_FIELDS
        self.extra = header[1 + len(self.fields) :]
        self.notes: list[str] = []

    def layer(self, number: int, cells: list[str]) -> Layer | None:
        """The layer in `cells`; None for a title."""
        if len([cell for cell in cells if cell]) == 1:
            self.notes.append(f"line {number}: {next(filter(None, cells))!r} has no numbers and is passed over")
            return None
        if len(cells) < 1 + len(self.fields):
            missing = self.fields[len(cells) - 1]
            raise InputError(f"{self.path}:{number}: no {missing}", self._shape())
        values = [self._number(number, name, cells[at], 1) for at, name in enumerate(self.fields, start=1)]
        where = f"{self.path}:{number}"
        if self.kind == "gemm":
            m, n, k = values
            layer = Layer.gemm(cells[0], m, n, k, where=where)
        else:
            ifmap_h, ifmap_w, filter_h, filter_w, channels, filters, stride = values
            layer = Layer(
                cells[0], ifmap_h, ifmap_w, filter_h, filter_w, channels, filters, stride, stride, where=where
            )
        layer = self._extras(layer, number, cells[1 + len(self.fields) :])
        self._check_window(layer, number)
        return layer

    def _shape(self) -> str:
        return "allowed: name, " + ", ".join(self.fields) + "[, N:M]"

    def _number(self, number: int, field: str, cell: str, least: int) -> int:
        try:
            value = int(cell)
        except ValueError:
            value = least - 1
        if value < least:
            raise InputError(f"{self.path}:{number}: {field} = {cell!r}", f"allowed: whole numbers from {least}")
        return value

    def _extras(self, layer: Layer, number: int, cells: list[str]) -> Layer:
        for at, cell in enumerate(cells):
            name = self.extra[at] if at < len(self.extra) else ""
            fields = _EXTRA_FIELDS.get(_plain(name))
            if fields is not None and cell:
                value = self._number(number, name, cell, 0 if fields[0] in _FROM_ZERO else 1)
                layer = replace(layer, **dict.fromkeys(fields, value))
            elif ":" in cell:
                n, m = self._ratio(number, cell)
                layer = replace(layer, sparse_n=n, sparse_m=m)
            elif cell:
                note = f"column {name!r} is passed over" if name else "columns past the header are passed over"
                if note not in self.notes:
                    self.notes.append(note)
        return layer

    def _ratio(self, number: int, cell: str) -> tuple[int, int]:
        parts = [part.strip() for part in cell.split(":")]
        if len(parts) == 2 and all(part.isdecimal() for part in parts):
            n, m = int(parts[0]), int(parts[1])
            if 1 <= n <= m:
                return n, m
        raise InputError(f"{self.path}:{number}: sparsity = {cell!r}", "allowed: N:M with 1 <= N <= M, such as 2:4")

    def _check_window(self, layer: Layer, number: int) -> None:
        for side, size, pad, dilation, window in (
            ("height", layer.ifmap_h, layer.pad_h, layer.dilation_h, layer.filter_h),
            ("width", layer.ifmap_w, layer.pad_w, layer.dilation_w, layer.filter_w),
        ):
            reach = (window - 1) * dilation + 1
            if reach > size + 2 * pad:
                raise InputError(
                    f"{self.path}:{number}: filter {side} = {reach} is larger than the input's {size + 2 * pad}",
                    f"allowed: 1 to {size + 2 * pad}",
                )
        if layer.channels % layer.groups or layer.filters % layer.groups:
            raise InputError(
                f"{self.path}:{number}: groups = {layer.groups}",
                f"allowed: divisors of {layer.channels} channels and {layer.filters} filters",
            )
