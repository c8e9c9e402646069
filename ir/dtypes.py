"""Element types of tensors, by their StableHLO names."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType

from stablecast.ir.errors import InputError, near_names


class DTypeKind(StrEnum):
    """What an element stands for."""

    FLOAT = "float"
    INT = "int"
    UINT = "uint"
    BOOL = "bool"
    COMPLEX = "complex"
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    `name`: StableHLO spelling (`bf16`, `i4`, `ui8`, `i1`, `c64` for complex<f32>). `bits`: width in memory; sub-byte
    types are packed, `i1` takes a byte as XLA stores it.
    """

    name: str
    kind: DTypeKind
    bits: int

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` packed elements, rounded up to a whole byte."""
        return (elements * self.bits + 7) // 8

    @property
    def is_float(self) -> bool:
        return self.kind is DTypeKind.FLOAT

    @property
    def is_complex(self) -> bool:
        return self.kind is DTypeKind.COMPLEX

    def __str__(self) -> str:
        return self.name


_FLOATS = {
    "f64": 64,
    "f32": 32,
    "tf32": 32,
    "f16": 16,
    "bf16": 16,
    "f8e3m4": 8,
    "f8e4m3": 8,
    "f8e4m3fn": 8,
    "f8e4m3fnuz": 8,
    "f8e4m3b11fnuz": 8,
    "f8e5m2": 8,
    "f8e5m2fnuz": 8,
    "f8e8m0fnu": 8,
    "f6e2m3fn": 6,
    "f6e3m2fn": 6,
    "f4e2m1fn": 4,
}
_WIDTHS = (2, 4, 8, 16, 32, 64)

DTYPES = MappingProxyType(
    {name: DType(name, DTypeKind.FLOAT, bits) for name, bits in _FLOATS.items()}
    | {f"i{bits}": DType(f"i{bits}", DTypeKind.INT, bits) for bits in _WIDTHS}
    | {f"ui{bits}": DType(f"ui{bits}", DTypeKind.UINT, bits) for bits in _WIDTHS}
    | {
        "i1": DType("i1", DTypeKind.BOOL, 8),
        "c64": DType("c64", DTypeKind.COMPLEX, 64),
        "c128": DType("c128", DTypeKind.COMPLEX, 128),
        "index": DType("index", DTypeKind.INT, 64),
        "token": DType("token", DTypeKind.TOKEN, 0),
    }
)

_ALIASES = {
    "bool": "i1",
    "pred": "i1",
    "float64": "f64",
    "fp64": "f64",
    "float32": "f32",
    "fp32": "f32",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
    "fp8": "f8e4m3fn",
    "fp8_e4m3": "f8e4m3fn",
    "float8_e4m3fn": "f8e4m3fn",
    "fp8_e5m2": "f8e5m2",
    "float8_e5m2": "f8e5m2",
    "float4_e2m1fn": "f4e2m1fn",
    "fp4": "f4e2m1fn",
}


@cache
def dtype(name: str) -> DType:
    """The element type called `name`, in StableHLO, HLO (`s32`, `u8`, `pred`) or numpy (`int32`) spelling.

    Raises `InputError` for a name that is none of these.
    """
    lowered = name.lower()
    for candidate in (lowered, _ALIASES.get(lowered, ""), _respelled(lowered)):
        if candidate in DTYPES:
            return DTYPES[candidate]
    raise InputError(f"unknown element type '{name}'", near_names(name, [*DTYPES, *_ALIASES]))


def _respelled(name: str) -> str:
    for prefix, ours in (("uint", "ui"), ("int", "i"), ("ui", "ui"), ("u", "ui"), ("s", "i")):
        if name.startswith(prefix) and name[len(prefix) :].isdigit():
            return ours + name[len(prefix) :]
    return ""
