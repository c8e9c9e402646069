"""Which ops share a kernel: the fusion rules for XLA.

Ops are visited from the last to the first, so that every consumer is settled before its producers:

1. a loop op with one consuming kernel is computed inside it;
2. one with several is computed inside each, if that moves fewer bytes than writing it once and reading it back, and it
   is not expensive to compute again;
3. a matrix product or convolution joins the elementwise kernel that alone consumes it (its epilogue); transposes (and,
   for products, converts) of its operands are part of it;
4. reductions, scatters and windows take in their producers and end a kernel;
5. an elementwise kernel whose result is needed elsewhere too joins its first consumer of the same extent, and kernels
   of the same extent that read the same tensor become one, where no other kernel lies between (multi-output).
"""

from collections.abc import Iterable

from stablecast.lowering.categories import EXPENSIVE, Category
from stablecast.lowering.graph import Graph
from stablecast.lowering.multi_output import Group, merge_groups

MAX_MEMBERS = 256
MAX_READS = 96
"""Operands and outputs of one XLA fusion (`MaxOperandsAndOutputsPerFusion`)."""
MAX_COPIES = 24
"""Kernels into which one op is copied; beyond that its result is stored."""
MAX_EXPENSIVE_COPIES = 3

_PASS_THROUGH = (Category.LOOP, Category.GENERATOR)
_TAKES_PRODUCERS = (Category.LOOP, Category.GENERATOR, Category.REDUCE, Category.INPUT)
_MATMUL_PROLOGUE = frozenset({"stablehlo.transpose", "stablehlo.convert"})
_CONV_PROLOGUE = frozenset({"stablehlo.transpose", "stablehlo.reverse"})


def fuse(graph: Graph, *, ready_made: bool = False) -> list[Group]:
    """The kernels of `graph` in issue order (its dead nodes belong to none).

    `ready_made`: the producer has fused already; its fusions are kept and nothing is added to them.
    """
    if ready_made:
        return merge_groups(graph, _ready_made(graph), share=False)
    return merge_groups(graph, _Grouping(graph).run())


def _ready_made(graph: Graph) -> dict[int, Group]:
    """One group for each fusion and for each op outside of fusions, by its last node."""
    members: dict[int, list[int]] = {}
    for node, live in enumerate(graph.live):
        if live:
            fusion = graph.fusion_of[node]
            members.setdefault(node if fusion < 0 else -1 - fusion, []).append(node)
    groups: dict[int, Group] = {}
    for nodes in members.values():
        own = set(nodes)
        reads = {
            v for node in nodes for v in graph.inputs[node] if not graph.weightless[v] and graph.producer[v] not in own
        }
        extent = max(graph.types[value].elements for node in nodes for value in graph.outputs[node])
        products = [node for node in nodes if graph.categories[node] not in _PASS_THROUGH]
        groups[nodes[-1]] = Group(nodes, own, reads, max(products, default=-1), extent, fusible=False)
    return groups


