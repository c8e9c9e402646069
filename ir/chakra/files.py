"""Trace files on disk: finding the ranks of a prefix, streaming them in, writing them so that they appear whole."""

import errno
import gzip
import os
import re
import secrets
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from stablecast.ir.chakra.jsonform import nodes_of_json
from stablecast.ir.chakra.schema import Node, TraceMetadata
from stablecast.ir.chakra.wire import (
    MalformedMessage,
    NodeDecoder,
    decode_metadata,
    decode_varint,
    encode_metadata,
    encode_node,
    frame,
    is_metadata,
)
from stablecast.ir.errors import InputError

_CHUNK = 1 << 20
_RANK_FILE = re.compile(r"(?P<stem>.+)\.(?P<rank>\d+)\.et(?:\.gz)?")
_SINGLE_SUFFIXES = (".et", ".et.gz", ".json", ".json.gz")


class TraceError(InputError):
    """A trace file cannot be read to its end. `kind`: `truncated file` or `malformed message`."""

    def __init__(self, kind: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class TraceFiles:
    """The files of a prefix. `ranks` maps each rank found to its file; `prefix` is the path without `.<rank>.et`.

    `single`: one file was named, so that the absence of other ranks means nothing.
    """

    prefix: Path
    ranks: Mapping[int, Path]
    single: bool = False

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return self.prefix.parent


def rank_files(folder: Path, stem: str = "") -> dict[str, dict[int, Path]]:
    """Rank files in a folder by prefix name (only the prefix `stem` where given)."""
    found: dict[str, dict[int, Path]] = {}
    try:
        entries = os.scandir(folder)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from None
    with entries:
        for entry in entries:
            match = _RANK_FILE.fullmatch(entry.name)
            if match and (not stem or match["stem"] == stem):
                ranks = found.setdefault(match["stem"], {})
                rank = int(match["rank"])
                if rank not in ranks or not entry.name.endswith(".gz"):
                    ranks[rank] = folder / entry.name
    return found


def find_traces(source: str | Path) -> TraceFiles:
    """The trace files behind a prefix, a folder that holds one prefix, or a single file (`.et`, `.json`, `.gz`).

    Raises `InputError` where there is none.
    """
    path = Path(source)
    if path.is_file() and path.name.endswith(_SINGLE_SUFFIXES):
        match = _RANK_FILE.fullmatch(path.name)
        if match:
            return TraceFiles(path.parent / match["stem"], {int(match["rank"]): path}, single=True)
        return TraceFiles(path, {0: path}, single=True)
    folder, stem = (path, "") if path.is_dir() else (path.parent, path.name)
    if not folder.is_dir():
        raise InputError(f"{source}: no such folder as {folder}")
    found = rank_files(folder, stem)
    if not found:
        raise InputError(f"{source}: no trace files", f"expected {path.name}.<rank>.et, such as {path.name}.0.et")
    if len(found) > 1:
        raise InputError(f"{source}: several prefixes", "name one: " + ", ".join(sorted(found)[:8]))
    name, ranks = next(iter(found.items()))
    return TraceFiles(folder / name, dict(sorted(ranks.items())))


def is_gzip(path: Path) -> bool:
    """Whether the file's content is compressed, whatever its name says."""
    with path.open("rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    try:
        return gzip.GzipFile(path, "rb") if is_gzip(path) else path.open("rb", buffering=0)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _read(stream: BinaryIO | gzip.GzipFile, size: int, path: Path) -> bytes:
    """At most `size` bytes; of a compressed file that is cut off, all that it gives come before the error."""
    try:
        return (stream.read1(size) if isinstance(stream, gzip.GzipFile) else stream.read(size)) or b""
    except EOFError:
        raise TraceError("truncated file", f"{path}: the compressed data is cut off") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError("malformed message", f"{path}: the compressed data is broken ({error})") from None


def read_messages(path: Path) -> Iterator[bytes]:
    """The messages of a file in order, a megabyte or one message held at a time.

    Raises `TraceError` where the file ends inside a message or a length makes no sense.
    """
    with _open(path) as stream:
        buffer, at, before = b"", 0, 0
        while True:
            if len(buffer) - at < 10:
                before += at
                buffer, at = buffer[at:] + _read(stream, _CHUNK, path), 0
                if not buffer:
                    return
            try:
                length, start = decode_varint(buffer, at)
            except MalformedMessage:
                raise TraceError("truncated file", f"{path}: the length at byte {before + at} is cut off") from None
            if length >= 1 << 31:
                raise TraceError("malformed message", f"{path}: a message of {length} bytes at byte {before + at}")
            end = start + length
            if end > len(buffer):
                parts, have = [buffer[at:]], len(buffer)
                while have < end and (more := _read(stream, _CHUNK, path)):
                    parts.append(more)
                    have += len(more)
                if have < end:
                    where = f"byte {before + at} promises {length} bytes, {have - start} are there"
                    raise TraceError("truncated file", f"{path}: the message at {where}")
                before, start, end, buffer, at = before + at, start - at, end - at, b"".join(parts), 0
            yield buffer[start:end]
            at = end


class TraceReader:
    """Streams the nodes of one file. `metadata` is None where the file does not begin with that record.

    Iterating gives `Node`s; JSON files are read whole, all others a piece at a time. Raises `TraceError` for a
    file that is cut off or broken, `InputError` for one that is not there.
    """

    def __init__(self, path: str | Path, decoder: NodeDecoder | None = None) -> None:
        self.path = Path(path)
        self.metadata: TraceMetadata | None = None
        self._decoder = decoder or NodeDecoder()
        self._json = self.path.name.endswith((".json", ".json.gz"))
        self._nodes = self._from_json() if self._json else self._from_messages()
        self._first = next(self._nodes, None)

    def _from_json(self) -> Iterator[Node]:
        with _open(self.path) as stream:
            parts: list[bytes] = []
            while part := _read(stream, _CHUNK, self.path):
                parts.append(part)
        self.metadata, nodes = nodes_of_json(b"".join(parts), str(self.path))
        yield from nodes

    def _from_messages(self) -> Iterator[Node]:
        decode, first = self._decoder.decode, True
        for index, message in enumerate(read_messages(self.path)):
            try:
                if first and is_metadata(message):
                    self.metadata = decode_metadata(message)
                else:
                    yield decode(message)
            except MalformedMessage as error:
                raise TraceError("malformed message", f"{self.path}: message {index}: {error}") from None
            first = False

    def __iter__(self) -> Iterator[Node]:
        if self._first is not None:
            first, self._first = self._first, None
            yield first
        yield from self._nodes


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's trace, whole in memory."""

    metadata: TraceMetadata | None
    nodes: tuple[Node, ...]


def load_trace(path: str | Path) -> Trace:
    """Read a file whole."""
    reader = TraceReader(path)
    nodes = tuple(reader)
    return Trace(reader.metadata, nodes)


def temporary_beside(path: Path) -> Path:
    """A free hidden name in the same folder."""
    return path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")


def os_failure(path: Path, error: OSError) -> InputError:
    """One line for a write that the system refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InputError(f"{path}: the disk is full", "nothing was left under its final name")
    return InputError(f"{path}: {error.strerror or error}")


class TraceWriter:
    """Streams nodes into one file (compressed where the name ends in `.gz`); it appears whole or not at all.

    Use as a context manager. Leaving it by an exception removes what was written.
    """

    def __init__(self, path: str | Path, metadata: TraceMetadata | None = None, overwrite: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not overwrite:
            raise InputError(f"{self.path} exists", "choose to overwrite it or another name")
        self.nodes = 0
        self._part = temporary_beside(self.path)
        try:
            self._raw = self._part.open("xb")
        except OSError as error:
            raise os_failure(self.path, error) from None
        zipped = self.path.name.endswith(".gz")
        self._packed = gzip.GzipFile("", "wb", fileobj=self._raw, mtime=0) if zipped else None
        self._write(frame(encode_metadata(metadata or TraceMetadata())))

    def _write(self, data: bytes) -> None:
        try:
            (self._packed or self._raw).write(data)
        except OSError as error:
            raise os_failure(self.path, error) from None

    def write(self, node: Node) -> None:
        """Append a node. Raises `ValueError` where a value does not fit its type."""
        self._write(frame(encode_node(node)))
        self.nodes += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            try:
                if self._packed is not None:
                    self._packed.close()
            finally:
                self._raw.close()
            if kind is None:
                os.replace(self._part, self.path)
        except OSError as failure:
            if kind is None:
                raise os_failure(self.path, failure) from None
        finally:
            self._part.unlink(missing_ok=True)
