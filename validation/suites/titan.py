"""TorchTitan: Llama 3.1 training steps on 8 to 512 H100, from `examples/torch_titan.py` under FSDP2 and TP.

The program is TorchTitan's own model, of early 2025. Each distinct one is captured with three and with four layers; a
step of n layers is the first and n - 3 times the difference. Compiled rows have TorchInductor's kernels within layers,
one an ATen call outside: TorchTitan compiles block by block and left the loss out. Pipelines (TorchTitan's default:
as many micro-batches as stages) follow 1F1B, interleaved ones with two chunks a stage, and gather and reduce over FSDP
once a step. Context parallelism is PyTorch's ring attention with its load balance, captured. Assumptions: what torch
2.6 does (FlashAttention-2; which transfers asynchronous tensor parallelism pipelines: `titan_async`), TorchAO's recipes
(`titan_float8`), and a board whose clock is that of its power limit (`docs/analytical.md`). Peak memory is that of
whole steps: `titan_memory`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from stablecast.backends import kernel_specs
from stablecast.backends.analytical.constants import constants_for
from stablecast.backends.analytical.rates import power_clock
from stablecast.backends.device import Device
from stablecast.backends.estimates import FloatArray
from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.backends.pricing import price
from stablecast.backends.registry import Choice
from stablecast.frontends.script import load_module
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import StablecastError
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable
from stablecast.ir.workload import Workload
from stablecast.lowering.passes.registry import default_passes, run_passes
from stablecast.lowering.products import TF32_ARITHMETIC
from stablecast.lowering.target import Target
from stablecast.validation.suites.base import Data, Record, Row, number, whole
from stablecast.validation.suites.captures import example_kernels, kernels
from stablecast.validation.suites.titan_async import pipelined_share
from stablecast.validation.suites.titan_float8 import RECIPES, VOCAB, as_torchao
from stablecast.validation.suites.titan_memory import reserved

_FILE: Final = "distributed_steps/torchtitan_steps.csv"
_SCRIPT: Final = "torch_titan.py"
_DEVICES: Final = {"H100-96GB-HBM2e-500W": "h100-sxm-hbm2e-96gb"}
_LAYERS: Final = {"8b": 32, "70b": 80, "405b": 126}
FLASH_SHARE: Final = 0.35
"""Share of an H100's peak that PyTorch's flash attention (FlashAttention-2) reaches, says the abstract of
FlashAttention-3 (Shah et al., 2024); the shipped constants are those of a Hopper kernel. Boards with less power: as
their products."""
CHUNKS: Final = 2


@dataclass(frozen=True, slots=True)
class Case:
    """What decides a program."""

    size: str
    dp: int
    tp: int
    cp: int
    batch: int
    seq: int
    recompute: str
    compiled: bool
    float8: str
    overlapped: bool


@dataclass(frozen=True, slots=True)
class Cost:
    """Time, low and high in seconds. `exposed`: seconds of the time in which FSDP is waited for."""

    time: FloatArray
    exposed: float = 0.0

    def plus(self, other: "Cost", times: float) -> "Cost":
        return Cost(self.time + times * other.time, self.exposed + times * other.exposed)


def case_of(record: Record) -> Case:
    """The program of a row: a pipeline's micro-batch is one of as many as there are stages, `seq` a device's part."""
    fsdp, tp, pp, cp, batch, seq = whole(record, "fsdp", "tp", "pp", "cp", "local_batch", "seq_len")
    return Case(
        record["model"].removeprefix("llama3.1-"),
        fsdp,
        tp,
        cp,
        max(batch // pp, 1),
        seq // cp,
        record["activation_checkpointing"],
        record["compile"] == "1",
        record["float8"] if record["float8"] in RECIPES else "",
        record["async_tp"] == "1",
    )


@dataclass
class Titan:
    """Prices rows; keeps captured programs."""

    data: Data
    folder: Path
    _programs: dict[tuple[Case, int], DeviceProgram] = field(default_factory=dict[tuple[Case, int], DeviceProgram])

    @cached_property
    def module(self) -> Any:
        """The example's functions."""
        return load_module(self.folder / _SCRIPT)

    def step(self, record: Record) -> Cost:
        """A step of a row."""
        case, pp = case_of(record), whole(record, "pp")[0]
        device, layers = _DEVICES[record["gpu"]], _LAYERS[case.size]
        layer = self._parts(case, device)[0]
        if pp == 1:
            rest = self._parts(replace(case, compiled=False, overlapped=False), device)[1]
            return Cost(rest.time + layers * layer.time)
        own, chunks = math.ceil(layers / pp), CHUNKS if record["schedule"].startswith("interleaved") else 1
        # parameters are gathered and gradients reduced once a step
        return Cost((pp + (pp - 1) / chunks) * own * (layer.time - layer.exposed) + own * layer.exposed)

    def _parts(self, case: Case, device: str) -> tuple[Cost, Cost]:
        """A layer, and all that is outside of layers."""
        three, four = (self._cost(case, layers, device) for layers in (3, 4))
        layer = four.plus(three, -1.0)
        return layer, three.plus(layer, -3)

    def _cost(self, case: Case, layers: int, device: str) -> Cost:
        program = self._program(case, layers)
        program = run_passes(program, default_passes(program.exec_model, recorded=program.recorded))
        system = self.data.catalogue.resolve(f"{device}:{program.num_devices}")
        program = with_flash2(program, system.device, self.data.choice)
        casts = 0.0
        if case.float8:
            program, moved = as_torchao(program, RECIPES[case.float8])
            rows = [kernel_specs.elementwise(system.device, "bf16", round(nbytes / 4)) for nbytes in moved]
            casts = float(price(KernelTable.of(rows), system.device, self.data.choice).estimates.time_s.sum())
        found = predict_device_program(program, system, Settings(self.data.choice, {}), case.size)
        times = np.array([found.step_time_s, found.step_time_low_s, found.step_time_high_s])
        hidden = 0.0
        if case.overlapped:
            share = pipelined_share(program, bool(case.float8) and RECIPES[case.float8].rows)
            hidden = found.exposed_by_axis_s.get("tp", 0.0) * share * (1 - 1 / case.tp)
        waited = found.exposed_by_axis_s.get("dp", 0.0)
        return Cost(times + casts - hidden, waited)

    def _program(self, case: Case, layers: int) -> DeviceProgram:
        key = replace(case, float8="", overlapped=False)
        if (key, layers) not in self._programs:
            self._programs[key, layers] = self._made(key, layers)
        return self._programs[key, layers]

    def _made(self, case: Case, layers: int) -> DeviceProgram:
        target = Target("cuda", TF32_ARITHMETIC, False, "inductor" if case.compiled else "eager")

        def make() -> DeviceProgram:
            workload = self._capture(case, layers)
            lowered = kernels(workload, _SCRIPT, target)
            return lowered if lowered.meshes else replace(lowered, meshes=workload.meshes)

        return example_kernels(self.folder, "torch", (_SCRIPT, case, layers, target), make)

    def _capture(self, case: Case, layers: int) -> Workload:
        module = self.module
        from stablecast.frontends.torch import capture_torch

        mesh = {"dp": case.dp} | {axis: size for axis, size in (("cp", case.cp), ("tp", case.tp)) if size > 1}

        def build(mesh: Any) -> Any:
            return module.build_mixed(mesh, case.size, layers=layers, vocab=VOCAB, recompute=case.recompute)

        step: Any = module.split_loss_step if case.tp > 1 else module.ring_step if case.cp > 1 else module.step
        return capture_torch(build, step, lambda: module.inputs(case.batch, case.seq), mesh=mesh)


