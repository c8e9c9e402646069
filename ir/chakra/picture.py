"""A rank's graph as an SVG picture, layers from top to bottom."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path

from stablecast.ir.chakra.schema import Node
from stablecast.ir.chakra.show import colour_of, open_rank, shorten, summary_of

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 34, 14, 34, 16
_PASSES = 3


def trace_svg(source: str | Path, rank: int | None = None, *, limit: int | None = 500) -> str:
    """A rank's graph as SVG: full lines are data dependencies, dashed ones control dependencies only.

    A node stands below all that it waits for; within a layer nodes stand near what they wait for. Only the first
    `limit` nodes are drawn (all where None). Raises `InputError` where the trace cannot be read.
    """
    reader = iter(open_rank(source, rank))
    nodes = list(islice(reader, limit))
    rest = sum(1 for _ in reader)
    places = _places(nodes)
    columns = max((column for column, _ in places.values()), default=0) + 1
    layers = max((layer for _, layer in places.values()), default=0) + 1
    width = 2 * _MARGIN + columns * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + layers * (_HEIGHT + _GAP_Y) - _GAP_Y + (20 if rest else 0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="10">',
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#666"/></marker>',
    ]
    for node in nodes:
        lines += _edges(node, places)
    lines += (_box(node, places[node.id]) for node in nodes)
    if rest:
        lines.append(f'<text x="{_MARGIN}" y="{height - _MARGIN // 2}">{rest:,} more nodes</text>')
    return "\n".join([*lines, "</svg>"])


def _places(nodes: Sequence[Node]) -> dict[int, tuple[int, int]]:
    """(column, layer) of each node."""
    depth: dict[int, int] = {}
    for node in nodes:
        depth[node.id] = 1 + max((depth[dep] for dep in (*node.data_deps, *node.ctrl_deps) if dep in depth), default=-1)
    layers: dict[int, list[int]] = {}
    for node_id, layer in depth.items():
        layers.setdefault(layer, []).append(node_id)
    waits = {node.id: [dep for dep in (*node.data_deps, *node.ctrl_deps) if dep in depth] for node in nodes}
    column = {node_id: at for held in layers.values() for at, node_id in enumerate(held)}
    for _ in range(_PASSES):
        for layer in sorted(layers):
            held = sorted(layers[layer], key=lambda node_id: (_middle(waits[node_id], column), column[node_id]))
            column.update({node_id: at for at, node_id in enumerate(held)})
    return {node_id: (column[node_id], depth[node_id]) for node_id in depth}


def _middle(deps: Sequence[int], column: Mapping[int, int]) -> float:
    return sum(column[dep] for dep in deps) / len(deps) if deps else 0.0


def _corner(place: tuple[int, int]) -> tuple[int, int]:
    return _MARGIN + place[0] * (_WIDTH + _GAP_X), _MARGIN + place[1] * (_HEIGHT + _GAP_Y)


def _edges(node: Node, places: Mapping[int, tuple[int, int]]) -> list[str]:
    x, y = _corner(places[node.id])
    lines: list[str] = []
    for dep in dict.fromkeys((*node.data_deps, *node.ctrl_deps)):
        if dep not in places or dep == node.id:
            continue
        left, top = _corner(places[dep])
        start, end = (left + _WIDTH // 2, top + _HEIGHT), (x + _WIDTH // 2, y)
        bend = max(12, (end[1] - start[1]) // 2)
        dashes = "" if dep in node.data_deps else ' stroke-dasharray="4 3"'
        lines.append(
            f'<path d="M{start[0]} {start[1]}C{start[0]} {start[1] + bend} {end[0]} {end[1] - bend} {end[0]} {end[1]}" '
            f'fill="none" stroke="#666"{dashes} marker-end="url(#tip)"/>'
        )
    return lines


def _box(node: Node, place: tuple[int, int]) -> str:
    x, y = _corner(place)
    name, what = escape(shorten(f"{node.id} {node.name}", 32)), escape(shorten(summary_of(node), 34))
    return (
        f'<g><title>{escape(node.name)}</title><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="3" '
        f'fill="{colour_of(node)}" stroke="#999"/><text x="{x + 5}" y="{y + 14}">{name}</text>'
        f'<text x="{x + 5}" y="{y + 27}" fill="#555">{what}</text></g>'
    )
