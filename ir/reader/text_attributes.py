"""Attributes that the bindings have no accessors for, read from their printed form."""

import re

from stablecast.ir.attributes import DotDims, RaggedDotDims
from stablecast.ir.errors import InputError
from stablecast.ir.program import Axis


def ragged_dot_dims(text: str) -> RaggedDotDims:
    """`#chlo.ragged_dot<lhs_batching_dimensions = [0], ...>` (or mhlo's); a field that is not printed is empty."""
    if not text.startswith(("#chlo.ragged_dot<", "#mhlo.ragged_dot<")):
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


def axis_lists(text: str) -> tuple[tuple[Axis, ...], ...]:
    """`#sdy<list_of_axis_ref_lists[{}, {"x", "y":(1)2}]>` or `#sdy<axis_ref_list{"x"}>`: the axes in each brace."""
    return tuple(_axes(braces) for braces in re.findall(r"\{([^}]*)\}", text))


def all_to_all_params(text: str) -> tuple[tuple[tuple[Axis, ...], int, int], ...]:
    """`#sdy<all_to_all_param_list[{"x"}: 0->2]>`: axes, the dimension that they leave, the one that they then split."""
    found = re.findall(r"\{([^}]*)\}: *(\d+) *-> *(\d+)", text)
    return tuple((_axes(braces), int(source), int(target)) for braces, source, target in found)


def _axes(text: str) -> tuple[Axis, ...]:
    found = re.findall(r'"([^"]+)"(?::\((\d+)\)(\d+))?', text)
    return tuple(Axis(name, (int(pre), int(size)) if size else None) for name, pre, size in found)
