"""Protocol buffer wire format, only as much as reading needs."""

from collections.abc import Iterator
from typing import Final

Value = int | bytes
_MAX_VARINT: Final = 10


class WireError(ValueError):
    """A message is cut off or is not in wire format; `at`: where, in bytes."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(f"{what} at byte {at:,}")
        self.at = at


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and the place after it."""
    number = shift = 0
    for index in range(at, min(at + _MAX_VARINT, len(data))):
        byte = data[index]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, index + 1
        shift += 7
    raise WireError("a number is cut off", at)


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """`(field number, value)` in order: integers for varints, bytes for all others.

    Raises `WireError` where the message breaks, after all whole fields were given.
    """
    at, size = 0, len(data)
    while at < size:
        start = at
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise WireError(f"wire type {kind} is unknown", start)
        if at + length > size:
            raise WireError(f"a field of {length:,} bytes is cut off", start)
        yield key >> 3, data[at : at + length]
        at += length


def signed(number: int) -> int:
    """An int64 from its varint."""
    return number - (1 << 64) if number >= 1 << 63 else number
