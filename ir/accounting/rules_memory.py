"""Ops that move data: slices read what they output, gathers their rows, updates touch their slice; metadata is free."""

from stablecast.ir.accounting.context import Context, reads_of, tensor, writes_of
from stablecast.ir.accounting.registry import hlo, rule
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op


def nothing(op: Op) -> OpWork:
    """No FLOPs and no bytes, with one zero per operand and result."""
    return OpWork(reads=(0,) * len(op.operands), writes=(0,) * len(op.results), klass=KernelClass.COPY)


@rule(
    *hlo(
        "after_all",
        "bitcast_convert",
        "constant",
        "create_token",
        "get_dimension_size",
        "get_tuple_element",
        "optimization_barrier",
        "partition_id",
        "replica_id",
        "reshape",
        "set_dimension_size",
        "tuple",
    ),
    "mhlo.add_dependency",
    "mhlo.bitcast",
    "mhlo.domain",
    "mhlo.minimum_broadcast_shapes",
    "mhlo.trace",
    "chlo.constant",
    "arith.constant",
    "builtin.unrealized_conversion_cast",
    klass=KernelClass.COPY,
    notes="metadata: 0 FLOP, 0 B",
)
def metadata(op: Op, context: Context) -> OpWork:
    """Changes how bytes are looked at, not the bytes."""
    return nothing(op)


@rule(
    "sdy.sharding_constraint",
    "sdy.sharding_group",
    "sdy.propagation_barrier",
    "sdy.data_flow_edge",
    "sdy.func_data_flow_edge",
    "sdy.constant",
    "sdy.replicated_to_unreduced",
    "sdy.sharded_to_unreduced",
    klass=KernelClass.COPY,
    notes="annotation: 0 FLOP, 0 B; what partitioning makes of it is counted after partitioning",
)
def annotation(op: Op, context: Context) -> OpWork:
    return nothing(op)


@rule(*hlo("dynamic_reshape"), klass=KernelClass.COPY, notes="metadata: 0 FLOP, 0 B, once its dimensions are bound")
def dynamic_reshape(op: Op, context: Context) -> OpWork:
    return nothing(op)


@rule(*hlo("iota", "dynamic_iota"), "chlo.constant_like", notes="writes its result only")
def generated(op: Op, context: Context) -> OpWork:
    """Elements that follow from their indices, or are all equal."""
    return OpWork(reads=(0,) * len(op.operands), writes=writes_of(op))


@rule(
    *hlo("broadcast", "broadcast_in_dim", "dynamic_broadcast_in_dim"),
    notes="0 FLOP; reads the operand, writes the result",
    control=True,
)
def broadcast(op: Op, context: Context) -> OpWork:
    reads = (op.operand_types[0].nbytes,) + (0,) * (len(op.operands) - 1)
    return OpWork(reads=reads, writes=writes_of(op))


@rule(
    *hlo("concatenate", "reverse", "transpose"),
    "mhlo.copy",
    klass=KernelClass.COPY,
    notes="0 FLOP; every operand and result once",
)
def copy(op: Op, context: Context) -> OpWork:
    return OpWork(reads=reads_of(op), writes=writes_of(op), klass=KernelClass.COPY)


@rule(*hlo("pad", "dynamic_pad"), klass=KernelClass.COPY, notes="0 FLOP; reads the operand, writes the padded result")
def pad(op: Op, context: Context) -> OpWork:
    """Negative padding drops what it cuts off, so no more than the result is read."""
    result = tensor(op.result_type)
    reads = (min(op.operand_types[0].nbytes, result.nbytes), op.operand_types[1].nbytes)
    rest = (0,) * (len(op.operands) - 2)
    return OpWork(reads=reads + rest, writes=writes_of(op), klass=KernelClass.COPY)


@rule(
    *hlo("slice", "dynamic_slice", "real_dynamic_slice"),
    klass=KernelClass.COPY,
    notes="0 FLOP; reads what it outputs, and its start indices",
    control=True,
)
def slicing(op: Op, context: Context) -> OpWork:
    taken = op.result_type.nbytes
    reads = (taken, *(kind.nbytes for kind in op.operand_types[1:]))
    return OpWork(reads=reads, writes=(taken,), klass=KernelClass.COPY)


@rule(
    *hlo("dynamic_update_slice"),
    klass=KernelClass.COPY,
    notes="0 FLOP; in place: reads and writes the update, else a copy of the operand on top",
    in_place=True,
)
def update_slice(op: Op, context: Context) -> OpWork:
    update = op.operand_types[1].nbytes
    reads = (0, update, *(kind.nbytes for kind in op.operand_types[2:]))
    return OpWork(reads=reads, writes=(update,), klass=KernelClass.COPY)


@rule(
    *hlo("gather", "dynamic_gather", "torch_index_select"),
    klass=KernelClass.GATHER,
    notes="0 FLOP; reads the rows that it outputs, and its indices",
)
def gather(op: Op, context: Context) -> OpWork:
    """Rows that several indices name are read once for each."""
    taken = op.result_type.nbytes
    reads = (taken, op.operand_types[1].nbytes) + (0,) * (len(op.operands) - 2)
    return OpWork(reads=reads, writes=(taken,), klass=KernelClass.GATHER)


@rule(
    *hlo("scatter"),
    klass=KernelClass.SCATTER,
    notes="body FLOPs per updated element; in place: reads updates, indices and (unless it overwrites) the old values, "
    "writes as many, else a copy of the operand on top",
    in_place=True,
)
def scatter(op: Op, context: Context) -> OpWork:
    """Operands are (inputs..., indices, updates...), one input and update a result."""
    count = len(op.results)
    updates = op.operand_types[count + 1 :]
    body = op.regions[0]
    cost = context.body_cost(body)
    overwrites = all(value in body.args[count:] for value in body.returns)
    touched = tuple(update.nbytes for update in updates)
    old = (0,) * count if overwrites else touched
    return OpWork(
        vector_flops=updates[0].elements * cost.flops,
        transcendentals=updates[0].elements * cost.transcendentals,
        reads=(*old, op.operand_types[count].nbytes, *touched),
        writes=touched,
        klass=KernelClass.SCATTER,
    )


@rule(
    *hlo("infeed", "outfeed", "send", "recv"),
    klass=KernelClass.COPY,
    basis=Basis.FORMULA,
    notes="0 FLOP; its data once, the other end not counted",
)
def transfer(op: Op, context: Context) -> OpWork:
    return OpWork(reads=reads_of(op), writes=writes_of(op), klass=KernelClass.COPY, basis=Basis.FORMULA)
