"""Custom calls of libraries as the products and convolutions that they compute, with their epilogues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stablecast.ir.attributes import ConvDims, DotDims
from stablecast.ir.hlo.decode import conv_dims, nested, numbers, window
from stablecast.ir.types import TensorType

_GEMMS = {
    "__cublas$gemm": "cublas",
    "__cublas$lt$matmul": "cublas",
    "__cublas$lt$matmul$f8": "cublas",
    "__triton_gemm": "triton",
    "__onednn$matmul": "onednn",
}
_CONVOLUTIONS = {
    "__cudnn$convForward": "forward",
    "__cudnn$convForwardGraph": "forward",
    "__cudnn$convBiasActivationForward": "forward",
    "__cudnn$convBackwardInput": "input",
    "__cudnn$convBackwardFilter": "filter",
}
_ACTIVATIONS = {"RELU": "maximum", "GELU": "tanh", "kRelu": "maximum", "kRelu6": "clamp", "kElu": "exponential"}


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two operands. `name`: `stablehlo.dot_general` or `stablehlo.convolution`; `library`: who runs it.

    `adds`: places of further operands (bias, the matrix that it is added to). `activation`: StableHLO op after that,
    empty if none.
    """

    name: str
    library: str
    attrs: Mapping[str, Any]
    adds: tuple[int, ...] = ()
    activation: str = ""


def product(
    target: str, attrs: Mapping[str, str], config: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
) -> Product | None:
    """What the custom call `target` computes, None where it is neither a product nor a convolution."""
    if target in _GEMMS:
        return _gemm(target, config, len(operands))
    if target in _CONVOLUTIONS and "dim_labels" in attrs:
        return _convolution(_CONVOLUTIONS[target], attrs, config, operands, result)
    return None


def _gemm(target: str, config: Mapping[str, Any], operands: int) -> Product | None:
    held = config.get("gemm_backend_config", config)
    if nested(held, "dot_dimension_numbers") is None:
        return None
    names = ("lhs_batch", "rhs_batch", "lhs_contracting", "rhs_contracting")
    dot = DotDims(*(numbers(nested(held, "dot_dimension_numbers", f"{name}_dimensions")) for name in names))
    precision = tuple(map(str, nested(held, "precision_config", "operand_precision") or ()))
    epilogue = str(held.get("epilogue", ""))
    activation = next((op for name, op in _ACTIVATIONS.items() if name in epilogue), "")
    scaled = target.endswith("$f8")
    adds = () if scaled else tuple(range(2, operands))
    attrs = {"dot_dimension_numbers": dot, "precision_config": precision}
    return Product("stablehlo.dot_general", _GEMMS[target], attrs, adds, activation)


def _convolution(
    kind: str, attrs: Mapping[str, str], config: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
) -> Product:
    forward = conv_dims(attrs["dim_labels"])
    spatial = window(attrs.get("window", ""), len(forward.input_spatial))
    made = {"forward": _forward, "input": _input_gradient, "filter": _filter_gradient}[kind]
    dims, geometry = made(forward, spatial, operands, result)
    groups = {"feature_group_count": int(attrs.get("feature_group_count", 1)) if kind != "filter" else 1}
    if kind == "filter" and "feature_group_count" in attrs:
        groups["batch_group_count"] = int(attrs["feature_group_count"])
    held = config.get("cudnn_conv_backend_config", config)
    activation = _ACTIVATIONS.get(str(held.get("activation_mode", "")), "")
    adds = tuple(range(2, len(operands)))
    return Product(
        "stablehlo.convolution", "cudnn", {"dimension_numbers": dims, **geometry, **groups}, adds, activation
    )


def _forward(
    dims: ConvDims, spatial: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
) -> tuple[ConvDims, dict[str, Any]]:
    return dims, {
        "window_strides": spatial["stride"],
        "padding": spatial["padding"],
        "lhs_dilation": spatial["lhs_dilation"],
        "rhs_dilation": spatial["rhs_dilation"],
    }


def _input_gradient(
    dims: ConvDims, spatial: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
) -> tuple[ConvDims, dict[str, Any]]:
    """The output's gradient, dilated by the stride, with the kernel turned round and its features exchanged."""
    made = ConvDims(
        dims.output_batch,
        dims.output_feature,
        dims.output_spatial,
        dims.kernel_output_feature,
        dims.kernel_input_feature,
        dims.kernel_spatial,
        dims.input_batch,
        dims.input_feature,
        dims.input_spatial,
    )
    padding: list[tuple[int, int]] = []
    for axis, stride in enumerate(spatial["stride"]):
        taps = (operands[1].shape[dims.kernel_spatial[axis]] - 1) * spatial["rhs_dilation"][axis] + 1
        low = taps - 1 - spatial["padding"][axis][0]
        dilated = (operands[0].shape[dims.output_spatial[axis]] - 1) * stride + 1
        padding.append((low, result.shape[dims.input_spatial[axis]] + taps - 1 - dilated - low))
    ones = (1,) * len(padding)
    return made, {
        "window_strides": ones,
        "padding": tuple(padding),
        "lhs_dilation": spatial["stride"],
        "rhs_dilation": spatial["rhs_dilation"],
    }


def _filter_gradient(
    dims: ConvDims, spatial: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
) -> tuple[ConvDims, dict[str, Any]]:
    """The input with the output's gradient as its kernel, dilated by the stride, summed over the batch."""
    made = ConvDims(
        dims.input_feature,
        dims.input_batch,
        dims.input_spatial,
        dims.output_batch,
        dims.output_feature,
        dims.output_spatial,
        dims.kernel_input_feature,
        dims.kernel_output_feature,
        dims.kernel_spatial,
    )
    padding: list[tuple[int, int]] = []
    for axis, stride in enumerate(spatial["stride"]):
        low = spatial["padding"][axis][0]
        taps = (operands[1].shape[dims.output_spatial[axis]] - 1) * stride + 1
        outputs = (result.shape[dims.kernel_spatial[axis]] - 1) * spatial["rhs_dilation"][axis]
        padding.append((low, outputs + taps - operands[0].shape[dims.input_spatial[axis]] - low))
    return made, {
        "window_strides": spatial["rhs_dilation"],
        "padding": tuple(padding),
        "lhs_dilation": spatial["lhs_dilation"],
        "rhs_dilation": spatial["stride"],
    }
