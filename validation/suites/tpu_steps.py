"""TPU training steps of MaxText on TPU v7x (Llama 3.1, Gemma 4, GPT-OSS, DeepSeek-V3), and Llama on eight TPU v3 cores.

Rows of tpu-recipes that give sequence length and batch and whose model is a decoder; the programs are
`examples/llama_tpu.py`, `gemma_tpu.py` and `moe_tpu.py`, with the sizes of MaxText's own model files. Layout and
recomputation are not in the table (assumption): of the ways that MaxText has to split the devices, and of running
layers again with or without attention, the fastest whose predicted memory fits is taken, and named in a note. 8-bit
rows run every product of a layer in 8 bits; what casting costs beside it is not counted. Devices that share a sequence
have queries of all parts of it (MaxText balances them), half of the keys before each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from stablecast.backends.layout_search import Ranked, best, rank, splits
from stablecast.backends.prediction import Prediction
from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.frontends.script import capture_script
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import StablecastError
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable
from stablecast.lowering.attention_shape import visible_pairs
from stablecast.lowering.passes.registry import default_passes, run_passes
from stablecast.lowering.products import TPU_ARITHMETIC
from stablecast.validation.suites import hespas
from stablecast.validation.suites.base import Data, Record, Row, half_digit, whole
from stablecast.validation.suites.captures import example_kernels
from stablecast.validation.suites.titan_float8 import in_float8

_RECIPES: Final = "tpu_step_times/tpu_recipes_steps.csv"
_V3: Final = "hespas/refs/tpuv3_llama3.csv"
_ATTENTION: Final = "flash"
_DEVICES: Final[Mapping[str, tuple[str, int]]] = {"v7x (Ironwood)": ("tpu-v7x", 2)}
"""Catalogue's name, and devices a chip."""
_ENTRIES: Final[Mapping[str, str]] = {
    "train_step": "layers run again",
    "train_step_keeping_context": "layers but attention run again",
}
_CONTEXTS: Final = (1, 2, 4, 8, 16)
_EXPERTS: Final = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Model:
    """An example, the size in it, its width, and the axes beside `fsdp` that it can split devices over."""

    script: str
    size: str
    width: int
    axes: tuple[str, ...] = ()


_MODELS: Final[Mapping[str, Model]] = {
    "llama3.1-70b": Model("llama_tpu.py", "70b", 8192, ("context",)),
    "gemma4-31b": Model("gemma_tpu.py", "31b", 5376),
    "gemma4-2b": Model("gemma_tpu.py", "e2b", 1536),
    "gpt-oss-120b": Model("moe_tpu.py", "gpt-oss-120b", 2880, ("outer", "expert")),
    "deepseek-v3": Model("moe_tpu.py", "deepseek-v3", 7168, ("outer", "expert")),
}
_LEFT_OUT: Final[Mapping[str, str]] = {"wan2.1-14b": "a diffusion transformer for video, no decoder"}
Choice = tuple[str, dict[str, int]]
"""Function of the example, and devices along each of its axes."""


def run(data: Data) -> list[Row]:
    """Every row that has a program."""
    rows: list[Row] = []
    for record in data.read(_RECIPES):
        if record["seq_len"] and record["global_batch"]:
            rows += _recipe(data, record)
    return [*rows, *(replace(row, suite="tpu-steps", group="tpu-v3") for row in hespas.table(data, _V3))]


