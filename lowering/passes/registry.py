"""Passes by name: built-in ones register exactly as third parties' do, as entry points."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Final

from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.entry_points import registered
from stablecast.ir.errors import InputError, near_names
from stablecast.lowering.passes.legality import illegal

GROUP: Final = "stablecast.passes"
SchedulePass = Callable[[DeviceProgram], DeviceProgram]
"""What a pass does. The entry point is a class, or a function, that gives one for the text after `=`."""

_OWN: Final = "stablecast."
_COMPILED: Final = ("latency-hiding",)
DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "xla": _COMPILED,
    "unfused": _COMPILED,
    "inductor": ("fsdp-prefetch=1", "async"),
}
"""Passes by execution model."""


def _entries() -> Mapping[str, EntryPoint]:
    return registered(GROUP, "pass")


def pass_names() -> tuple[str, ...]:
    """Every registered pass."""
    return tuple(sorted(_entries()))


def pass_summaries() -> dict[str, str]:
    """What each pass does: the first line of its docstring."""
    return {name: ((_entries()[name].load().__doc__ or "").strip().splitlines() or [""])[0] for name in pass_names()}


def find_pass(text: str) -> tuple[SchedulePass, bool]:
    """The pass that `NAME` or `NAME=VALUE` names, and whether it is one of stablecast's own.

    Raises `InputError` for an unknown name or a value that the pass does not take.
    """
    name, _, value = text.partition("=")
    entry = _entries().get(name)
    if entry is None:
        raise InputError(f"unknown pass '{name}'", near_names(name, pass_names()) or "`stablecast passes` lists them")
    make: Callable[[str], SchedulePass] = entry.load()
    return make(value), entry.value.startswith(_OWN)


def default_passes(exec_model: str, *, recorded: bool = False) -> tuple[str, ...]:
    """The passes that a prediction takes for granted for an execution model.

    XLA hides latency by its scheduler (on by default for TPUs; on GPUs the flag
    `xla_gpu_enable_latency_hiding_scheduler`, which published recipes set). Under TorchInductor FSDP gathers one unit
    ahead and collectives run on streams of their own. `recorded`: streams and events are those of a recorded run
    (eager PyTorch), which needs none. Traces stay as they are.
    """
    return () if recorded else DEFAULTS.get(exec_model, ())


def run_passes(program: DeviceProgram, texts: Sequence[str]) -> DeviceProgram:
    """`program` after the passes `texts`, in order.

    What a third party's pass does is checked. Raises `InputError` for an unknown pass and for an illegal change.
    """
    for text in texts:
        change, own = find_pass(text)
        fault = "" if own else illegal(change, program)
        if fault:
            raise InputError(f"pass '{text}' breaks the program: {fault}", "a pass may move nodes, not dependencies")
        program = change(program)
    return program
