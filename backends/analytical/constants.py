"""The constants of the analytical backend: `backends/models/analytical.yaml`, read once, each with its source.

The file maps a key to constants by name: a kind of device (`gpu`, `tpu`, `cpu`) that states every constant its
models use, and architectures (`sm_80`, `gfx950`, `tpu-v4`) that state only what measurements say differs. An
architecture may name another one it is `like`; its constants then come between its own and those of the kind.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import yaml

from stablecast.backends.device import Device
from stablecast.ir.errors import InputError

CONSTANTS_FILE: Final = Path(__file__).parent.parent / "models" / "analytical.yaml"

_COMPUTE_CAPABILITY: Final = re.compile(r"cc (\d+)\.(\d+)")
_GFX: Final = re.compile(r"gfx[0-9a-f]+")
_CHAIN_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Constant:
    """A fitted or assumed number, SI, with its origin. `of`: the key of the file that states it."""

    value: float
    source: str
    of: str


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants that hold for one device, by name.

    `architecture`: its key. `measured`: the file states constants of that key. `like`: the architecture it is like.
    """

    architecture: str
    kind: str
    by_name: Mapping[str, Constant]
    measured: bool
    like: str = ""

    def __getitem__(self, name: str) -> float:
        return self.by_name[name].value

    def source(self, name: str) -> str:
        """Where constant `name` comes from."""
        return self.by_name[name].source


def architecture_key(device: Device) -> str:
    """`sm_80` for NVIDIA's compute capability 8.0, AMD's `gfx90a`, else the device's own name."""
    capability = _COMPUTE_CAPABILITY.search(device.architecture)
    if capability:
        return f"sm_{capability.group(1)}{capability.group(2)}"
    gfx = _GFX.search(device.architecture)
    return gfx.group(0) if gfx else device.name


def constants_for(device: Device, path: Path = CONSTANTS_FILE) -> Constants:
    """The constants of `device`: its kind's, then those of the architecture it is like, then its own."""
    return _resolve(architecture_key(device), device.kind, path)


@cache
def _resolve(architecture: str, kind: str, path: Path) -> Constants:
    table = read_constants(path)
    chain: list[str] = []
    key = architecture
    while key in table and len(chain) < _CHAIN_MAX:
        chain.insert(0, key)
        key = table[key].like
    merged: dict[str, Constant] = {}
    for part in (kind, *chain):
        if part not in table:
            raise InputError(f"{path}: has no constants for devices of kind '{part}'")
        merged |= table[part].constants
    measured = architecture in table and bool(table[architecture].constants)
    like = table[architecture].like if architecture in table else ""
    return Constants(architecture, kind, merged, measured, like)


@dataclass(frozen=True, slots=True)
class Section:
    """One key of the file: what it states, and the architecture it is like."""

    constants: Mapping[str, Constant]
    like: str = ""


@cache
def read_constants(path: Path = CONSTANTS_FILE) -> Mapping[str, Section]:
    """The sections of a constants file. Raises `InputError` for an entry without a number or a source."""
    raw = cast("Mapping[str, Mapping[str, Any]]", yaml.load(path.read_text(encoding="utf-8"), Loader=_loader()))
    return {str(key): _section(path, str(key), entries or {}) for key, entries in raw.items()}


def _section(path: Path, key: str, entries: Mapping[str, Any]) -> Section:
    constants: dict[str, Constant] = {}
    for name, entry in entries.items():
        if name == "like":
            continue
        try:
            constants[name] = Constant(float(entry["value"]), str(entry["source"]), key)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: {key}.{name} needs a number `value` and a `source`") from error
    return Section(constants, str(entries.get("like", "")))


def _loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)
