"""Backends by name: built-in ones register exactly as third parties' do, as entry points."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint

from stablecast.backends.estimates import CONTRACT, Backend
from stablecast.ir.entry_points import registered
from stablecast.ir.errors import InputError, near_names
from stablecast.ir.kernels import KernelClass

GROUP = "stablecast.backends"
DEFAULT = "analytical"


def _entries() -> Mapping[str, EntryPoint]:
    return registered(GROUP, "backend")


def backend_names() -> tuple[str, ...]:
    """Every registered backend."""
    return tuple(sorted(_entries()))


@cache
def get_backend(name: str) -> Backend:
    """The backend called `name`. Raises `InputError` for an unknown one and for one of a newer contract."""
    entry = _entries().get(name)
    if entry is None:
        raise InputError(f"unknown backend '{name}'", near_names(name, backend_names()))
    make: Callable[[], Backend] = entry.load()
    backend = make()
    needs = getattr(backend, "contract", CONTRACT)
    if needs > CONTRACT:
        raise InputError(
            f"backend '{name}' needs contract {needs}; this stablecast has {CONTRACT}", "upgrade stablecast"
        )
    return backend


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend prices which kernel class: `by_class`, and `default` for the rest."""

    default: str = DEFAULT
    by_class: tuple[tuple[str, str], ...] = ()

    def name_for(self, klass: str) -> str:
        """The backend for kernels of class `klass`."""
        return dict(self.by_class).get(klass, self.default)

    @property
    def names(self) -> tuple[str, ...]:
        """Every backend named, the default first."""
        return tuple(dict.fromkeys((self.default, *(name for _, name in self.by_class))))

    def __str__(self) -> str:
        mixed = [f"{klass}={name}" for klass, name in self.by_class]
        return ",".join([*mixed, f"default={self.default}"]) if mixed else self.default


def parse_choice(text: str) -> Choice:
    """`analytical`, or `matmul=systolic,default=learned`. Raises `InputError` for unknown classes and backends."""
    default, by_class = DEFAULT, list[tuple[str, str]]()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        klass, equals, name = part.partition("=")
        if not equals:
            klass, name = "default", part
        get_backend(name)
        if klass == "default":
            default = name
        elif klass in set(KernelClass):
            by_class.append((klass, name))
        else:
            raise InputError(f"unknown kernel class '{klass}' in --backend", near_names(klass, list(KernelClass)))
    return Choice(default, tuple(by_class))
