"""Splits of devices, and which of several predictions comes first."""

from dataclasses import replace

import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.kernel_specs import matmul
from stablecast.backends.layout_search import best, rank, splits
from stablecast.backends.prediction import Prediction
from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.backends.registry import Choice
from stablecast.ir.device_program import Buffers, DeviceProgram, Kernel
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelTable
from stablecast.ir.work import SymbolicWork

TPU = Catalogue().resolve("tpu-v5p")
ROOM = TPU.device.hbm_bytes.value


def predicted(size: int, share: float) -> Prediction:
    """A square product, and temporaries of `share` of the device's memory."""
    row = matmul(TPU.device, "bf16", size, size, size)
    program = DeviceProgram("test", (Kernel(0),), KernelTable.of([row]), SymbolicWork())
    made = replace(program, buffers=Buffers(0, 0, 0, int(share * ROOM), {}))
    return predict_device_program(made, TPU, Settings(Choice(), {}), "test")


def test_splits() -> None:
    assert list(splits(8, {"a": (1, 2, 4, 3), "b": (2, 4, 8)})) == [
        {"a": 1, "b": 8},
        {"a": 2, "b": 4},
        {"a": 4, "b": 2},
    ]
    assert list(splits(1, {})) == [{}]
    assert list(splits(6, {"a": (4,)})) == []


def test_fastest_that_fits_comes_first() -> None:
    """What leaves less than 5 % free does not fit; a choice that raises is last."""

    def predict(choice: tuple[int, float]) -> Prediction:
        if not choice[0]:
            raise InputError("no sizes")
        return predicted(*choice)

    choices = [(0, 0.0), (1024, 0.96), (4096, 0.5), (2048, 0.94), (512, 1.5)]
    ranked = rank(choices, predict)
    assert [one.choice for one in ranked] == [(2048, 0.94), (4096, 0.5), (1024, 0.96), (512, 1.5), (0, 0.0)]
    assert [one.fits for one in ranked] == [True, True, False, False, False]
    assert ranked[-1].why == "no sizes"
    choice, prediction = best(ranked)
    assert (choice, prediction) == ((2048, 0.94), ranked[0].prediction)
    with pytest.raises(InputError, match=r"no layout fits: \(1024, 0\.96\), the smallest, needs .* and 5% for holes"):
        best(ranked[2:])
    with pytest.raises(InputError, match="no layout could be predicted: no sizes"):
        best(ranked[4:])
    with pytest.raises(InputError, match="no layout to choose from"):
        best([])
