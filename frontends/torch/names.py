"""Element types of torch by their StableHLO names."""

from typing import Any

from stablecast.frontends.torch.private import torch
from stablecast.ir.errors import InputError

_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "ui8",
    "uint16": "ui16",
    "uint32": "ui32",
    "uint64": "ui64",
    "bool": "i1",
    "complex64": "c64",
    "complex128": "c128",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
    "float8_e4m3fnuz": "f8e4m3fnuz",
    "float8_e5m2fnuz": "f8e5m2fnuz",
    "float8_e8m0fnu": "f8e8m0fnu",
}

DTYPES: dict[Any, str] = {getattr(torch, name): ours for name, ours in _NAMES.items() if hasattr(torch, name)}
"""torch dtype -> StableHLO name."""

BACK: dict[str, Any] = {ours: dtype for dtype, ours in DTYPES.items()}
"""StableHLO name -> torch dtype."""


def dtype_name(dtype: Any) -> str:
    """The StableHLO name of a torch dtype; raises `InputError` for quantised and other types that have none."""
    found = DTYPES.get(dtype)
    if found is None:
        raise InputError(f"tensors of {dtype} have no StableHLO type", "convert them before the step")
    return found
