"""Ops whose work lies in their regions or callee, ops that are parts of others, and ops that are refused."""

from stablecast.ir.accounting.context import Context, opaque
from stablecast.ir.accounting.registry import hlo, part, rule, structure
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op

structure(
    *hlo("while"),
    notes="body x trips, read from the program, else a symbol; tensor ops of the condition x (trips + 1)",
)
structure(*hlo("case", "if"), notes="the branch with most FLOPs and the most bytes; minimum or a probability by choice")
structure("func.call", "call", notes="the work of the function, at every call")
structure(*hlo("composite"), notes="its decomposition, unless a rule is registered for its name")
structure("sdy.manual_computation", notes="body x devices along its manual axes, as the program is still global")
structure("sdy.named_computation", notes="its body or function")
structure("chlo.scan", "mhlo.scan", notes="body x length of the scanned dimension")
structure(*hlo("async_start"), notes="the computation that it starts")
part(*hlo("return"), "func.return", "sdy.return", "sdy.mesh", "func.func", notes="no work of its own")


@rule(*hlo("async_done"), "mhlo.async_update", klass=KernelClass.COPY, notes="counted at async_start")
def async_done(op: Op, context: Context) -> OpWork:
    return OpWork(reads=(0,) * len(op.operands), writes=(0,) * len(op.results), klass=KernelClass.COPY)


@rule(
    *hlo("custom_call"),
    klass=KernelClass.CUSTOM,
    basis=Basis.OPAQUE,
    notes="by the rule of its target; a target without one is an opaque kernel with its operands and results",
)
def custom_call(op: Op, context: Context) -> OpWork:
    return opaque(op, "nobody said what this custom call computes")
