"""`predict` and `work`: the one road from a workload to numbers that the library and the command line share."""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from stablecast._ahead import EXEC, Ahead, ahead_program, can_compile, with_compiled_memory
from stablecast._capture import capture, load
from stablecast._measured import MeasuredInput, is_measured
from stablecast._timeline import TimelineOptions, map_note, pipeline_plan
from stablecast.backends.arithmetic import arithmetic_of
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device, System
from stablecast.backends.placement import place
from stablecast.backends.prediction import Prediction
from stablecast.backends.predictor import ProgramRole, Settings, predict_roles
from stablecast.backends.registry import parse_choice
from stablecast.backends.staged import predict_pipeline
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.frontends.chakra import TracePrograms, is_chakra, read_chakra
from stablecast.frontends.registry import Request, frontend_for
from stablecast.frontends.xla import Settings as XlaSettings
from stablecast.ir.accounting import BUILT_IN_TARGETS, Account, account
from stablecast.ir.accounting.registry import TARGETS
from stablecast.ir.accounting.values import Conventions
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import InputError, ToolError
from stablecast.ir.program import Program, Stage
from stablecast.ir.reader import bind_dimensions, dynamic_dimensions, read
from stablecast.ir.reader.dynamic import unbound
from stablecast.ir.throughput import Throughput, throughput_of
from stablecast.ir.workload import Role, Workload
from stablecast.lowering import program_cache
from stablecast.lowering.device import lower
from stablecast.lowering.execution.models import exec_model, uses_flash
from stablecast.lowering.partition import partition
from stablecast.lowering.partition.stages import stage_note
from stablecast.lowering.passes import default_passes, run_passes
from stablecast.lowering.peers import coordinates, with_peers
from stablecast.lowering.target import Target

