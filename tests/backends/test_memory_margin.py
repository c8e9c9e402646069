"""The fragmentation margin is named where a step fits with little to spare, and nowhere else."""

from dataclasses import replace

import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.memory_margin import FRAGMENTATION_MARGIN, with_memory_margin
from stablecast.backends.prediction import Prediction
from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.backends.registry import Choice
from stablecast.ir.reader import read
from stablecast.lowering.device import lower
from stablecast.lowering.target import Target

TEXT = b"""module { func.func @main(%a: tensor<64xf32>) -> tensor<64xf32> {
 %0 = stablehlo.tanh %a : tensor<64xf32> return %0 : tensor<64xf32> } }"""


@pytest.fixture(scope="module")
def small() -> Prediction:
    system = Catalogue().resolve("h100-sxm")
    return predict_device_program(lower(read(TEXT), Target()), system, Settings(Choice(), {}), "small")


def notes(made: Prediction) -> list[str]:
    return [text for text in made.assumptions if text.startswith("fragmentation margin")]


@pytest.mark.parametrize(("used", "said"), [(0.5, 0), (0.94, 0), (0.96, 1), (1.0, 1), (1.01, 0)])
def test_named_near_the_limit_only(small: Prediction, used: float, said: int) -> None:
    assert notes(small) == []
    near = with_memory_margin(replace(small, peak_memory_bytes=round(used * small.memory_bytes)))
    assert len(notes(near)) == said
    assert near.fits == (used <= 1.0)


def test_says_margin_and_what_is_free(small: Prediction) -> None:
    room = 100 * 10**9
    near = with_memory_margin(replace(small, memory_bytes=room, peak_memory_bytes=97 * 10**9))
    assert FRAGMENTATION_MARGIN * room == 5e9
    (note,) = notes(near)
    assert "5% of device memory (5.00 GB)" in note
    assert note.endswith("3.00 GB is")
    assert notes(with_memory_margin(near)) == [note]
    assert notes(with_memory_margin(replace(near, peak_memory_bytes=10**9))) == []
