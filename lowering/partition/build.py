"""Makes ops of the local program: fresh value ids, signatures, and the collectives by their StableHLO names."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from stablecast.ir.groups import Groups
from stablecast.ir.program import NO_ATTRIBUTES, Block, Op
from stablecast.ir.reader.module import region_key
from stablecast.ir.types import UNKNOWN_LOCATION, Count, Location, TensorType, ValueType, as_tensor

Attributes = Mapping[str, Any]


class Builder:
    """Numbers values and signatures of one program."""

    def __init__(self, first_value: int) -> None:
        self._next = first_value
        self._signatures: dict[Any, int] = {}
        self._attributes: dict[int, tuple[Attributes, Any]] = {}
        self._scalar_regions: dict[tuple[str, TensorType], tuple[Block, ...]] = {}

    def value(self) -> int:
        """A value id that no other value has."""
        self._next += 1
        return self._next - 1

    def signature(
        self,
        name: str,
        attrs: Attributes,
        operand_types: Sequence[ValueType],
        result_types: Sequence[ValueType],
        regions: Sequence[Block] = (),
        count: Count = 1,
        callee: str = "",
    ) -> int:
        """A number that ops share which are equal but for their values and locations."""
        shape = tuple(region_key(region) for region in regions)
        key = (name, self._frozen(attrs), tuple(operand_types), tuple(result_types), shape, count, callee)
        return self._signatures.setdefault(key, len(self._signatures))

    def _frozen(self, attrs: Attributes) -> Any:
        if not attrs:
            return ()
        found = self._attributes.get(id(attrs))
        if found is None:
            found = self._attributes[id(attrs)] = (attrs, freeze(attrs))
        return found[1]

    def op(
        self,
        name: str,
        operands: Sequence[int],
        operand_types: Sequence[ValueType],
        result_types: Sequence[ValueType],
        attrs: Attributes = NO_ATTRIBUTES,
        *,
        results: Sequence[int] | None = None,
        regions: tuple[Block, ...] = (),
        location: Location = UNKNOWN_LOCATION,
    ) -> Op:
        """An op with a signature; its results are new values unless given."""
        made = tuple(results) if results is not None else tuple(self.value() for _ in result_types)
        return Op(
            name,
            tuple(operands),
            made,
            tuple(operand_types),
            tuple(result_types),
            attrs,
            regions,
            location=location,
            signature=self.signature(name, attrs, operand_types, result_types, regions),
        )

    def collective(
        self,
        kind: str,
        operand: int,
        operand_type: ValueType,
        result_type: ValueType,
        groups: Groups,
        location: Location,
        result: int | None = None,
        reduce_op: str = "",
        attrs: Attributes = NO_ATTRIBUTES,
    ) -> Op:
        """`stablehlo.<kind>` over `groups`."""
        return self.op(
            f"stablehlo.{kind}",
            (operand,),
            (operand_type,),
            (result_type,),
            {"replica_groups": groups, **attrs},
            results=None if result is None else (result,),
            regions=self.scalar_region(f"stablehlo.{reduce_op}", as_tensor(operand_type)) if reduce_op else (),
            location=location,
        )

    def scalar_region(self, name: str, kind: TensorType) -> tuple[Block, ...]:
        """A region that applies the binary op `name` to two scalars."""
        key = (name, TensorType((), kind.dtype))
        found = self._scalar_regions.get(key)
        if found is None:
            scalar = key[1]
            left, right = self.value(), self.value()
            op = self.op(name, (left, right), (scalar, scalar), (scalar,))
            found = self._scalar_regions[key] = (Block((left, right), (scalar, scalar), (op,), (op.result,)),)
        return found


def freeze(value: Any) -> Any:
    """`value` as something hashable that is equal where it is equal."""
    if isinstance(value, Mapping):
        held = cast("Mapping[str, Any]", value)
        return tuple(sorted((name, freeze(item)) for name, item in held.items()))
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        return tuple(map(freeze, items))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
