"""What a mask of attention says: positions of queries are compared with positions of keys.

A causal mask compares two counts. A sliding window compares their difference with a constant: `q - k < w` and
`k - q > -w` let a query see `w` keys, its own included; with `<=` and `>=` one more.
"""

from collections.abc import Iterable
from typing import Final

from stablecast.lowering.categories import Category
from stablecast.lowering.graph import EXTERNAL, IOTA, Graph

_SEEN: Final = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.convert"})
_UPPER = frozenset({"LT", "LE"})
_LOWER = frozenset({"GT", "GE"})
_WITH_EQUAL = frozenset({"LE", "GE"})
_DEPTH: Final = 6


def is_causal(graph: Graph, nodes: Iterable[int]) -> bool:
    """Whether one of `nodes` compares positions of queries with positions of keys."""
    return any(
        all(_counts(graph, value, _DEPTH) for value in graph.inputs[node]) for node, _ in _compares(graph, nodes)
    )


def window_of(graph: Graph, nodes: Iterable[int]) -> int:
    """How many keys a causal query sees at most by the masks that `nodes` make; 0 where none says so."""
    found: list[int] = []
    for node, direction in _compares(graph, nodes):
        left, right = graph.inputs[node]
        limit, swapped = _constant(graph, right), False
        if limit is None:
            limit, left, swapped = _constant(graph, left), right, True
        if limit is None or not _is_difference(graph, left):
            continue
        upper = (direction in _UPPER) != swapped
        width = (limit if upper else -limit) + int(direction in _WITH_EQUAL)
        if width > 0:
            found.append(width)
    return min(found, default=0)


def _compares(graph: Graph, nodes: Iterable[int]) -> Iterable[tuple[int, str]]:
    for node in nodes:
        op = graph.ops[node]
        direction = str(op.attrs.get("comparison_direction"))
        if op.name == "stablehlo.compare" and direction in _UPPER | _LOWER:
            yield node, direction


def _counts(graph: Graph, value: int, depth: int) -> bool:
    """Whether an integer is made of positions."""
    producer = graph.producer[value]
    if producer == EXTERNAL or not depth:
        return value in graph.positions
    if graph.ops[producer].name == IOTA:
        return True
    if graph.categories[producer] not in (Category.LOOP, Category.GENERATOR):
        return False
    return any(_counts(graph, held, depth - 1) for held in graph.inputs[producer])


def _is_difference(graph: Graph, value: int) -> bool:
    producer = graph.producer[_origin(graph, value)]
    if producer == EXTERNAL or graph.ops[producer].name != "stablehlo.subtract":
        return False
    return all(_counts(graph, held, _DEPTH) for held in graph.inputs[producer])


def _constant(graph: Graph, value: int) -> int | None:
    """The whole number that every element of a value is."""
    return graph.literals.get(_origin(graph, value))


def _origin(graph: Graph, value: int) -> int:
    """The value that is only seen under other extents or types."""
    while graph.producer[value] != EXTERNAL and graph.ops[graph.producer[value]].name in _SEEN:
        value = graph.inputs[graph.producer[value]][0]
    return value
