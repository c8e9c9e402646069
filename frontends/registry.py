"""Frontends by entry point: each says which inputs are its own and turns them into workloads.

Built-in frontends register exactly as a third party's would, in the group `stablecast.frontends`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint
from typing import Protocol, runtime_checkable

from stablecast.frontends.arguments import ArgumentOptions
from stablecast.ir.entry_points import registered
from stablecast.ir.errors import InputError
from stablecast.ir.workload import Workload

GROUP = "stablecast.frontends"
CONTRACT = 1
"""Version of the frontend contract; a frontend that needs a newer one says so in `contract`."""


@dataclass(frozen=True, slots=True)
class Request:
    """An INPUT and what the user says about it.

    `platform`: what scripts are lowered for. `mesh`: axis -> size for scripts. `arguments`: how functions get theirs.
    """

    text: str
    platform: str = "cuda"
    mesh: Mapping[str, int] | None = None
    arguments: ArgumentOptions = field(default_factory=ArgumentOptions)


@runtime_checkable
class Frontend(Protocol):
    """Turns inputs of one kind into workloads.

    `priority`: of several that claim an input the highest takes it; built-in ones have 0, the one for files -10.
    `lowers`: whether its workloads depend on the platform asked for.
    """

    @property
    def name(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def lowers(self) -> bool: ...

    def claims(self, request: Request) -> bool:
        """Whether the input is of this kind; cheap, without running or parsing it."""
        ...

    def load(self, request: Request) -> Workload:
        """The workload. Raises `InputError` where the input is not what it claims to be."""
        ...


@cache
def frontends() -> tuple[Frontend, ...]:
    """Every registered frontend, the highest priority first. Raises `InputError` for a name registered twice."""
    made = [_make(entry) for entry in registered(GROUP, "frontend").values()]
    return tuple(sorted(made, key=lambda frontend: (-frontend.priority, frontend.name)))


def _make(entry: EntryPoint) -> Frontend:
    make: Callable[[], Frontend] = entry.load()
    frontend = make()
    needs = getattr(frontend, "contract", CONTRACT)
    if needs > CONTRACT:
        raise InputError(
            f"frontend '{entry.name}' needs contract {needs}; this stablecast has {CONTRACT}", "upgrade stablecast"
        )
    return frontend


def frontend_for(request: Request) -> Frontend:
    """The frontend that takes the input. Raises `InputError` where none does."""
    for frontend in frontends():
        if frontend.claims(request):
            return frontend
    raise InputError(f"'{request.text}' is no input that any frontend knows", "give a script, a capture or a module")
