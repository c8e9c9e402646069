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

For TPUs 2 holds for products too (3 has no limit on what makes an operand), and epilogues come last: a product joins
the first kernel that walks over its result (`multi_output.into_products`).
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from stablecast.ir.types import TensorType
from stablecast.lowering.categories import EXPENSIVE, Category, swaps_two
from stablecast.lowering.graph import EXTERNAL, Graph
from stablecast.lowering.group import Group
from stablecast.lowering.reductions import dear_chain, is_row_reduction, meets_mask, takes_two_kernels

IO_TOLERANCE_BYTES = 1024
_MOVING = frozenset(
    {
        "stablehlo.concatenate",
        "stablehlo.gather",
        "stablehlo.pad",
        "stablehlo.dynamic_update_slice",
        "stablehlo.reverse",
    }
)
_GATHERS = frozenset({"stablehlo.gather", "stablehlo.dynamic_gather"})
_NO_PROLOGUE_TPU = _GATHERS | {"stablehlo.dynamic_update_slice"}
_NO_PROLOGUE = _MOVING | {"stablehlo.select", "stablehlo.compare"}
_NO_EPILOGUE = _MOVING | {"stablehlo.slice", "stablehlo.reduce"}
_VIEWS = frozenset({"stablehlo.transpose"})
_EPILOGUE_OPS = 16
_ROW_STEPS = 6
"""Ops between a sum over rows and where it is spread: scaling, epsilon, root."""
MAX_BLOCK_MEMBERS = 128
"""Ops of a kernel that rows are still folded in: beyond that its tiles do not fit the registers."""


@dataclass(frozen=True, slots=True)
class FusionRules:
    """What a compiler lets into one kernel.

    `max_reads`: operands and outputs (XLA: `MaxOperandsAndOutputsPerFusion`). `max_copies`: kernels into which one op
    is copied, beyond that its result is stored; `max_dear_copies` of a transcendental one. `products`: whether products
    and convolutions take an epilogue, and converts of their operands. `inline`: ops are copied into all that read them,
    whatever that moves (which nodes are stored instead, the caller says). `normalisation`: a sum over rows that is
    spread over the same rows again is computed where it is used (XLA:GPU's softmax and normalisation kernels).
    `prologues`: products compute element-wise operands that read no more than they make, and take no epilogue that
    writes more than it reads (`gemm_fusion.cc`: `IsInputWorthFusing`, `IsOutputWorthFusing`). `views`: ops that a
    product reads through, by strides. `operands`: products compute element-wise operands of any kind, each its own
    copy where that moves fewer bytes; what follows them is left to a later pass (TPU).
    """

    max_members: int = 256
    max_reads: int = 96
    max_copies: int = 24
    max_dear_copies: int = 3
    products: bool = True
    inline: bool = False
    normalisation: bool = False
    prologues: bool = False
    operands: bool = False
    views: frozenset[str] = _VIEWS


XLA_RULES = FusionRules()
XLA_GPU_RULES = FusionRules(normalisation=True, prologues=True)
XLA_TPU_RULES = FusionRules(operands=True, max_dear_copies=24)
INDUCTOR_RULES = FusionRules(
    max_members=4096, max_reads=4096, products=False, inline=True, views=_VIEWS | {"stablehlo.slice"}
)

_PASS_THROUGH = (Category.LOOP, Category.GENERATOR)
_TAKES_PRODUCERS = (Category.LOOP, Category.GENERATOR, Category.REDUCE, Category.INPUT)
_MATMUL_PROLOGUE = frozenset({"stablehlo.transpose", "stablehlo.convert"})
_CONV_PROLOGUE = frozenset({"stablehlo.transpose", "stablehlo.reverse"})


