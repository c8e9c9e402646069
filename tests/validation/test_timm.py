"""The timm suite: its list, its rows, and how it stands without timm."""

import gzip
from pathlib import Path

import pytest

from stablecast.validation.accuracy import run_accuracy
from stablecast.validation.suites import captures, timm
from stablecast.validation.suites.captures import captured, is_captured

HEAD = "gpu,precision,layout,torch,cuda,compiled,model,samples_per_s,step_ms,batch,img_size,gmacs,mactivations,mparams"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STABLECAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_list_is_forty_models_of_forty_families() -> None:
    names = timm.models()
    assert len(names) == len(set(names)) == 40
    assert "resnet34d" in names


def test_captures_are_kept(cache: Path) -> None:
    torch = pytest.importorskip("torch")
    from stablecast.frontends.torch import capture_module

    calls: list[int] = []

    def make() -> object:
        calls.append(1)
        return capture_module(torch.nn.Linear(4, 8), torch.empty(2, 4))

    first, second = captured("a linear layer", "torch", make), captured("a linear layer", "torch", make)
    assert len(calls) == 1
    assert first.modules[0].data == second.modules[0].data
    assert is_captured("a linear layer", "torch")
    assert not is_captured("another", "torch")
    (path,) = (cache / "captures").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    captured("a linear layer", "torch", make)
    assert len(calls) == 2, "a broken entry is made again"


def test_failures_are_kept(cache: Path) -> None:
    """A model that cannot be captured is not tried again."""
    calls: list[int] = []

    def make() -> captures.Workload:
        calls.append(1)
        raise ValueError("no model of\n that kind")

    with pytest.raises(ValueError, match="no model"):
        captured("a model", "torch", make)
    with pytest.raises(captures.StablecastError, match="no model of that kind"):
        captured("a model", "torch", make)
    assert len(calls) == 1


def test_rows_start_at_a_capture(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of a model that stands in for timm's: eager and compiled, FP16 autocast, its own batch."""
    torch = pytest.importorskip("torch")
    from stablecast.frontends.torch import capture_module

    def capture(name: str, batch: int, size: int, training: bool) -> object:
        assert (name, batch, size, training) == ("resnet34d", 64, 32, False)
        return capture_module(torch.nn.Conv2d(3, 8, 3), torch.empty(batch, 3, size, size))

    monkeypatch.setattr(timm, "_capture", capture)
    folder = tmp_path / "data" / "timm"
    folder.mkdir(parents=True)
    rows = [
        "RTX3090,amp,nchw,240,124,0,resnet34d,1,20.5,64.0,32,1,1,1",
        "RTX4090,amp,nchw,291,128,1,resnet34d,1,9,64,32,1,1,1",
    ]
    other = "RTX3090,amp,nhwc,240,124,0,resnet34d,1,20.5,64.0,32,1,1,1"
    (folder / "inference.csv.gz").write_bytes(gzip.compress("\n".join([HEAD, *rows, other]).encode()))
    report = run_accuracy("timm", tmp_path / "data", "analytical")
    assert [(row.device, row.group, row.path, row.measured_s) for row in report.rows] == [
        ("rtx-3090", "inference eager", "program", pytest.approx(20.5e-3)),
        ("rtx-4090", "inference inductor", "program", pytest.approx(9e-3)),
    ]
    assert report.rows[0].rounding_s == pytest.approx(0.05e-3)
    assert all(row.predicted_s > 0 for row in report.rows)


def test_without_timm_only_what_is_on_disk(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> object:
        raise ModuleNotFoundError("No module named 'timm'")

    monkeypatch.setattr(timm, "import_models", absent)
    folder = tmp_path / "data" / "timm"
    folder.mkdir(parents=True)
    row = "RTX3090,amp,nchw,240,124,0,{},1,20.5,64.0,32,1,1,1"
    text = "\n".join([HEAD, row.format("resnet34d"), row.format("vgg11")])
    for name in ("inference", "training"):
        (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(
        captures.StablecastError,
        match="no row of suite timm could be made: timm: its models cannot be captured here: No module named 'timm'",
    ):
        run_accuracy("timm", tmp_path / "data", "analytical")
