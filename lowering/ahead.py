"""What a loop's trip, or a step, can do before the rest of it: ops that need only parameters and counters.

Compilers and FSDP gather the next layer's parameters while this one runs; these ops say where that is legal.
"""

from stablecast.ir.dtypes import DTypeKind
from stablecast.ir.types import TensorType
from stablecast.lowering.categories import Category
from stablecast.lowering.graph import EXTERNAL, Graph

_NEVER = (Category.MATMUL, Category.CONV, Category.HERO, Category.CONTROL)


def runs_ahead(graph: Graph, *, loop: bool) -> set[int]:
    """Nodes that need no product of matrices and, in a loop's body, nothing that an earlier trip made but its counters.

    Of a loop's arguments, those that every trip hands on as they are, and single integers that follow from such.
    """
    ready = _free_arguments(graph) if loop else set(graph.arguments)
    carried = set(graph.arguments)
    found: set[int] = set()
    for node, inputs in enumerate(graph.inputs):
        if graph.categories[node] in _NEVER:
            continue
        if all(value in ready or (graph.producer[value] == EXTERNAL and value not in carried) for value in inputs):
            found.add(node)
            ready.update(graph.outputs[node])
    return found


def _free_arguments(graph: Graph) -> set[int]:
    given = dict(zip(graph.arguments, graph.returns, strict=False))
    free = {value for value, returned in given.items() if value == returned}
    counters = {value for value in given if _is_counter(graph, value)} - free
    while True:
        lost = {value for value in counters if not _follows(graph, given[value], free | counters)}
        if not lost:
            return free | counters
        counters -= lost


def _is_counter(graph: Graph, value: int) -> bool:
    kind = graph.types[value]
    return isinstance(kind, TensorType) and kind.elements == 1 and kind.dtype.kind in (DTypeKind.INT, DTypeKind.UINT)


def _follows(graph: Graph, value: int, known: set[int]) -> bool:
    """Whether `value` is worked out from `known` values and constants alone, all of them single integers."""
    producer = graph.producer[value]
    if producer == EXTERNAL:
        return value in known or value not in graph.arguments
    return _is_counter(graph, value) and all(_follows(graph, one, known) for one in graph.inputs[producer])
