"""Products of matrices: 2 FLOP per multiply-add; a complex multiply-add is four real ones."""

import math

from stablecast.ir.accounting.context import Context, reads_of, tensor, writes_of
from stablecast.ir.accounting.registry import hlo, rule
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.attributes import DotDims, RaggedDotDims
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op


def flops_per_multiply_add(op: Op) -> int:
    """2, or 8 where both factors are complex, 4 where one is."""
    kinds = [tensor(kind).dtype.is_complex for kind in op.operand_types[:2]]
    return 2 * (2 ** sum(kinds))


def product(op: Op, contracted: float) -> OpWork:
    """A matrix product whose every result element sums `contracted` multiply-adds."""
    return OpWork(
        matmul_flops=flops_per_multiply_add(op) * op.result_type.elements * contracted,
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.MATMUL,
    )


@rule(*hlo("dot_general"), klass=KernelClass.MATMUL, notes="2 x result x contracted sizes; complex 8")
def dot_general(op: Op, context: Context) -> OpWork:
    dims: DotDims = op.attrs["dot_dimension_numbers"]
    shape = tensor(op.operand_types[0]).shape
    return product(op, math.prod(shape[axis] for axis in dims.lhs_contracting))


@rule(*hlo("dot"), klass=KernelClass.MATMUL, notes="2 x result x last size of the left operand")
def dot(op: Op, context: Context) -> OpWork:
    shape = tensor(op.operand_types[0]).shape
    return product(op, shape[-1] if shape else 1)


@rule(*hlo("einsum"), klass=KernelClass.MATMUL, notes="2 x result x sizes of the summed indices")
def einsum(op: Op, context: Context) -> OpWork:
    """`einsum_config` is `ij,jk->ik`; an ellipsis stands for leading dimensions."""
    config = str(op.attrs["einsum_config"])
    inputs, _, output = config.partition("->")
    sizes: dict[str, int] = {}
    for labels, kind in zip(inputs.split(","), op.operand_types, strict=True):
        shape = tensor(kind).shape
        names = labels.strip().replace("...", "")
        if len(names) > len(shape):
            raise InputError(f"{op.name} '{config}' has more indices than {kind} has dimensions")
        sizes.update(zip(names, shape[len(shape) - len(names) :], strict=True))
    return product(op, math.prod(size for label, size in sizes.items() if label not in output))


@rule("stablehlo.unary_einsum", klass=KernelClass.REDUCTION, notes="1 FLOP per element summed away")
def unary_einsum(op: Op, context: Context) -> OpWork:
    summed = max(op.operand_types[0].elements - op.result_type.elements, 0)
    return OpWork(vector_flops=summed, reads=reads_of(op), writes=writes_of(op), klass=KernelClass.REDUCTION)


@rule(
    "chlo.ragged_dot",
    "mhlo.ragged_dot",
    klass=KernelClass.MATMUL,
    notes="every row by the matrix of its group: 2 x rows x k x n, whatever the group sizes; all groups' weights read",
)
def ragged_dot(op: Op, context: Context) -> OpWork:
    """Group sizes sum to the ragged dimension, so the work does not depend on how rows fall on groups.

    Ragged lhs rows (m): each result element contracts k. Ragged contraction: the lhs is gone through once, each of its
    elements with every column of the rhs. Ragged batch: an ordinary batched product.
    """
    dims: RaggedDotDims = op.attrs["ragged_dot_dimension_numbers"]
    lhs, rhs = tensor(op.operand_types[0]).shape, tensor(op.operand_types[1]).shape
    used = {*dims.dot.rhs_batch, *dims.dot.rhs_contracting, *dims.rhs_group}
    columns = math.prod(size for axis, size in enumerate(rhs) if axis not in used)
    return OpWork(
        matmul_flops=flops_per_multiply_add(op) * math.prod(lhs) * columns,
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.MATMUL,
        basis=Basis.EXACT,
        note="group sizes are taken to sum to the ragged dimension",
    )
