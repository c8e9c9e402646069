"""Pipelines of models that transformers makes: one capture a stage, run by `torch.distributed.pipelining`."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import copy
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stablecast.frontends.torch.private import load, torch
from stablecast.ir.errors import InputError, near_names
from stablecast.ir.workload import Module, Role, Workload

SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb": "ScheduleInterleavedZeroBubble",
}
_LOOPED = ("interleaved", "zb")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`stages` ranks along `pp`, each with `parts` pieces of the model; `micro_batches` 0: one a sample."""

    stages: int = 1
    schedule: str = "1f1b"
    parts: int = 1
    micro_batches: int = 0

    def batches(self, batch: int) -> int:
        """Micro-batches of a batch. Raises `InputError` where the batch cannot be split so, or fills no pipeline."""
        count = self.micro_batches or batch
        if batch % count:
            raise InputError(f"a batch of {batch} does not divide into {count} micro-batches", "change --batch or mbN")
        if count < self.stages:
            raise InputError(
                f"{count} micro-batches do not fill {self.stages} stages", f"give --batch {self.stages} or more"
            )
        return count


def parse(parallel: str) -> tuple[str, Pipeline]:
    """`pp4:interleaved2,mb8` taken out of a text of parallelisms: what is left (with `pp4`), and the pipeline."""
    made, left = Pipeline(), list[str]()
    for part in [part for part in parallel.split(",") if part.strip()]:
        name, _, schedule = part.strip().partition(":")
        if found := re.fullmatch(r"mb=?(\d+)", name):
            made = replace(made, micro_batches=max(1, int(found[1])))
            continue
        left.append(name)
        if found := re.fullmatch(r"pp=?(\d+)", name):
            made = replace(made, stages=int(found[1]))
        if schedule:
            made = _scheduled(made, schedule, part)
    return ",".join(left), made


def _scheduled(made: Pipeline, schedule: str, part: str) -> Pipeline:
    found = re.fullmatch(r"([a-z]+|1f1b)(\d*)", schedule)
    if found is None or found[1] not in SCHEDULES or not part.strip().startswith("pp"):
        raise InputError(f"unknown pipeline schedule '{part}'", near_names(schedule, SCHEDULES))
    parts = int(found[2] or 2) if found[1] in _LOOPED else 1
    return replace(made, schedule=found[1], parts=parts)


