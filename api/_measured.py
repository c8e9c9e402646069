"""A measured trace as an input: the program that ran, rebuilt from its operators and shapes."""

from dataclasses import dataclass, field
from pathlib import Path

from stablecast.backends.device import Device
from stablecast.frontends.traces.pytorch_et import ExecutionTrace, read_et
from stablecast.frontends.traces.read import detect, read_trace
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import InputError
from stablecast.validation.from_et import et_program
from stablecast.validation.from_trace import trace_program
from stablecast.validation.measured import MeasuredRun, measure

_ENDINGS = (".json", ".json.gz", ".pb", ".pb.gz", ".sqlite", ".csv", ".csv.gz")


def is_measured(source: str | Path) -> bool:
    """Whether `source` is a profile of a real run, or the host trace of one."""
    path = Path(source)
    if not path.name.lower().endswith(_ENDINGS) or not path.is_file():
        return False
    try:
        return detect(path) != "chakra"
    except InputError:
        return False


@dataclass
class MeasuredInput:
    """The program in a measured trace, made for each device that it is priced on; durations are not used.

    `path`: a profile with shapes, or a PyTorch execution trace. Raises `InputError` where it cannot be read.
    """

    path: Path
    _source: ExecutionTrace | MeasuredRun | None = None
    _programs: dict[str, DeviceProgram] = field(default_factory=dict[str, DeviceProgram])

    def program(self, device: Device) -> DeviceProgram:
        """The program of a typical step, for pricing on `device`."""
        if device.name not in self._programs:
            if self._source is None:
                is_host = detect(self.path) == "pytorch-et"
                self._source = read_et(self.path) if is_host else measure(read_trace(self.path))
            source = self._source
            self._programs[device.name] = (
                et_program(source, device)
                if isinstance(source, ExecutionTrace)
                else trace_program(source, source.typical_step, device)
            )
        return self._programs[device.name]
