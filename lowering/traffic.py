"""What a kernel does: bytes over its boundary and arithmetic inside, by what its results demand."""

from dataclasses import dataclass

from stablecast.ir.accounting.values import OpWork
from stablecast.lowering.categories import Category
from stablecast.lowering.graph import Graph
from stablecast.lowering.group import Group

_WHOLE = (Category.MATMUL, Category.CONV)
"""Library kernels compute their whole result, whatever is read of it."""


@dataclass(slots=True)
class Traffic:
    """`reads`: value -> bytes that the kernel reads of it. `written`: value -> bytes; the rest as in `Work`."""

    reads: dict[int, float]
    written: dict[int, float]
    matmul_flops: float = 0
    padded_flops: float = 0
    dilation_flops: float = 0
    vector_flops: float = 0
    transcendentals: float = 0
    modelled: bool = True


def traffic(graph: Graph, group: Group, written: tuple[int, ...], works: dict[int, OpWork]) -> Traffic:
    """Bytes and arithmetic of the kernel `group` that hands on the values `written`.

    `works`: work of nodes that differs from `graph.works` (updates in place). A producer computed inside the kernel
    does only what its consumers read of it: a slice of a sum adds the slice.
    """
    members = group.members
    demand: dict[int, float] = dict.fromkeys(written, 1.0)
    touched: dict[int, float] = {}
    result = Traffic({}, {})
    for node in sorted(members, reverse=True):
        outputs = graph.outputs[node]
        share = max([demand.get(value, 0.0) for value in outputs], default=1.0)
        if graph.categories[node] in _WHOLE:
            share = 1.0
        work = works.get(node) or graph.works[node]
        result.matmul_flops += (work.matmul_flops - work.dilation_flops) * share
        result.padded_flops += (work.padded_flops - work.dilation_flops) * share
        result.dilation_flops += work.dilation_flops * share
        result.vector_flops += work.vector_flops * share
        result.transcendentals += work.transcendentals * share
        result.modelled = result.modelled and work.modelled
        for value, nbytes in zip(graph.inputs[node], work.reads, strict=False):
            if graph.weightless[value]:
                continue
            if graph.producer[value] in members:
                size = graph.types[value].nbytes
                part = share * min(1.0, nbytes / size) if size else share
                demand[value] = min(1.0, demand.get(value, 0.0) + part)
            elif nbytes:
                touched[value] = touched.get(value, 0.0) + nbytes * share
    for value, nbytes in touched.items():
        result.reads[value] = 0.0 if value in graph.near else min(nbytes, max(float(graph.types[value].nbytes), 0.0))
    for value in written:
        if value in graph.near:
            result.written[value] = 0.0
            continue
        node = graph.producer[value]
        work = works.get(node) or graph.works[node]
        position = graph.outputs[node].index(value)
        result.written[value] = work.writes[position] if position < len(work.writes) else graph.types[value].nbytes
    return result


def written_values(graph: Graph, group: Group, needed: set[int]) -> tuple[int, ...]:
    """Results of the kernel that others read (`needed`: values read by some other kernel, or returned)."""
    return tuple(value for root in sorted(group.roots) for value in graph.outputs[root] if value in needed)
