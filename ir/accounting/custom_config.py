"""Backend configurations of custom calls, as plain values."""

import json
from collections.abc import Mapping
from typing import Any, cast

from stablecast.ir.program import Op

Config = Mapping[str, Any]


def config_of(op: Op) -> Config:
    """The configuration of a custom call by key: JSON text or an attribute dictionary; empty where there is neither."""
    for name in ("mhlo.backend_config", "backend_config"):
        value = op.attrs.get(name)
        if isinstance(value, Mapping) and value:
            return cast(Config, value)
        if isinstance(value, (str, bytes)) and value.lstrip()[:1] in ("{", b"{"):
            return _json(value)
    return {}


def _json(text: str | bytes) -> Config:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return cast(Config, found) if isinstance(found, dict) else {}


def section(config: Config, *path: str) -> Config:
    """The dictionary at `path`, empty where it is not there."""
    for name in path:
        inner = config.get(name)
        if not isinstance(inner, Mapping):
            return {}
        config = cast(Config, inner)
    return config


def integers(config: Config, name: str) -> tuple[int, ...]:
    """The list `name` as integers (protobuf's JSON writes 64-bit ones as text)."""
    value = config.get(name, ())
    return tuple(int(item) for item in cast(list[Any], value)) if isinstance(value, (list, tuple)) else ()
