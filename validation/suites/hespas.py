"""HeSPaS: whole training steps on four GPUs or eight TPU cores, from a StableHLO module and from the example programs.

The Llama steps are `examples/llama.py` under fully sharded data parallelism, one sequence a device; the ResNets are
`examples/resnet.py` with 1,024 images over four devices; ResNet-50 also as the module that the peer ships. The peer's
own figures are sums of regions that it compiled and timed on the GPU in question, without communication.
"""

from collections.abc import Mapping
from typing import Final

from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.frontends import files
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.frontends.script import capture_script
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import StablecastError
from stablecast.ir.reader import read
from stablecast.ir.workload import Workload
from stablecast.lowering.device import Target, lower
from stablecast.lowering.partition import partition
from stablecast.lowering.products import TF32_ARITHMETIC, TPU_ARITHMETIC, Arithmetic
from stablecast.validation.suites.base import Data, Record, Row, half_digit, number
from stablecast.validation.suites.captures import captured_example, example_kernels, module_kernels

_FIXTURE: Final = "hespas/resnet_50_train_step_4_devices_1024_batch.mlir.gz"
_SYSTEMS: Final[Mapping[str, tuple[str, int, str]]] = {
    "A100_40GB_4GPU": ("a100-sxm-40gb", 4, "cuda"),
    "H100_80GB_4GPU": ("h100-sxm", 4, "cuda"),
    "B200_180GB_4GPU": ("b200-sxm", 4, "cuda"),
    "8xTPUv3": ("tpu-v3", 8, "tpu"),
}
_GPUS: Final[Mapping[str, str]] = {"A100": "a100-sxm-40gb", "H100": "h100-sxm", "B200": "b200-sxm"}
_PEER: Final = "hespas xla profiling (compute)"
_MILLI: Final = 1e-3


def run(data: Data) -> list[Row]:
    """Every measured step whose program is at hand."""
    tables = ("hespas/refs/resnet_train.csv", "hespas/refs/llama3_train.csv", "hespas/refs/tpuv3_llama3.csv")
    return [*table(data, *tables), *_fixture(data, _peers(data))]


def table(data: Data, *paths: str) -> list[Row]:
    """The steps of some of the tables."""
    peers = _peers(data)
    programs: dict[tuple[str, int, str], DeviceProgram | None] = {}
    rows: list[Row] = []
    for record in (record for path in paths for record in data.read(path)):
        device, count, platform = _SYSTEMS.get(record["system"], ("", 0, ""))
        if not device:
            continue
        key = (record["workload"], count, platform)
        if key not in programs:
            programs[key] = _example(data, *key)
        found = programs[key]
        if found is not None:
            rows.append(_row(data, found, record, device, count, peers))
    return rows


def _fixture(data: Data, peers: Mapping[tuple[str, str], Record]) -> list[Row]:
    path = data.find(_FIXTURE)
    if path is None:
        return []
    program = module_kernels(path.read_bytes(), _arithmetic("cuda"), lambda: lowered(files.load(path), "cuda"))
    record = {"system": "A100_40GB_4GPU", "workload": "resnet50", "runtime_s": "0.10"}
    return [_row(data, program, record, "a100-sxm-40gb", 4, peers, " module")]


def _example(data: Data, workload: str, devices: int, platform: str) -> DeviceProgram | None:
    """The example program of a workload of the peer, None (and a note) where it is not at hand."""
    folder = data.examples
    if folder is None:
        note = "hespas: the example programs are not at hand, so only the module is scored"
        data.notes += [note] if note not in data.notes else []
        return None
    family, _, size = workload.partition("-")
    if family == "llama3":
        script, settings = "llama.py", [f"size={size}", f"fsdp={devices}"]
    else:
        script, settings = "resnet.py", [f"depth={workload.removeprefix('resnet')}", "batch=1024", f"data={devices}"]
    data.say(f"{workload} on {devices} devices")

    def made() -> DeviceProgram:
        options = ArgumentOptions(settings=settings)
        choices = (script, settings, platform)
        workload = captured_example(
            folder, "jax", choices, lambda: capture_script(f"{folder / script}:train_step", options, platform=platform)
        )
        return lowered(workload, platform)

    try:
        return example_kernels(folder, "jax", (script, settings, platform, _arithmetic(platform)), made)
    except StablecastError as error:
        data.notes.append(f"hespas: {workload} on {devices} devices is left out: {error.message}")
        return None


def lowered(workload: Workload, platform: str, attention: str = "auto") -> DeviceProgram:
    """The kernels of one device. `attention`: as `Target` has it."""
    content, source = workload.modules[0].data, workload.source or "program"
    program = read(content, source)
    if program.stage.is_global and program.num_partitions > 1:
        program = partition(content, source)
    return lower(program, Target(platform, _arithmetic(platform), attention=attention))


def _arithmetic(platform: str) -> Arithmetic:
    return TPU_ARITHMETIC if platform == "tpu" else TF32_ARITHMETIC


def _peers(data: Data) -> dict[tuple[str, str], Record]:
    """The peer's rows by device and workload."""
    return {
        (_GPUS[record["gpu"]], record["workload"]): record
        for record in data.read("hespas/xla_profiling_predictions.csv")
        if record["gpu"] in _GPUS
    }


def _row(
    data: Data,
    program: DeviceProgram,
    record: Record,
    device: str,
    devices: int,
    peers: Mapping[tuple[str, str], Record],
    mark: str = "",
) -> Row:
    system = data.catalogue.resolve(f"{device}:{devices}")
    found = predict_device_program(program, system, Settings(data.choice, {}), record["workload"])
    theirs = peers.get((device, record["workload"]), {})
    measured, rounding = float(record["runtime_s"]), half_digit(record["runtime_s"], 1.0)
    if record["workload"].startswith("resnet") and number(theirs, "measured_ms"):
        measured = number(theirs, "measured_ms") * _MILLI
        rounding = number(theirs, "measured_uncertainty_ms") * _MILLI
    peer = {_PEER: number(theirs, "profiling_compute_ms") * _MILLI} if theirs else {}
    return Row(
        "hespas",
        f"{record['workload']} train{mark}, {devices} devices",
        device,
        measured,
        found.step_time_s,
        found.step_time_low_s,
        found.step_time_high_s,
        peer=next(iter(peer), ""),
        peer_predicted_s=peer.get(_PEER),
        peers=peer,
        group=f"{'llama3' if record['workload'].startswith('llama3') else 'resnet'}{mark}",
        path="program",
        rounding_s=rounding,
        key=f"{record['workload']}{mark}",
        basis="program",
    )
