"""The files that lie beside a trace and say how it will be run: groups, system, network, manifest."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml

from stablecast.ir.chakra.files import TraceFiles
from stablecast.ir.errors import InputError


@dataclass(frozen=True, slots=True)
class CommGroups:
    """The group file: members by key; `problems` are the entries that a consumer refuses."""

    path: Path
    members: Mapping[str, tuple[int, ...]]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known about how a trace will be run; None or empty where nothing says so.

    `roofline`: whether compute is timed from `num_ops` and `tensor_size`; `npus_count`: size of each network
    dimension; `ranks`: number of ranks that should be there; `sizes`: bytes of each file by the manifest.
    """

    groups: CommGroups | None = None
    roofline: bool | None = None
    npus_count: tuple[int, ...] = ()
    ranks: int | None = None
    sizes: Mapping[str, int] | None = None


def manifest_path(prefix: Path) -> Path:
    """Where the manifest of a prefix lies."""
    return prefix.with_name(prefix.name + ".manifest.json")


def _load(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read: {reason}") from None


def _mapping(path: Path) -> Mapping[str, object]:
    value = _load(path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected an object")
    return cast(Mapping[str, object], value)


def _ranks_of(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    items = cast(list[object], value)
    ranks = tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0)
    return ranks if len(ranks) == len(items) else None


def read_comm_groups(path: Path) -> CommGroups:
    """Read a group file (`{"<positive integer>": [rank, ...]}`). Raises `InputError` where it is no JSON object."""
    members: dict[str, tuple[int, ...]] = {}
    problems: list[str] = []
    for key, value in _mapping(path).items():
        if not (key.isascii() and key.isdigit() and int(key) > 0):
            problems.append(f'the key "{key}" is not a positive integer')
            continue
        ranks = _ranks_of(value)
        if ranks is None:
            problems.append(f'group "{key}" is not a flat list of ranks')
        elif len(set(ranks)) < len(ranks):
            problems.append(f'group "{key}" lists a rank twice')
        else:
            members[key] = ranks
    return CommGroups(path, members, tuple(problems))


def _beside(files: TraceFiles, *names: str) -> Path | None:
    """The first of the names that exists beside the trace, `<prefix>.name` before plain `name`."""
    for name in names:
        for candidate in (f"{files.prefix.name}.{name}", name):
            path = files.folder / candidate
            if path.is_file():
                return path
    return None


def find_group_file(files: TraceFiles) -> Path | None:
    """`<prefix>.comm_group.json`, `comm_group.json` or `<prefix>.json` beside the trace."""
    own = files.prefix.with_name(files.prefix.name + ".json")
    return _beside(files, "comm_group.json") or (own if own.is_file() and _names_groups(own) else None)


def _names_groups(path: Path) -> bool:
    """Whether `<prefix>.json` is meant as a group file, and is not some other JSON of the same name."""
    try:
        content = _mapping(path)
    except InputError:
        return False
    return any(key.isdigit() for key in content)


def find_surroundings(files: TraceFiles, group_file: Path | None = None) -> Surroundings:
    """Read what lies beside a trace: `comm_group.json`, `system.json`, `network.yml` and the manifest.

    Raises `InputError` where one of them cannot be read; a group file of the wrong shape is no error here.
    """
    path = group_file or find_group_file(files)
    groups = None
    if path is not None:
        try:
            groups = read_comm_groups(path)
        except InputError as error:
            groups = CommGroups(path, {}, (error.message,))
    system, network = _beside(files, "system.json"), _beside(files, "network.yml", "network.yaml")
    roofline = None if system is None else bool(_mapping(system).get("roofline-enabled", 0))
    npus = () if network is None else _ranks_of(_mapping(network).get("npus_count")) or ()
    manifest = manifest_path(files.prefix)
    ranks, sizes = _read_manifest(manifest) if manifest.is_file() else (None, None)
    return Surroundings(groups, roofline, npus, ranks or (math.prod(npus) if npus else None), sizes)


def _read_manifest(path: Path) -> tuple[int | None, Mapping[str, int] | None]:
    content = _mapping(path)
    ranks, entries = content.get("ranks"), content.get("files")
    sizes: dict[str, int] = {}
    if isinstance(entries, dict):
        for name, entry in cast(Mapping[str, object], entries).items():
            size = cast(Mapping[str, object], entry).get("bytes") if isinstance(entry, dict) else None
            if isinstance(size, int):
                sizes[name] = size
    return (ranks if isinstance(ranks, int) else None), sizes or None
