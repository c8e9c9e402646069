"""Captured PyTorch steps laid on real profiles of them: structure exactly, and times."""

from pathlib import Path

import pytest

from stablecast._predict import Options, Session
from stablecast._validate import validate
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.validation.report import ValidationReport

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def resnet(traces: Path) -> ValidationReport:
    """The Kineto trace is of ResNet-18 at batch 128 (its input copy says so); the host trace beside it is not."""
    pytest.importorskip("torch")
    source = f"{EXAMPLES / 'torch_resnet.py'}:build_18,step"
    arguments = ArgumentOptions(args=f"{EXAMPLES / 'torch_resnet.py'}:inputs", settings=("batch=128",))
    session = Session(source, Options(exec="eager", arguments=arguments))
    return validate(traces / "param" / "rtx2080ti_resnet_kineto.json.gz", workload=session, on="rtx-2080-ti")


@pytest.fixture(scope="module")
def alexnet(traces: Path) -> ValidationReport:
    """One forward pass; its batch, 128, follows from the threads of elementwise kernels."""
    pytest.importorskip("torch")
    session = Session(f"{EXAMPLES / 'torch_alexnet.py'}:build,step", Options(exec="eager"))
    step = "[param|pytorch.model.alex_net|0|0|0|measure|forward]"
    return validate(traces / "hta" / "a100_alexnet_kineto.json.gz", workload=session, on="a100-sxm-40gb", step=step)


@pytest.mark.slow
def test_alexnet(alexnet: ValidationReport) -> None:
    """Every kernel has a partner; convolutions multiply as TF32, products do not, as the kernels' names say."""
    assert alexnet.matching is not None
    assert alexnet.matching.matched_share > 0.99
    assert alexnet.graph is not None
    assert alexnet.graph.ok
    assert _counts(alexnet)["convolution"] == (5, 5)
    errors = {share.name: share.error for share in alexnet.classes}
    for name in ("convolution", "matmul", "elementwise"):
        assert errors[name] == pytest.approx(0.0, abs=0.4)


@pytest.fixture(scope="module")
def dlrm(traces: Path) -> ValidationReport:
    """All ranks that the profile saw whole, so that waiting for each other is known."""
    pytest.importorskip("torch")
    session = Session(f"{EXAMPLES / 'torch_dlrm.py'}:build,step", Options(exec="eager", mesh={"dp": 8}))
    ranks = [traces / "param" / f"v100x8_dlrm_rank{rank}_kineto.json.gz" for rank in (0, 2, 4, 5, 6, 7)]
    return validate(*ranks, workload=session, on="v100-sxm2:8")


def _counts(report: ValidationReport) -> dict[str, tuple[int, int]]:
    assert report.graph is not None
    return dict(report.graph.operators)


def _device_s(report: ValidationReport) -> tuple[float, float]:
    """Device time on both sides without copies between host and device, which no program asks for."""
    shares = [share for share in report.classes if share.name != "memcpy"]
    return sum(share.measured_s for share in shares), sum(share.predicted_s for share in shares)


@pytest.mark.slow
def test_resnet_structure(resnet: ValidationReport) -> None:
    counts = _counts(resnet)
    assert counts["convolution"] == (59, 59), "twenty forward, twenty to filters, nineteen to images"
    assert counts["gemm"] == (3, 3)
    assert resnet.matching is not None
    assert resnet.matching.matched_share > 0.95
    assert resnet.graph is not None
    assert resnet.graph.order_checked > 100
    assert not resnet.graph.order_faults


@pytest.mark.slow
def test_resnet_times(resnet: ValidationReport) -> None:
    """Each class within 40 %, all of them within 25 %, the copy of the batch apart."""
    errors = {share.name: share.error for share in resnet.classes}
    for name in ("convolution", "matmul", "reduction", "elementwise"):
        assert errors[name] == pytest.approx(0.0, abs=0.4)
    measured, predicted = _device_s(resnet)
    assert predicted == pytest.approx(measured, rel=0.25)


@pytest.mark.slow
def test_dlrm_structure(dlrm: ValidationReport) -> None:
    counts = _counts(dlrm)
    assert counts["gemm"] == (23, 23)
    assert counts["collective"] == (8, 8)
    assert dlrm.graph is not None
    assert dlrm.graph.collectives_agree, "kind, group and bytes of each"
    assert dlrm.matching is not None
    assert dlrm.matching.matched_share > 0.95
    assert dlrm.matching.predicted_share > 0.99


@pytest.mark.slow
def test_dlrm_times(dlrm: ValidationReport) -> None:
    """Without waiting for other ranks, each class is within 40 % and all of them within 25 %."""
    errors = {share.name: share.error for share in dlrm.classes if share.name != "memcpy"}
    assert len(errors) == 8
    for error in errors.values():
        assert error == pytest.approx(0.0, abs=0.4)
    measured, predicted = _device_s(dlrm)
    assert predicted == pytest.approx(measured, rel=0.25)
    assert dlrm.waiting_s is not None
    assert dlrm.waiting_s > 5e-3, "most of what the profile calls communication"
