"""Programs rebuilt from a trace's own shapes, and the graph that they are checked against."""

from pathlib import Path

import pytest

from stablecast._validate import validate
from stablecast.backends.catalogue import Catalogue
from stablecast.frontends.traces import read_trace
from stablecast.ir.device_program import Collective
from stablecast.validation.from_trace import trace_program
from stablecast.validation.measured import measure


def test_dlrm_from_its_own_shapes(traces: Path) -> None:
    """Collectives agree in number and bytes, products in number; the durations of the trace are not used."""
    report = validate(traces / "param" / "v100x8_dlrm_rank7_kineto.json.gz", on="v100-sxm2")
    assert report.matching is not None
    assert report.graph is not None
    assert report.matching.matched_share > 0.9
    assert report.graph.collectives_agree
    assert sum(ours for ours, _ in report.graph.collectives.values()) == 8


def test_carried_to_another_device(traces: Path) -> None:
    path = traces / "param" / "v100x8_dlrm_rank7_kineto.json.gz"
    times = {on: validate(path, on=on).prediction for on in ("v100-sxm2", "h200-sxm")}
    assert times["v100-sxm2"] is not None
    assert times["h200-sxm"] is not None
    assert times["h200-sxm"].compute_s < times["v100-sxm2"].compute_s
    assert not times["h200-sxm"].complete, "custom operators without shapes are said"
    assert any("lookup" in entry.op.lower() for entry in times["h200-sxm"].unmodelled)


def test_arithmetic_follows_the_kernels(traces: Path) -> None:
    """The A100 run used TF32 kernels, the V100 run had none."""
    device = Catalogue().device("a100-sxm-40gb")
    modes = {}
    for name in ("hta/a100_8ranks_rank3", "param/v100x8_dlrm_rank7"):
        run = measure(read_trace(traces / f"{name}_kineto.json.gz"))
        program = trace_program(run, run.typical_step, device)
        modes[name] = {row.math for row in program.table.rows if row.matmul_flops}
        assert sum(isinstance(node, Collective) for node in program.body) in (8, 10)
    assert modes == {"hta/a100_8ranks_rank3": {"tf32"}, "param/v100x8_dlrm_rank7": {"fp32"}}


def test_trace_without_shapes_is_incomplete(traces: Path) -> None:
    report = validate(traces / "hta" / "a100_2ranks_nccl_rank0_kineto.json.gz", on="a100-sxm-40gb")
    assert report.prediction is not None
    assert not report.prediction.complete
    assert report.graph is not None
    assert report.graph.collectives_agree


@pytest.mark.parametrize("on", ["v100-sxm2", "v100-sxm2:8"])
def test_number_of_devices_comes_from_the_trace(traces: Path, on: str) -> None:
    report = validate(traces / "param" / "v100x8_dlrm_rank0_kineto.json.gz", on=on)
    assert report.prediction is not None
    assert report.prediction.devices == 8
