"""The form of attention that is written out as products and element-wise ops.

A batched product makes the scores S. Element-wise ops on values as large as S lead to an exponential and to a second
product that sums over the keys; rows of S are summed over the same dimension on the way. Scaling, masks, biases,
dropout, taking off a maximum, and a division before or after the second product are all element-wise, so none of them
needs a rule. The backward pass hangs on another product as large as S whose values meet those of S.

Dimensions are followed by labels: a value as large as S is a row-major list of factors, each a label and a size, which
reshapes keep and transposes permute.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from stablecast.ir.attributes import DotDims
from stablecast.ir.types import as_tensor
from stablecast.lowering.attention_shape import AttentionShape
from stablecast.lowering.categories import Category
from stablecast.lowering.execution.attention_mask import is_causal, window_of
from stablecast.lowering.graph import EXTERNAL, Graph

Factors = tuple[tuple[str, int], ...]
_SOFT = (Category.LOOP, Category.GENERATOR, Category.REDUCE)
MAX_ROW_OPS = 64
"""Ops on row statistics that are followed from one attention; what is further away is somebody else's."""
_DIVISIONS = frozenset({"stablehlo.divide", "stablehlo.multiply"})
_TAILS = frozenset({"stablehlo.transpose", "stablehlo.convert"})
_NOT_A_MASK = frozenset({"stablehlo.gather", "stablehlo.dynamic_slice", "stablehlo.concatenate", "stablehlo.pad"})


@dataclass(slots=True)
class Site:
    """One attention and its sizes.

    `forward`, `backward`: the nodes of each pass. `masks`, `again`: copied into the forward and the backward kernel:
    what makes masks, which others may read too, and forward nodes that the backward pass computes again.
    """

    shape: AttentionShape
    forward: set[int]
    backward: set[int]
    masks: set[int]
    again: set[int]


@dataclass(slots=True)
class _Reach:
    """What follows a product of the scores' size.

    `large`: nodes with values of that size and their factors. `rows`: nodes on row statistics. `reduced`: labels that
    rows are reduced over. `ends`: where rows meet other values. `products`: products that read large values.
    """

    large: dict[int, Factors] = field(default_factory=dict[int, Factors])
    rows: set[int] = field(default_factory=set[int])
    ends: set[int] = field(default_factory=set[int])
    reduced: set[str] = field(default_factory=set[str])
    products: set[int] = field(default_factory=set[int])


def score_candidates(graph: Graph) -> Iterator[int]:
    """Batched products, in program order."""
    for node, kind in enumerate(graph.categories):
        if kind is Category.MATMUL and graph.live[node]:
            dims = graph.ops[node].attrs.get("dot_dimension_numbers")
            if isinstance(dims, DotDims) and dims.lhs_batch:
                yield node


def find_site(graph: Graph, score: int) -> Site | None:
    """The attention whose scores the product `score` makes, None if it makes none."""
    return _Finder(graph, score).run()


