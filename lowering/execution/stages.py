"""Kernels that XLA:GPU launches in two: long reductions, and products whose contraction is split."""

from dataclasses import replace

from stablecast.ir.kernels import KernelRow
from stablecast.lowering.categories import Category
from stablecast.lowering.graph import Graph
from stablecast.lowering.group import Group
from stablecast.lowering.reductions import partial_results, roots_in_two_kernels

_PARTIAL_BYTES = 4


def launches_of_group(graph: Graph, group: Group) -> int:
    """Launches of the kernel `group`: a second one adds up partial results."""
    if group.split > 1:
        return 1 if _added_by_reader(graph, group) else 2
    return 2 if roots_in_two_kernels(graph, group.roots) else 1


def _added_by_reader(graph: Graph, group: Group) -> bool:
    """Whether one element-wise op alone reads a split product: it adds the parts as it reads them."""
    consumers = graph.consumers_of(group.roots[0])
    returned = set(graph.returns)
    alone = len(consumers) == 1 and returned.isdisjoint(graph.outputs[group.roots[0]])
    return alone and graph.categories[consumers[0]] is Category.LOOP


def with_partial_results(graph: Graph, group: Group, row: KernelRow) -> KernelRow:
    """`row` with its partial results, in f32, written and read again."""
    results = sum(partial_results(graph.ops[node]) for node in roots_in_two_kernels(graph, group.roots))
    if group.split > 1:
        results = group.split * row.elems
    partial = _PARTIAL_BYTES * results
    if not partial:
        return row
    return replace(row, bytes_read=row.bytes_read + partial, bytes_written=row.bytes_written + partial)