AUTO = "auto"
CACHE_FROM_BYTES = 65536
"""Modules smaller than this are lowered again rather than kept."""
_VENDOR_PLATFORM = {"NVIDIA": "cuda", "AMD": "rocm"}
Source = Workload | DeviceProgram | TracePrograms | Callable[..., Any] | str | Path


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may choose besides input and system.

    `cache`: whether lowered programs are kept on disk. `platform`: what scripts are lowered for, empty: what the device
    needs. `backend`: as `--backend`. `exec`: `auto` or an execution model. `attention`: `auto`, `flash` or
    `as-written`. `mesh`: axis -> size for scripts. `arguments`: how scripts get theirs. `xla`: how XLA compiles where
    it does. `expandable_segments`: as PYTORCH_CUDA_ALLOC_CONF says of PyTorch's allocator.
    """

    backend: str = "analytical"
    exec: str = AUTO
    attention: str = "auto"
    platform: str = ""
    mesh: Mapping[str, int] | None = None
    arguments: ArgumentOptions = field(default_factory=ArgumentOptions)
    cache: bool = True
    conventions: Conventions = field(default_factory=Conventions)
    timeline: TimelineOptions = field(default_factory=TimelineOptions)
    xla: XlaSettings = field(default_factory=XlaSettings)
    expandable_segments: bool = False


def platform_of(device: Device) -> str:
    """The platform that programs for `device` are lowered for."""
    if device.kind != "gpu":
        return device.kind
    return _VENDOR_PLATFORM.get(device.vendor, "cuda")


def choose_exec(workload: Workload, wanted: str, device: Device | None) -> tuple[str, tuple[str, ...]]:
    """The execution model for `workload` on `device` (None: none in mind), and what is to be said of the choice.

    `auto`: a PyTorch capture runs eagerly, or under TorchInductor where its module was compiled; all else under XLA,
    which compiles it where it is installed and knows the device.
    """
    if wanted != AUTO:
        return wanted, ()
    if workload.launches is None:
        return EXEC if device is not None and can_compile(device, workload) else "xla", ()
    if workload.metadata.get("compiled"):
        return "inductor", ("torch.compile was asked for: kernels as TorchInductor makes them (--exec inductor)",)
    return "eager", ("PyTorch without torch.compile: one launch for each ATen op (--exec eager)",)


def split_system(spec: str) -> tuple[str, int | None]:
    """`h100-sxm:4` as name and count; the count is None where it is left out."""
    from stablecast.backends.catalogue import split_count

    return split_count(spec)


def predict(
    source: Source | Sequence[Workload | str | Path],
    *args: Any,
    on: str,
    backend: str = "analytical",
    loops: Mapping[str, int] | None = None,
    **kwargs: Any,
) -> Prediction:
    """Predict the step time of a program on a device or system.

    `source`: a JAX function (with its `args` and `kwargs`), a `Workload`, a `DeviceProgram`, or what the command line
    takes as INPUT; or several, captures of ranks whose programs differ (pipeline stages). `on`: `NAME`, `NAME:N` or a
    YAML file; without `:N`, as many devices as the program has. `backend`: a name, or
    `matmul=systolic,default=analytical`. `loops`: trip counts that the program leaves open. Raises `StablecastError`.
    """
    started = time.perf_counter()
    options = Options(backend=backend, conventions=Conventions(loops=loops or {}))
    if isinstance(source, Sequence) and not isinstance(source, str):
        ranks = cast("Sequence[Workload | str | Path]", source)
        if not ranks:
            raise InputError("no program is given")
        first, *others = [Session(one, options) for one in ranks]
        return replace(first.predict(on, others), wall_s=time.perf_counter() - started)
    if callable(source) and not isinstance(source, (str, Path)):
        device = Catalogue().resolve(split_system(on)[0]).device
        source = capture(source, *args, platform=platform_of(device), **kwargs)
    session = Session(source, options)
    return replace(session.predict(on), wall_s=time.perf_counter() - started)


def work(
    source: Source, conventions: Conventions | None = None, *, fused: bool = False, platform: str = "cuda"
) -> dict[str, Any]:
    """The work of one device and step: the object of `stablecast work --json`, before or after fusion."""
    options = Options(platform=platform, conventions=conventions or Conventions())
    return Session(source, options).work(fused=fused)


class Session:
    """One input and what has been worked out for it; a comparison uses one for all its systems."""

    def __init__(self, source: Source, options: Options, catalogue: Catalogue | None = None) -> None:
        self._source = source
        self.options = options
        self.catalogue = catalogue or Catalogue()
        self._workloads: dict[str, Workload] = {}
        self._programs: dict[tuple[str, str], Program] = {}
        self._lowered: dict[tuple[str, Target, str], DeviceProgram] = {}
        self._of_role: dict[str, Session] = {}
        self._scheduled: dict[tuple[int, tuple[str, ...]], tuple[DeviceProgram, DeviceProgram]] = {}
        self._traces: TracePrograms | None = None
        self._measured: MeasuredInput | None = None
        if options.exec != AUTO:
            exec_model(options.exec)
        uses_flash(Target(attention=options.attention))

    def with_backend(self, backend: str) -> "Session":
        """The same input and what is known of it, priced by another backend."""
        other = copy(self)
        other.options = replace(self.options, backend=backend)
        other._of_role = {}
        return other

    def workload(self, platform: str) -> Workload:
        """The workload, lowered for `platform` where it comes from a script."""
        if isinstance(self._source, Workload):
            return self._source
        wanted = self.options.platform or platform
        if isinstance(self._source, DeviceProgram | TracePrograms) or self._ready():
            raise InputError(f"{self.name} is a trace or device program: it has kernels, but no program text")
        if callable(self._source):
            raise InputError("give a workload: stablecast.capture(function, ...)")
        key = wanted if frontend_for(Request(str(self._source))).lowers else ""
        if key not in self._workloads:
            self._workloads[key] = load(self._source, self.options.arguments, platform=wanted, mesh=self.options.mesh)
        return self._workloads[key]

    def _ready(self) -> bool:
        return self.traces() is not None or self.measured() is not None

    def traces(self, ranks: int | None = None) -> TracePrograms | None:
        """The device programs of an input that is a Chakra trace or ready, None for all others.

        `ranks`: how many there are, for a trace of which one file is there.
        """
        source = self._source
        if isinstance(source, TracePrograms):
            return source
        if isinstance(source, DeviceProgram):
            return TracePrograms.of(source)
        if self._traces is None and not isinstance(source, Workload) and not callable(source) and is_chakra(source):
            self._traces = read_chakra(source, ranks=ranks)
        return self._traces

    def measured(self) -> MeasuredInput | None:
        """The program in an input that is a measured trace, None for all others."""
        source = self._source
        if self._measured is None and isinstance(source, str | Path) and is_measured(source):
            self._measured = MeasuredInput(Path(source))
        return self._measured

    def program(self, platform: str) -> Program:
        """The program of one device: that of the workload's first module, partitioned where it is a whole mesh's.

        `platform`: whose compiler partitions it.
        """
        workload = self.workload(platform)
        key = (workload.platform, platform)
        if key not in self._programs:
            data, program = self._whole(workload)
            if program.stage.is_global and program.num_partitions > 1:
                program = partition(data, workload.source or "program", platform=platform)
            self._programs[key] = program
        return self._programs[key]

    def _whole(self, workload: Workload) -> tuple[bytes, Program]:
        """The workload's first module with its open dimensions bound, and the program in it."""
        data, source = workload.modules[0].data, workload.source or "program"
        if self.options.conventions.dims:
            data = bind_dimensions(data, self.options.conventions.dims, source)
        program = read(data, source)
        open_dimensions = dict.fromkeys(dimension.name for dimension in dynamic_dimensions(program))
        if open_dimensions:
            raise unbound(source, list(open_dimensions))
        return data, program

    def device_program(self, device: Device) -> DeviceProgram:
        """The kernels of one device, for the platform and arithmetic of `device`."""
        ready = self.traces()
        if ready is not None:
            return next(iter(ready.values()))
        measured = self.measured()
        if measured is not None:
            return measured.program(device)
        platform = platform_of(device)
        workload = self.workload(platform)
        chosen, why = choose_exec(workload, self.options.exec, device)
        target = Target(platform, arithmetic_of(device), workload.launches is None, chosen, self.options.attention)
        ahead = chosen == EXEC
        key = (workload.platform, target, device.name if ahead else "")
        if key not in self._lowered:
            lowered = self._ahead(workload, target, device) if ahead else self._lower(workload, target)
            lowered = with_compiled_memory(lowered, workload)
            platform = workload.platform or lowered.platform
            notes = (*why, *workload.notes, *lowered.notes)
            self._lowered[key] = replace(lowered, platform=platform, notes=notes)
        return self._lowered[key]

    def _ahead(self, workload: Workload, target: Target, device: Device) -> DeviceProgram:
        """The program as XLA compiles it; where XLA fails and was not asked for, our own with a note."""
        chosen = Ahead(self.options.xla, self.options.cache)
        try:
            return ahead_program(
                workload, lambda: self._whole(workload)[0], device, target, self.options.conventions, chosen
            )
        except ToolError as error:
            if self.options.exec == EXEC:
                raise
            lowered = self._lower(workload, replace(target, exec="xla"))
            return replace(lowered, notes=(*lowered.notes, f"kernels by our own rules: {error.message}"))

    def _lower(self, workload: Workload, target: Target) -> DeviceProgram:
        """The lowered program, from the disk cache where it is kept; what is quickly made is not."""
        conventions = self.options.conventions
        data = workload.modules[0].data
        own_rules = len(TARGETS) != BUILT_IN_TARGETS
        launches = workload.launches if exec_model(target.exec).dispatched else None

        def made() -> DeviceProgram:
            program = self.program(target.platform)
            return lower(program, target, conventions, launches=launches, schedule=workload.schedule)

        if not self.options.cache or own_rules or len(data) < CACHE_FROM_BYTES:
            lowered = made()
        else:
            key = program_cache.key_of(data, workload.stage, target, conventions, launches)
            lowered = program_cache.cached(key, made)
        meshed = lowered if lowered.meshes else replace(lowered, meshes=workload.meshes)
        return with_peers(meshed, int(workload.metadata.get("rank", 0)))

    def scheduled(self, program: DeviceProgram, *, defaults: bool = True) -> DeviceProgram:
        """`program` after the schedule passes that were chosen; those of its execution model where none were.

        `defaults=False`: only those that were chosen. Traces have no passes of their own.
        """
        chosen = self.options.timeline.passes
        if chosen is None:
            if not defaults or self._ready():
                return program
            chosen = default_passes(program.exec_model, recorded=program.recorded)
        key = (id(program), chosen)
        if key not in self._scheduled:
            self._scheduled[key] = (program, run_passes(program, chosen))
        return self._scheduled[key][1]

    def lowered_alone(self) -> DeviceProgram:
        """The kernels with no device in mind: for the module's own platform, f32 products as on recent GPUs."""
        ready = self.traces()
        if ready is not None:
            return next(iter(ready.values()))
        if self.measured() is not None:
            raise InputError(f"{self.name} is a measured trace: its kernels are made for a device", "give --on NAME")
        platform = self.options.platform or "cuda"
        workload = self.workload(platform)
        chosen, why = choose_exec(workload, self.options.exec, None)
        if chosen == EXEC:
            raise InputError("--exec xla-aot compiles for a device", "give --on NAME")
        target = Target(platform, combine=workload.launches is None, exec=chosen, attention=self.options.attention)
        lowered = self._lower(workload, target)
        return replace(lowered, platform=workload.platform or platform, notes=(*why, *lowered.notes))

    def system(self, spec: str) -> System:
        """The system that `spec` names, with as many devices as the program has."""
        name, given = split_system(spec)
        device = self.catalogue.resolve(spec).device
        ready = self.traces(given)
        measured = None if ready else self.measured()
        if measured is not None:
            wanted = measured.program(device).num_devices
        else:
            wanted = ready.num_devices if ready else self.workload(platform_of(device)).num_devices
        if given is not None and given != wanted:
            raise InputError(
                f"--on {spec} has {given} device(s), but the program is written for {wanted}",
                f"say --on {name}:{wanted}, or capture the program for {given} (--mesh)",
            )
        return self.catalogue.resolve(spec if given is not None else f"{name}:{wanted}")

    def predict(self, spec: str, beside: "Sequence[Session]" = ()) -> Prediction:
        """The prediction for one `--on`. `beside`: other ranks of the same step (pipeline stages), a session each."""
        started = time.perf_counter()
        system = self.system(spec)
        program = self.device_program(system.device)
        system = self._placed(program, system)
        choice, timeline = parse_choice(self.options.backend), self.options.timeline
        streams = timeline.settings
        if self.traces() is not None and program.exec_model == "as-written":
            streams = replace(streams, overlap="all", starts="free", comm_streams="one")
        settings = Settings(choice, self.options.conventions.loops, streams, self.options.expandable_segments)
        if timeline.pipeline:
            plan = pipeline_plan(timeline, program)
            made = predict_pipeline(self.scheduled(program), system, settings, self.name, plan)
            stages = ""
        else:
            made = predict_roles(self._roles(program, system.device, beside), system, settings, self.name)
            stages = stage_note(program, self.options.conventions.loops)
        said = [map_note(system), stages, self._passes_note(program, made)]
        made = replace(made, assumptions=(*made.assumptions, *filter(None, said)))
        native = platform_of(system.device)
        if program.platform and program.platform != native:
            note = f"the module was lowered for {program.platform}, not for {native}"
            made = replace(made, assumptions=(*made.assumptions, note))
        return replace(
            made, throughput=self._throughput(platform_of(system.device)), wall_s=time.perf_counter() - started
        )

    def _throughput(self, platform: str) -> Throughput | None:
        """What a step works through, where the input has a program; of one device where it is one's of several."""
        if self.traces() is not None or self.measured() is not None:
            return None
        workload = self.workload(platform)
        found = throughput_of(workload.args, workload.num_replicas)
        shared = workload.stage is Stage.PER_DEVICE and workload.num_partitions > 1
        return replace(found, unit=f"{found.unit} a device") if found and shared else found

    def _placed(self, program: DeviceProgram, system: System) -> System:
        """`system` with the axes of the program's mesh on its dimensions."""
        wanted = self.options.timeline.placed
        mesh = next((mesh for mesh in program.meshes if mesh.size == system.count), None)
        if mesh is None:
            if wanted:
                raise InputError(f"--map: {self.name} has no mesh with names over {system.count} devices")
            return system
        return place(mesh.axes, wanted, system)

    def _passes_note(self, program: DeviceProgram, made: Prediction) -> str:
        if not made.collectives or self._ready():
            return ""
        chosen = self.options.timeline.passes
        if chosen is not None:
            return f"schedule passes: {', '.join(chosen) or 'none'}"
        if program.recorded:
            return "streams and events as PyTorch recorded them (--pass changes them)"
        names = default_passes(program.exec_model)
        return f"schedule passes of {program.exec_model}: {', '.join(names) or 'none'} (--pass chooses others)"

    def role(self, device: Device) -> ProgramRole:
        """The captured rank of a program whose ranks differ, as one role among others."""
        program = self.device_program(device)
        workload = self.workload(platform_of(device))
        rank = int(workload.metadata.get("rank", 0))
        mesh = next((mesh for mesh in program.meshes if mesh.size == program.num_devices), None)
        coords = coordinates(mesh, rank) if mesh else {}
        return ProgramRole(f"rank {rank}", self.scheduled(program), coords, self.options.timeline.speeds.get(rank, 1.0))

    def part(self, workload: Workload, role: Role) -> "Session":
        """A session of one role of `workload`, which is that of this session."""
        key = f"{role.module} of {workload.platform}"
        if key not in self._of_role:
            self._of_role[key] = Session(workload.alone(role), self.options, self.catalogue)
        return self._of_role[key]

    def _stages(self, device: Device) -> list[ProgramRole]:
        """The roles of a workload that has a module for each; empty for all others."""
        if self.traces() is not None or self.measured() is not None or isinstance(self._source, DeviceProgram):
            return []
        workload = self.workload(platform_of(device))
        if len(workload.modules) < 2 or not workload.roles:
            return []
        made: list[ProgramRole] = []
        for role in workload.roles:
            one = self.part(workload, role)
            made.append(ProgramRole(role.name, one.scheduled(one.device_program(device)), role.coords, role.speed))
        return made

    def _roles(self, program: DeviceProgram, device: Device, beside: "Sequence[Session]") -> list[ProgramRole]:
        """The roles of the step: captured ranks, those of a trace, and ranks with a speed of their own."""
        if beside:
            return [session.role(device) for session in (self, *beside)]
        stages = self._stages(device)
        if stages:
            if self.options.timeline.speeds:
                raise InputError("--slow cannot be given for a program of several stages", "leave it out")
            return stages
        speeds = self.options.timeline.speeds
        ready = self.traces()
        if ready is not None and len(ready) > 1:
            return [
                ProgramRole(role.name, self.scheduled(role.program), role.coords, role.speed, role.ranks)
                for role in ready.roles.values()
            ]
        whole = self.scheduled(program)
        if not speeds:
            return [ProgramRole("", whole)]
        strange = [rank for rank in speeds if not 0 <= rank < program.num_devices]
        if strange:
            raise InputError(f"--slow {strange[0]}: there is no such rank", f"ranks are 0 to {program.num_devices - 1}")
        slow = [ProgramRole(f"rank {rank}", whole, speed=speed) for rank, speed in sorted(speeds.items())]
        return [ProgramRole("others", whole), *slow] if len(slow) < program.num_devices else slow

    @property
    def name(self) -> str:
        """What reports call the input."""
        if isinstance(self._source, Workload | TracePrograms):
            return self._source.source or "program"
        return self._source.name if isinstance(self._source, DeviceProgram) else str(self._source)

    def work(self, *, fused: bool = False) -> dict[str, Any]:
        """The `work` object of design section 11."""
        if not fused and self.traces() is None:
            counted: Account = account(self.program(self.options.platform or "cuda"), self.options.conventions)
            return {**counted.to_dict(), "fused": False}
        lowered = self.lowered_alone()
        total, exact = lowered.work.evaluate(self.options.conventions.loops)
        from stablecast.backends.prediction import unmodelled_dict

        return {
            **total.to_dict(),
            "complete": lowered.complete and exact,
            "unmodelled": [unmodelled_dict(entry) for entry in lowered.unmodelled],
            "symbols": [symbol.name for symbol in lowered.work.symbols],
            "conventions": {**self.options.conventions.to_dict(), "bytes": "after fusion"},
            "fused": True,
        }


def parse_pairs(texts: Sequence[str], flag: str) -> dict[str, int]:
    """`a=8,b=4` or several `n=7` as integers; raises `InputError` for anything else."""
    found: dict[str, int] = {}
    for text in (part for given in texts for part in given.split(",") if part):
        name, equals, value = text.partition("=")
        if not equals or not value.strip().isdigit() or not name.strip():
            raise InputError(f"{flag} '{text}' is not name=number", f"write {flag} data=8,model=4")
        found[name.strip()] = int(value)
    return found
