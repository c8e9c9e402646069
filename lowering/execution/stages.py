"""What compilers launch beside a kernel: second stages of long reductions and split products, layout copies, fills."""

from collections.abc import Iterator
from dataclasses import replace

from stablecast.ir.attributes import ConvDims, DotDims
from stablecast.ir.kernels import KernelRow
from stablecast.ir.types import as_tensor
from stablecast.lowering.categories import Category, swaps_two
from stablecast.lowering.graph import EXTERNAL, Graph
from stablecast.lowering.group import Group
from stablecast.lowering.reductions import partial_results, roots_in_two_kernels

_PARTIAL_BYTES = 4
_POINTWISE_PARTS = 8
"""`max_pointwise_cat_inputs` of TorchInductor."""


class Extras:
    """Launches of XLA:GPU that the ops of a program do not show.

    Copies are launches of the kernel that they belong to, with their bytes read and written once more.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._returned = set(graph.returns)
        self._filters = _filter_gradients(graph)
        self._gathered = _gathered_minor(graph)

    def of(self, group: Group) -> tuple[int, float]:
        """Launches beyond the first, and bytes that are written and read again."""
        graph = self._graph
        launches, nbytes = 0, 0.0
        partial = roots_in_two_kernels(graph, group.roots)
        if partial:
            launches = len(partial)
            nbytes = _PARTIAL_BYTES * float(sum(partial_results(graph.ops[node]) for node in partial))
        if group.split > 1:
            launches += 0 if self._added_by_reader(group) else 1
            nbytes += _PARTIAL_BYTES * float(group.split * self._elements(group.roots[0]))
        turned = (*self._results(group, self._filters), *self._results(group, self._gathered))
        for value in (*self._slices(group), *turned, *self._relaid(group)):
            launches, nbytes = launches + 1, nbytes + graph.types[value].nbytes
        return launches, nbytes

    def _elements(self, node: int) -> int:
        return self._graph.types[self._graph.outputs[node][0]].elements

    def _added_by_reader(self, group: Group) -> bool:
        """Whether one element-wise op alone reads a split product: it adds the parts as it reads them."""
        root = group.roots[0]
        return self._alone(root) and self._graph.categories[self._graph.consumers_of(root)[0]] is Category.LOOP

    def _alone(self, node: int) -> bool:
        graph = self._graph
        return len(graph.consumers_of(node)) == 1 and self._returned.isdisjoint(graph.outputs[node])

    def _slices(self, group: Group) -> Iterator[int]:
        """Results of merged products that are cut out for more than one element-wise reader."""
        for node in group.merged:
            consumers = self._graph.consumers_of(node)
            if not (self._alone(node) and self._graph.categories[consumers[0]] is Category.LOOP):
                yield self._graph.outputs[node][0]

    def _results(self, group: Group, turned: set[int]) -> Iterator[int]:
        """Results of the step as large as a value of `turned` that their kernel reads: they are turned back.

        Gradients of filters come channels first from cuDNN; those of what is gathered along a minor dimension start
        with that one.
        """
        if turned.isdisjoint(group.reads):
            return
        sizes = {self._graph.types[value].elements for value in turned & group.reads}
        for root in group.roots:
            for value in self._graph.outputs[root]:
                if value in self._returned and self._graph.types[value].elements in sizes:
                    yield value

    def _relaid(self, group: Group) -> Iterator[int]:
        """Operands of batched products that come from another product and do not lie batch first."""
        graph = self._graph
        if group.attention is not None:
            return
        for node in group.members:
            dims = graph.ops[node].attrs.get("dot_dimension_numbers")
            if graph.categories[node] is not Category.MATMUL or not isinstance(dims, DotDims) or not dims.lhs_batch:
                continue
            for value, batch in zip(graph.inputs[node], (dims.lhs_batch, dims.rhs_batch), strict=False):
                leads = tuple(sorted(batch)) == tuple(range(len(batch)))
                if self._from_product(value, turned=leads):
                    yield value

    def _from_product(self, value: int, *, turned: bool) -> bool:
        """Whether a product makes `value`; `turned`: by a transpose that strides cannot express."""
        graph = self._graph
        producer = graph.producer[value]
        if turned:
            if producer == EXTERNAL or graph.ops[producer].name != "stablehlo.transpose":
                return False
            if swaps_two(graph.ops[producer]):
                return False
            producer = graph.producer[graph.inputs[producer][0]]
        return producer != EXTERNAL and graph.categories[producer] is Category.MATMUL


class InductorExtras:
    """Launches of TorchInductor that the ops of a program do not show.

    Filters and images are copied into channels-last order once each (`layout_optimization`). Parts of a concatenation
    are written into its buffer by a loop each: on a CPU always, elsewhere beyond `max_pointwise_cat_inputs`. What a
    scatter adds to is filled by a loop of its own.
    """

    def __init__(self, graph: Graph, *, cpu: bool) -> None:
        self._graph = graph
        self._most_parts = 1 if cpu else _POINTWISE_PARTS
        self._done: set[int] = set()

    def of(self, group: Group) -> tuple[int, float]:
        """Launches beyond the first, and bytes that are written and read again."""
        launches = sum(self._parts(node) + self._fills(node) for node in group.members)
        given = self._relaid(group)
        self._done.update(given)
        return launches + len(given), float(sum(self._graph.types[value].nbytes for value in given))

    def _relaid(self, group: Group) -> list[int]:
        graph = self._graph
        if group.hero < 0 or graph.categories[group.hero] is not Category.CONV:
            return []
        return [v for v in graph.inputs[group.hero] if graph.producer[v] == EXTERNAL and v not in self._done]

    def _parts(self, node: int) -> int:
        """Loops of a concatenation beyond the first."""
        graph = self._graph
        if graph.ops[node].name != "stablehlo.concatenate" or len(graph.inputs[node]) <= self._most_parts:
            return 0
        return len(graph.inputs[node]) - 1

    def _fills(self, node: int) -> int:
        graph = self._graph
        if graph.ops[node].name != "stablehlo.scatter":
            return 0
        producer = graph.producer[graph.inputs[node][0]]
        constant = graph.weightless[graph.inputs[node][0]]
        return int(constant or (producer != EXTERNAL and graph.categories[producer] is Category.GENERATOR))


def with_extras(row: KernelRow, launches: int, nbytes: float) -> KernelRow:
    """`row` with more launches, and bytes that are written and read again."""
    return replace(
        row,
        launches=row.launches + launches,
        bytes_read=row.bytes_read + nbytes,
        bytes_written=row.bytes_written + nbytes,
    )


def gathers_minor(graph: Graph, group: Group) -> bool:
    """Whether the kernel is an all-gather along another than the first dimension (of those larger than 1)."""
    if not group.roots or graph.ops[group.roots[0]].name != "stablehlo.all_gather":
        return False
    op = graph.ops[group.roots[0]]
    kind = op.result_types[0]
    first = next((dim for dim, size in enumerate(as_tensor(kind).shape) if size != 1), 0)
    return int(op.attrs.get("all_gather_dim", 0)) > first


def _gathered_minor(graph: Graph) -> set[int]:
    """Arguments that are gathered along a minor dimension."""
    found: set[int] = set()
    for node, kind in enumerate(graph.categories):
        if kind is Category.COLLECTIVE and graph.live[node]:
            value = graph.inputs[node][0]
            if graph.producer[value] == EXTERNAL and gathers_minor(graph, Group([node], {node}, set())):
                found.add(value)
    return found


def _filter_gradients(graph: Graph) -> set[int]:
    """Values that are gradients of convolution filters, or these converted or scaled."""
    found: set[int] = set()
    for node, kind in enumerate(graph.categories):
        if kind is Category.CONV and graph.live[node] and _is_filter_gradient(graph, node):
            found.add(graph.outputs[node][0])
        elif kind is Category.LOOP and found:
            size = graph.types[graph.outputs[node][0]].elements
            if any(value in found and graph.types[value].elements == size for value in graph.inputs[node]):
                found.update(graph.outputs[node])
    return found


def _is_filter_gradient(graph: Graph, node: int) -> bool:
    """Whether the window of a convolution is larger than its result: it sums over positions."""
    op = graph.ops[node]
    dims = op.attrs.get("dimension_numbers")
    if not isinstance(dims, ConvDims):
        return False
    rhs, out = as_tensor(op.operand_types[1]).shape, as_tensor(op.result_types[0]).shape
    window = positions = 1
    for dim in dims.kernel_spatial:
        window *= rhs[dim]
    for dim in dims.output_spatial:
        positions *= out[dim]
    return window > positions
