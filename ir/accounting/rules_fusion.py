"""Fusions that a compiler made: the FLOPs inside, the bytes at the boundary."""

from stablecast.ir.accounting.context import Context, opaque
from stablecast.ir.accounting.registry import rule
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Block, Op

_PRECEDENCE = (
    KernelClass.CONVOLUTION,
    KernelClass.MATMUL,
    KernelClass.FFT,
    KernelClass.SORT,
    KernelClass.CUSTOM,
    KernelClass.SCATTER,
    KernelClass.REDUCTION,
    KernelClass.GATHER,
    KernelClass.ELEMENTWISE,
    KernelClass.COPY,
)
_UPDATES = frozenset(
    f"{dialect}.{name}" for dialect in ("stablehlo", "mhlo") for name in ("dynamic_update_slice", "scatter")
)
_ALIASES = frozenset({"stablehlo.reshape", "mhlo.reshape", "mhlo.bitcast", "mhlo.tuple", "stablehlo.tuple"})


@rule("mhlo.fusion", notes="FLOPs of its region; bytes at its boundary, where slices and updates count what they touch")
def fusion(op: Op, context: Context) -> OpWork:
    """A region argument that only slices, gathers or in-place updates use counts what these touch of it."""
    block = _body(op, context)
    return opaque(op, "a fusion without a body") if block is None else fused(op, block, context)


def _body(op: Op, context: Context) -> Block | None:
    """The region of a fusion, or the function that it or its region's only op calls."""
    functions = context.program.functions
    if op.callee in functions:
        return functions[op.callee].body
    region = op.regions[0] if op.regions else None
    if region is None or not region.ops:
        return None
    only = region.ops[0]
    if len(region.ops) == 1 and only.callee in functions and only.operands == region.args:
        return functions[only.callee].body
    return region


def fused(op: Op, block: Block, context: Context) -> OpWork:
    """The work of `op`, whose body is `block` and runs as one kernel."""
    works = [context.work(inner, in_place=True) for inner in block.ops]
    classes = {work.klass for work in works}
    worst = next((work for work in works if not work.modelled), None)
    return OpWork(
        matmul_flops=sum(work.matmul_flops for work in works),
        padded_flops=sum(work.padded_flops for work in works),
        dilation_flops=sum(work.dilation_flops for work in works),
        vector_flops=sum(work.vector_flops for work in works),
        transcendentals=sum(work.transcendentals for work in works),
        reads=_reads(op, block, works),
        writes=_writes(op, block, works),
        klass=next((klass for klass in _PRECEDENCE if klass in classes), KernelClass.ELEMENTWISE),
        basis=worst.basis if worst else Basis.EXACT,
        note=worst.note if worst else "",
    )


def _reads(op: Op, block: Block, works: list[OpWork]) -> tuple[float, ...]:
    touched: dict[int, float] = {}
    origin: dict[int, int] = {}
    for inner, work in zip(block.ops, works, strict=True):
        if inner.name in _ALIASES and len(inner.operands) == 1:
            origin[inner.result] = origin.get(inner.operands[0], inner.operands[0])
        for value, nbytes in zip(inner.operands, work.reads, strict=False):
            value = origin.get(value, value)
            touched[value] = touched.get(value, 0) + nbytes
    return tuple(
        min(kind.nbytes, touched.get(value, 0)) for value, kind in zip(block.args, op.operand_types, strict=True)
    )


def _writes(op: Op, block: Block, works: list[OpWork]) -> tuple[float, ...]:
    """Results once, an in-place update of a region argument its slice."""
    writers = {value: (inner, work) for inner, work in zip(block.ops, works, strict=True) for value in inner.results}
    roots = [_root(value, writers) for value in block.returns]
    if len(roots) != len(op.result_types):
        return tuple(kind.nbytes for kind in op.result_types)
    return tuple(_written(root, kind.nbytes, block, writers) for root, kind in zip(roots, op.result_types, strict=True))


def _root(value: int, writers: dict[int, tuple[Op, OpWork]]) -> int:
    while value in writers and writers[value][0].name in _ALIASES and len(writers[value][0].operands) == 1:
        value = writers[value][0].operands[0]
    return value


def _written(root: int, nbytes: int, block: Block, writers: dict[int, tuple[Op, OpWork]]) -> float:
    if root not in writers:
        return nbytes
    inner, work = writers[root]
    updates = inner.name in _UPDATES
    if updates and _root(inner.operands[0], writers) in block.args:
        return work.writes[0]
    return nbytes
