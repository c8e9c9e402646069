"""Bytes and text of a file in pieces, unpacked where it is gzip, with the place where it breaks."""

import codecs
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stablecast.ir.errors import InputError

CHUNK: Final = 1 << 20
GZIP_MAGIC: Final = b"\x1f\x8b"
_GZIP_WINDOW: Final = 31


class Pieces:
    """Iterates over the unpacked bytes of `path`, a megabyte or so at a time.

    A file that is cut off or broken gives all that can be unpacked; `damage` then says what is wrong, else it is
    empty. `nbytes`: unpacked so far. Raises `InputError` for a file that cannot be opened or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        self.nbytes = 0
        try:
            if path.is_dir():
                raise InputError(f"{path} is a folder", "give a file")
            self._file = path.open("rb")
        except FileNotFoundError:
            raise InputError(f"there is no file {path}") from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        self._first = self._file.read(CHUNK)
        if not self._first:
            self._file.close()
            raise InputError(f"{path} is empty")

    @property
    def is_gzip(self) -> bool:
        return self._first.startswith(GZIP_MAGIC)

    def __iter__(self) -> Iterator[bytes]:
        with self._file:
            for piece in self._unpacked() if self.is_gzip else self._raw():
                self.nbytes += len(piece)
                yield piece

    def _raw(self) -> Iterator[bytes]:
        piece = self._first
        while piece:
            yield piece
            piece = self._file.read(CHUNK)

    def _unpacked(self) -> Iterator[bytes]:
        unpacker = zlib.decompressobj(_GZIP_WINDOW)
        for packed in self._raw():
            left = packed
            while left:
                if unpacker.eof:
                    if not left.strip(b"\0"):
                        break
                    unpacker = zlib.decompressobj(_GZIP_WINDOW)
                try:
                    yield unpacker.decompress(left, 4 * CHUNK)
                except zlib.error as error:
                    self.damage = f"the compressed data is broken after {self.nbytes:,} bytes ({error})"
                    return
                left = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
        if not unpacker.eof:
            self.damage = f"the compressed data is cut off after {self.nbytes:,} bytes"


def text_pieces(pieces: Pieces) -> Iterator[str]:
    """The same as text; bytes that are no UTF-8 become replacement marks."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in pieces:
        yield decoder.decode(piece)


def text_lines(pieces: Pieces) -> Iterator[str]:
    """The lines of a text, without their ends."""
    rest = ""
    for text in text_pieces(pieces):
        *whole_lines, rest = (rest + text).split("\n")
        yield from whole_lines
    if rest:
        yield rest


def head(path: Path, size: int = 4096) -> bytes:
    """The first `size` unpacked bytes."""
    found = b""
    for piece in Pieces(path):
        found += piece
        if len(found) >= size:
            break
    return found[:size]


def whole(path: Path, limit: int) -> tuple[bytes, str]:
    """All unpacked bytes, and the damage. Raises `InputError` beyond `limit` bytes."""
    pieces = Pieces(path)
    found: list[bytes] = []
    for piece in pieces:
        found.append(piece)
        if pieces.nbytes > limit:
            raise InputError(f"{path} unpacks to more than {limit >> 20} MiB")
    return b"".join(found), pieces.damage
