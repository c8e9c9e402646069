"""HLO instructions as ops of our program: names and decoded attributes."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stablecast.ir.attributes import DotDims
from stablecast.ir.hlo import decode
from stablecast.ir.program import NO_ATTRIBUTES
from stablecast.ir.types import TensorType

Attributes = Mapping[str, str]

_SPECIAL = {
    "dot": "stablehlo.dot_general",
    "broadcast": "stablehlo.broadcast_in_dim",
    "population-count": "stablehlo.popcnt",
    "opt-barrier": "stablehlo.optimization_barrier",
    "rng-get-and-update-state": "mhlo.xla.rng_get_and_update_state",
    "ragged-dot": "chlo.ragged_dot",
    "copy-start": "mhlo.copy",
    "all-gather-start": "stablehlo.all_gather",
    "all-reduce-start": "stablehlo.all_reduce",
    "ragged-all-to-all": "stablehlo.all_to_all",
    "raggedalltoall": "stablehlo.all_to_all",
}
_MHLO = frozenset(
    {
        "acos",
        "acosh",
        "add-dependency",
        "asin",
        "asinh",
        "atanh",
        "bitcast",
        "copy",
        "cosh",
        "domain",
        "erf",
        "sinh",
        "stochastic-convert",
        "topk",
    }
)
COLLECTIVES = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "collective_broadcast",
        "collective_permute",
        "reduce_scatter",
    )
)


NEEDS_REGION = frozenset(
    f"stablehlo.{name}" for name in ("reduce", "reduce_window", "scatter", "select_and_scatter", "sort", "map")
)
"""Ops that apply a computation."""
NEEDS_NOTHING = frozenset(
    f"stablehlo.{name}" for name in ("constant", "iota", "partition_id", "replica_id", "create_token", "infeed", "recv")
) | {"mhlo.xla.rng_get_and_update_state"}
"""Ops without operands."""


def op_name(opcode: str) -> str:
    """The name of the op that an instruction with `opcode` is."""
    found = _SPECIAL.get(opcode)
    if found is not None:
        return found
    if opcode in _MHLO:
        return f"mhlo.{opcode.replace('-', '_')}"
    return f"stablehlo.{opcode.removesuffix('-start').replace('-', '_')}"


def decoded(name: str, attrs: Attributes, inside: str, kind: TensorType | None, rank: int) -> Mapping[str, Any]:
    """The attributes of the op `name` that anything asks for.

    `inside`: what stands in the brackets of a constant; `kind`: type of its first result; `rank`: of its first operand.
    """
    if name == "stablehlo.constant" and kind is not None:
        return {"value": decode.literal(inside, kind)}
    if name in COLLECTIVES:
        return _collective(attrs)
    maker = _MAKERS.get(name)
    return maker(attrs, rank) if maker is not None else NO_ATTRIBUTES


def check_product(name: str, made: Mapping[str, Any], operands: Sequence[TensorType]) -> None:
    """Raises `ValueError` where a product has not two operands with the dimensions that it names."""
    if name not in ("stablehlo.dot_general", "stablehlo.convolution"):
        return
    if len(operands) != 2:
        raise ValueError(f"it has {len(operands)} operands, not 2")
    dims = made.get("dot_dimension_numbers") or made["dimension_numbers"]
    if isinstance(dims, DotDims):
        named = (dims.lhs_batch + dims.lhs_contracting, dims.rhs_batch + dims.rhs_contracting)
    else:
        named = (
            (dims.input_batch, dims.input_feature, *dims.input_spatial),
            (dims.kernel_input_feature, dims.kernel_output_feature, *dims.kernel_spatial),
        )
    for operand, axes in zip(operands, named, strict=True):
        if any(not 0 <= axis < operand.rank for axis in axes):
            raise ValueError(f"{operand} has not the dimensions {axes}")


def _collective(attrs: Attributes) -> Mapping[str, Any]:
    made: dict[str, Any] = {}
    groups = decode.replica_groups(attrs["replica_groups"]) if "replica_groups" in attrs else None
    if groups is not None:
        made["replica_groups"] = groups
    if "source_target_pairs" in attrs:
        made["source_target_pairs"] = decode.pairs(attrs["source_target_pairs"])
    if attrs.get("channel_id", "").isdigit():
        made["channel_handle"] = int(attrs["channel_id"])
    return made


def _dot(attrs: Attributes, rank: int) -> Mapping[str, Any]:
    return {"dot_dimension_numbers": decode.dot_dims(attrs), "precision_config": decode.precision(attrs)}


def _convolution(attrs: Attributes, rank: int) -> Mapping[str, Any]:
    window = decode.window(attrs.get("window", ""), max(rank - 2, 0))
    return {
        "dimension_numbers": decode.conv_dims(attrs["dim_labels"]),
        "window_strides": window["stride"],
        "padding": window["padding"],
        "lhs_dilation": window["lhs_dilation"],
        "rhs_dilation": window["rhs_dilation"],
        "window_reversal": window["reversal"],
        "feature_group_count": int(attrs.get("feature_group_count", 1)),
        "batch_group_count": int(attrs.get("batch_group_count", 1)),
        "precision_config": decode.precision(attrs),
    }


def _windowed(attrs: Attributes, rank: int) -> Mapping[str, Any]:
    window = decode.window(attrs.get("window", ""), rank)
    return {
        "window_dimensions": window["size"],
        "window_strides": window["stride"],
        "padding": window["padding"],
        "base_dilations": window["lhs_dilation"],
        "window_dilations": window["rhs_dilation"],
    }


def _slice(attrs: Attributes, rank: int) -> Mapping[str, Any]:
    cuts = [decode.ints(part) for part in decode.split(attrs.get("slice", "{}")[1:-1]) if part.strip()]
    return {
        "start_indices": tuple(cut[0] for cut in cuts),
        "limit_indices": tuple(cut[1] for cut in cuts),
        "strides": tuple(cut[2] if len(cut) > 2 else 1 for cut in cuts),
    }


def _transpose(attrs: Attributes, rank: int) -> Mapping[str, Any]:
    order = decode.ints(attrs.get("dimensions", ""))
    if sorted(order) != list(range(rank)):
        raise ValueError(f"{order} is no order of {rank} dimensions")
    return {"permutation": order}


def _pad(attrs: Attributes, rank: int) -> Mapping[str, Any]:
    rows = [decode.ints(part.replace("_", " ")) for part in attrs.get("padding", "").split("x") if part]
    return {
        "edge_padding_low": tuple(row[0] for row in rows),
        "edge_padding_high": tuple(row[1] for row in rows),
        "interior_padding": tuple(row[2] if len(row) > 2 else 0 for row in rows),
    }


def _named(attribute: str, name: str) -> Callable[[Attributes, int], Mapping[str, Any]]:
    return lambda attrs, rank: {name: decode.ints(attrs.get(attribute, ""))}


def _first(attribute: str, name: str) -> Callable[[Attributes, int], Mapping[str, Any]]:
    return lambda attrs, rank: {name: next(iter(decode.ints(attrs.get(attribute, ""))), 0)}


_MAKERS: Mapping[str, Callable[[Attributes, int], Mapping[str, Any]]] = MappingProxyType(
    {
        "stablehlo.dot_general": _dot,
        "stablehlo.convolution": _convolution,
        "stablehlo.reduce_window": _windowed,
        "stablehlo.select_and_scatter": _windowed,
        "stablehlo.slice": _slice,
        "stablehlo.pad": _pad,
        "stablehlo.transpose": _transpose,
        "stablehlo.broadcast_in_dim": _named("dimensions", "broadcast_dimensions"),
        "stablehlo.reduce": _named("dimensions", "dimensions"),
        "stablehlo.reverse": _named("dimensions", "dimensions"),
        "stablehlo.fft": _named("fft_length", "fft_length"),
        "stablehlo.dynamic_slice": _named("dynamic_slice_sizes", "slice_sizes"),
        "stablehlo.concatenate": _first("dimensions", "dimension"),
        "stablehlo.sort": _first("dimensions", "dimension"),
        "stablehlo.iota": _first("iota_dimension", "iota_dimension"),
        "stablehlo.compare": lambda attrs, rank: {"comparison_direction": attrs.get("direction", "EQ")},
        "stablehlo.gather": lambda attrs, rank: {
            "dimension_numbers": decode.gather_dims(attrs),
            "slice_sizes": decode.ints(attrs.get("slice_sizes", "")),
        },
        "stablehlo.scatter": lambda attrs, rank: {"scatter_dimension_numbers": decode.scatter_dims(attrs)},
        "stablehlo.rng_bit_generator": lambda attrs, rank: {
            "rng_algorithm": attrs.get("algorithm", "rng_default").removeprefix("rng_").upper()
        },
        "stablehlo.rng": lambda attrs, rank: {
            "rng_distribution": attrs.get("distribution", "").removeprefix("rng_").upper()
        },
        "stablehlo.custom_call": lambda attrs, rank: {
            "call_target_name": attrs.get("custom_call_target", "").strip('"'),
            "backend_config": attrs.get("backend_config", ""),
        },
    }
)
