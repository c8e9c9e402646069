"""XLA:GPU's changes to products: those that share an operand become one, and long contractions are split."""

from collections.abc import Iterator, Sequence

from stablecast.ir.attributes import DotDims
from stablecast.ir.types import as_tensor
from stablecast.lowering.categories import Category
from stablecast.lowering.execution.ordering import group_of
from stablecast.lowering.execution.plan import Plan, plan_pass
from stablecast.lowering.execution.xla import on_gpu
from stablecast.lowering.graph import EXTERNAL, Graph
from stablecast.lowering.products import matmul_shape

MERGE = "xla-dot-merger"
LARGEST_MERGED_BYTES = 64 * 2**20
"""`xla_gpu_dot_merger_threshold_mb`: of two products that become one, the smaller has at most so many bytes of operands
and result."""
MAX_SEARCHED = 512
"""Nodes looked at to prove that one product does not need the other."""


@plan_pass(MERGE, "products that share an operand and need nothing of each other become one (GPU)")
def merge(plan: Plan) -> None:
    if not on_gpu(plan):
        return
    for products in _mergeable(plan.graph, plan.claimed):
        members = sorted({*products, *_views(plan.graph, products)})
        made = group_of(plan.graph, members, roots=products)
        made.hero, made.merged = products[0], tuple(products)
        plan.groups[products[-1]] = made
        plan.claimed.update(dict.fromkeys(products, products[-1]))


def _mergeable(graph: Graph, claimed: dict[int, int]) -> Iterator[list[int]]:
    by_operand: dict[tuple[object, ...], list[int]] = {}
    for node, kind in enumerate(graph.categories):
        if kind is Category.MATMUL and graph.live[node] and node not in claimed:
            for key in _operand_keys(graph, node):
                by_operand.setdefault(key, []).append(node)
    taken: set[int] = set()
    for nodes in by_operand.values():
        together: list[int] = []
        for node in nodes:
            if node in taken or (together and not _may_join(graph, together, node)):
                continue
            together.append(node)
        if len(together) > 1:
            taken.update(together)
            yield together


def _operand_keys(graph: Graph, node: int) -> Iterator[tuple[object, ...]]:
    """What two products must have in common: an operand, how it is contracted, and the element types."""
    op = graph.ops[node]
    dims = op.attrs.get("dot_dimension_numbers")
    if not isinstance(dims, DotDims) or dims.lhs_batch:
        return
    types = tuple(as_tensor(kind).dtype for kind in (*op.operand_types, op.result_type))
    sides = ((dims.lhs_contracting, dims.rhs_contracting), (dims.rhs_contracting, dims.lhs_contracting))
    for side, (own, _) in enumerate(sides):
        yield (side, graph.inputs[node][side], own, types)


def _may_join(graph: Graph, together: Sequence[int], node: int) -> bool:
    small = [one for one in (*together, node) if _nbytes(graph, one) <= LARGEST_MERGED_BYTES]
    return len(small) >= len(together) and all(_apart(graph, one, node) for one in together)


def _nbytes(graph: Graph, node: int) -> int:
    op = graph.ops[node]
    return sum(kind.nbytes for kind in (*op.operand_types, op.result_type))


def _apart(graph: Graph, first: int, second: int) -> bool:
    """Whether `second` needs nothing of `first`, as far as `MAX_SEARCHED` nodes tell."""
    stack, seen = list(graph.consumers_of(first)), set[int]()
    while stack:
        node = stack.pop()
        if node == second:
            return False
        if node in seen or node > second:
            continue
        seen.add(node)
        if len(seen) > MAX_SEARCHED:
            return False
        stack += graph.consumers_of(node)
    return True


def _views(graph: Graph, nodes: Sequence[int]) -> set[int]:
    """Transposes of operands."""
    found: set[int] = set()
    for node in nodes:
        for value in graph.inputs[node]:
            producer = graph.producer[value]
            while producer != EXTERNAL and graph.ops[producer].name == "stablehlo.transpose":
                found.add(producer)
                producer = graph.producer[graph.inputs[producer][0]]
    return found


SPLIT = "xla-split-k"
SPLIT_TILE, SPLIT_BLOCKS, MAX_SPLIT, SPLIT_K_MIN, SPLIT_K_MIN_FEW = 128, 231, 32, 128, 64
"""Observed on XLA:GPU's output for a device of 132 cores (its heuristic is not documented): the largest power of two
that makes no more than 231 blocks of 128 x 128, at most 32, and leaves each part 128 of k (64 where there are fewer
than eight blocks)."""
_FEW_BLOCKS = 8


def split_of(batch: int, m: int, n: int, k: int) -> int:
    """Parts that the contraction of a product is split in, 1 for none."""
    blocks = -(-m // SPLIT_TILE) * -(-n // SPLIT_TILE)
    if batch > 1:
        return 1
    least = SPLIT_K_MIN if blocks >= _FEW_BLOCKS else SPLIT_K_MIN_FEW
    parts = 1
    while parts < MAX_SPLIT and blocks * parts * 2 <= SPLIT_BLOCKS and k >= least * parts * 2:
        parts *= 2
    return parts


@plan_pass(SPLIT, "products with few results and a long contraction are cut along it, and their parts added (GPU)")
def split(plan: Plan) -> None:
    if not on_gpu(plan):
        return
    graph = plan.graph
    for node, kind in enumerate(graph.categories):
        if kind is not Category.MATMUL or not graph.live[node] or node in plan.claimed:
            continue
        if graph.ops[node].name == "chlo.ragged_dot":
            continue
        sizes = matmul_shape(graph.ops[node])
        parts = split_of(sizes["batch"], sizes["m"], sizes["n"], sizes["k"])
        if parts > 1:
            made = group_of(graph, sorted({node, *_views(graph, [node])}), roots=[node])
            made.hero, made.split = node, parts
            plan.groups[node] = made
            plan.claimed[node] = node
