"""What a frontend captures: modules with a manifest that says what they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from stablecast.ir.program import Argument, Mesh, Stage
from stablecast.ir.schedule import LaunchTable, Schedule
from stablecast.ir.types import Symbol

FORMAT = 1
"""Version of the capture format that this stablecast writes; it reads this and older ones."""


class ModuleFormat(StrEnum):
    """How a module's bytes are to be read."""

    MLIR = "mlir"
    ARTIFACT = "artifact"
    HLO_TEXT = "hlo"


@dataclass(frozen=True, slots=True)
class Module:
    """One program text: `data` is MLIR text or bytecode, a StableHLO portable artifact, or HLO text.

    `args`, `schedule`, `launches`, `metadata`: its own, where modules of a workload differ (pipeline stages); else the
    workload's.
    """

    name: str
    data: bytes
    format: ModuleFormat = ModuleFormat.MLIR
    args: tuple[Argument, ...] = ()
    schedule: Schedule | None = None
    launches: LaunchTable | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks that run the same module: a pipeline stage, ranks that differ, a straggler.

    `coords`: mesh axis -> coordinate that this role holds; axes not named run over their whole size, so ranks follow
    by arithmetic. `speed`: device speed relative to the others, 0.8 for a straggler 20 % slow.
    """

    name: str
    module: str
    coords: Mapping[str, int] = field(default_factory=dict[str, int])
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request or step: `role` runs `repeat` times (prefill once, decode n times)."""

    name: str
    role: str
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """A captured program.

    `format`: version of the capture format. `producer`: name and versions of what made the modules. `args`: the
    entry's arguments. `phases` empty means: every role once. `schedule`, `launches`: what PyTorch's streams and
    dispatch said, where known. `source`: file, or script and function, for messages. `platform`: lowered for. `notes`:
    assumptions made while capturing.
    """

    producer: Mapping[str, str]
    stage: Stage
    modules: tuple[Module, ...]
    format: int = FORMAT
    num_replicas: int = 1
    num_partitions: int = 1
    meshes: tuple[Mesh, ...] = ()
    roles: tuple[Role, ...] = ()
    args: tuple[Argument, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    phases: tuple[Phase, ...] = ()
    schedule: Schedule | None = None
    launches: LaunchTable | None = None
    source: str = ""
    platform: str = ""
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def num_devices(self) -> int:
        """Devices that the program was written for."""
        return self.num_replicas * self.num_partitions

    def module(self, name: str) -> Module:
        """The module called `name`."""
        return next(module for module in self.modules if module.name == name)

    def alone(self, role: Role) -> "Workload":
        """The program of one role, as a workload of its own."""
        module = self.module(role.module)
        return replace(
            self,
            modules=(module,),
            roles=(),
            args=module.args or self.args,
            schedule=module.schedule or self.schedule,
            launches=module.launches or self.launches,
            metadata=module.metadata or self.metadata,
        )

    def __repr__(self) -> str:
        size = sum(len(module.data) for module in self.modules)
        return (
            f"Workload({self.source or 'program'}: {len(self.modules)} module(s), {size / 1e3:.0f} kB, {self.stage}, "
            f"{self.num_devices} device(s), {len(self.args)} arguments)"
        )
