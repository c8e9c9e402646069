"""Eager PyTorch: one kernel for each ATen call that launches any, in the order of dispatch.

A call's kernel is made of the StableHLO ops that it became. Views launch nothing: the transposes, slices and broadcasts
that stand for them are part of every kernel that reads them. A call that became no op (a value written over, say) is
known by its shapes alone.
"""

from collections.abc import Sequence

from stablecast.ir.schedule import Launch
from stablecast.lowering.attention_shape import AttentionShape
from stablecast.lowering.categories import Category
from stablecast.lowering.execution.composites import composite_attention
from stablecast.lowering.execution.ordering import group_of
from stablecast.lowering.execution.plan import Plan, plan_pass
from stablecast.lowering.execution.xla import GPU_PLATFORMS
from stablecast.lowering.graph import EXTERNAL, Graph
from stablecast.lowering.group import Group

GROUP = "dispatch"
_VIEWS = frozenset({"stablehlo.transpose", "stablehlo.slice", "stablehlo.broadcast_in_dim", "stablehlo.broadcast"})
_ALONE = (Category.COLLECTIVE, Category.CONTROL)


@plan_pass(GROUP, "one kernel for each ATen call as dispatched; views belong to their readers")
def dispatched(plan: Plan) -> None:
    """Without a record of calls every op is one."""
    graph = plan.graph
    calls, hidden = _calls(plan)
    views = _views(graph, [nodes for _, nodes in calls]) | hidden
    for launch, nodes in calls:
        plan.ordered += _kernels(plan, launch, [node for node in nodes if node not in views], views)


def _calls(plan: Plan) -> tuple[list[tuple[int, list[int]]], set[int]]:
    """Number and nodes of each call that launches something, and the nodes of calls that do not.

    Nodes that no call became stand alone, as number -1.
    """
    graph = plan.graph
    launches = plan.launches.launches if plan.launches else ()
    launch_of = {place: number for number, launch in enumerate(launches) for place in launch.ops}
    nodes_of: dict[int, list[int]] = {}
    loose: list[tuple[int, int]] = []
    for node, live in enumerate(graph.live):
        number = launch_of.get(graph.place[node], -1)
        if number >= 0:
            nodes_of.setdefault(number, []).append(node)
        elif live:
            loose.append((graph.place[node], node))
    calls = [
        ((launch.ops[0] if launch.ops else -1), number, nodes_of.get(number, []))
        for number, launch in enumerate(launches)
        if runs_on_device(launch)
    ]
    hidden = {node for number, nodes in nodes_of.items() if not runs_on_device(launches[number]) for node in nodes}
    before = -1
    placed: list[tuple[int, int, list[int]]] = []
    for place, number, nodes in calls:
        before = max(before, place)
        placed.append((before, number, nodes))
    placed += [(place, -1, [node]) for place, node in loose]
    placed.sort(key=lambda entry: entry[0])
    return [(number, nodes) for _, number, nodes in placed], hidden


def runs_on_device(launch: Launch) -> bool:
    """Whether the call launches a kernel: views and work on host memory do not."""
    return not (launch.is_view or launch.host)


def _views(graph: Graph, calls: Sequence[list[int]]) -> set[int]:
    """Nodes that stand for views: they move data, and another node of their own call reads them."""
    found: set[int] = set()
    for nodes in calls:
        own = set(nodes)
        for node in reversed(nodes):
            if graph.ops[node].name in _VIEWS and any(c in own for c in graph.consumers[graph.outputs[node][0]]):
                found.add(node)
    return found


def _with_views(graph: Graph, nodes: Sequence[int], views: set[int]) -> list[int]:
    """`nodes` and the views that they read, and those that these read."""
    members = set(nodes)
    stack = list(nodes)
    while stack:
        for value in graph.inputs[stack.pop()]:
            producer = graph.producer[value]
            if producer != EXTERNAL and producer in views and producer not in members:
                members.add(producer)
                stack.append(producer)
    return sorted(members)


def _kernels(plan: Plan, launch: int, nodes: list[int], views: set[int]) -> list[Group]:
    """The kernel of a call; collectives, and control flow in it, are nodes of their own."""
    graph = plan.graph
    if not nodes:
        return [Group([], set(), set(), launch=launch, fusible=False)] if launch >= 0 else []
    apart = [node for node in nodes if graph.categories[node] in _ALONE]
    if apart:
        return [_made(graph, launch, [node], views) for node in nodes]
    attention = composite_attention(graph, nodes)
    if attention is not None and not plan.flash:
        return [_made(graph, launch, [node], views) for node in nodes]
    if any(graph.categories[node] is Category.CONV for node in nodes):
        return [_made(graph, launch, part, views) for part in _convolutions(plan, nodes, views)]
    return [_made(graph, launch, nodes, views, attention)]


def _convolutions(plan: Plan, nodes: Sequence[int], views: set[int]) -> list[list[int]]:
    """The kernels of a call that convolves: one for each convolution, with what leads up to it and what follows.

    A gradient's call has one to the image and one to the filter, and sums that of the bias by itself. On a GPU, a bias
    is added by a kernel of its own.
    """
    graph = plan.graph
    parts: dict[int, list[int]] = {}
    owner: dict[int, int] = {}
    for node in nodes:
        before = next((owner[p] for p in _producers(graph, node, views) if p in owner), -1)
        if graph.categories[node] is Category.CONV:
            owner[node] = node
        elif before >= 0 and not (plan.target.platform in GPU_PLATFORMS and graph.ops[node].name == "stablehlo.add"):
            owner[node] = before
    for node in reversed(nodes):
        for producer in _producers(graph, node, views):
            if node in owner and producer in nodes:
                owner.setdefault(producer, owner[node])
    for node in nodes:
        parts.setdefault(owner.get(node, -1), []).append(node)
    return sorted(parts.values(), key=max)


def _producers(graph: Graph, node: int, views: set[int]) -> list[int]:
    """What makes the operands of `node`, seen through views."""
    found: list[int] = []
    stack = list(graph.inputs[node])
    while stack:
        producer = graph.producer[stack.pop()]
        if producer != EXTERNAL and producer in views:
            stack += graph.inputs[producer]
        elif producer != EXTERNAL:
            found.append(producer)
    return found


def _made(
    graph: Graph, launch: int, nodes: list[int], views: set[int], attention: AttentionShape | None = None
) -> Group:
    made = group_of(graph, _with_views(graph, nodes, views), roots=nodes)
    made.launch, made.attention = launch, attention
    return made
