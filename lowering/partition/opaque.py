"""Custom calls that nobody gave a sharding rule: every device runs them on whole operands, as in XLA."""

from stablecast.ir.program import Op
from stablecast.ir.types import TensorType, ValueType
from stablecast.lowering.partition.halo import Exchange, final
from stablecast.lowering.partition.site import Site

OPAQUE_NOTE = (
    "a custom call without a sharding rule: its operands are gathered and every device runs all of it, as in XLA"
)


def custom_call(site: Site) -> list[Op] | None:
    """Gathers what is sharded; None where the results are sharded (it has a rule) or nothing is."""
    if any(sharding.axes for sharding in site.result_shardings) or not any(held.axes for held in site.shardings):
        return None
    site.note(OPAQUE_NOTE)
    ops: list[Op] = []
    values: list[int] = []
    types: list[ValueType] = []
    for operand, kind in enumerate(site.local):
        if not isinstance(kind, TensorType):
            values.append(site.operands[operand])
            types.append(kind)
            continue
        exchange = Exchange.of(site, operand)
        for dim in reversed(range(kind.rank)):
            if site.parts(operand, dim) > 1:
                whole = site.operand_type(operand).shape[dim]
                exchange.gather_to(dim, site.axes(operand, dim), site.shardings[operand].mesh, whole)
        ops += exchange.ops
        values.append(exchange.value)
        types.append(exchange.kind)
    return [*ops, final(site, values, types)]