class Stage(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Layers `low` to `high` of a decoder, with what comes before the layers or after them where it is an end."""

    def __init__(self, model: Any, low: int, high: int) -> None:
        super().__init__()
        base = model.base_model
        before, layers, after = _plan(model)
        held = getattr(base, layers)
        self.first, self.last = low == 0, high == len(held)
        setattr(base, layers, torch.nn.ModuleList(list(held)[low:high]))
        base.config = _sliced(base.config, low, high)
        for name in before if not self.first else ():
            setattr(base, name, None)
        for name in after if not self.last else ():
            setattr(base, name, torch.nn.Identity())
        self.model = model if self.last else base

    def forward(self, x: Any) -> Any:
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        out = self.model(**given, use_cache=False)
        return out.logits if self.last and hasattr(out, "logits") else out[0]


def _plan(model: Any) -> tuple[list[str], str, list[str]]:
    """Names before the layers, of the layers, and after them, by the model's own plan."""
    plan: list[str] = list(getattr(model.config, "base_model_pp_plan", None) or ())
    lists = [name for name in plan if isinstance(getattr(model.base_model, name, None), torch.nn.ModuleList)]
    if len(lists) != 1:
        raise InputError(
            f"{type(model).__name__} has no plan for a pipeline", "use dpN, fsdpN or tpN, or capture a script of yours"
        )
    place = plan.index(lists[0])
    return plan[:place], lists[0], plan[place + 1 :]


def _sliced(config: Any, low: int, high: int) -> Any:
    made = copy.copy(config)
    made.num_hidden_layers = high - low
    kinds = getattr(config, "layer_types", None)
    if kinds:
        made.layer_types = kinds[low:high]
    return made


def bounds(layers: int, parts: int) -> list[tuple[int, int]]:
    """First and last (exclusive) layer of each part; earlier parts take what does not divide."""
    if layers < parts:
        raise InputError(f"{layers} layers cannot be split over {parts} parts", "use fewer stages")
    edges = [-(-layers * part // parts) for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


def layers_in(model: Any) -> int:
    """Number of layers of a whole model. Raises `InputError` for a model without a plan."""
    return len(getattr(model.base_model, _plan(model)[1]))


def schedule_of(
    plan: Pipeline,
    rank: int,
    modules: Sequence[Any],
    group: Any,
    shape: tuple[int, int],
    sizes: Mapping[str, Any],
    loss: Callable[..., Any] | None,
) -> Any:
    """The schedule that runs `modules` as the pieces of one rank.

    `rank`: along the pipeline. `shape`: batch and sequence. `sizes`: `hidden`, `vocab`, `dtype`. `loss`: of the last
    stage's output and the target; None for a forward pass.
    """
    pipelining = load("torch.distributed.pipelining")
    count = plan.batches(shape[0])
    rows, total = shape[0] // count, plan.stages * plan.parts
    hidden = lambda grad=False: torch.empty(  # noqa: E731
        rows, shape[1], sizes["hidden"], dtype=sizes["dtype"], requires_grad=grad
    )
    train = loss is not None
    stages: list[Any] = []
    for part, module in enumerate(modules):
        index = rank + part * plan.stages
        first, last = index == 0, index == total - 1
        logits = torch.empty(rows, shape[1], sizes["vocab"], dtype=sizes["dtype"], requires_grad=train)
        stages.append(
            pipelining.PipelineStage(
                module,
                index,
                total,
                torch.device("cpu"),
                input_args=(torch.zeros(rows, shape[1], dtype=torch.int64) if first else hidden(train),),
                output_args=(logits if last else hidden(train),),
                input_grads=None if first or not train else (hidden(),),
                output_grads=None if last or not train else (hidden(),),
                group=group,
            )
        )
    kind = getattr(pipelining, SCHEDULES[plan.schedule])
    return kind(stages if plan.schedule in _LOOPED else stages[0], count, loss_fn=loss)


def loss_of(module: Any, vocab: int) -> Callable[[Any, Any], Any]:
    """The model's own loss, of logits and labels; stages that are not the last only need to know that there is one."""
    stage = getattr(module, "module", module)
    function = stage.model.loss_function if stage.last else None

    def loss(logits: Any, labels: Any) -> Any:
        assert function is not None
        return function(logits=logits, labels=labels, vocab_size=vocab)

    return loss


def joined(stages: Sequence[Workload], axis: str = "pp") -> Workload:
    """One workload of all stages: a module and a role for each."""
    modules: list[Module] = []
    for place, stage in enumerate(stages):
        held = stage.modules[0]
        modules.append(
            Module(f"stage{place}", held.data, held.format, stage.args, stage.schedule, stage.launches, stage.metadata)
        )
    roles = [Role(module.name, module.name, {axis: place}) for place, module in enumerate(modules)]
    first = stages[0]
    notes = dict.fromkeys(
        note for stage in stages for note in stage.notes if not note.startswith("the program of rank")
    )
    said = f"{len(stages)} stages along {axis}, each captured as one rank of its stage runs it"
    metadata = {**first.metadata, "stages": [dict(stage.metadata) for stage in stages]}
    return replace(first, modules=tuple(modules), roles=tuple(roles), notes=(said, *notes), metadata=metadata)


def world_of(axes: Sequence[tuple[str, int]], place: int, rank: int) -> int:
    """The rank at `place` along `pp` that is `rank` along everything else."""
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    below = math.prod(sizes[names.index("pp") + 1 :])
    size = dict(axes)["pp"]
    return rank // below // size * below * size + place * below + rank % below
