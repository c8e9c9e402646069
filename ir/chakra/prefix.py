"""Writing all ranks of a prefix: files appear together, with a manifest written last."""

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from stablecast.ir.chakra.files import os_failure, rank_files, temporary_beside
from stablecast.ir.chakra.schema import Node, TraceMetadata
from stablecast.ir.chakra.surroundings import manifest_path
from stablecast.ir.chakra.wire import encode_metadata, encode_node, frame
from stablecast.ir.errors import InputError

MANIFEST_FORMAT = "stablecast-chakra-manifest"
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def encode_trace(nodes: Iterable[Node], metadata: TraceMetadata | None = None) -> bytes:
    """The bytes of a rank's file."""
    head = frame(encode_metadata(metadata or TraceMetadata()))
    return head + b"".join(frame(encode_node(node)) for node in nodes)


class PrefixWriter:
    """Writes `<prefix>.<rank>.et` for many ranks, other files beside them, and `<prefix>.manifest.json` last.

    Use as a context manager. Everything is written into a hidden folder beside the prefix and moved into place on
    leaving; leaving by an exception removes it, so that nothing looks complete. `notes` are added to the manifest.
    Raises `InputError` where files of the prefix exist (unless `overwrite`) or the system refuses a write.
    """

    def __init__(self, prefix: str | Path, *, overwrite: bool = False) -> None:
        self.prefix = Path(prefix)
        if not self.prefix.name:
            raise InputError(f"{prefix}: no name for the trace", "give DIR/name")
        self.overwrite = overwrite
        self.notes: dict[str, object] = {}
        self.bytes = self.nodes = self.ranks = 0
        self._entries: dict[str, dict[str, int]] = {}
        folder = self.prefix.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._old = self._existing()
            if self._old and not overwrite:
                raise InputError(f"{self._old[0]} exists", "add --overwrite or choose another prefix")
            self._staging = temporary_beside(self.prefix)
            self._staging.mkdir()
        except OSError as error:
            raise os_failure(self.prefix, error) from None

    def _existing(self) -> list[Path]:
        ranks = rank_files(self.prefix.parent, self.prefix.name).get(self.prefix.name, {})
        manifest = manifest_path(self.prefix)
        both = [
            path.with_name(f"{self.prefix.name}.{rank}.et{end}") for rank, path in ranks.items() for end in ("", ".gz")
        ]
        return ([manifest] if manifest.exists() else []) + [path for path in both if path.exists()]

    def write_rank(self, rank: int, data: bytes, nodes: int) -> None:
        """Write the bytes of a rank's file, which holds that many nodes."""
        if rank < 0:
            raise InputError(f"{rank} is no rank")
        self._write(f"{self.prefix.name}.{rank}.et", data)
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
        target = self.prefix.parent / name
        if target.exists() and not self.overwrite:
            raise InputError(f"{target} exists", "add --overwrite or choose another folder")
        self._write(name, data)

    def _write(self, name: str, data: bytes) -> None:
        if name in self._entries:
            raise InputError(f"{name} is written twice")
        try:
            handle = os.open(f"{self._staging}/{name}", _FLAGS, 0o666)
            try:
                done = os.write(handle, data)
                while done < len(data):
                    done += os.write(handle, data[done:])
            finally:
                os.close(handle)
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

    def _commit(self) -> None:
        folder, manifest = self.prefix.parent, manifest_path(self.prefix)
        (self._staging / manifest.name).write_bytes(self._manifest())
        moved: list[str] = []
        try:
            for path in self._old:
                if path.name not in self._entries:
                    path.unlink(missing_ok=True)
            for name in [*self._entries, manifest.name]:
                moved.append(name)
                os.replace(f"{self._staging}/{name}", f"{folder}/{name}")
        except BaseException:
            for name in moved:
                (folder / name).unlink(missing_ok=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if not self.ranks:
                    raise InputError(f"{self.prefix}: no rank was written", "ask for at least one rank")
                self._commit()
        except OSError as failure:
            raise os_failure(self.prefix, failure) from None
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)
