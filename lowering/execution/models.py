"""The execution models: each is a named list of passes over one `Plan`.

A model decides what one launch is. `plan_kernels` runs its passes, and gives the kernels of a block in issue order.
"""

from dataclasses import dataclass

from stablecast.ir.errors import InputError, near_names
from stablecast.ir.schedule import LaunchTable
from stablecast.lowering.execution import attention, eager, inductor, merged_products, ordering, xla
from stablecast.lowering.execution.plan import PASSES, Plan
from stablecast.lowering.graph import Graph
from stablecast.lowering.group import Group
from stablecast.lowering.target import ATTENTION_CHOICES, Target


@dataclass(frozen=True, slots=True)
class ExecModel:
    """What one launch is. `passes`: names, in order. `flash`: whether `--attention auto` makes attention one kernel.

    `dispatched`: kernels follow the calls of a PyTorch capture, even those whose results nobody reads.
    """

    name: str
    summary: str
    passes: tuple[str, ...]
    flash: bool = False
    dispatched: bool = False


_MODELS: dict[str, ExecModel] = {}


def register_model(model: ExecModel) -> None:
    """Make `model` known under its name. Raises `InputError` where the name is taken or a pass is unknown."""
    if model.name in _MODELS:
        raise InputError(f"there is an execution model '{model.name}' already")
    for name in model.passes:
        if name not in PASSES:
            raise InputError(f"execution model '{model.name}' has an unknown pass '{name}'", near_names(name, PASSES))
    _MODELS[model.name] = model


def model_names() -> tuple[str, ...]:
    """Every execution model, in the order of registration."""
    return tuple(_MODELS)


def exec_model(name: str) -> ExecModel:
    """The model called `name`; raises `InputError` for an unknown one."""
    if name not in _MODELS:
        raise InputError(f"unknown execution model '{name}'", near_names(name, ("auto", *_MODELS)))
    return _MODELS[name]


def plan_kernels(
    graph: Graph, target: Target, launches: LaunchTable | None = None, *, ready_made: bool = False
) -> list[Group]:
    """The kernels of `graph` in issue order; its dead nodes belong to none.

    `launches`: of the block, where it is the entry of a PyTorch capture. `ready_made`: the producer has fused already;
    its kernels are kept and nothing is added to them.
    """
    model = exec_model(target.exec)
    plan = Plan(graph, target, launches, ready_made, flash=uses_flash(target))
    for name in READY_MADE if ready_made else model.passes:
        PASSES[name].run(plan)
    return plan.ordered


def uses_flash(target: Target) -> bool:
    """Whether attention is one kernel where it is recognised. Raises `InputError` for an unknown choice."""
    if target.attention not in ATTENTION_CHOICES:
        raise InputError(f"unknown --attention '{target.attention}'", "known: " + ", ".join(ATTENTION_CHOICES))
    return target.attention == "flash" or (target.attention == "auto" and exec_model(target.exec).flash)


UNFUSED = "unfused"
READY_MADE = (ordering.READY_MADE, ordering.ORDER)
"""Passes for programs whose producer has fused already, under any model."""

register_model(
    ExecModel(
        "xla",
        "XLA's GPU and TPU compilers: loop, input and multi-output fusion, products with epilogues",
        (
            attention.RECOGNISE,
            merged_products.MERGE,
            merged_products.SPLIT,
            xla.GROUP,
            xla.INTO_CONSUMERS,
            xla.SIBLINGS,
            xla.OUTPUTS,
            ordering.ORDER,
        ),
    )
)
register_model(
    ExecModel("xla-aot", "XLA itself, compiling for a device that is not there: its kernels as they are", READY_MADE)
)
register_model(
    ExecModel(
        "inductor",
        "TorchInductor: products and convolutions as library calls, everything else in fused loops",
        (attention.RECOGNISE, inductor.GROUP, inductor.FUSE, ordering.ORDER),
        flash=True,
    )
)
register_model(
    ExecModel(
        "eager",
        "PyTorch without a compiler: one launch for each ATen op as dispatched",
        (eager.GROUP,),
        flash=True,
        dispatched=True,
    )
)
register_model(
    ExecModel(UNFUSED, "one launch for each StableHLO op", (ordering.SINGLE, ordering.ORDER)),
)