class Grouping:
    """Puts the ops of `graph` into kernels, from the last op to the first.

    `groups`: kernels that are there already, by root, which take in nothing more; `claimed`: the nodes that belong to
    them alone. `stored`: nodes whose results are written, and copied nowhere.
    """

    def __init__(
        self,
        graph: Graph,
        groups: dict[int, Group],
        claimed: Iterable[int],
        rules: FusionRules = XLA_RULES,
        stored: Set[int] = frozenset(),
    ) -> None:
        self._graph = graph
        self._rules = rules
        self._stored = stored
        self._kept = set(graph.returns).union(*[group.reads for group in groups.values()])
        self._groups = groups
        self._elsewhere = set(claimed)
        self._in: list[tuple[int, ...]] = [()] * len(graph.ops)

    def run(self) -> dict[int, Group]:
        """The kernels by root."""
        graph = self._graph
        for node in range(len(graph.ops) - 1, -1, -1):
            if not graph.live[node] or node in self._elsewhere:
                continue
            if self._elsewhere and not self._escapes(node) and not self._consumers(node) and graph.consumers_of(node):
                self._elsewhere.add(node)
                continue
            kind = graph.categories[node]
            if kind in _PASS_THROUGH:
                self._place_loop(node, kind)
            elif kind in (Category.MATMUL, Category.CONV):
                self._place_product(node)
            elif kind is Category.REDUCE and self._rules.normalisation:
                self._place_reduction(node)
            else:
                self._root(node)
        return self._groups

    def _root(self, node: int) -> None:
        graph = self._graph
        kind = graph.categories[node]
        values = graph.outputs[node] if kind in _PASS_THROUGH else (*graph.inputs[node], *graph.outputs[node])
        extent = max((graph.types[value].elements for value in values), default=0)
        fusible = kind in (Category.LOOP, Category.GENERATOR, Category.REDUCE)
        reduces = kind is Category.REDUCE
        rows = graph.types[graph.outputs[node][0]].elements if reduces else 0
        columns = reduces and not is_row_reduction(graph.ops[node])
        hero = node if not fusible else -1
        self._groups[node] = Group(
            [node], {node}, set(self._inputs(node)), hero, extent, fusible, rows=rows, columns=columns
        )
        self._in[node] = (node,)

    def _inputs(self, node: int) -> Iterable[int]:
        weightless = self._graph.weightless
        return [value for value in self._graph.inputs[node] if not weightless[value]]

    def _consumers(self, node: int) -> list[int]:
        consumers = self._graph.consumers_of(node)
        if not self._elsewhere:
            return consumers
        return [consumer for consumer in consumers if consumer not in self._elsewhere]

    def _escapes(self, node: int) -> bool:
        return not self._kept.isdisjoint(self._graph.outputs[node])

    def _place_loop(self, node: int, kind: Category) -> None:
        consumers = self._consumers(node)
        taking = [consumer for consumer in consumers if self._accepts(consumer, node)]
        stored = node in self._stored or (self._rules.operands and self._graph.ops[node].name in _GATHERS)
        if stored or self._escapes(node) or len(taking) < len(consumers) or not taking:
            self._root(node)
            if stored or kind is not Category.GENERATOR or not taking:
                return
        kernels = tuple({kernel: None for consumer in taking for kernel in self._in[consumer]})
        if self._worth_copying(node, kind, kernels):
            self._copy_into(node, kernels)
        elif node not in self._groups:
            self._root(node)

    def _place_reduction(self, node: int) -> None:
        """A reduction of rows joins the kernels that walk over the same rows; others read what it has stored."""
        op = self._graph.ops[node]
        kernels = tuple({kernel: None for consumer in self._consumers(node) for kernel in self._in[consumer]})
        walking = tuple(kernel for kernel in kernels if self._same_rows(node, self._groups[kernel]))
        if walking and meets_mask(self._graph, node):
            walking = ()
        apart = self._escapes(node) or len(walking) < len(kernels)
        if len(op.results) != 1 or not is_row_reduction(op) or takes_two_kernels(op) or not walking:
            self._root(node)
            return
        if (apart or len(walking) > 1) and dear_chain(self._graph, node):
            self._root(node)
            return
        if apart:
            self._root(node)
        self._copy_into(node, walking)
        for kernel in walking:
            self._groups[kernel].block = True

    def _same_rows(self, node: int, group: Group) -> bool:
        size = self._graph.types[self._graph.inputs[node][0]].elements
        return group.fusible and group.extent == size and not group.columns and len(group.members) < MAX_BLOCK_MEMBERS

    def _accepts(self, consumer: int, node: int) -> bool:
        kind = self._graph.categories[consumer]
        if kind in _TAKES_PRODUCERS:
            return True
        if self._rules.operands and kind in (Category.MATMUL, Category.CONV):
            return self._graph.ops[node].name not in _NO_PROLOGUE_TPU
        if kind is Category.MATMUL:
            if self._rules.prologues and self._fits_prologue(node):
                return True
            if self._rules.prologues and self._is_relaid(node):
                return False
            name = self._graph.ops[node].name
            alone = self._rules.products and len(self._consumers(node)) == 1
            return name in self._rules.views or (alone and name in _MATMUL_PROLOGUE)
        return kind is Category.CONV and self._graph.ops[node].name in _CONV_PROLOGUE

    def _rides_along(self, node: int, kind: Category) -> bool:
        """Whether a product may compute `node` for its operand or epilogue; where rows end, a kernel does."""
        if kind is Category.GENERATOR:
            return True
        if self._graph.ops[node].name in _VIEWS:
            return not self._is_relaid(node)
        return self._fits_prologue(node) and not self._joins_rows(node)

    def _joins_rows(self, node: int) -> bool:
        """Whether `node` is where something made of rows meets the rows again: the end of a normalisation."""
        graph = self._graph
        size = graph.types[graph.outputs[node][0]].elements
        for value in graph.inputs[node]:
            spread = graph.producer[value]
            if spread == EXTERNAL or graph.categories[spread] is not Category.GENERATOR or not graph.inputs[spread]:
                continue
            stack = [graph.inputs[spread][0]]
            for _ in range(_ROW_STEPS):
                producer = graph.producer[stack.pop()] if stack else EXTERNAL
                if producer == EXTERNAL:
                    break
                if graph.categories[producer] is Category.REDUCE:
                    if (
                        is_row_reduction(graph.ops[producer])
                        and graph.types[graph.inputs[producer][0]].elements == size
                    ):
                        return True
                    break
                if graph.categories[producer] in _PASS_THROUGH:
                    stack += [held for held in graph.inputs[producer] if not graph.weightless[held]]
        return False

    def _fits_prologue(self, node: int) -> bool:
        """Whether a product computes `node` as it reads its operand: it then reads no more than before."""
        graph = self._graph
        if graph.categories[node] is not Category.LOOP or graph.ops[node].name in _NO_PROLOGUE or self._is_relaid(node):
            return False
        return self._bytes_in(node) - self._bytes_out(node) <= IO_TOLERANCE_BYTES and not self._follows_product(node)

    def _is_relaid(self, node: int) -> bool:
        """Whether several products need `node`, a transpose that strides cannot express: it is written out for them."""
        graph = self._graph
        op = graph.ops[node]
        if op.name != "stablehlo.transpose" or swaps_two(op):
            return False
        return sum(graph.categories[consumer] is Category.MATMUL for consumer in graph.consumers_of(node)) > 1

    def _follows_product(self, node: int) -> bool:
        """Whether a product that `node` alone reads will take it as its epilogue."""
        graph = self._graph
        producers = [graph.producer[value] for value in graph.inputs[node]]
        return any(
            producer != EXTERNAL
            and graph.categories[producer] in (Category.MATMUL, Category.CONV)
            and producer not in self._elsewhere
            and len(graph.consumers_of(producer)) == 1
            for producer in producers
        )

    def _bytes_in(self, node: int) -> int:
        return sum(self._graph.types[value].nbytes for value in self._tensors(node))

    def _tensors(self, node: int) -> list[int]:
        """What `node` reads that is not merely counted up or spread out."""
        graph = self._graph
        return [
            value
            for value in self._inputs(node)
            if graph.producer[value] == EXTERNAL or graph.categories[graph.producer[value]] is not Category.GENERATOR
        ]

    def _uniform(self, value: int) -> bool:
        """Whether `value` is one number spread out, counted up, or a mask: nothing that a kernel would read."""
        graph = self._graph
        producer = graph.producer[value]
        if producer == EXTERNAL or graph.categories[producer] is not Category.GENERATOR:
            return False
        kind = graph.types[value]
        mask = isinstance(kind, TensorType) and kind.dtype.name == "i1"
        return mask or all(graph.types[held].elements == 1 for held in graph.inputs[producer])

    def _bytes_out(self, node: int) -> int:
        return sum(self._graph.types[value].nbytes for value in self._graph.outputs[node])

    def _worth_copying(self, node: int, kind: Category, kernels: tuple[int, ...]) -> bool:
        groups = [self._groups[kernel] for kernel in kernels]
        rules = self._rules
        if not rules.products and any(self._called(group, node) for group in groups):
            return False
        if rules.prologues and any(node < group.hero for group in groups) and not self._rides_along(node, kind):
            return False
        if any(len(group.members) >= rules.max_members or len(group.reads) >= rules.max_reads for group in groups):
            return False
        if len(kernels) == 1 or kind is Category.GENERATOR or rules.inline:
            return True
        if len(kernels) > rules.max_copies or (rules.prologues and self._picks(node)):
            return False
        if self._graph.ops[node].name in EXPENSIVE and len(kernels) > rules.max_dear_copies:
            return False
        if rules.operands and self._ends_epilogue(node):
            return False
        types = self._graph.types
        inputs = {value: self._moved(value) for value in self._inputs(node) if not self._uniform(value)}
        own = sum(inputs.values())
        result = sum(types[value].nbytes for value in self._graph.outputs[node])
        copied = sum(size for group in groups for value, size in inputs.items() if value not in group.reads)
        return copied <= result * (1 + len(kernels)) + own

    def _moved(self, value: int) -> int:
        """Bytes that a kernel reads for `value`; on TPUs, of one that is spread out those of what is spread."""
        graph = self._graph
        producer = graph.producer[value]
        if self._rules.operands and producer != EXTERNAL and graph.categories[producer] is Category.GENERATOR:
            return sum(graph.types[held].nbytes for held in graph.inputs[producer])
        return graph.types[value].nbytes

    def _ends_epilogue(self, node: int) -> bool:
        """Whether a product may hand on `node`, computed from its result by element-wise ops that nothing else reads.

        Not where that is wider than the result itself, which is then stored instead.
        """
        graph = self._graph
        size = graph.types[graph.outputs[node][0]].elements
        nbytes = self._bytes_out(node)
        stack = [node]
        for _ in range(_EPILOGUE_OPS):
            if not stack:
                break
            for value in graph.inputs[stack.pop()]:
                producer = graph.producer[value]
                if producer == EXTERNAL or graph.types[value].elements != size or len(graph.consumers_of(producer)) > 1:
                    continue
                if graph.categories[producer] in (Category.MATMUL, Category.CONV):
                    return producer not in self._elsewhere and nbytes <= graph.types[value].nbytes
                if graph.categories[producer] is Category.LOOP:
                    stack.append(producer)
        return False

    def _picks(self, node: int) -> bool:
        """Whether `node` picks by a comparison of what was computed (a rectifier's gradient): whoever stores it
        computes the comparison once, and stores no mask."""
        graph = self._graph
        if graph.ops[node].name != "stablehlo.select":
            return False
        mask = graph.producer[graph.inputs[node][0]]
        if mask == EXTERNAL or graph.ops[mask].name != "stablehlo.compare":
            return False
        sources = [graph.producer[value] for value in graph.inputs[mask]]
        return any(source != EXTERNAL and graph.categories[source] is Category.LOOP for source in sources)

    def _called(self, group: Group, node: int) -> bool:
        """Whether `group` is a library call that needs the result of `node` in memory."""
        graph = self._graph
        if group.hero < 0 or graph.categories[group.hero] not in (Category.MATMUL, Category.CONV):
            return False
        return graph.ops[node].name not in self._rules.views | _CONV_PROLOGUE

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
        if (
            not self._rules.products
            or self._rules.operands
            or len(consumers) != 1
            or self._escapes(node)
            or len(graph.outputs[node]) != 1
        ):
            return None
        consumer = consumers[0]
        grows = self._bytes_out(consumer) - self._bytes_in(consumer) > IO_TOLERANCE_BYTES
        if self._rules.prologues and grows:
            return None
        if graph.categories[consumer] is not Category.LOOP or len(self._in[consumer]) != 1:
            return None
        kernel = self._in[consumer][0]
        group = self._groups[kernel]
        elements = graph.types[graph.outputs[node][0]].elements
        if not group.fusible or graph.categories[kernel] is not Category.LOOP or group.extent != elements:
            return None
        if self._rules.prologues and (group.block or not self._plain(group)):
            return None
        product = graph.outputs[node][0]
        others = [value for value in group.reads if value != product and graph.types[value].elements >= elements]
        return kernel if len(others) <= 1 else None

    def _plain(self, group: Group) -> bool:
        return all(self._graph.ops[node].name not in _NO_EPILOGUE for node in group.members)