class _Grouping:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._returned = set(graph.returns)
        self._groups: dict[int, Group] = {}
        self._in: list[tuple[int, ...]] = [()] * len(graph.ops)

    def run(self) -> dict[int, Group]:
        graph = self._graph
        for node in range(len(graph.ops) - 1, -1, -1):
            if not graph.live[node]:
                continue
            kind = graph.categories[node]
            if kind in _PASS_THROUGH:
                self._place_loop(node, kind)
            elif kind in (Category.MATMUL, Category.CONV):
                self._place_product(node)
            else:
                self._root(node)
        return self._groups

    def _root(self, node: int) -> None:
        graph = self._graph
        kind = graph.categories[node]
        values = graph.outputs[node] if kind in _PASS_THROUGH else (*graph.inputs[node], *graph.outputs[node])
        extent = max((graph.types[value].elements for value in values), default=0)
        fusible = kind in (Category.LOOP, Category.GENERATOR, Category.REDUCE)
        self._groups[node] = Group(
            [node], {node}, set(self._inputs(node)), node if not fusible else -1, extent, fusible
        )
        self._in[node] = (node,)

    def _inputs(self, node: int) -> Iterable[int]:
        weightless = self._graph.weightless
        return [value for value in self._graph.inputs[node] if not weightless[value]]

    def _consumers(self, node: int) -> list[int]:
        outputs = self._graph.outputs[node]
        if len(outputs) == 1:
            return self._graph.consumers[outputs[0]]
        return sorted({consumer for value in outputs for consumer in self._graph.consumers[value]})

    def _escapes(self, node: int) -> bool:
        return not self._returned.isdisjoint(self._graph.outputs[node])

    def _place_loop(self, node: int, kind: Category) -> None:
        consumers = self._consumers(node)
        taking = [consumer for consumer in consumers if self._accepts(consumer, node)]
        if self._escapes(node) or len(taking) < len(consumers) or not taking:
            self._root(node)
            if kind is not Category.GENERATOR or not taking:
                return
        kernels = tuple({kernel: None for consumer in taking for kernel in self._in[consumer]})
        if self._worth_copying(node, kind, kernels):
            self._copy_into(node, kernels)
        elif node not in self._groups:
            self._root(node)

    def _accepts(self, consumer: int, node: int) -> bool:
        kind = self._graph.categories[consumer]
        if kind in _TAKES_PRODUCERS:
            return True
        if kind is Category.MATMUL:
            return self._graph.ops[node].name in _MATMUL_PROLOGUE and len(self._consumers(node)) == 1
        return kind is Category.CONV and self._graph.ops[node].name in _CONV_PROLOGUE

    def _worth_copying(self, node: int, kind: Category, kernels: tuple[int, ...]) -> bool:
        groups = [self._groups[kernel] for kernel in kernels]
        if any(len(group.members) >= MAX_MEMBERS or len(group.reads) >= MAX_READS for group in groups):
            return False
        if len(kernels) == 1 or kind is Category.GENERATOR:
            return True
        if len(kernels) > MAX_COPIES:
            return False
        if self._graph.ops[node].name in EXPENSIVE and len(kernels) > MAX_EXPENSIVE_COPIES:
            return False
        types = self._graph.types
        inputs = {value: types[value].nbytes for value in self._inputs(node)}
        own = sum(inputs.values())
        result = sum(types[value].nbytes for value in self._graph.outputs[node])
        copied = sum(size for group in groups for value, size in inputs.items() if value not in group.reads)
        return copied <= result * (1 + len(kernels)) + own

    def _copy_into(self, node: int, kernels: tuple[int, ...]) -> None:
        outputs, inputs = self._graph.outputs[node], self._inputs(node)
        for kernel in kernels:
            group = self._groups[kernel]
            group.members.add(node)
            group.reads.difference_update(outputs)
            group.reads.update(inputs)
        self._in[node] = (*self._in[node], *kernels)

    def _place_product(self, node: int) -> None:
        kernel = self._epilogue(node)
        if kernel is None:
            self._root(node)
            return
        self._copy_into(node, (kernel,))
        group = self._groups[kernel]
        group.hero, group.fusible = node, False

    def _epilogue(self, node: int) -> int | None:
        """The elementwise kernel that alone consumes the product, if it may run as its epilogue."""
        graph = self._graph
        consumers = self._consumers(node)
        if len(consumers) != 1 or self._escapes(node) or len(graph.outputs[node]) != 1:
            return None
        consumer = consumers[0]
        if graph.categories[consumer] is not Category.LOOP or len(self._in[consumer]) != 1:
            return None
        kernel = self._in[consumer][0]
        group = self._groups[kernel]
        elements = graph.types[graph.outputs[node][0]].elements
        if not group.fusible or graph.categories[kernel] is not Category.LOOP or group.extent != elements:
            return None
        product = graph.outputs[node][0]
        others = [value for value in group.reads if value != product and graph.types[value].elements >= elements]
        return kernel if len(others) <= 1 else None
