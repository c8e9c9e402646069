"""Attributes that hold sizes, rewritten for local shapes."""

from collections.abc import Callable, Mapping
from typing import Any

from stablecast.ir.attributes import ConvDims
from stablecast.ir.program import Op
from stablecast.ir.types import ValueType, as_tensor

Attributes = Mapping[str, Any]
Types = tuple[ValueType, ...]


def local_attributes(op: Op, operands: Types, results: Types) -> Attributes:
    """The attributes of `op` where its operands and results have these local types."""
    rule = _RULES.get(op.name)
    return op.attrs if rule is None else rule(op, operands, results)


def _slice(op: Op, operands: Types, results: Types) -> Attributes:
    starts, limits, strides = (op.attrs[name] for name in ("start_indices", "limit_indices", "strides"))
    whole, here, there = (as_tensor(kind).shape for kind in (op.operand_types[0], operands[0], results[0]))
    changed = [local != size for local, size in zip(here, whole, strict=True)]
    if not any(changed):
        return op.attrs
    new_starts = tuple(0 if moved else start for start, moved in zip(starts, changed, strict=True))
    new_limits = tuple(
        min(local, (size - 1) * stride + 1 if size else 0) if moved else limit
        for limit, moved, local, size, stride in zip(limits, changed, here, there, strides, strict=True)
    )
    return {**op.attrs, "start_indices": new_starts, "limit_indices": new_limits}


def _dynamic_slice(op: Op, operands: Types, results: Types) -> Attributes:
    return {**op.attrs, "slice_sizes": as_tensor(results[0]).shape}


def _gather(op: Op, operands: Types, results: Types) -> Attributes:
    here = as_tensor(operands[0]).shape
    return {**op.attrs, "slice_sizes": tuple(map(min, op.attrs["slice_sizes"], here))}


def _convolution(op: Op, operands: Types, results: Types) -> Attributes:
    dims: ConvDims = op.attrs["dimension_numbers"]
    given, kernel, result = (as_tensor(kind).shape for kind in (operands[0], operands[1], results[0]))
    attrs = dict(op.attrs)
    if attrs.get("feature_group_count", 1) > 1:
        attrs["feature_group_count"] = max(1, given[dims.input_feature] // kernel[dims.kernel_input_feature])
    if attrs.get("batch_group_count", 1) > 1:
        attrs["batch_group_count"] = max(1, given[dims.input_batch] // max(1, result[dims.output_batch]))
    return attrs


_RULES: Mapping[str, Callable[[Op, Types, Types], Attributes]] = {
    "stablehlo.slice": _slice,
    "stablehlo.dynamic_slice": _dynamic_slice,
    "stablehlo.gather": _gather,
    "stablehlo.convolution": _convolution,
}
