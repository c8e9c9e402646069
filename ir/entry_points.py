"""What packages register under a group of entry points: built-in parts register exactly as third parties' do."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from stablecast.ir.errors import InputError


@cache
def registered(group: str, kind: str) -> Mapping[str, EntryPoint]:
    """The entry points of `group` by name. Raises `InputError` where two packages register one name of this `kind`."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        if entry.name in found and found[entry.name].value != entry.value:
            raise InputError(
                f"two packages register a {kind} '{entry.name}': {found[entry.name].value} and {entry.value}",
                "uninstall one of them",
            )
        found[entry.name] = entry
    return found
