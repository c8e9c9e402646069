"""Passes that every execution model shares: kernels as they come, and the issue order."""

from stablecast.lowering.categories import Category
from stablecast.lowering.execution.plan import Plan, plan_pass
from stablecast.lowering.graph import Graph
from stablecast.lowering.group import Group

READY_MADE, SINGLE, ORDER = "ready-made", "single", "order"
_LOOPS = (Category.LOOP, Category.GENERATOR)


@plan_pass(READY_MADE, "one kernel for each fusion that the producer made, and for each op outside of them")
def ready_made(plan: Plan) -> None:
    graph = plan.graph
    members: dict[int, list[int]] = {}
    for node, live in enumerate(graph.live):
        if live:
            fusion = graph.fusion_of[node]
            members.setdefault(node if fusion < 0 else -1 - fusion, []).append(node)
    plan.groups = {nodes[-1]: group_of(graph, nodes) for nodes in members.values()}


@plan_pass(SINGLE, "one kernel for each op")
def single(plan: Plan) -> None:
    plan.groups = {node: group_of(plan.graph, [node]) for node, live in enumerate(plan.graph.live) if live}


@plan_pass(
    ORDER,
    "kernels as their producer ordered them, else what frees memory first, beside collectives last products last",
)
def order(plan: Plan) -> None:
    if plan.ready_made:
        plan.ordered = [plan.groups[last] for last in sorted(plan.groups)]
    else:
        target = plan.target
        hides = target.exec == "xla" and target.platform in ("cuda", "rocm") and target.combine
        plan.ordered = plan.merger().ordered(hides=hides)


def group_of(graph: Graph, nodes: list[int], roots: list[int] | None = None) -> Group:
    """The kernel made of `nodes` (ascending), of which `roots` may be read from outside (all, unless said)."""
    own = set(nodes)
    reads = {
        value
        for node in nodes
        for value in graph.inputs[node]
        if not graph.weightless[value] and graph.producer[value] not in own
    }
    extent = max((graph.types[value].elements for node in nodes for value in graph.outputs[node]), default=0)
    heroes = [node for node in nodes if graph.categories[node] not in _LOOPS]
    return Group(roots or list(nodes), own, reads, _main(graph, heroes), extent, fusible=False)


def _main(graph: Graph, nodes: list[int]) -> int:
    """The node that decides a kernel's class: the largest product, else the largest other op, else none."""
    products = [node for node in nodes if graph.categories[node] in (Category.MATMUL, Category.CONV)]
    chosen = products or nodes
    return max(chosen, key=lambda node: (graph.works[node].matmul_flops, graph.works[node].nbytes), default=-1)
