"""Collectives: what one device reads and writes; the network, and the sums it makes, are priced by the backends."""

from stablecast.ir.accounting.context import Context, reads_of, writes_of
from stablecast.ir.accounting.registry import hlo, rule
from stablecast.ir.accounting.values import OpWork
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op

_NAMES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective_broadcast",
    "collective_permute",
    "cross-replica-sum",
    "reduce_scatter",
)


@rule(
    *hlo(*_NAMES),
    "sdy.all_gather",
    "sdy.all_reduce",
    "sdy.all_slice",
    "sdy.all_to_all",
    "sdy.collective_permute",
    "sdy.reduce_scatter",
    "sdy.reshard",
    klass=KernelClass.COPY,
    notes="0 FLOP (its sums belong to the network); operands and results once",
)
def collective(op: Op, context: Context) -> OpWork:
    return OpWork(reads=reads_of(op), writes=writes_of(op), klass=KernelClass.COPY)
