"""TPU training steps: Llama 3.1 70B, GPT-OSS 120B and DeepSeek-V3 on TPU v7x, and the visible Llama steps on TPU v3.

Rows of tpu-recipes that give sequence length and batch and whose model is a decoder with published sizes; the programs
are `examples/llama_tpu.py` and `examples/moe_tpu.py`. Their layout is not in the table: everything is fully sharded
over all devices and every layer runs again (assumptions; to keep the outputs of products would need 220 GB a device),
tokens are spread evenly over experts, and where there are fewer sequences than devices, several share one.
MaxText's attention kernel keeps scores on chip and skips what the causal mask hides. 8-bit rows run every product of a
layer in 8 bits; what casting costs beside it is not counted.
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
from stablecast.validation.suites.titan_float8 import in_float8

_RECIPES: Final = "tpu_step_times/tpu_recipes_steps.csv"
_V3: Final = "hespas/refs/tpuv3_llama3.csv"
_ATTENTION_BYTES: Final = 2
_ATTENTION: Final = "flash"
_EXPERT_AXIS: Final = 64
_DEVICES: Final[Mapping[str, tuple[str, int]]] = {"v7x (Ironwood)": ("tpu-v7x", 2)}
"""Catalogue's name, and devices a chip."""
_PROGRAMS: Final[Mapping[str, tuple[str, str]]] = {
    "llama3.1-70b": ("llama_tpu.py", "70b"),
    "gpt-oss-120b": ("moe_tpu.py", "gpt-oss-120b"),
    "deepseek-v3": ("moe_tpu.py", "deepseek-v3"),
}
"""Example, and size in it."""


def run(data: Data) -> list[Row]:
    """Every row that has a program."""
    rows: list[Row] = []
    for record in data.read(_RECIPES):
        if record["seq_len"] and record["global_batch"]:
            rows += _recipe(data, record)
    return [*rows, *(replace(row, suite="tpu-steps", group="tpu-v3") for row in hespas.table(data, _V3))]


def _recipe(data: Data, record: Record) -> list[Row]:
    script, size = _PROGRAMS.get(record["model"], ("", ""))
    device, per_chip = _DEVICES[record["tpu"]]
    chips, seq, batch = whole(record, "chips", "seq_len", "global_batch")
    devices, name = chips * per_chip, f"{record['model']} {record['precision']} s{record['seq_len'].removesuffix('.0')}"
    axes, folder = layout(script, devices, batch), data.examples
    why = ""
    if not size:
        why = "no program of that model"
    elif not axes:
        why = f"{batch} sequences cannot be split over {devices} devices"
    elif folder is None:
        why = "the example programs are not at hand"
    if why or folder is None:
        data.notes.append(f"tpu-steps: {name} on {chips} chips is left out: {why}")
        return []
    settings = [f"size={size}", f"batch={batch}", f"seq={seq}", *(f"{axis}={count}" for axis, count in axes.items())]
    try:
        program = masked_on_chip(_captured(folder, script, settings), seq)
        if record["precision"] == "fp8_full":
            program = in_float8(program)
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


def _captured(folder: Path, script: str, settings: list[str]) -> DeviceProgram:
    """The kernels of the example program."""

    def make() -> DeviceProgram:
        options = ArgumentOptions(settings=settings)
        workload = capture_script(f"{folder / script}:train_step", options, platform="tpu")
        return hespas.lowered(workload, "tpu", _ATTENTION)

    return example_kernels(folder, "jax", (script, settings, TPU_ARITHMETIC, _ATTENTION), make)


def layout(script: str, devices: int, batch: int) -> dict[str, int]:
    """Devices along each mesh axis of the example, empty where they do not go round."""
    if script == "moe_tpu.py":
        whole_groups = batch % devices == devices % _EXPERT_AXIS == 0
        return {"fsdp": _EXPERT_AXIS, "outer": devices // _EXPERT_AXIS} if whole_groups else {}
    if batch % devices == 0:
        return {"fsdp": devices}
    return {"fsdp": batch, "context": devices // batch} if devices % batch == 0 else {}


def masked_on_chip(program: DeviceProgram, seq: int) -> DeviceProgram:
    """`program` with attention over `seq` positions that knows its causal mask, which is then never stored.

    A kernel reads the queries, keys and values of its heads (backward also the output and its gradient), and writes as
    many results; what makes masks over `seq` keys costs nothing. Devices that share a sequence have queries of all
    parts of it, half of the keys before each.
    """
    table = program.table
    queries = min((row.sq for row in table.rows if row.klass == KernelClass.ATTENTION and row.skv == seq), default=seq)
    rows = tuple(_on_chip(row, seq, queries) for row in table.rows)
    return replace(program, table=KernelTable(rows, table.count, table.bodies))


def _on_chip(row: KernelRow, seq: int, queries: int) -> KernelRow:
    if row.klass == KernelClass.ATTENTION:
        if row.skv != seq:
            return row
        heads = row.batch * row.d * _ATTENTION_BYTES
        backward = row.direction == "bwd"
        read = heads * ((3 if backward else 1) * row.hq * row.sq + 2 * row.hkv * seq)
        written = heads * (row.hq * row.sq + (2 * row.hkv * seq if backward else 0))
        seen = {"causal": 1} if row.sq == seq else {"causal": 0, "skv": seq // 2}
        share = 1.0 if row.sq == seq else 0.5
        return replace(
            row,
            **seen,
            matmul_flops=row.matmul_flops * share,
            vector_flops=row.vector_flops * share,
            transcendentals=row.transcendentals * share,
            bytes_read=float(read),
            bytes_written=float(written),
        )
    if row.klass != KernelClass.MATMUL and row.elems >= queries * seq and row.elems % (queries * seq) == 0:
        return replace(row, bytes_read=0.0, bytes_written=0.0, vector_flops=0.0, transcendentals=0.0)
    return row
