"""The command line in process, and small inputs for it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stablecast.cli import main

MODULE = """module @small { func.func public @main(%x: tensor<1024x1024xbf16>, %w: tensor<1024x4096xbf16>, %b: tensor<4096xbf16>)
 -> tensor<1024x4096xbf16> {
 %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<1024x1024xbf16>, tensor<1024x4096xbf16>) -> tensor<1024x4096xbf16>
 %1 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<4096xbf16>) -> tensor<1024x4096xbf16>
 %2 = stablehlo.add %0, %1 : tensor<1024x4096xbf16>
 return %2 : tensor<1024x4096xbf16> } }
"""


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line with these words."""

    def call(*words: object) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        output = capfd.readouterr()
        code = left.value.code
        return Result(code if isinstance(code, int) else 0, output.out, output.err)

    return call


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A matrix product with bias, as `small.mlir` in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("small.mlir").write_text(MODULE)
    return "small.mlir"
