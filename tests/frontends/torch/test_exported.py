"""`torch.export` programs and the files that hold them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra")

from stablecast.frontends.torch import capture_exported  # noqa: E402
from stablecast.ir.errors import InputError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_program_in_a_file(
    train: bool,
    tmp_path: Path,
    execute: Callable[..., Any],
    error_of: Callable[..., float],
    example: Callable[[str], Any],
) -> None:
    model = example("torch_resnet").ResNet(((8, 1),), 10).train(train)
    x = torch.randn(2, 3, 32, 32)
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (x,)), str(path))
    workload = capture_exported(path)
    values = {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    found = execute(workload, {**values, "x": x})
    assert error_of(found["result[0]"], model(x)) < 1e-5
    assert workload.source == str(path)
    written = [argument.name for argument in workload.args if argument.aliases_output is not None]
    assert bool(written) == train


def test_what_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        capture_exported(tmp_path / "absent.pt2")
    path = tmp_path / "text.pt2"
    path.write_text("nothing")
    with pytest.raises(InputError, match="not an exported program"):
        capture_exported(path)
