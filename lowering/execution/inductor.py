"""TorchInductor: loops inlined into their readers, then fused; products and convolutions are library calls."""

from stablecast.ir.scopes import parse_scope
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
_HEAVY = frozenset({"stablehlo.exponential", "stablehlo.logistic"})
"""Ops that TorchInductor does not compute twice on a CPU."""


@plan_pass(GROUP, "element-wise ops are computed in every reader, unless that reads much or is dear")
def group(plan: Plan) -> None:
    scattered = _scattered_rows(plan.graph)
    kept = stored(plan.graph, cpu=plan.target.platform == "cpu") | _saved_rows(plan.graph, scattered)
    plan.groups = Grouping(plan.graph, plan.groups, plan.claimed, INDUCTOR_RULES, kept).run()
    for root in scattered:
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