class _Finder:
    def __init__(self, graph: Graph, score: int) -> None:
        self._graph = graph
        self._score = score
        self._size = _elements(graph, score)

    def run(self) -> Site | None:
        graph, score = self._graph, self._score
        labels = _product_factors(graph, score)
        reach = self._reach(score, labels)
        sides = {label[0] for label in reach.reduced} - {"b"}
        has_exp = any(graph.ops[node].name == "stablehlo.exponential" for node in reach.large)
        if not has_exp or len(sides) != 1 or not sides <= {"l", "r"} or not reach.products:
            return None
        keys = sides.pop()
        tainted, gradients = self._backward_reach(reach)
        mixed = {
            node
            for node in reach.products
            if not self._reads(node, tainted.large) and self._contracts(node, reach.large) == {keys}
        }
        ends = mixed | self._divisions(mixed, reach.rows | reach.ends)
        known = set(reach.large) | reach.rows | mixed
        first = known - set(tainted.large) - tainted.rows
        forward = self._ancestors(ends, first) if ends else set[int]()
        if ends and score not in forward:
            return None
        backward = self._backward(reach, tainted, gradients, mixed)
        backward |= self._ancestors(backward, first) - forward - self._saved(forward) if backward else set[int]()
        forward |= self._tails(forward)
        backward |= self._tails(backward)
        again = self._again(backward, forward)
        least = _product(size for label, size in labels if label[0] == keys) * max(
            (size for label, size in labels if label[0] not in ("b", keys)), default=1
        )
        masks = self._masks(forward, least)
        again |= self._masks(backward | again, least)
        shape = self._shape(labels, keys, forward | backward | masks | again)
        return Site(shape, forward, backward, masks, again) if forward or backward else None

    def _reach(self, start: int, factors: Factors, known: Mapping[int, Factors] = MappingProxyType({})) -> _Reach:
        """Forward from `start` through element-wise ops and reductions up to the products that read large values.

        `known`: factors of nodes that are large again where rows meet them.
        """
        graph = self._graph
        reach = _Reach({start: factors})
        stack = [start]
        while stack:
            node = stack.pop()
            held = reach.large.get(node)
            for consumer in _consumers(graph, node):
                kind = graph.categories[consumer]
                if kind is Category.MATMUL and held is not None:
                    reach.products.add(consumer)
                if kind not in _SOFT or consumer in reach.large or consumer in reach.rows:
                    continue
                after = self._after(consumer, held) if held is not None else None
                if after is not None:
                    reach.large[consumer] = after
                elif held is not None and kind is Category.REDUCE:
                    reach.rows.add(consumer)
                    reach.reduced |= self._reduced(consumer, held)
                elif held is None and kind is not Category.REDUCE and len(reach.rows) < MAX_ROW_OPS:
                    if consumer in known:
                        reach.large[consumer] = known[consumer]
                    elif self._of_rows(consumer, reach):
                        reach.rows.add(consumer)
                    else:
                        reach.ends.add(consumer)
                        continue
                else:
                    continue
                stack.append(consumer)
        return reach

    def _of_rows(self, node: int, reach: _Reach) -> bool:
        """Whether an op on row statistics reads nothing else but constants; where it does, rows end.

        One that reads large values too is followed from these, however the walk came by it first.
        """
        graph = self._graph
        for value in graph.inputs[node]:
            producer = graph.producer[value]
            if graph.weightless[value] or producer in reach.rows:
                continue
            if producer == EXTERNAL or not all(graph.weightless[held] for held in graph.inputs[producer]):
                return False
        return True

    def _after(self, node: int, factors: Factors) -> Factors | None:
        """The factors of a large result of `node`, None where its result is not as large."""
        graph = self._graph
        if graph.categories[node] is not Category.LOOP or _elements(graph, node) != self._size:
            return None
        op = graph.ops[node]
        if op.name != "stablehlo.transpose":
            return factors
        parts = split(factors, as_tensor(op.operand_types[0]).shape)
        if parts is None:
            return None
        order: tuple[int, ...] = op.attrs["permutation"]
        return tuple(factor for dim in order for factor in parts[dim])

    def _reduced(self, node: int, factors: Factors) -> set[str]:
        op = self._graph.ops[node]
        parts = split(factors, as_tensor(op.operand_types[0]).shape)
        if parts is None:
            return set()
        dims: tuple[int, ...] = op.attrs.get("dimensions", ())
        return {label for dim in dims for label, _ in parts[dim]}

    def _backward_reach(self, reach: _Reach) -> tuple[_Reach, set[int]]:
        """Everything that follows the products whose values meet those of the scores, and these products.

        What only meets their gradients belongs to somebody else: another attention with the same bias.
        """
        found = _Reach()
        gradients: set[int] = set()
        for node in sorted(reach.large):
            if node in found.large:
                continue
            factors = reach.large[node]
            for value in self._graph.inputs[node]:
                origin = self._origin(value, reach)
                if origin is None or origin in gradients or node == self._score:
                    continue
                gradients.add(origin)
                more = self._reach(origin, factors, reach.large)
                found.large |= {other: reach.large.get(other, held) for other, held in more.large.items()}
                found.rows |= more.rows
                found.products |= more.products
        return found, gradients

    def _origin(self, value: int, reach: _Reach) -> int | None:
        """The product that a large operand comes from by element-wise ops, None if it comes from the scores or none."""
        graph = self._graph
        if graph.types[value].elements != self._size:
            return None
        stack, seen = [value], set[int]()
        while stack and len(seen) < MAX_ROW_OPS:
            producer = graph.producer[stack.pop()]
            if producer == EXTERNAL or producer in seen or producer in reach.large:
                continue
            seen.add(producer)
            if graph.categories[producer] is Category.MATMUL:
                return producer
            if graph.categories[producer] is Category.LOOP:
                stack += [held for held in graph.inputs[producer] if graph.types[held].elements == self._size]
        return None

    def _reads(self, node: int, nodes: Iterable[int]) -> bool:
        own = set(nodes)
        return any(self._graph.producer[value] in own for value in self._graph.inputs[node])

    def _contracts(self, node: int, large: dict[int, Factors]) -> set[str]:
        """Sides (`l`, `r`) of the scores that the product sums over, by its large operand."""
        op = self._graph.ops[node]
        dims: DotDims = op.attrs["dot_dimension_numbers"]
        for place, contracted in ((0, dims.lhs_contracting), (1, dims.rhs_contracting)):
            factors = large.get(self._graph.producer[self._graph.inputs[node][place]])
            parts = split(factors, as_tensor(op.operand_types[place]).shape) if factors else None
            if parts is not None:
                return {label[0] for dim in contracted for label, size in parts[dim] if size > 1}
        return set()

    def _divisions(self, mixed: set[int], rows: set[int]) -> set[int]:
        """Row ops that read the mixed values: a division after the product."""
        graph = self._graph
        after = set(mixed)
        for node in mixed:
            after.update(c for c in _consumers(graph, node) if graph.categories[c] is Category.LOOP)
        return {node for node in rows if graph.ops[node].name in _DIVISIONS and self._reads(node, after)}

    def _ancestors(self, ends: Iterable[int], within: set[int]) -> set[int]:
        found = set(ends)
        stack = list(found)
        while stack:
            for value in self._graph.inputs[stack.pop()]:
                producer = self._graph.producer[value]
                if producer in within and producer not in found:
                    found.add(producer)
                    stack.append(producer)
        return found

    def _backward(self, reach: _Reach, tainted: _Reach, gradients: set[int], mixed: set[int]) -> set[int]:
        """The products of the backward pass, and what lies between them."""
        if not gradients:
            return set()
        ends = (reach.products | tainted.products) - mixed
        return self._ancestors(ends, set(tainted.large) | tainted.rows | gradients) | gradients

    def _saved(self, forward: set[int]) -> set[int]:
        return {node for node in forward if _elements(self._graph, node) != self._size}

    def _tails(self, nodes: set[int]) -> set[int]:
        """Converts and transposes that alone read a result: the kernel writes them in its place."""
        graph = self._graph
        returned = set(graph.returns)
        found: set[int] = set()
        for node in nodes:
            while graph.categories[node] is not Category.CONTROL and returned.isdisjoint(graph.outputs[node]):
                consumers = _consumers(graph, node)
                if len(consumers) != 1 or consumers[0] in nodes or graph.ops[consumers[0]].name not in _TAILS:
                    break
                node = consumers[0]
                found.add(node)
        return found

    def _again(self, backward: set[int], forward: set[int]) -> set[int]:
        """Forward values as large as the scores that the backward pass needs; it computes them again from the rows."""
        large = {
            node
            for node in forward
            if _elements(self._graph, node) == self._size and self._graph.categories[node] is not Category.MATMUL
        }
        return (self._ancestors(backward, large | {self._score}) & forward) if backward else set()

    def _masks(self, nodes: set[int], least: int) -> set[int]:
        """Element-wise nodes that make masks and biases: constants, and values of `least` elements or more that come
        from no product."""
        graph = self._graph
        found: set[int] = set()
        stack = [value for node in nodes if graph.categories[node] in _SOFT for value in graph.inputs[node]]
        while stack:
            value = stack.pop()
            node = graph.producer[value]
            if node == EXTERNAL or node in nodes or node in found:
                continue
            constant = all(graph.weightless[held] for held in graph.inputs[node])
            if graph.types[value].elements < least and not constant:
                continue
            if graph.categories[node] not in (Category.LOOP, Category.GENERATOR):
                continue
            if graph.ops[node].name in _NOT_A_MASK or self._is_product(node):
                continue
            found.add(node)
            stack += graph.inputs[node]
        return found

    def _is_product(self, node: int) -> bool:
        return any(
            self._graph.producer[value] != EXTERNAL
            and self._graph.categories[self._graph.producer[value]] in (Category.MATMUL, Category.CONV)
            for value in self._graph.inputs[node]
        )

    def _shape(self, labels: Factors, keys: str, nodes: set[int]) -> AttentionShape:
        op = self._graph.ops[self._score]
        dims: DotDims = op.attrs["dot_dimension_numbers"]
        lhs = as_tensor(op.operand_types[0])
        batch = [size for label, size in labels if label[0] == "b"]
        queries = [size for label, size in labels if label[0] not in ("b", keys)]
        d = 1
        for dim in dims.lhs_contracting:
            d *= lhs.shape[dim]
        sq = max(queries, default=1)
        hq = (batch[-1] if batch else 1) * _product(queries) // max(1, sq)
        count = _product(batch[:-1])
        key = self._graph.inputs[self._score][1 if keys == "r" else 0]
        skv = _product([size for label, size in labels if label[0] == keys])
        held = self._unspread(key) // max(1, count * skv * d)
        shape = AttentionShape(count, hq, max(1, min(hq, held)), sq, skv, d)
        causal = is_causal(self._graph, nodes)
        return replace(shape, causal=int(causal), window=window_of(self._graph, nodes) if causal else 0)

    def _unspread(self, value: int) -> int:
        """Elements of a key operand before its heads were shared out."""
        graph = self._graph
        while graph.producer[value] != EXTERNAL:
            op = graph.ops[graph.producer[value]]
            if op.name not in ("stablehlo.transpose", "stablehlo.broadcast_in_dim", "stablehlo.convert"):
                break
            value = graph.inputs[graph.producer[value]][0]
        return graph.types[value].elements


