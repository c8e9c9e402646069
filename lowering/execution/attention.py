"""Attention as one kernel forward and one backward, where the execution model or the user wants it so."""

from collections.abc import Iterable
from dataclasses import replace

from stablecast.lowering.attention_shape import AttentionShape
from stablecast.lowering.execution.attention_form import find_site, score_candidates
from stablecast.lowering.execution.attention_patterns import is_replaced
from stablecast.lowering.execution.composites import attention_of
from stablecast.lowering.execution.cycles import waits_for_itself
from stablecast.lowering.execution.ordering import group_of
from stablecast.lowering.execution.plan import Plan, plan_pass
from stablecast.lowering.graph import EXTERNAL, Graph

RECOGNISE = "attention"
_STRIDED = frozenset({"stablehlo.transpose", "stablehlo.broadcast_in_dim"})


@plan_pass(RECOGNISE, "attention becomes one kernel forward and one backward, where the model or --attention says so")
def recognise(plan: Plan) -> None:
    """By name in composites, by form elsewhere. A backward kernel computes the scores again, as flash kernels do.

    The compiler that takes it by itself (`auto`) is TorchInductor: only in the spellings that it knows.
    """
    if not plan.flash:
        return
    _named(plan)
    for score in score_candidates(plan.graph):
        if score in plan.claimed:
            continue
        site = find_site(plan.graph, score)
        if site is None or any(node in plan.claimed for node in site.forward | site.backward):
            continue
        if plan.target.attention == "auto" and not is_replaced(plan.graph, score, site, plan.target):
            continue
        if site.forward:
            _add(plan, site.forward, site.masks, site.shape)
        if site.backward:
            _add(plan, site.backward, site.again, replace(site.shape, direction="bwd"))


def _named(plan: Plan) -> None:
    graph = plan.graph
    nodes_of: dict[int, list[int]] = {}
    for node, unit in enumerate(graph.unit_of):
        if unit >= 0 and graph.live[node]:
            nodes_of.setdefault(unit, []).append(node)
    for unit, nodes in nodes_of.items():
        shape = attention_of(graph.units[unit].op)
        if shape is not None:
            _add(plan, nodes, (), shape)


def _add(plan: Plan, own: Iterable[int], copied: Iterable[int], shape: AttentionShape) -> None:
    """One kernel of `own` nodes, which belong to no other, and of `copied` ones, unless it would wait for itself."""
    graph = plan.graph
    roots = sorted(own)
    made = group_of(graph, sorted(_with_strided(graph, {*roots, *copied})), roots=roots)
    if waits_for_itself(graph, made, plan.groups.values()):
        return
    made.attention = shape
    plan.groups[roots[-1]] = made
    plan.claimed.update(dict.fromkeys(roots, roots[-1]))


def _with_strided(graph: Graph, nodes: set[int]) -> set[int]:
    """`nodes` and what only rearranges their operands: attention kernels take any strides, and shared heads."""
    found = set(nodes)
    stack = list(nodes)
    while stack:
        for value in graph.inputs[stack.pop()]:
            producer = graph.producer[value]
            if producer != EXTERNAL and producer not in found and graph.ops[producer].name in _STRIDED:
                found.add(producer)
                stack.append(producer)
    return found
