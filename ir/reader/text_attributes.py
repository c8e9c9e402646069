"""Attributes that the bindings have no accessors for, read from their printed form."""

import re

from stablecast.ir.attributes import DotDims, RaggedDotDims
from stablecast.ir.errors import InputError


def ragged_dot_dims(text: str) -> RaggedDotDims:
    """`#chlo.ragged_dot<lhs_batching_dimensions = [0], ...>`; a field that is not printed is empty."""
    if not text.startswith("#chlo.ragged_dot<"):
        raise InputError(f"not the dimension numbers of a ragged dot: {text[:80]}")
    fields = {name: _numbers(values) for name, values in re.findall(r"(\w+) = \[([^\]]*)\]", text)}
    dot = DotDims(
        fields.get("lhs_batching_dimensions", ()),
        fields.get("rhs_batching_dimensions", ()),
        fields.get("lhs_contracting_dimensions", ()),
        fields.get("rhs_contracting_dimensions", ()),
    )
    return RaggedDotDims(dot, fields.get("lhs_ragged_dimensions", ()), fields.get("rhs_group_dimensions", ()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
