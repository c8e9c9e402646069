"""Partitioned and fused programs on disk, by content: the same capture is lowered once.

A program lies under a key made of the module's bytes, how it was lowered, the versions of jaxlib and stablecast, and
the state of stablecast's own files; an entry that cannot be read is made again. The folder is `STABLECAST_CACHE`, or
`stablecast` under the user's cache folder; the oldest entries go when there are more than `MAX_ENTRIES`.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from stablecast.ir import mlir
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import InputError
from stablecast.ir.program_json import device_program_of_json, device_program_to_json

FORMAT = 4
MAX_ENTRIES = 256
_ROOMS = ("ir", "lowering")


def folder() -> Path:
    """Where entries lie."""
    given = os.environ.get("STABLECAST_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stablecast"


@cache
def _state() -> str:
    """Versions, and every file that decides the result."""
    root = Path(__file__).resolve().parents[1]
    return digest_of([root / room for room in _ROOMS], f"{FORMAT} {mlir.check_version()}")


def digest_of(folders: Iterable[Path], *others: str, without: Collection[str] = ()) -> str:
    """A digest of every Python file below `folders` by place and content, and of `others`.

    `without`: names of folders directly below one of them that do not count.
    """
    digest = hashlib.sha256("\n".join(others).encode())
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if path.relative_to(folder).parts[0] in without:
                continue
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def key_of(data: bytes, *choices: object) -> str:
    """The key of the module `data` lowered by `choices`, whose `repr` must tell them apart."""
    digest = hashlib.sha256(data)
    digest.update(repr(choices).encode())
    digest.update(_state().encode())
    return digest.hexdigest()


def path_of(key: str, entries: Path | None = None) -> Path:
    """Where the program under `key` lies in the folder `entries`, by default `folder()`."""
    return (entries or folder()) / f"{key}.json.z"


def cached(
    key: str, make: Callable[[], DeviceProgram], entries: Path | None = None, most: int = MAX_ENTRIES
) -> DeviceProgram:
    """The program under `key`, or what `make` gives, which is then kept. A folder that cannot be written is no error.

    A program from disk has no op bodies in its kernel table. `most`: entries that the folder keeps.
    """
    path = path_of(key, entries)
    found = _read(path)
    if found is not None:
        return found
    made = make()
    with contextlib.suppress(OSError):
        _write(path, made, most)
    return made


def _read(path: Path) -> DeviceProgram | None:
    try:
        held: Any = json.loads(zlib.decompress(path.read_bytes()))
        return device_program_of_json(held)
    except (OSError, zlib.error, ValueError, KeyError, TypeError, IndexError, InputError):
        return None


def _write(path: Path, program: DeviceProgram, most: int) -> None:
    data = zlib.compress(json.dumps(device_program_to_json(program), separators=(",", ":")).encode(), 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    _prune(path.parent, most)


def _prune(entries: Path, most: int) -> None:
    kept = sorted(entries.glob("*.json.z"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[most:]:
        path.unlink(missing_ok=True)
