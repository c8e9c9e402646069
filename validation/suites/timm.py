"""timm: whole vision models on workstation GPUs, inference and training, from captures of timm's own models.

The forty models are listed in `timm_models.txt`, chosen before any of them was scored. A row is one forward of a batch
under FP16 autocast (eager, or compiled by Inductor), or one training step with SGD; the model is built without weights
and captured by the PyTorch frontend. Measured times are whole steps on the host's clock.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import StablecastError
from stablecast.ir.workload import Workload
from stablecast.lowering.products import TF32_ARITHMETIC
from stablecast.lowering.target import Target
from stablecast.validation.suites.base import Data, Record, Row, half_digit
from stablecast.validation.suites.captures import captured_kernels, import_models, is_captured

LIST: Final = Path(__file__).with_name("timm_models.txt")
_MILLI: Final = 1e-3
_KEY: Final = "timm amp "
_PACKAGE: Final = "timm"
_LEFT_OUT: Final = "timm: models whose captures are not on disk are left out"


@dataclass(frozen=True, slots=True)
class Setup:
    """One configuration that is scored: rows with these values of `gpu`, `torch` and `compiled`."""

    gpu: str
    device: str
    torch: str
    compiled: str
    training: bool = False

    @property
    def exec_model(self) -> str:
        return "inductor" if self.compiled == "1" else "eager"

    @property
    def group(self) -> str:
        what = "train" if self.training else "inference"
        return f"{what} {self.exec_model}"


SETUPS: Final = (
    Setup("RTX3090", "rtx-3090", "240", "0"),
    Setup("RTX4090", "rtx-4090", "240", "0"),
    Setup("RTX4090", "rtx-4090", "291", "1"),
    Setup("RTX-PRO-6000-MaxQ", "rtx-pro-6000-maxq", "291", "0"),
    Setup("RTX3090", "rtx-3090", "112", "0", training=True),
)


def models() -> tuple[str, ...]:
    """The names in the list."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def run(data: Data) -> list[Row]:
    """Every row of the listed models whose capture can be made or is on disk."""
    rows: list[Row] = []
    tables = {
        training: data.read(f"timm/{'training' if training else 'inference'}.csv.gz") for training in (False, True)
    }
    programs = _Programs(data)
    for setup in SETUPS:
        for record in _chosen(tables[setup.training], setup):
            program = programs.get(record, setup)
            if program is not None:
                rows.append(_row(data, program, record, setup))
    return rows


def _chosen(records: Sequence[Record], setup: Setup) -> Iterator[Record]:
    wanted = set(models())
    for record in records:
        same = (record["gpu"], record["torch"], record["compiled"]) == (setup.gpu, setup.torch, setup.compiled)
        if same and record["precision"] == "amp" and record["layout"] == "nchw" and record["model"] in wanted:
            yield record


class _Programs:
    """Captures by model, batch and size; what cannot be captured is noted once."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._failed: dict[str, str] = {}
        self._absent = False

    def get(self, record: Record, setup: Setup) -> DeviceProgram | None:
        """The kernels of a row's step, None where its model cannot be captured."""
        name, batch, size = record["model"], int(float(record["batch"])), int(record["img_size"])
        what = f"{name} {batch} x {size} {'train' if setup.training else 'forward'}"
        if name in self._failed:
            return None
        target = Target("cuda", TF32_ARITHMETIC, combine=False, exec=setup.exec_model)
        if (self._absent or not self._data.capture) and not is_captured(_KEY + what, _PACKAGE, target):
            self._data.notes += [_LEFT_OUT] if _LEFT_OUT not in self._data.notes else []
            return None
        self._data.say(what)
        try:
            return captured_kernels(_KEY + what, _PACKAGE, target, lambda: _capture(name, batch, size, setup.training))
        except ModuleNotFoundError as error:
            self._absent = True
            self._data.notes.append(f"timm: its models cannot be captured here: {error}")
            return None
        except (StablecastError, RuntimeError) as error:
            self._failed[name] = " ".join(str(error).split())[:160]
            self._data.notes.append(f"timm: {name} is left out: {self._failed[name]}")
            return None


def _capture(name: str, batch: int, size: int, training: bool) -> Workload:
    """One step of a timm model under FP16 autocast."""
    timm: Any = import_models("timm")
    torch: Any = importlib.import_module("torch")
    from stablecast.frontends.torch import capture_module

    with torch.device("meta"):
        model = timm.create_model(name)
    model = model.train(training)
    images = torch.empty(batch, 3, size, size, device="meta")
    if not training:
        return capture_module(_Autocast.around(model), images, mode="forward")
    return capture_module(
        _Autocast.around(model),
        images,
        mode="train",
        loss=lambda logits: torch.nn.functional.cross_entropy(
            logits.float(), torch.zeros(batch, dtype=torch.int64, device=logits.device)
        ),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    )


class _Autocast:
    """A module that runs another under FP16 autocast; made when asked, as torch may not be there."""

    @staticmethod
    def around(model: Any) -> Any:
        torch: Any = importlib.import_module("torch")

        class Under(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, images: Any) -> Any:
                with torch.autocast("cuda", torch.float16):
                    return self.model(images)

        return Under()


def _row(data: Data, program: DeviceProgram, record: Record, setup: Setup) -> Row:
    system = data.catalogue.resolve(setup.device)
    found = predict_device_program(program, system, Settings(data.choice, {}), record["model"])
    labels: Mapping[str, str] = record
    return Row(
        "timm",
        f"{record['model']} {record['img_size']} x{int(float(record['batch']))} {setup.group}",
        setup.device,
        float(labels["step_ms"]) * _MILLI,
        found.step_time_s,
        found.step_time_low_s,
        found.step_time_high_s,
        group=setup.group,
        path="program",
        rounding_s=half_digit(labels["step_ms"], _MILLI),
        key=f"{record['model']} {record['img_size']} {setup.group}",
        basis="program",
    )