def with_flash2(program: DeviceProgram, device: Device, choice: Choice) -> DeviceProgram:
    """`program` with attention no faster than FlashAttention-2: as many more heads as make the shipped rate as slow."""
    table = program.table
    times = price(table, device, choice).estimates.time_s
    rate = device.peak("bf16").value * FLASH_SHARE * power_clock(device, constants_for(device))
    rows = [
        replace(row, hq=round(row.hq * max(_attention_flops(row) / rate / float(time), 1.0)))
        if row.klass == KernelClass.ATTENTION
        else row
        for row, time in zip(table.rows, times, strict=True)
    ]
    return replace(program, table=KernelTable(tuple(rows), table.count, table.bodies))


def _attention_flops(row: KernelRow) -> float:
    """FLOPs as the FlashAttention papers count them: half under a causal mask, 2.5 times as many backward."""
    forward = 4.0 * row.batch * row.hq * row.sq * row.skv * row.d * (0.5 if row.causal else 1.0)
    return forward * (2.5 if row.direction == "bwd" else 1.0)


def torchtitan(data: Data) -> list[Row]:
    """Every row."""
    records = data.read(_FILE)
    if data.examples is None:
        data.notes.append("torchtitan: the example programs are not at hand")
        return []
    model = Titan(data, data.examples)
    rows: list[Row] = []
    errors: list[float] = []
    for record in records:
        try:
            cost = model.step(record)
        except StablecastError as error:
            data.notes.append(f"torchtitan: {_item(record)} is left out: {error.message}")
            continue
        rows.append(_row(record, cost))
        if record["memory_gib"]:
            device = data.catalogue.device(_DEVICES[record["gpu"]])
            nbytes = reserved(data.examples, _SCRIPT, record, device).reserved
            errors.append(nbytes / 2**30 / number(record, "memory_gib") - 1)
    data.notes += [memory_note(errors)] if errors else []
    return rows


def memory_note(errors: Sequence[float]) -> str:
    """The errors of the peak memory in words."""
    size = np.abs(errors)
    return (
        f"torchtitan, peak memory of {len(size)} rows: median error {np.median(size):.1%}, "
        f"{np.mean(size <= 0.1):.0%} within 10 %, from {min(errors):+.0%} to {max(errors):+.0%}"
    )


def _item(record: Record) -> str:
    split = " ".join(f"{name}{record[name]}" for name in ("fsdp", "tp", "pp", "cp") if record[name] != "1")
    how = "compiled" if record["compile"] == "1" else "eager"
    marks = [f"float8 {record['float8']}"] if record["float8"] not in ("no", "") else []
    marks += ["async tp"] if record["async_tp"] == "1" else []
    marks += [record["schedule"]] if record["schedule"] else []
    sizes = f"b{record['local_batch']} s{record['seq_len']}"
    return ", ".join([f"{record['model']} {split} {sizes} on {record['gpus']}", how, *marks])


def _row(record: Record, cost: Cost) -> Row:
    batch, seq, tp, pp, cp = whole(record, "local_batch", "seq_len", "tp", "pp", "cp")
    measured = batch * seq / (tp * pp * cp) / number(record, "tokens_per_s_per_gpu")
    time, low, high = (float(value) for value in cost.time)
    return Row(
        "torchtitan",
        _item(record),
        _DEVICES[record["gpu"]],
        measured,
        time,
        low,
        high,
        group=record["model"],
        path="program",
        basis="program",
    )
