"""TPU training steps: Llama 3.1 70B on TPU v7x from `examples/llama_tpu.py`, and the visible Llama steps on TPU v3.

Rows of tpu-recipes that give sequence length and batch and whose model is a dense decoder with published sizes. Their
layout is not in the table: everything is fully sharded over all devices and every layer runs again (assumptions; to
keep the outputs of products would need 220 GB a device). MaxText's attention kernel keeps scores on chip and skips what
the causal mask hides: kernels over the scores cost nothing, their products half. 8-bit rows run every product of a
layer in 8 bits; what casting costs beside it is not counted. Sequences that one device cannot hold a batch of are left
out.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.frontends.script import capture_script
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import StablecastError
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable
from stablecast.lowering.passes.registry import default_passes, run_passes
from stablecast.lowering.products import TPU_ARITHMETIC
from stablecast.validation.suites import hespas
from stablecast.validation.suites.base import Data, Record, Row, half_digit, whole
from stablecast.validation.suites.captures import example_kernels
from stablecast.validation.suites.titan import in_float8

_RECIPES: Final = "tpu_step_times/tpu_recipes_steps.csv"
_V3: Final = "hespas/refs/tpuv3_llama3.csv"
_SCRIPT: Final = "llama_tpu.py"
_DEVICES: Final[Mapping[str, tuple[str, int]]] = {"v7x (Ironwood)": ("tpu-v7x", 2)}
"""Catalogue's name, and devices a chip."""
_SIZES: Final[Mapping[str, tuple[str, int]]] = {"llama3.1-70b": ("70b", 64)}
"""Size in the example, and heads."""


def run(data: Data) -> list[Row]:
    """Every row that has a program."""
    rows: list[Row] = []
    for record in data.read(_RECIPES):
        if record["seq_len"] and record["global_batch"]:
            rows += _recipe(data, record)
    return [*rows, *(replace(row, suite="tpu-steps", group="tpu-v3") for row in hespas.table(data, _V3))]


def _recipe(data: Data, record: Record) -> list[Row]:
    size, heads = _SIZES.get(record["model"], ("", 0))
    device, per_chip = _DEVICES[record["tpu"]]
    chips, seq, batch = whole(record, "chips", "seq_len", "global_batch")
    devices, name = chips * per_chip, f"{record['model']} {record['precision']} s{record['seq_len'].removesuffix('.0')}"
    why = ""
    if not size:
        why = "no program of that model"
    elif batch % devices:
        why = f"{batch} sequences cannot be split over {devices} devices"
    elif data.examples is None:
        why = "the example programs are not at hand"
    if why or data.examples is None:
        data.notes.append(f"tpu-steps: {name} on {chips} chips is left out: {why}")
        return []
    settings = [f"size={size}", f"fsdp={devices}", f"batch={batch}", f"seq={seq}"]
    try:
        program = scores_on_chip(_captured(data.examples, settings), batch // devices * heads, seq)
        if record["precision"] == "fp8_full":
            program, _ = in_float8(program)
        program = run_passes(program, default_passes(program.exec_model))
        system = data.catalogue.resolve(f"{device}:{devices}")
        found = predict_device_program(program, system, Settings(data.choice, {}), name)
    except StablecastError as error:
        data.notes.append(f"tpu-steps: {name} on {chips} chips is left out: {error.message}")
        return []
    times = (found.step_time_s, found.step_time_low_s, found.step_time_high_s)
    item = f"{name} b{batch} on {chips} chips"
    rounding = half_digit(record["step_s"], 1.0)
    return [
        Row(
            "tpu-steps",
            item,
            device,
            float(record["step_s"]),
            *times,
            group=f"{device} {record['precision']}",
            path="program",
            rounding_s=rounding,
            basis="program",
        )
    ]


def _captured(folder: Path, settings: list[str]) -> DeviceProgram:
    """The kernels of the example program."""

    def make() -> DeviceProgram:
        options = ArgumentOptions(settings=settings)
        return hespas.lowered(capture_script(f"{folder / _SCRIPT}:train_step", options, platform="tpu"), "tpu")

    return example_kernels(folder, "jax", (_SCRIPT, settings, TPU_ARITHMETIC), make)


def scores_on_chip(program: DeviceProgram, heads: int, seq: int) -> DeviceProgram:
    """`program` with scores of attention (`heads` of all sequences of a device, `seq` x `seq` each) kept on chip."""
    table = program.table
    rows = tuple(_on_chip(row, heads, seq) for row in table.rows)
    return replace(program, table=KernelTable(rows, table.count, table.bodies))


def _on_chip(row: KernelRow, heads: int, seq: int) -> KernelRow:
    scores = heads * seq * seq
    nothing = {"bytes_read": 0.0, "bytes_written": 0.0, "vector_flops": 0.0, "transcendentals": 0.0}
    if row.klass == KernelClass.MATMUL:
        sizes = (row.m, row.n, row.k)
        if row.batch * row.m * row.n * row.k < scores or sum(size % seq == 0 for size in sizes) < 2 or row.batch < 2:
            return row
        half = {"n": row.n // 2} if row.m % seq == 0 and row.n % seq == 0 else {"k": row.k // 2}
        return replace(row, **half, matmul_flops=row.matmul_flops / 2, **nothing)
    if max(row.elems, row.elems * max(row.reduced, 1) if row.klass == KernelClass.REDUCTION else 0) >= scores:
        return replace(row, **nothing)
    return row
