"""Reductions as GPU kernels do them: along rows or columns, in one kernel or two."""

import math
from collections.abc import Sequence

from stablecast.ir.program import Op
from stablecast.ir.types import TensorType
from stablecast.lowering.categories import EXPENSIVE, Category
from stablecast.lowering.graph import EXTERNAL, Graph

ROW_LIMIT, COLUMN_LIMIT = 16384, 4096
"""Elements that XLA:GPU folds in one kernel without atomics (`ReductionDimensionRaceFreeBound`): 1024 threads of 16
along a row, 32 of 128 down a column. Longer ones are cut in two kernels (`TreeReductionRewriter`)."""
CHAIN_DEPTH = 8


def reduced_dims(op: Op) -> tuple[int, ...]:
    """The dimensions that `op` folds, without those of size 1."""
    kind = op.operand_types[0]
    if not isinstance(kind, TensorType):
        return ()
    return tuple(dim for dim in op.attrs.get("dimensions", ()) if kind.shape[dim] != 1)


def is_row_reduction(op: Op) -> bool:
    """Whether the folded dimensions are the last ones: every row of memory gives one result."""
    kind = op.operand_types[0]
    if not isinstance(kind, TensorType):
        return False
    last = [dim for dim, size in enumerate(kind.shape) if size != 1]
    dims = reduced_dims(op)
    return bool(dims) and tuple(last[-len(dims) :]) == dims


def folded(op: Op) -> int:
    """Elements that one result is folded from."""
    kind = op.operand_types[0]
    return math.prod(kind.shape[dim] for dim in reduced_dims(op)) if isinstance(kind, TensorType) else 1


def takes_two_kernels(op: Op) -> bool:
    """Whether a GPU folds first to some partial results, and these in a second kernel."""
    return folded(op) > (ROW_LIMIT if is_row_reduction(op) else COLUMN_LIMIT)


def partial_results(op: Op) -> int:
    """Partial results between the two kernels: about the root of what is folded, for each result."""
    return op.result_types[0].elements * math.isqrt(folded(op))


def dear_chain(graph: Graph, node: int) -> bool:
    """Whether row reduction `node` folds transcendentals of another reduction over the same rows (softmax's sum).

    Compilers store such a sum rather than compute the whole chain wherever it is used.
    """
    rows = graph.types[graph.outputs[node][0]].elements
    stack = [(value, CHAIN_DEPTH, False) for value in graph.inputs[node]]
    while stack:
        value, depth, dear = stack.pop()
        producer = graph.producer[value]
        if producer == EXTERNAL or not depth:
            continue
        kind = graph.categories[producer]
        if kind is Category.REDUCE and graph.types[graph.outputs[producer][0]].elements == rows:
            if dear:
                return True
        elif kind in (Category.LOOP, Category.GENERATOR):
            dear = dear or graph.ops[producer].name in EXPENSIVE
            stack += [(held, depth - 1, dear) for held in graph.inputs[producer]]
    return False


def meets_mask(graph: Graph, node: int) -> bool:
    """Whether what row reduction `node` folded is next handed out by a mask that it was not folded from.

    The gradient of a maximum does that: to the places that hold it. XLA:GPU then ends the kernel at the reduction,
    where it goes on for softmax and normalisations, whose sums meet again what they were folded from.
    """
    source = graph.inputs[node][0]
    size = graph.types[source].elements
    own = {source, *(graph.inputs[graph.producer[source]] if graph.producer[source] != EXTERNAL else ())}
    stack = [(value, CHAIN_DEPTH) for value in graph.outputs[node]]
    while stack:
        value, depth = stack.pop()
        for consumer in graph.consumers[value] if depth else ():
            if graph.categories[consumer] not in (Category.LOOP, Category.GENERATOR):
                continue
            rows = [held for held in graph.inputs[consumer] if held != value and graph.types[held].elements == size]
            if any(_is_mask(graph, held) and held not in own for held in rows):
                return True
            if not rows:
                stack += [(made, depth - 1) for made in graph.outputs[consumer]]
    return False


def _is_mask(graph: Graph, value: int) -> bool:
    """Whether `value` is a comparison, or one written as numbers."""
    producer = graph.producer[value]
    if producer == EXTERNAL:
        return False
    if graph.ops[producer].name == "stablehlo.convert":
        producer = graph.producer[graph.inputs[producer][0]]
    return producer != EXTERNAL and graph.ops[producer].name == "stablehlo.compare"


def roots_in_two_kernels(graph: Graph, roots: Sequence[int]) -> list[int]:
    """The reductions among `roots` that take two kernels."""
    return [node for node in roots if graph.categories[node] is Category.REDUCE and takes_two_kernels(graph.ops[node])]
