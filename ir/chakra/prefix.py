"""Writing all ranks of a prefix: files appear together, with a manifest written last."""

import os
import shutil
from pathlib import Path

from stablecast.ir.chakra.files import os_failure, rank_files, temporary_beside
from stablecast.ir.chakra.sink import MANIFEST_FORMAT, TraceSink, encode_trace
from stablecast.ir.chakra.surroundings import manifest_path
from stablecast.ir.errors import InputError

__all__ = ["MANIFEST_FORMAT", "PrefixWriter", "encode_trace"]

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


class PrefixWriter(TraceSink):
    """Writes `<prefix>.<rank>.et` for many ranks, other files beside them, and `<prefix>.manifest.json` last.

    Use as a context manager. Everything is written into a hidden folder beside the prefix and moved into place on
    leaving; leaving by an exception removes it, so that nothing looks complete. `notes` are added to the manifest.
    Raises `InputError` where files of the prefix exist (unless `overwrite`) or the system refuses a write.
    """

    def __init__(self, prefix: str | Path, *, overwrite: bool = False) -> None:
        super().__init__(prefix)
        self.overwrite = overwrite
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

    def write_file(self, name: str, data: bytes) -> None:
        """Write another file that belongs to the trace, such as `system.json`."""
        target = self.prefix.parent / name
        if Path(name).name == name and target.exists() and not self.overwrite:
            raise InputError(f"{target} exists", "add --overwrite or choose another folder")
        super().write_file(name, data)

    def _write(self, name: str, data: bytes) -> None:
        handle = os.open(f"{self._staging}/{name}", _FLAGS, 0o666)
        try:
            done = os.write(handle, data)
            while done < len(data):
                done += os.write(handle, data[done:])
        finally:
            os.close(handle)

    def _commit(self, manifest: str) -> None:
        folder = self.prefix.parent
        (self._staging / manifest).write_bytes(self._manifest())
        moved: list[str] = []
        try:
            for path in self._old:
                if path.name not in self._entries:
                    path.unlink(missing_ok=True)
            for name in [*self._entries, manifest]:
                moved.append(name)
                os.replace(f"{self._staging}/{name}", f"{folder}/{name}")
        except BaseException:
            for name in moved:
                (folder / name).unlink(missing_ok=True)
            raise

    def _discard(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