def split(factors: Sequence[tuple[str, int]], shape: Sequence[int]) -> list[Factors] | None:
    """The factors of each dimension of `shape`, None where it cuts one unevenly. A factor may lie in several."""
    parts: list[Factors] = []
    rest = [factor for factor in factors if factor[1] != 1]
    for size in shape:
        taken: list[tuple[str, int]] = []
        product = 1
        while product < size and rest:
            label, held = rest.pop(0)
            needed = size // product
            if held > needed and not held % needed:
                rest.insert(0, (label, held // needed))
                held = needed
            taken.append((label, held))
            product *= held
        if product != size:
            return None
        parts.append(tuple(taken))
    return None if rest else parts


def _product_factors(graph: Graph, node: int) -> Factors:
    """Batch dimensions `b`, then those of the left (`l`) and of the right operand (`r`)."""
    op = graph.ops[node]
    dims: DotDims = op.attrs["dot_dimension_numbers"]
    lhs, rhs = as_tensor(op.operand_types[0]).shape, as_tensor(op.operand_types[1]).shape
    left = [size for dim, size in enumerate(lhs) if dim not in (*dims.lhs_batch, *dims.lhs_contracting)]
    right = [size for dim, size in enumerate(rhs) if dim not in (*dims.rhs_batch, *dims.rhs_contracting)]
    named = [("b", lhs[dim]) for dim in dims.lhs_batch] + [("l", size) for size in left] + [("r", s) for s in right]
    return tuple((f"{side}{place}", size) for place, (side, size) in enumerate(named))


def _elements(graph: Graph, node: int) -> int:
    return graph.types[graph.outputs[node][0]].elements


def _consumers(graph: Graph, node: int) -> list[int]:
    return [consumer for value in graph.outputs[node] for consumer in graph.consumers[value]]


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
