"""`to_chakra` and `read_chakra`: any input to Chakra traces of all its ranks, and back to device programs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from stablecast._predict import Options, Session, Source
from stablecast.backends.astrasim.files import memory_json, network_yaml, system_json
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import System
from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.backends.pricing import price
from stablecast.backends.registry import parse_choice
from stablecast.frontends.chakra import TraceRole, read_chakra
from stablecast.ir.accounting.values import Conventions
from stablecast.ir.chakra.algorithms import CollectiveAlgorithm, read_algorithm
from stablecast.ir.errors import InputError
from stablecast.ir.workload import Role, Workload
from stablecast.lowering.chakra import EmitOptions, EmitReport, MemoryNodes, Order, RolePart, Target, emit
from stablecast.lowering.partition.stages import stage_roles
from stablecast.validation.linking import LinkReport, link_traces

_Choice = TypeVar("_Choice", Target, MemoryNodes, Order)

__all__ = ["ChakraOptions", "chakra_from_traces", "read_chakra", "to_chakra", "write_chakra"]


@dataclass(frozen=True, slots=True)
class ChakraOptions:
    """How to write traces; the texts are those of the command line.

    `memory`: `none`, `step` or `kernel`. `order`: `data` or `stream`. `target`: `files`, `tar` or `dry-run`.
    `max_unroll`: trips of a loop that are written out, None for all. `roofline`: leave the time of compute to the
    consumer, by work and bytes. `collectives`: kind -> MSCCL XML or prefix of a point-to-point graph.
    """

    overwrite: bool = False
    target: str = "files"
    memory: str = "none"
    order: str = "data"
    max_unroll: int | None = None
    roofline: bool = False
    collectives: Mapping[str, str] = field(default_factory=dict[str, str])


def to_chakra(
    source: Source,
    *args: Any,
    out: str | Path,
    on: str = "",
    ranks: int | None = None,
    backend: str = "analytical",
    loops: Mapping[str, int] | None = None,
    options: ChakraOptions | None = None,
    **kwargs: Any,
) -> EmitReport:
    """Write the Chakra traces of every rank of a program as `<out>.<rank>.et`, with all that ASTRA-sim needs.

    `source`: a JAX function (with its `args` and `kwargs`), a `Workload`, a `DeviceProgram`, or what the command line
    takes as INPUT. `on`: the system whose predicted times fill the durations, and which the network, system and memory
    files describe; without it nodes have work and bytes only. `ranks`: must be the number of devices that the program
    is written for. Raises `StablecastError`; then nothing is left under a final name.
    """
    made = Options(backend=backend, conventions=Conventions(loops=loops or {}))
    if callable(source) and not isinstance(source, str | Path):
        source = _captured(source, args, kwargs, on)
    return write_chakra(Session(source, made), out, on=on, ranks=ranks, options=options)


def chakra_from_traces(
    host: str | Path,
    kineto: str | Path,
    out: str | Path,
    *,
    on: str = "",
    ranks: int | None = None,
    overwrite: bool = False,
) -> LinkReport:
    """Link a PyTorch execution trace and the Kineto trace of the same run into Chakra traces of all ranks.

    `host`, `kineto`: the files of one rank, or both with `{rank}` in their place for those of all ranks. `on`: a system
    whose network, system and memory files are put beside the traces. `ranks`: as the traces say, unless given.
    Raises `StablecastError`; then nothing is left under a final name.
    """
    pairs = _rank_pairs(str(host), str(kineto))
    files: dict[str, bytes] = {}
    if on:
        files = _astra_sim(Catalogue().resolve(on), ChakraOptions())
    return link_traces(pairs, out, ranks=ranks, overwrite=overwrite, files=files)


def _rank_pairs(host: str, kineto: str) -> list[tuple[Path, Path]]:
    mark = "{rank}"
    if (mark in host) != (mark in kineto):
        raise InputError(f"{mark} stands in one of the two names only", "write it in both, or name one rank's files")
    if mark not in host:
        return [(Path(host), Path(kineto))]
    found: list[tuple[Path, Path]] = []
    while Path(first := host.replace(mark, str(len(found)))).is_file():
        found.append((Path(first), Path(kineto.replace(mark, str(len(found))))))
    if not found:
        raise InputError(f"there is no {host.replace(mark, '0')}", "ranks are counted from 0")
    return found


def _captured(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], on: str) -> Workload:
    from stablecast._capture import capture
    from stablecast._predict import platform_of, split_system

    platform = platform_of(Catalogue().resolve(split_system(on)[0]).device) if on else "cuda"
    return capture(function, *args, platform=platform, **kwargs)


def write_chakra(
    session: Session, out: str | Path, *, on: str = "", ranks: int | None = None, options: ChakraOptions | None = None
) -> EmitReport:
    """`to_chakra` for the input of `session`."""
    chosen = options or ChakraOptions()
    if ranks is not None and ranks < 1:
        raise InputError(f"{ranks} ranks cannot be written", "give the number of devices of the program")
    system = session.system(on) if on else None
    parts = _parts(session, system)
    files: dict[str, bytes] = {}
    notes: dict[str, object] = {"input": session.name}
    settings = Settings(parse_choice(session.options.backend), session.options.conventions.loops)
    if system is not None:
        files = _astra_sim(system, chosen)
        timed = [_timed(part, system, settings) for part in parts]
        notes["prediction"] = _predictions(_staged(parts), system, settings, session.name)
        parts = [replace(part, durations_s=None) for part in parts] if chosen.roofline else timed
    parts = _staged(parts)
    rate = system.device.hbm_bytes_per_s.value if system else None
    emitted = _emit_options(chosen, session.options.conventions.loops, rate)
    return emit(parts, None, out, ranks=ranks, options=emitted, files=files, notes=notes)


def _parts(session: Session, system: System | None) -> list[RolePart]:
    """The parts of the program, after the schedule passes that were asked for."""
    return [_scheduled(session, part) for part in _bare_parts(session, system)]


def _scheduled(session: Session, part: RolePart) -> RolePart:
    program = session.scheduled(part.program, defaults=False)
    if part.durations_s is not None and len(part.durations_s) != len(program.table):
        raise InputError("a pass splits kernels whose times are those of a trace", "give --on for times of the parts")
    return replace(part, program=program)


def _bare_parts(session: Session, system: System | None) -> list[RolePart]:
    traces = session.traces()
    if traces is not None:
        return [_trace_part(role) for role in traces.roles.values()]
    workload = session.workload("cuda" if system is None else _platform(system))
    if not workload.roles:
        program = session.lowered_alone() if system is None else session.device_program(system.device)
        return [RolePart("main", program)]
    return [_role_part(session, workload, role, system) for role in workload.roles]


def _staged(parts: list[RolePart]) -> list[RolePart]:
    """A program of all ranks with a pipeline in it as one part a stage, else `parts`."""
    whole = parts[0]
    if len(parts) > 1 or whole.coords or whole.ranks:
        return parts
    stages = [replace(whole, name=role.name, coords=role.coords) for role in stage_roles(whole.program, whole.name)]
    return stages or parts


def _platform(system: System) -> str:
    from stablecast._predict import platform_of

    return platform_of(system.device)


def _trace_part(role: TraceRole) -> RolePart:
    return RolePart(role.name, role.program, role.durations_s, role.coords, role.speed, role.ranks)


def _role_part(session: Session, workload: Workload, role: Role, system: System | None) -> RolePart:
    one = session.part(workload, role)
    program = one.lowered_alone() if system is None else one.device_program(system.device)
    return RolePart(role.name, program, coords=role.coords, speed=role.speed)


def _timed(part: RolePart, system: System, settings: Settings) -> RolePart:
    priced = price(part.program.table, system.device, settings.choice)
    return replace(part, durations_s=priced.estimates.time_s)


def _predictions(parts: list[RolePart], system: System, settings: Settings, name: str) -> dict[str, object]:
    """What the manifest says of the prediction that the durations are from."""
    programs = {id(part.program): part.program for part in parts}
    known = {key: predict_device_program(program, system, settings, name) for key, program in programs.items()}
    made = {part.name: known[id(part.program)] for part in parts}
    first = next(iter(made.values()))
    return {
        "system": first.system,
        "devices": first.devices,
        "backend": first.backend,
        "step_time_s": {role: one.step_time_s for role, one in made.items()},
        "step_time_low_s": {role: one.step_time_low_s for role, one in made.items()},
        "step_time_high_s": {role: one.step_time_high_s for role, one in made.items()},
        "compute_s": {role: one.compute_s for role, one in made.items()},
        "complete": all(one.complete for one in made.values()),
        "assumptions": list(dict.fromkeys(note for one in made.values() for note in one.assumptions)),
    }


def _astra_sim(system: System, options: ChakraOptions) -> dict[str, bytes]:
    """Network, system and memory files. A single device has no network to describe."""
    files = {
        "system.json": system_json(system, roofline=options.roofline),
        "memory.json": memory_json(system, remote=options.memory != MemoryNodes.NONE),
    }
    if system.count > 1:
        files["network.yml"] = network_yaml(system)
    return {name: text.encode() for name, text in files.items()}


def _emit_options(options: ChakraOptions, loops: Mapping[str, int], rate: float | None) -> EmitOptions:
    algorithms: dict[str, CollectiveAlgorithm] = {
        kind: read_algorithm(source, kind) for kind, source in options.collectives.items()
    }
    return EmitOptions(
        options.overwrite,
        _choice(Target, options.target, "target"),
        options.max_unroll,
        _choice(MemoryNodes, options.memory, "--memory"),
        _choice(Order, options.order, "--order"),
        loops,
        algorithms,
        rate,
    )


def _choice(kinds: type[_Choice], text: str, flag: str) -> _Choice:
    try:
        return kinds(text)
    except ValueError:
        raise InputError(f"{flag} '{text}' is unknown", "known: " + ", ".join(kinds)) from None
