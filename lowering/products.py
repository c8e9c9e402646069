"""Matrix products and convolutions as kernels see them: sizes, layout, arithmetic."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from stablecast.ir.attributes import ConvDims, DotDims, RaggedDotDims
from stablecast.ir.dtypes import DType, DTypeKind
from stablecast.ir.program import Op
from stablecast.ir.types import as_tensor

_PRECISION = {
    "DEFAULT": "default",
    "HIGH": "high",
    "HIGHEST": "highest",
}
_F8 = {"f8e5m2": "fp8_e5m2", "f8e5m2fnuz": "fp8_e5m2"}
_SIMPLE = {"f64": "fp64", "tf32": "tf32"}
PASSES = {"bf16x3": 3, "bf16x6": 6, "tf32x3": 3}
"""Matrix passes of the modes that split an f32 operand."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a target multiplies with: f32 at `default`, `high` and `highest` precision, f16 (`half`) and bf16."""

    default: str = "tf32"
    high: str = "tf32x3"
    highest: str = "fp32"
    half: str = "fp16"
    bf16: str = "bf16"


TPU_ARITHMETIC = Arithmetic("bf16", "bf16x3", "bf16x6", "bf16")
PLAIN_ARITHMETIC = Arithmetic("fp32", "fp32", "fp32")
TF32_ARITHMETIC = Arithmetic()


def math_mode(dtype: DType, precision: Any, arithmetic: Arithmetic) -> str:
    """The math mode of a product of `dtype` operands.

    `precision`: the op's `precision_config` as decoded, or a name. Integer products are `int8` up to 8 bits and
    `int16`, `int32`, `int64` above.
    """
    if dtype.kind is DTypeKind.COMPLEX:
        return "fp64" if dtype.bits == 128 else getattr(arithmetic, _precision(precision))
    if dtype.name == "f32":
        return getattr(arithmetic, _precision(precision))
    if dtype.name in ("f16", "bf16"):
        return arithmetic.half if dtype.name == "f16" else arithmetic.bf16
    if dtype.name in _SIMPLE:
        return _SIMPLE[dtype.name]
    if dtype.kind is DTypeKind.FLOAT:
        return _F8.get(dtype.name, "fp8_e4m3" if dtype.bits == 8 else f"fp{dtype.bits}")
    return "int4" if dtype.bits == 4 else f"int{max(8, dtype.bits)}"


def _precision(config: Any) -> str:
    """The strictest precision that the operands ask for."""
    order = ("default", "high", "highest")
    texts = cast("tuple[Any, ...]", config if isinstance(config, tuple) else (config,) if config else ())
    found = [
        _PRECISION.get(str(text).removeprefix("#stablehlo<precision ").rstrip(">").upper(), "default") for text in texts
    ]
    return max(found, key=order.index, default="default")


def wider(left: DType, right: DType) -> DType:
    """The operand type that decides the arithmetic of a product of mixed types."""
    return left if left.bits >= right.bits else right


def _product(shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
    return math.prod(shape[dim] for dim in dims)


def matmul_shape(op: Op) -> Mapping[str, int]:
    """batch, m, n, k, trans_a, trans_b of a product; for a ragged one m covers all groups."""
    lhs, rhs = as_tensor(op.operand_types[0]), as_tensor(op.operand_types[1])
    dims = op.attrs.get("dot_dimension_numbers") or op.attrs.get("ragged_dot_dimension_numbers")
    if isinstance(dims, RaggedDotDims):
        group = dims.rhs_group
        dims = dims.dot
    else:
        group = ()
    if not isinstance(dims, DotDims):
        dims = DotDims((), (), (len(lhs.shape) - 1,), (0,))
    batch = _product(lhs.shape, dims.lhs_batch)
    k = _product(lhs.shape, dims.lhs_contracting)
    m = lhs.elements // max(1, batch * k)
    n = rhs.elements // max(1, batch * k * _product(rhs.shape, group))
    return {
        "batch": batch,
        "m": m,
        "n": n,
        "k": k,
        "trans_a": int(bool(dims.lhs_contracting) and max(dims.lhs_contracting) != len(lhs.shape) - 1),
        "trans_b": int(bool(dims.rhs_contracting) and max(dims.rhs_contracting) == len(rhs.shape) - 1),
    }


def conv_shape(op: Op) -> Mapping[str, int]:
    """The convolution's own sizes and those of its im2col product, per feature group.

    The im2col product has m = batch x output positions, n = output channels, k = input channels x window; with
    feature or batch groups `batch` counts them.
    """
    lhs, rhs, out = as_tensor(op.operand_types[0]), as_tensor(op.operand_types[1]), as_tensor(op.result_types[0])
    dims: ConvDims = op.attrs["dimension_numbers"]
    features = int(op.attrs.get("feature_group_count", 1))
    batches = int(op.attrs.get("batch_group_count", 1))
    groups = features * batches
    window = [rhs.shape[dim] for dim in dims.kernel_spatial]
    spatial = [lhs.shape[dim] for dim in dims.input_spatial]
    positions = math.prod(out.shape[dim] for dim in dims.output_spatial)
    out_channels = out.shape[dims.output_feature]
    padding = op.attrs.get("padding") or ()
    return {
        "batch": groups,
        "m": out.shape[dims.output_batch] * positions,
        "n": out_channels // groups,
        "k": rhs.shape[dims.kernel_input_feature] * math.prod(window),
        "cn": lhs.shape[dims.input_batch],
        "ch": math.prod(spatial[:-1]) if spatial else 1,
        "cw": spatial[-1] if spatial else 1,
        "cc": lhs.shape[dims.input_feature],
        "co": out_channels,
        "cr": math.prod(window[:-1]) if window else 1,
        "cs": window[-1] if window else 1,
        "stride": _last(op.attrs.get("window_strides"), 1),
        "pad": max((value for row in padding for value in row), default=0),
        "lhs_dilation": _last(op.attrs.get("lhs_dilation"), 1),
        "rhs_dilation": _last(op.attrs.get("rhs_dilation"), 1),
        "groups": groups,
    }


def _last(values: Any, default: int) -> int:
    return int(values[-1]) if values else default
