"""TorchInductor: loops inlined into their readers, then fused; products and convolutions are library calls."""

from stablecast.ir.scopes import parse_scope
from stablecast.ir.types import TensorType
from stablecast.lowering.categories import Category
from stablecast.lowering.execution.plan import Plan, plan_pass
from stablecast.lowering.fusion import INDUCTOR_RULES, Grouping
from stablecast.lowering.graph import EXTERNAL, Graph
from stablecast.lowering.multi_output import INDUCTOR_MERGES
from stablecast.lowering.reductions import is_row_reduction

GROUP, FUSE = "inductor-inlining", "inductor-fusion"
REUSED_READS, REUSED_OPS, MOST_READS = 4, 30, 8
"""`realize_reads_threshold`, `realize_opcount_threshold` and `realize_acc_reads_threshold` of TorchInductor."""
_LOOPS = (Category.LOOP, Category.GENERATOR)
_HOOKED = "c10d."
_COPY_OUT = "fsdp.split_with_sizes_copy"
_COMPLEX = "stablehlo.complex"
_PARTS = frozenset({"stablehlo.slice", "stablehlo.reshape"})
_HEAVY = frozenset({"stablehlo.exponential", "stablehlo.logistic"})
"""Ops that TorchInductor does not compute twice on a CPU."""


@plan_pass(GROUP, "element-wise ops are computed in every reader, unless that reads much or is dear")
def group(plan: Plan) -> None:
    scattered, complexes = _scattered_rows(plan.graph), complex_ops(plan.graph)
    kept = stored(plan.graph, cpu=plan.target.platform == "cpu") | _saved_rows(plan.graph, scattered)
    kept |= complexes | _pairs(plan.graph) | _copied_out(plan.graph)
    plan.groups = Grouping(plan.graph, plan.groups, plan.claimed, INDUCTOR_RULES, kept).run()
    for root in scattered | complexes:
        if root in plan.groups:
            plan.groups[root].fusible = False


def stored(graph: Graph, *, cpu: bool = False) -> set[int]:
    """Element-wise nodes whose results are written: those that read much, and those read twice that read or do more
    than a little."""
    found: set[int] = set()
    reads: dict[int, frozenset[int]] = {}
    ops: dict[int, int] = {}
    heavy: dict[int, bool] = {}
    for node, live in enumerate(graph.live):
        if not live or graph.categories[node] not in _LOOPS:
            continue
        held, count, dear = frozenset[int](), 1, graph.ops[node].name in _HEAVY
        for value in graph.inputs[node]:
            producer = graph.producer[value]
            if producer != EXTERNAL and producer in reads and producer not in found:
                held, count, dear = held | reads[producer], count + ops[producer], dear or heavy[producer]
            elif not graph.weightless[value]:
                held |= {value}
        reads[node], ops[node], heavy[node] = held, count, dear
        readers = sum(len(graph.consumers[value]) for value in graph.outputs[node])
        much = len(held) > REUSED_READS or count > REUSED_OPS or (cpu and dear)
        if len(held) > MOST_READS or (readers > 1 and much):
            found.add(node)
    return found


def complex_ops(graph: Graph) -> set[int]:
    """Ops that compute complex numbers, which TorchInductor generates no code for: kernels of PyTorch's own.

    `lowering.unsupported_input_tensor`: "does not support code generation for complex operators". Complex numbers from
    pairs of real ones, and back, are views.
    """
    return {
        node
        for node, live in enumerate(graph.live)
        if live
        and graph.categories[node] is Category.LOOP
        and graph.ops[node].name != _COMPLEX
        and _is_complex(graph, node)
    }


def _is_complex(graph: Graph, node: int) -> bool:
    kinds = [graph.types[value] for value in graph.outputs[node]]
    return any(isinstance(kind, TensorType) and kind.dtype.is_complex for kind in kinds)


def _pairs(graph: Graph) -> set[int]:
    """Loops whose results are read as complex numbers, through the slices that take their parts: they are stored."""
    found: set[int] = set()
    for node, live in enumerate(graph.live):
        if not live or graph.ops[node].name != _COMPLEX:
            continue
        for value in graph.inputs[node]:
            producer = graph.producer[value]
            while producer != EXTERNAL and graph.ops[producer].name in _PARTS:
                producer = graph.producer[graph.inputs[producer][0]]
            if producer != EXTERNAL and graph.categories[producer] is Category.LOOP:
                found.add(producer)
    return found


def _copied_out(graph: Graph) -> set[int]:
    """Parameters that FSDP2's hook copies out of the gathered buffer, before TorchInductor's graph reads them."""
    return {
        node
        for node, kind in enumerate(graph.categories)
        if kind is Category.LOOP and graph.live[node] and parse_scope(graph.scopes[node]).op == _COPY_OUT
    }


def _scattered_rows(graph: Graph) -> set[int]:
    """Reductions of channels-last tensors over groups of channels: their loops nest in those of no reader.

    Convolutions make channels-last tensors, and element-wise ops keep the order.
    """
    last: set[int] = set()
    found: set[int] = set()
    for node, kind in enumerate(graph.categories):
        values = [value for value in graph.inputs[node] if value in last]
        if kind is Category.CONV:
            last.update(graph.outputs[node])
        elif not values:
            continue
        elif kind is Category.LOOP and graph.ops[node].name != "stablehlo.transpose":
            last.update(graph.outputs[node])
        elif kind is Category.REDUCE and is_row_reduction(graph.ops[node]):
            found.add(node)
    return found


def _saved_rows(graph: Graph, scattered: set[int]) -> set[int]:
    """Element-wise results of scattered rows that more than one op reads, which the backward pass finds stored."""
    found: set[int] = set()
    rows = {value for node in scattered for value in graph.outputs[node]}
    for node, kind in enumerate(graph.categories):
        if kind is Category.LOOP and graph.live[node] and not rows.isdisjoint(graph.inputs[node]):
            rows.update(graph.outputs[node])
            if len(graph.consumers_of(node)) > 1:
                found.add(node)
    return found


@plan_pass(FUSE, "kernels over the same rows become one: vertically, then horizontally where they share a tensor")
def fuse(plan: Plan) -> None:
    merger = plan.merger(INDUCTOR_MERGES, graph_breaks(plan.graph))
    merger.into_consumers()
    merger.siblings()


def graph_breaks(graph: Graph) -> list[int]:
    """Collectives that hooks of FSDP and DDP start: no part of TorchInductor's graphs, as functional ones are.

    So a layer under FSDP2 is a graph forward and one backward.
    """
    return [
        node
        for node, kind in enumerate(graph.categories)
        if kind is Category.COLLECTIVE and graph.live[node] and parse_scope(graph.scopes[node]).op.startswith(_HOOKED)
    ]
