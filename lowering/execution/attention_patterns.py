"""Which written-out attention TorchInductor replaces by PyTorch's fused attention.

Inductor knows attention by a list of graph patterns (`torch/_inductor/fx_passes/fuse_attention.py`, here of torch
2.13) and leaves every other spelling as products and loops. What decides is where the scores are scaled, what masks
them, whether probabilities drop out, and whether the backward pass is there. On a GPU it leaves f32 operands alone
unless products may run as TF32 (`_sfdp_params_check`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from stablecast.ir.types import as_tensor
from stablecast.lowering.categories import Category
from stablecast.lowering.execution.attention_form import Site
from stablecast.lowering.graph import EXTERNAL, Graph
from stablecast.lowering.products import math_mode
from stablecast.lowering.target import Target

_EXPONENTIAL: Final = "stablehlo.exponential"
_IOTA: Final = "stablehlo.iota"
_MAX_STEPS: Final = 64
"""Ops that a uniform value is followed back through."""
_PASSED: Final = frozenset(
    {
        "stablehlo.convert",
        "stablehlo.transpose",
        "stablehlo.reshape",
        "stablehlo.broadcast_in_dim",
        "stablehlo.subtract",
    }
)
"""Casts, views, and softmax's own ops."""
_SCALES: Final = {"stablehlo.divide": "divide", "stablehlo.multiply": "multiply"}
_VIEWS: Final = frozenset(
    {"stablehlo.convert", "stablehlo.transpose", "stablehlo.reshape", "stablehlo.broadcast_in_dim", "stablehlo.slice"}
)
_DROPS: Final = frozenset({"stablehlo.multiply", "stablehlo.select"})


@dataclass(frozen=True, slots=True)
class Spelling:
    """`scale`: how scores are scaled (`divide`, `multiply`, empty). `masked`: whether a mask is added to them.
    `drops`: whether probabilities drop out. `trained`: whether the backward pass is there."""

    scale: str
    masked: bool = False
    drops: bool = False
    trained: bool = False


_KNOWN: Final = frozenset(
    {
        Spelling(""),
        Spelling("divide"),
        Spelling("multiply"),
        Spelling("", masked=True),
        Spelling("divide", masked=True),
        Spelling("divide", trained=True),
        Spelling("divide", masked=True, trained=True),
        Spelling("divide", drops=True, trained=True),
        Spelling("multiply", drops=True, trained=True),
        Spelling("divide", masked=True, drops=True, trained=True),
    }
)
_NOT_ON_CUDA: Final = frozenset({Spelling("divide", masked=True, drops=True, trained=True)})
"""Matched, and replaced by the same products and loops (`_sfdp_replacement_16`)."""


def is_replaced(graph: Graph, score: int, site: Site, target: Target) -> bool:
    """Whether Inductor replaces the attention `site`, whose scores the product `score` makes."""
    if target.platform != "cpu" and not _low_precision(graph, score, target):
        return False
    spelling = spelling_of(graph, score, site)
    return spelling in _KNOWN and not (target.platform == "cuda" and spelling in _NOT_ON_CUDA)


def _low_precision(graph: Graph, score: int, target: Target) -> bool:
    op = graph.ops[score]
    dtype = as_tensor(op.operand_types[0]).dtype
    return dtype.name != "f32" or math_mode(dtype, op.attrs.get("precision_config"), target.arithmetic) == "tf32"


def spelling_of(graph: Graph, score: int, site: Site) -> Spelling | None:
    """How the attention `site` is written, None where it holds what no pattern has: a selection, a soft cap, queries or
    keys that are scaled.

    Where only the backward pass is at hand (layers that run again), whether probabilities drop out is not seen.
    """
    size = _elements(graph, score)
    large = {node for node in site.forward or site.backward if _elements(graph, node) == size} | {score}
    last = [node for node in large if graph.ops[node].name == _EXPONENTIAL]
    if len(last) != 1 or any(_is_scaled(graph, value) for value in graph.inputs[score]):
        return None
    before = _reached(last, large, lambda node: [graph.producer[value] for value in graph.inputs[node]])
    after = _reached(last, large, graph.consumers_of) - before
    scales: list[str] = []
    masked = False
    for node in sorted(before - {score, *last}):
        name = graph.ops[node].name
        fixed = all(_is_uniform(graph, value) for value in graph.inputs[node] if graph.producer[value] not in before)
        if name in _SCALES and fixed:
            scales.append(_SCALES[name])
        elif name == "stablehlo.add":
            masked = masked or not fixed
        elif name not in _PASSED:
            return None
    if len(scales) > 1:
        return None
    drops = bool(site.forward) and any(graph.ops[node].name in _DROPS for node in after)
    return Spelling("".join(scales), masked, drops, bool(site.backward))


def _elements(graph: Graph, node: int) -> int:
    return graph.types[graph.outputs[node][0]].elements


def _reached(start: Iterable[int], within: set[int], step: Callable[[int], Iterable[int]]) -> set[int]:
    """`start` and the nodes of `within` that it reaches."""
    found = set(start)
    stack = list(found)
    while stack:
        more = [node for node in step(stack.pop()) if node in within and node not in found]
        found.update(more)
        stack += more
    return found


def _is_scaled(graph: Graph, value: int) -> bool:
    """Whether queries or keys are scaled before they are multiplied."""
    node = graph.producer[value]
    while node != EXTERNAL and graph.ops[node].name in _VIEWS:
        node = graph.producer[graph.inputs[node][0]]
    if node == EXTERNAL or graph.ops[node].name not in _SCALES:
        return False
    return any(_is_uniform(graph, held) for held in graph.inputs[node])


def _is_uniform(graph: Graph, value: int) -> bool:
    """Whether all elements are one number known beforehand: Inductor folds it into what reads it."""
    stack, steps = [value], 0
    while stack and steps < _MAX_STEPS:
        held, steps = stack.pop(), steps + 1
        node = graph.producer[held]
        if node == EXTERNAL:
            if not graph.weightless[held]:
                return False
        elif graph.ops[node].name == _IOTA or graph.categories[node] not in (Category.LOOP, Category.GENERATOR):
            return False
        else:
            stack += graph.inputs[node]
    return not stack
