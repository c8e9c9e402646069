"""Units at the border: "3.35 TB/s" in, SI out, and back again for people.

Inside, every quantity is SI: bytes, bytes per second, FLOP/s (integer OP/s count the same), hertz, watts, seconds;
counts and shares have no dimension. `k M G T P` are decimal, `Ki Mi Gi Ti` binary; `b` is a bit, `B` a byte.
"""

import re
from functools import cache
from typing import Final

from stablecast.ir.errors import InputError

BYTES: Final = "B"
BYTES_PER_S: Final = "B/s"
FLOP_PER_S: Final = "FLOP/s"
HERTZ: Final = "Hz"
WATT: Final = "W"
SECOND: Final = "s"
COUNT: Final = "1"

_DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SMALL: Final = {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "": 1.0}
_COUNTED: Final = (
    *("1", "SM", "CU", "TensorCore", "MXU", "lane", "sublane", "stack", "unit", "link"),
    *("GPU", "module", "chip", "device", "core", "die", "ALU", "node"),
)
_SHOWN_SUFFIX: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_TEXT: Final = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S.*?)?\s*")


def _prefixed(
    base: str, dimension: str, prefixes: dict[str, float], factor: float = 1.0
) -> dict[str, tuple[str, float]]:
    return {prefix + base: (dimension, scale * factor) for prefix, scale in prefixes.items()}


@cache
def _known_units() -> dict[str, tuple[str, float]]:
    sizes = _DECIMAL | _BINARY
    table: dict[str, tuple[str, float]] = {"%": (COUNT, 0.01)}
    table |= dict.fromkeys(_COUNTED, (COUNT, 1.0))
    table |= _prefixed("B", BYTES, sizes)
    table |= _prefixed("B/s", BYTES_PER_S, sizes) | _prefixed("b/s", BYTES_PER_S, _DECIMAL, 1 / 8)
    for base in ("FLOP/s", "FLOPS", "OP/s", "OPS"):
        table |= _prefixed(base, FLOP_PER_S, _DECIMAL)
    return table | _prefixed("Hz", HERTZ, _DECIMAL) | _prefixed("W", WATT, _DECIMAL) | _prefixed("s", SECOND, _SMALL)


def to_si(value: float, unit: str) -> tuple[float, str]:
    """`value` in `unit` as (SI value, dimension), e.g. (3.35, "TB/s") -> (3.35e12, "B/s").

    Raises `InputError` for a unit that is not known.
    """
    found = _known_units().get(unit or COUNT)
    if found is None:
        raise InputError(f"unknown unit '{unit}'", "write for example GB, MiB, TB/s, Gb/s, TFLOP/s, MHz, W, us")
    dimension, scale = found
    # powers of ten below one are divided by, so that 5 us is 5e-06 and not 4.9999e-06
    exact = scale if scale >= 1 else 1 / round(1 / scale)
    return value * exact, dimension


def parse(text: str) -> tuple[float, str]:
    """Number and unit of "3.35 TB/s" as they stand, the unit possibly empty.

    Raises `InputError` when the text does not begin with a number.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InputError(f"'{text}' is not a number with a unit", 'write for example "3.35 TB/s"')
    return float(match.group(1)), match.group(2) or ""


def examples(dimension: str) -> str:
    """Units a person may write for `dimension`, for error messages."""
    return {
        BYTES: "GB, GiB, MiB, KiB or B",
        BYTES_PER_S: "GB/s, TB/s or Gb/s",
        FLOP_PER_S: "TFLOP/s, TOP/s or GFLOP/s",
        HERTZ: "MHz or GHz",
        WATT: "W",
        SECOND: "us, ns or s",
        COUNT: "no unit, or the name of what is counted",
    }[dimension]


def show(value: float, dimension: str) -> str:
    """`value` (SI) for people: four significant digits and a decimal prefix, "3.352 TB/s", "12.5 us", "132"."""
    if dimension == COUNT:
        return f"{value:.6g}"
    if dimension == SECOND:
        if value and value < 1e-3:
            return f"{value * 1e6:.4g} us"
        return f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"
    for scale, prefix in _SHOWN_SUFFIX:
        if abs(value) >= scale:
            return f"{value / scale:.4g} {prefix}{dimension}"
    return f"{value:.4g} {dimension}"
