"""The hardware catalogue: names and files to `Device` and `System` values, read only when asked for.

A folder of hardware holds `devices/NAME.yaml`, `systems/NAME.yaml`, `aliases.yaml` (alias: NAME) and `sources.yaml`
(key: what it stands for). stablecast's own folder comes first; packages add theirs through entry points of group
`stablecast.hardware`, each naming a callable or a value that gives the folder's path. No name may stand twice.
"""

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, cast

from stablecast.backends.device import Device, System
from stablecast.backends.hardware import checks, show
from stablecast.backends.hardware.build import build_device, build_system, build_tiers
from stablecast.backends.hardware.schema import (
    DeviceFile,
    SystemFile,
    check_field_lists,
    is_system,
    merge,
    read_yaml,
    validate,
)
from stablecast.ir.errors import InputError, near_names

ENTRY_POINT_GROUP: Final = "stablecast.hardware"
_OWN_FOLDER: Final = Path(__file__).parent / "hardware"
_SUFFIXES: Final = (".yaml", ".yml")
_DEPTH_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class HardwareFolder:
    """A folder of hardware files and who brought it ("stablecast", or the entry point's name)."""

    path: Path
    owner: str


def installed_folders() -> tuple[HardwareFolder, ...]:
    """stablecast's own folder and those of installed packages (entry points `stablecast.hardware`).

    Raises `InputError` where an entry point cannot be loaded or gives no folder.
    """
    found = [HardwareFolder(_OWN_FOLDER, "stablecast")]
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            loaded: object = point.load()
            path = Path(cast("str | Path", loaded() if callable(loaded) else loaded))
        except Exception as error:
            raise InputError(f"hardware plug-in '{point.name}' ({point.value}) does not load: {error}") from error
        if not path.is_dir():
            raise InputError(f"hardware plug-in '{point.name}' ({point.value}) gives no folder: {path}")
        found.append(HardwareFolder(path, point.name))
    return tuple(found)


