"""`--exec xla-aot`: the program as XLA itself compiles it for a device that is not there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from stablecast.backends.device import Device
from stablecast.frontends.files import MEMORY
from stablecast.frontends.xla import (
    Settings,
    boards,
    check_terms,
    compile_ahead,
    compiler_installed,
    target_config,
    topology,
)
from stablecast.ir.accounting.values import Conventions
from stablecast.ir.device_program import Body, Branch, Buffers, Collective, DeviceProgram, Loop, Node
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups, named
from stablecast.ir.program import Stage
from stablecast.ir.reader import read
from stablecast.ir.workload import Workload
from stablecast.lowering import program_cache
from stablecast.lowering.device import lower
from stablecast.lowering.target import Target

EXEC = "xla-aot"
_PACKAGES = ("jaxlib", "jax-cuda12-pjrt", "libtpu")


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the user chose for XLA: its settings, and whether programs are kept on disk."""

    settings: Settings
    cache: bool = True


def can_compile(device: Device, workload: Workload) -> bool:
    """Whether `--exec auto` lets XLA compile: its CUDA compiler is installed and knows the device.

    A program that is compiled already, or that recorded how it was launched, is left as it is.
    """
    wanted = device.kind == "gpu" and device.name in boards() and workload.stage is not Stage.SCHEDULED
    return wanted and workload.launches is None and compiler_installed()


def ahead_program(
    workload: Workload,
    module: Callable[[], bytes],
    device: Device,
    target: Target,
    conventions: Conventions,
    chosen: Ahead,
) -> DeviceProgram:
    """The kernels, schedule and memory of `workload` as XLA compiles it for `device`.

    `module`: gives its first module with open dimensions bound. Compiled programs are kept on disk, by content, target
    and compiler. Raises as `compile_ahead` does, and `InputError` for a workload that is compiled already.
    """
    if workload.stage is Stage.SCHEDULED:
        raise InputError(f"{workload.source} is compiled already", "leave out --exec xla-aot")
    where = device.name
    if device.kind == "tpu":
        check_terms(chosen.settings)
        where = topology(device.name, workload.num_devices)
    data = module()

    def make() -> DeviceProgram:
        compiled = compile_ahead(workload, where, chosen.settings, data=data)
        made = lower(read(compiled.text, workload.source or "program"), target, conventions)
        assert made.buffers is not None
        memory = replace(compiled.memory, by_scope=made.buffers.by_scope)
        notes = (*made.notes, *compiled.notes)
        made = replace(made, exec_model=EXEC, buffers=memory, num_devices=workload.num_devices, notes=notes)
        return _on_mesh(made, workload)

    if not chosen.cache:
        return make()
    about = target_config(where) if device.kind == "gpu" else where
    options = (chosen.settings.products, sorted(chosen.settings.options.items()))
    key = program_cache.key_of(data, EXEC, about, workload.stage, target, conventions, options, _versions())
    return program_cache.cached(key, make)


def with_compiled_memory(program: DeviceProgram, workload: Workload) -> DeviceProgram:
    """`program` with the memory that the compiler laid out, where a dump says it."""
    held: Mapping[str, int] | None = workload.metadata.get(MEMORY)
    if held is None:
        return program
    sizes = [int(held[name]) for name in ("argument", "output", "alias", "temp")]
    return replace(program, buffers=Buffers(*sizes, by_scope=program.buffers.by_scope if program.buffers else {}))


def _on_mesh(program: DeviceProgram, workload: Workload) -> DeviceProgram:
    """`program` with the workload's mesh, and its collectives along the axes of that."""
    mesh = next((mesh for mesh in workload.meshes if mesh.size == program.num_devices and not mesh.device_ids), None)
    if mesh is None:
        return program
    known: dict[Groups, Groups] = {}

    def place(body: Body) -> Body:
        nodes: list[Node] = []
        for node in body:
            if isinstance(node, Collective):
                if node.groups not in known:
                    known[node.groups] = named(node.groups, mesh.name, mesh.axes)
                node = replace(node, groups=known[node.groups])
            elif isinstance(node, Loop):
                node = replace(node, body=place(node.body))
            elif isinstance(node, Branch):
                node = replace(node, bodies=tuple(map(place, node.bodies)))
            nodes.append(node)
        return tuple(nodes)

    return replace(program, body=place(program.body), meshes=workload.meshes)


def _versions() -> tuple[str, ...]:
    return tuple(f"{name} {_version(name)}" for name in _PACKAGES)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
