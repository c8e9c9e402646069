"""Where the files of a prefix go: a folder, one tar file, or nowhere but into the counts."""

import io
import json
import os
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

from stablecast.ir.chakra.files import os_failure, temporary_beside
from stablecast.ir.chakra.schema import Node, TraceMetadata
from stablecast.ir.chakra.surroundings import manifest_path
from stablecast.ir.chakra.wire import encode_metadata, encode_node, frame
from stablecast.ir.errors import InputError

MANIFEST_FORMAT = "stablecast-chakra-manifest"
_TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")


def encode_trace(nodes: Iterable[Node], metadata: TraceMetadata | None = None) -> bytes:
    """The bytes of a rank's file."""
    head = frame(encode_metadata(metadata or TraceMetadata()))
    return head + b"".join(frame(encode_node(node)) for node in nodes)


class TraceSink(ABC):
    """Takes the files of all ranks of a prefix and what belongs to them; a context manager.

    Leaving it without an exception makes everything appear, with the manifest (ranks, nodes, bytes, size and CRC-32
    of each file, and `notes`) as the last; leaving it by one leaves nothing. Raises `InputError` where files exist
    (unless overwriting was asked for) or the system refuses a write.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        if not self.prefix.name:
            raise InputError(f"{prefix}: no name for the trace", "give DIR/name")
        self.notes: dict[str, object] = {}
        self.bytes = self.nodes = self.ranks = 0
        self._entries: dict[str, dict[str, int]] = {}

    def write_rank(self, rank: int, data: bytes, nodes: int) -> None:
        """Write the bytes of a rank's file, which holds that many nodes."""
        if rank < 0:
            raise InputError(f"{rank} is no rank")
        self._add(f"{self.prefix.name}.{rank}.et", data)
        self.ranks += 1
        self.nodes += nodes

    def write_nodes(self, rank: int, nodes: Sequence[Node], metadata: TraceMetadata | None = None) -> None:
        """Encode and write the nodes of a rank."""
        self.write_rank(rank, encode_trace(nodes, metadata), len(nodes))

    def write_groups(self, members: Mapping[str, Sequence[int]], name: str = "comm_group.json") -> None:
        """Write the group file. Raises `InputError` for a key that is no positive integer or a group without ranks."""
        for key, ranks in members.items():
            if not (key.isascii() and key.isdigit() and int(key) > 0) or not ranks:
                raise InputError(f'group "{key}": keys are positive integers, groups hold at least one rank')
        self.write_file(name, json.dumps({key: list(ranks) for key, ranks in members.items()}).encode())

    def write_file(self, name: str, data: bytes) -> None:
        """Write another file that belongs to the trace, such as `system.json`."""
        if Path(name).name != name:
            raise InputError(f"{name} is no plain file name")
        self._add(name, data)

    def _add(self, name: str, data: bytes) -> None:
        if name in self._entries:
            raise InputError(f"{name} is written twice")
        try:
            self._write(name, data)
        except OSError as error:
            raise os_failure(self.prefix.parent / name, error) from None
        self._entries[name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
        self.bytes += len(data)

    def _manifest(self) -> bytes:
        content = {
            "format": MANIFEST_FORMAT,
            "version": 1,
            "prefix": self.prefix.name,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "bytes": self.bytes,
            **self.notes,
            "files": self._entries,
        }
        return json.dumps(content).encode()

    @abstractmethod
    def _write(self, name: str, data: bytes) -> None:
        """Take one file."""

    @abstractmethod
    def _commit(self, manifest: str) -> None:
        """Make everything appear; `manifest`: the name of that file, still to be written."""

    @abstractmethod
    def _discard(self) -> None:
        """Remove what is not in its final place."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if not self.ranks:
                    raise InputError(f"{self.prefix}: no rank was written", "ask for at least one rank")
                self._commit(manifest_path(self.prefix).name)
        except OSError as failure:
            raise os_failure(self.prefix, failure) from None
        finally:
            self._discard()


class TarWriter(TraceSink):
    """Puts all files into one tar file (compressed where its name ends in `.gz` or `.tgz`), the manifest last.

    `path`: `DIR/name.tar`, where `name` becomes the prefix of the members; the ending is added where it lacks.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        target = Path(path)
        ending = next((end for end in _TAR_ENDINGS if target.name.endswith(end)), "")
        self.path = target if ending else target.with_name(target.name + ".tar")
        super().__init__(self.path.with_name(self.path.name.removesuffix(ending or ".tar")))
        if self.path.exists() and not overwrite:
            raise InputError(f"{self.path} exists", "add --overwrite or choose another name")
        self._part = temporary_beside(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._raw = self._part.open("xb")
        except OSError as error:
            raise os_failure(self.path, error) from None
        raw = cast(IO[bytes], self._raw)
        if ending in (".tar.gz", ".tgz"):
            self._tar = tarfile.open(fileobj=raw, mode="w:gz", compresslevel=1)  # noqa: SIM115
        else:
            self._tar = tarfile.open(fileobj=raw, mode="w")  # noqa: SIM115

    def _write(self, name: str, data: bytes) -> None:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        entry.mode = 0o644
        self._tar.addfile(entry, io.BytesIO(data))
        cast(list[tarfile.TarInfo], vars(self._tar)["members"]).clear()

    def _commit(self, manifest: str) -> None:
        self._write(manifest, self._manifest())
        self._tar.close()
        self._raw.close()
        os.replace(self._part, self.path)

    def _discard(self) -> None:
        self._raw.close()
        self._part.unlink(missing_ok=True)


class CountingWriter(TraceSink):
    """Takes everything and keeps nothing but the counts: a dry run."""

    def _write(self, name: str, data: bytes) -> None:
        del name, data

    def _commit(self, manifest: str) -> None:
        del manifest

    def _discard(self) -> None:
        return
