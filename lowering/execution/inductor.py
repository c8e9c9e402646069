"""TorchInductor: loops inlined into their readers, then fused; products and convolutions are library calls."""

from stablecast.lowering.categories import Category
from stablecast.lowering.execution.plan import Plan, plan_pass
from stablecast.lowering.fusion import INDUCTOR_RULES, Grouping
from stablecast.lowering.graph import EXTERNAL, Graph
from stablecast.lowering.multi_output import INDUCTOR_MERGES

GROUP, FUSE = "inductor-inlining", "inductor-fusion"
REUSED_READS, REUSED_OPS, MOST_READS = 4, 30, 8
"""`realize_reads_threshold`, `realize_opcount_threshold` and `realize_acc_reads_threshold` of TorchInductor."""
_LOOPS = (Category.LOOP, Category.GENERATOR)
_HEAVY = frozenset({"stablehlo.exponential", "stablehlo.logistic"})
"""Ops that TorchInductor does not compute twice on a CPU."""


@plan_pass(GROUP, "element-wise ops are computed in every reader, unless that reads much or is dear")
def group(plan: Plan) -> None:
    kept = stored(plan.graph, cpu=plan.target.platform == "cpu")
    plan.groups = Grouping(plan.graph, plan.groups, plan.claimed, INDUCTOR_RULES, kept).run()


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


@plan_pass(FUSE, "kernels over the same rows become one: vertically, then horizontally where they share a tensor")
def fuse(plan: Plan) -> None:
    merger = plan.merger(INDUCTOR_MERGES)
    merger.into_consumers()
    merger.siblings()