def layouts(model: Model, devices: int, batch: int) -> list[dict[str, int]]:
    """The ways to split `devices`: as many as divide the width over `fsdp` (and `expert`), the rest over another axis.

    Sequences are split over all axes but `context`, and none is left over.
    """
    if "expert" in model.axes:
        wide = max(size for size in _powers(devices) if model.width % size == 0)
        if batch % devices or devices % wide:
            return []
        sizes = {"fsdp": _powers(wide), "expert": _EXPERTS}
        return [{**axes, "outer": devices // wide} for axes in splits(wide, sizes)]
    sizes = {"fsdp": [size for size in _powers(devices) if model.width % size == 0 and batch % size == 0]}
    if "context" in model.axes:
        sizes["context"] = list(_CONTEXTS)
    return list(splits(devices, sizes))


def _powers(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length()) if not limit % (1 << exponent)]


def _recipe(data: Data, record: Record) -> list[Row]:
    device, per_chip = _DEVICES[record["tpu"]]
    chips, batch = whole(record, "chips", "global_batch")
    name = f"{record['model']} {record['precision']} s{record['seq_len'].removesuffix('.0')}"
    item = f"{name} b{batch} on {chips} chips"
    try:
        chosen = _chosen(data, record, f"{device}:{chips * per_chip}", item)
    except StablecastError as error:
        data.notes.append(f"tpu-steps: {name} on {chips} chips is left out: {error.message}")
        return []
    if isinstance(chosen, str):
        data.notes.append(f"tpu-steps: {name} on {chips} chips is left out: {chosen}")
        return []
    times = (chosen.step_time_s, chosen.step_time_low_s, chosen.step_time_high_s)
    return [
        Row(
            "tpu-steps",
            item,
            device,
            float(record["step_s"]),
            *times,
            group=f"{device} {record['precision']}",
            path="program",
            rounding_s=half_digit(record["step_s"], 1.0),
            basis="program",
        )
    ]


def _chosen(data: Data, record: Record, on: str, item: str) -> Prediction | str:
    """The fastest layout that fits, which a note names; or why there is none."""
    model, folder = _MODELS.get(record["model"]), data.examples
    if model is None:
        return _LEFT_OUT.get(record["model"], "no program of that model")
    if folder is None:
        return "the example programs are not at hand"
    system = data.catalogue.resolve(on)
    seq, batch = whole(record, "seq_len", "global_batch")
    choices = [(entry, axes) for axes in layouts(model, system.count, batch) for entry in _ENTRIES]

    def predicted(choice: Choice) -> Prediction:
        entry, axes = choice
        settings = [f"size={model.size}", f"batch={batch}", f"seq={seq}"]
        settings += [f"{axis}={count}" for axis, count in axes.items()]
        program = balanced(_captured(folder, f"{model.script}:{entry}", settings), seq)
        if record["precision"] == "fp8_full":
            program = in_float8(program)
        program = run_passes(program, default_passes(program.exec_model))
        return predict_device_program(program, system, Settings(data.choice, {}), item)

    ranked = rank(choices, predicted)
    choice, prediction = best(ranked)
    data.notes.append(f"tpu-steps: {item}: {_said(choice, ranked)}")
    return prediction


def _said(choice: Choice, ranked: list[Ranked[Choice]]) -> str:
    entry, axes = choice
    split = ", ".join(f"{axis} {count}" for axis, count in axes.items() if count > 1)
    fit = sum(one.fits for one in ranked)
    return f"{split}; {_ENTRIES[entry]} (fastest of {fit} layouts that fit, {len(ranked)} tried)"


def _captured(folder: Path, target: str, settings: list[str]) -> DeviceProgram:
    """The kernels of the example program."""

    def make() -> DeviceProgram:
        workload = capture_script(f"{folder / target}", ArgumentOptions(settings=settings), platform="tpu")
        return hespas.lowered(workload, "tpu", _ATTENTION)

    return example_kernels(folder, "jax", (target, settings, TPU_ARITHMETIC, _ATTENTION), make)


def balanced(program: DeviceProgram, seq: int) -> DeviceProgram:
    """`program` whose devices, where several share a sequence of `seq` positions, have queries of all parts of it.

    On average as many keys lie before a query as where all positions are on one device.
    """
    table = program.table
    rows = tuple(_balanced(row, seq) for row in table.rows)
    return replace(program, table=KernelTable(rows, table.count, table.bodies))


def _balanced(row: KernelRow, seq: int) -> KernelRow:
    """The last queries of so many keys that they see half of `seq` each on average."""
    if row.klass != KernelClass.ATTENTION or row.skv != seq or row.sq >= seq:
        return row
    keys = (seq + row.sq) // 2
    flops = row.matmul_flops * keys / seq
    hidden = 1.0 - visible_pairs(row.sq, keys, 1, 0) / (row.sq * keys)
    return replace(row, causal=1, skv=keys, matmul_flops=flops, padded_flops=flops * hidden)
