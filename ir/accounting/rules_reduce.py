"""Reductions, maps, sorts and selections of the largest."""

from stablecast.ir.accounting.context import Context, reads_of, tensor, writes_of
from stablecast.ir.accounting.registry import hlo, rule
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op


def log2_ceiling(number: int) -> int:
    """The least k with 2**k >= number."""
    return max(number - 1, 0).bit_length()


@rule(*hlo("reduce"), klass=KernelClass.REDUCTION, notes="body FLOPs x (elements - results)")
def reduce(op: Op, context: Context) -> OpWork:
    """n elements need n - 1 applications of the body."""
    applications = max(op.operand_types[0].elements - op.result_type.elements, 0)
    body = context.body_cost(op.regions[0])
    return OpWork(
        vector_flops=applications * body.flops,
        transcendentals=applications * body.transcendentals,
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.REDUCTION,
    )


@rule(*hlo("map"), notes="body FLOPs x elements")
def mapped(op: Op, context: Context) -> OpWork:
    body = context.body_cost(op.regions[0])
    elements = op.result_type.elements
    return OpWork(
        vector_flops=elements * body.flops,
        transcendentals=elements * body.transcendentals,
        reads=reads_of(op),
        writes=writes_of(op),
    )


@rule(
    *hlo("sort"),
    klass=KernelClass.SORT,
    basis=Basis.FORMULA,
    notes="comparator FLOPs x elements x ceil(log2 of the sorted size); operands and results once",
)
def sort(op: Op, context: Context) -> OpWork:
    """n log2 n comparisons a line (comparison sorts, as XLA's cost analysis has it)."""
    first = tensor(op.operand_types[0])
    length = first.shape[int(op.attrs.get("dimension", -1))] if first.shape else 1
    comparisons = first.elements * log2_ceiling(length)
    body = context.body_cost(op.regions[0])
    return OpWork(
        vector_flops=comparisons * body.flops,
        transcendentals=comparisons * body.transcendentals,
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.SORT,
        basis=Basis.FORMULA,
    )


def top_k_work(op: Op) -> OpWork:
    """The k largest of each line: a heap of k takes log2(k) + 1 comparisons an element at most."""
    taken = tensor(op.result_type).shape[-1]
    return OpWork(
        vector_flops=op.operand_types[0].elements * (log2_ceiling(taken) + 1),
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.SORT,
        basis=Basis.FORMULA,
    )


@rule(
    "chlo.top_k",
    "mhlo.topk",
    klass=KernelClass.SORT,
    basis=Basis.FORMULA,
    notes="elements x (ceil(log2 k) + 1) comparisons; the operand and both results once",
)
def top_k(op: Op, context: Context) -> OpWork:
    return top_k_work(op)
