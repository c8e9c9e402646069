"""TorchTitan's peak memory: what PyTorch's allocator has reserved, of whole captured steps of every layer.

TorchTitan prints `max_reserved`. A pipeline's steps are those of PyTorch's own schedules, captured as its first and its
last rank; the one that takes more counts. Compiled layers let go of memory behind its last reader (what a selective
checkpoint saves and the backward pass does not read is gone), and are else played as eager runs them; the loss is not
compiled. Float8 is left out, and so are gathers of float8 weights. The allocator has PyTorch's default settings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from stablecast.backends.device import Device
from stablecast.frontends.script import load_module
from stablecast.ir.allocations import Allocations
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelTableBuilder
from stablecast.ir.work import SymbolicWork
from stablecast.ir.workload import Workload
from stablecast.lowering.allocations import step_allocations, until_last_use
from stablecast.lowering.caching_allocator import Reserved, replay, workspace_bytes
from stablecast.validation.suites.base import Record, whole
from stablecast.validation.suites.captures import example_kernels

_STAGES: Final = "torch_titan_stages.py"
_LAYERS: Final = "/layers/"


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one rank. `batch`, `seq`: sequences of the rank's replica, and this device's part of each.

    `schedule`: of a pipeline of `pp` ranks, of which `stage` is captured; else empty.
    """

    size: str
    dp: int
    tp: int
    cp: int
    pp: int
    batch: int
    seq: int
    recompute: str
    compiled: bool
    schedule: str = ""
    stage: int = 0

    @property
    def mesh(self) -> dict[str, int]:
        """Axes from the outermost to the innermost."""
        axes = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}
        return {axis: size for axis, size in axes.items() if size > 1 or axis == "dp"}


def steps_of(record: Record) -> list[Step]:
    """The steps of a row: one, or of a pipeline those of its ends."""
    fsdp, tp, cp, pp, batch, seq = whole(record, "fsdp", "tp", "cp", "pp", "local_batch", "seq_len")
    size, recompute = record["model"].removeprefix("llama3.1-"), record["activation_checkpointing"]
    compiled, schedule = record["compile"] == "1", record["schedule"] if pp > 1 else ""
    one = Step(size, fsdp, tp, cp, pp, batch, seq // cp, recompute, compiled, schedule)
    return [one] if pp == 1 else [one, replace(one, stage=pp - 1)]


def reserved(folder: Path, script: str, record: Record, device: Device, *, expandable: bool = False) -> Reserved:
    """What the allocator reserves for a row on `device`; of a pipeline, on the rank that takes more.

    `folder`, `script`: where the model is. Raises `InputError` where a step cannot be captured.
    """
    found = [asked_of(folder, script, step) for step in steps_of(record)]
    room, workspace = int(device.memory_bytes.value), workspace_bytes(device.architecture)
    played = [replay(asked, room, expandable=expandable, workspace=workspace) for asked in found]
    return max(played, key=lambda one: one.reserved)


def asked_of(folder: Path, script: str, step: Step) -> Allocations:
    """What a step asks for, from disk where it is kept."""

    def make() -> DeviceProgram:
        workload = capture(folder, script, step)
        schedule, launches = workload.schedule, workload.launches
        assert schedule is not None
        assert schedule.allocations is not None
        assert launches is not None
        recorded = schedule.allocations
        if step.compiled:
            recorded = until_last_use(recorded, launches, lambda call: _LAYERS in call.module_path)
        asked = step_allocations(recorded, workload.args, launches)
        return DeviceProgram("memory", (), KernelTableBuilder().build({}), SymbolicWork(), allocations=asked)

    found = example_kernels(folder, "torch", (script, "memory", step), make).allocations
    if found is None:
        raise InputError("the cached step has no allocations", "empty the cache")
    return found


def capture(folder: Path, script: str, step: Step, layers: int | None = None, vocab: int | None = None) -> Workload:
    """A step of all layers; `layers`, `vocab`: of a smaller model."""
    from stablecast.frontends.torch import capture_torch

    module: Any = load_module(folder / script)
    sizes = {name: size for name, size in (("layers", layers), ("vocab", vocab)) if size is not None}
    build: Callable[..., Any]
    if step.schedule:
        stages: Any = load_module(folder / _STAGES)
        chosen = {"stage": step.stage, "schedule": step.schedule, "batch": step.batch, "seq": step.seq}
        build, run = partial(stages.build, size=step.size, **chosen, **sizes), stages.step
    else:
        build = partial(module.build_mixed, size=step.size, recompute=step.recompute, **sizes)
        run = module.split_loss_step if step.tp > 1 else module.ring_step if step.cp > 1 else module.step
    head = module.SIZES[step.size].width // module.SIZES[step.size].heads
    rank = step.stage * step.dp * step.cp * step.tp

    def inputs() -> Any:
        made = module.inputs(step.batch, step.seq, head=head)
        return made[:2] if step.schedule else made

    return capture_torch(build, run, inputs, mesh=step.mesh, rank=rank)