class Catalogue:
    """Devices and systems by name. Nothing is read before it is asked for; what was read is kept.

    `folders`: where to look; by default stablecast's own and those of installed packages. `adjust`: what the caller
    knows better about a device, applied to each as it is built.
    """

    def __init__(
        self,
        folders: Sequence[HardwareFolder] | None = None,
        adjust: Callable[[Device], Device] | None = None,
    ) -> None:
        self.folders: Final = tuple(installed_folders() if folders is None else folders)
        self._adjust = adjust or _as_it_is
        self._devices: dict[str, Device] = {}
        self._device_files: dict[str, DeviceFile] = {}
        self._families: dict[str, SystemFile] = {}

    @cached_property
    def device_paths(self) -> Mapping[str, Path]:
        """File of every device, by name."""
        return self._index("devices")

    @cached_property
    def system_paths(self) -> Mapping[str, Path]:
        """File of every network family and machine, by name."""
        return self._index("systems")

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Other names of devices and systems: alias to name."""
        found: dict[str, str] = {}
        for folder in self.folders:
            path = folder.path / "aliases.yaml"
            for alias, name in read_yaml(path).items() if path.exists() else ():
                if alias in found or alias in self.device_paths or alias in self.system_paths:
                    raise InputError(f"{path}: alias '{alias}' is already taken")
                found[alias] = str(name)
        return found

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """What each source key stands for."""
        found: dict[str, str] = {}
        for folder in self.folders:
            path = folder.path / "sources.yaml"
            found |= {key: str(text) for key, text in read_yaml(path).items()} if path.exists() else {}
        return found

    def names(self) -> tuple[str, ...]:
        """Names of all devices, sorted."""
        return tuple(sorted(self.device_paths))

    def system_names(self) -> tuple[str, ...]:
        """Names of all machines and network families, sorted."""
        return tuple(sorted(self.system_paths))

    def device(self, name: str) -> Device:
        """The device of that name or alias. Raises `InputError` with near names for an unknown one."""
        known = self._canonical(name, self.device_paths)
        if known is None:
            raise self._unknown(name)
        if known not in self._devices:
            path = self.device_paths[known]
            aliases = sorted(alias for alias, target in self.aliases.items() if target == known)
            self._devices[known] = self._adjust(build_device(known, self.device_file(known), str(path), aliases))
        return self._devices[known]

    def device_file(self, name: str, chain: tuple[str, ...] = ()) -> DeviceFile:
        """The checked file of catalogue device `name`, with everything that it inherits."""
        if name not in self._device_files:
            path = self.device_paths[name]
            self._device_files[name] = self._inherit(
                self._checked_device(path, read_yaml(path), user=False), path, (*chain, name)
            )
        return self._device_files[name]

    def family(self, name: str) -> SystemFile:
        """The checked file of network family or machine `name`. Raises `InputError` for an unknown one."""
        known = self._canonical(name, self.system_paths)
        if known is None:
            raise InputError(f"unknown system family '{name}'", near_names(name, self.system_paths))
        if known not in self._families:
            path = self.system_paths[known]
            self._families[known] = validate(SystemFile, read_yaml(path), path, user=False)
        return self._families[known]

    def resolve(self, spec: str) -> System:
        """`NAME`, `NAME:N`, `FILE.yaml` or `FILE.yaml:N` as a system; without `:N` one device, or a machine's count.

        Raises `InputError` for an unknown name (with near names), a count that is not a whole number from 1 up, a
        count that the network cannot hold, or a faulty file.
        """
        name, count = split_count(spec)
        if name.lower().endswith(_SUFFIXES) or "/" in name:
            return self._from_file(Path(name), name, count)
        if self._canonical(name, self.device_paths) is not None:
            device = self.device(name)
            return self._system(device.name, device, count or 1, device.system)
        known = self._canonical(name, self.system_paths)
        if known is None:
            raise self._unknown(name)
        return self._machine(known, self.family(known), known, count, self.system_paths[known])

    def check(self) -> list[str]:
        """Faults of every file, one line each, none for a sound catalogue: schema, inheritance, sparse = 2 x dense,
        known source keys, links x rate = total, systems of 1, 4 and 8."""
        return checks.check(self)

    def list_rows(self) -> list[dict[str, object]]:
        """One plain row a device for `hardware list`: name, vendor, kind, rates in SI, marks, aliases."""
        return show.list_rows(self)

    def show_dict(self, name: str) -> dict[str, object]:
        """Everything about a device or system as plain values, each with unit, source, confidence and note."""
        return show.show_dict(self, name)

    def _index(self, part: str) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for folder in self.folders:
            for path in sorted((folder.path / part).glob("*.yaml")):
                if path.stem in found:
                    raise InputError(f"hardware '{path.stem}' stands twice: {found[path.stem]} and {path}")
                found[path.stem] = path
        return found

    def _canonical(self, name: str, known: Mapping[str, Path]) -> str | None:
        lowered = name.strip().lower().replace("_", "-")
        if lowered in known:
            return lowered
        target = self.aliases.get(lowered)
        return target if target in known else None

    def _unknown(self, name: str) -> InputError:
        asked = name.strip().lower().replace("_", "-")
        variants = [known for known in self.names() if known.startswith(f"{asked}-")]
        if variants:
            return InputError(f"'{name}' is not one device", f"choose {', '.join(variants)}")
        hint = near_names(asked, [*self.device_paths, *self.aliases])
        return InputError(f"unknown device '{name}'", hint or "`stablecast hardware list` shows all names")

    @staticmethod
    def _checked_device(path: Path, raw: Mapping[str, object], user: bool) -> DeviceFile:
        file = validate(DeviceFile, raw, path, user)
        if not user and file.name != path.stem:
            raise InputError(f"{path}: field 'name' is '{file.name}', not the file's own '{path.stem}'")
        check_field_lists(file, path)
        return file

    def _inherit(self, file: DeviceFile, path: Path, chain: tuple[str, ...]) -> DeviceFile:
        if not file.inherits:
            return file
        parent = self._canonical(file.inherits, self.device_paths)
        if parent is None:
            raise InputError(
                f"{path}: inherits unknown '{file.inherits}'", near_names(file.inherits, self.device_paths)
            )
        if parent in chain or len(chain) > _DEPTH_MAX:
            raise InputError(f"{path}: inherits in a circle ({' -> '.join((*chain, parent))})")
        return merge(self.device_file(parent, chain), file, parent)

    def _system(self, name: str, device: Device, count: int, family: str) -> System:
        found = self.family(family) if count > 1 and family else None
        return build_system(name, device, count, found, f"system family {family}")

    def _from_file(self, path: Path, name: str, count: int | None) -> System:
        raw = read_yaml(path)
        if is_system(raw):
            return self._machine(path.stem, validate(SystemFile, raw, path, user=True), name, count, path)
        device = self._user_device(path, raw)
        return self._system(device.name, device, count or 1, device.system)

    def _user_device(self, path: Path, raw: Mapping[str, object]) -> Device:
        file = self._inherit(self._checked_device(path, raw, user=True), path, (str(path),))
        return self._adjust(build_device(file.name or path.stem, file, str(path)))

    def _machine(self, name: str, file: SystemFile, asked: str, count: int | None, path: Path) -> System:
        """The system of a machine file: its device, its count unless asked otherwise, its own or a named network."""
        if not file.device:
            raise InputError(
                f"'{asked}' is a network family, not a device",
                f"ask for one of its devices, or add `device` to {path.name}",
            )
        if file.device.lower().endswith(_SUFFIXES):
            inner = path.parent / file.device
            device = self._user_device(inner, read_yaml(inner))
        else:
            device = self.device(file.device)
        number = count or file.count or 1
        if not file.dims:
            made = self._system(name, device, number, file.system or device.system)
            return replace(made, tiers=build_tiers((file,), device, path.name)) if file.tiers else made
        return build_system(name, device, number, file, str(path.name))


def _as_it_is(device: Device) -> Device:
    return device


def split_count(spec: str) -> tuple[str, int | None]:
    """`NAME:N` as (name, N), N None where it is left out. Raises `InputError` unless N is a whole number from 1 up."""
    name, colon, text = spec.rpartition(":")
    if not colon:
        return spec, None
    if not name:
        raise InputError(f"'{spec}' names no device", "write NAME or NAME:N, for example h100-sxm:8")
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InputError(f"'{text}' in '{spec}' is not a count", "the count after ':' is a whole number from 1 up")
    return name, int(text)


format_list: Final[Callable[[Sequence[Mapping[str, object]]], str]] = show.format_list
format_show: Final[Callable[[Mapping[str, object]], str]] = show.format_show
