"""How a device's compiler multiplies matrices of each element type."""

from dataclasses import replace

from stablecast.backends.device import Device
from stablecast.lowering.products import PLAIN_ARITHMETIC, TF32_ARITHMETIC, TPU_ARITHMETIC, Arithmetic


def arithmetic_of(device: Device) -> Arithmetic:
    """What XLA does with products on `device`: types that its matrix units lack are widened to f32."""
    if device.kind == "tpu":
        return TPU_ARITHMETIC
    base = TF32_ARITHMETIC if "tf32" in device.matrix_flops else PLAIN_ARITHMETIC
    lacking = {name: "fp32" for name, mode in (("half", "fp16"), ("bf16", "bf16")) if mode not in device.math_modes}
    return replace(base, **lacking)
