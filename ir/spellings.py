"""Older spellings of StableHLO text, rewritten to what today's parser takes.

Before StableHLO 0.17 lists of integers and booleans were dense tensors: `dense<[0, 1]> : tensor<2xi64>` where
`array<i64: 0, 1>` stands today.
"""

import re

_LISTS = (
    "base_dilations",
    "broadcast_dimensions",
    "broadcast_sizes",
    "dimensions",
    "edge_padding_high",
    "edge_padding_low",
    "fft_length",
    "interior_padding",
    "known_expanding_dimensions",
    "known_nonexpanding_dimensions",
    "lhs_dilation",
    "limit_indices",
    "permutation",
    "rhs_dilation",
    "slice_sizes",
    "start_indices",
    "strides",
    "window_dilations",
    "window_dimensions",
    "window_reversal",
    "window_strides",
)
_DENSE = re.compile(
    rb"\b(" + "|".join(_LISTS).encode() + rb")(\s*=\s*)dense<(\[[^\]\[]*\]|[-\w]*)>\s*:\s*tensor<(\d+)x(i64|i1)>"
)
COMPLAINTS = ("dense array attribute", "expected array<", "i64 dense array", "dense bool array")
"""What the parser says where it meets such a list."""


def modernised(text: bytes) -> bytes:
    """`text` with every such list in today's spelling."""
    return _DENSE.sub(_as_array, text)


def _as_array(found: re.Match[bytes]) -> bytes:
    name, equals, values, size, kind = found.groups()
    items = [item.strip() for item in values.strip(b"[]").split(b",") if item.strip()]
    if not values.startswith(b"["):
        items *= int(size)
    return name + equals + b"array<" + kind + (b": " + b", ".join(items) if items else b"") + b">"
