"""HeSPaS: whole training steps on four GPUs, from StableHLO modules and from the example programs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.backends.registry import Choice
from stablecast.frontends import files
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.reader import read
from stablecast.lowering.device import Target, lower
from stablecast.lowering.products import TF32_ARITHMETIC
from stablecast.validation.suites.base import Data, Row, half_digit, number

_FIXTURE: Final = "hespas/resnet_50_train_step_4_devices_1024_batch.mlir.gz"
_SYSTEMS: Final[Mapping[str, str]] = {
    "A100_40GB_4GPU": "a100-sxm-40gb",
    "H100_80GB_4GPU": "h100-sxm",
    "B200_180GB_4GPU": "b200-sxm",
}
_GPUS: Final[Mapping[str, str]] = {"A100": "a100-sxm-40gb", "H100": "h100-sxm", "B200": "b200-sxm"}
_DEVICES: Final = 4
_MILLI: Final = 1e-3


def run(data: Data) -> list[Row]:
    """The steps whose module is at hand: ResNet-50."""
    path = data.find(_FIXTURE)
    if path is None:
        return []
    program = lowered(path)
    peers = _peers(data)
    rows: list[Row] = []
    for record in data.read("hespas/refs/resnet_train.csv"):
        device = _SYSTEMS.get(record["system"], "")
        if record["workload"] == "resnet50" and device:
            measured = float(record["runtime_s"])
            rows.append(_row(data, program, device, measured, half_digit(record["runtime_s"], 1.0), peers))
    data.notes.append(
        "hespas: the llama3 rows and the other ResNets need captures of the example programs for 4 devices"
    )
    return rows


def lowered(path: Path) -> DeviceProgram:
    """The kernels of the fixture on a GPU with TF32."""
    workload = files.load(path)
    program = read(workload.modules[0].data, str(path))
    return lower(program, Target("cuda", TF32_ARITHMETIC))


def _peers(data: Data) -> dict[str, float]:
    """The peer's compute time of ResNet-50 by device; it holds no communication."""
    return {
        _GPUS[record["gpu"]]: number(record, "profiling_compute_ms") * _MILLI
        for record in data.read("hespas/xla_profiling_predictions.csv")
        if record["workload"] == "resnet50" and record["gpu"] in _GPUS
    }


def _row(
    data: Data,
    program: DeviceProgram,
    device: str,
    measured_s: float,
    rounding_s: float | None,
    peers: Mapping[str, float],
) -> Row:
    system = data.catalogue.resolve(f"{device}:{_DEVICES}")
    found = predict_device_program(program, system, Settings(_choice(data), {}), "resnet50")
    peer = {"hespas xla profiling (compute)": peers[device]} if device in peers else {}
    return Row(
        "hespas",
        "resnet50 train, 4 devices",
        device,
        measured_s,
        found.step_time_s,
        found.step_time_low_s,
        found.step_time_high_s,
        peer=next(iter(peer), ""),
        peer_predicted_s=peers.get(device),
        peers=peer,
        group="resnet train",
        path="program",
        rounding_s=rounding_s,
        key="resnet50 train",
        basis="program",
    )


def _choice(data: Data) -> Choice:
    return data.choice
