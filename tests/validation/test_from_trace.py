"""Programs rebuilt from a trace's own shapes, and the graph that they are checked against."""

from collections import Counter
from pathlib import Path

import pytest

from stablecast._predict import Options, Session, predict
from stablecast._validate import validate
from stablecast.backends.catalogue import Catalogue
from stablecast.frontends.traces import read_trace
from stablecast.frontends.traces.pytorch_et import read_et
from stablecast.ir.device_program import Collective, Kernel
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelClass
from stablecast.validation.from_et import et_program
from stablecast.validation.from_trace import trace_program
from stablecast.validation.measured import measure
from stablecast.validation.report import ValidationReport


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
    assert {entry.op for entry in times["h200-sxm"].unmodelled} == {"aten::cat"}, (
        "lists have no shapes here, and are said"
    )


def test_library_calls_from_their_operands(traces: Path) -> None:
    """FBGEMM's calls as many kernels as it launches for these sizes; the host trace alone states the same."""
    device = Catalogue().device("v100-sxm2")
    run = measure(read_trace(traces / "param" / "v100x8_dlrm_rank4_kineto.json.gz"))
    kineto = trace_program(run, run.typical_step, device)
    alone = et_program(read_et(traces / "param" / "v100x8_dlrm_rank4_et.json.gz"), device)
    assert alone.complete
    wanted = Counter(
        {"permute_2D_sparse_data": 14, "asynchronous_complete_cumsum": 6, "bounds_check_indices": 2}
        | {"SplitLookupFunction_adagrad_Op": 26, "SplitLookupFunction_Dense_Op": 15, "_index_put_impl_": 7}
    )
    for program in (kineto, alone):
        launches: Counter[str] = Counter(
            {"_index_put_impl_": 2} if program is kineto else {}
        )  # no list of indices there
        for node in program.body:
            label = program.table.rows[node.row].label if isinstance(node, Kernel) else ""
            for name in wanted:
                launches[name] += program.table.rows[node.row].launches if name in label else 0
        assert launches == wanted


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


def test_what_a_trace_does_not_say_is_listed(traces: Path) -> None:
    """XLA's events on a TPU have bytes and no shapes: nobody should take the bound for a prediction."""
    report = validate(traces / "tpu_v4_jax" / "matmul_1024x1024x1024.xplane.pb", on="tpu-v4")
    text, data, page = repr(report), report.to_dict(), report.to_html()
    assert "  predicted  at least " in text
    assert "; predicted at least " in page
    assert "not modelled, only their bytes are counted:" in text
    assert data["complete"] is False
    assert {entry["op"] for entry in data["unmodelled"]} == {"fusion", "copy-start", "copy-done"}
    assert sum(entry["share"] for entry in data["unmodelled"]) == pytest.approx(1.0)
    (product,) = [entry for entry in data["unmodelled"] if entry["op"] == "fusion"]
    assert product["bytes"] > 0


@pytest.mark.parametrize("on", ["v100-sxm2", "v100-sxm2:8"])
def test_number_of_devices_comes_from_the_trace(traces: Path, on: str) -> None:
    report = validate(traces / "param" / "v100x8_dlrm_rank0_kineto.json.gz", on=on)
    assert report.prediction is not None
    assert report.prediction.devices == 8


def test_a_trace_is_an_input_of_predict(traces: Path) -> None:
    """What would this run take on an H200? Its own shapes say; the durations of the trace do not matter."""
    path = traces / "hta" / "a100_8ranks_rank3_kineto.json.gz"
    times = {on: predict(path, on=on) for on in ("a100-sxm-40gb", "h200-sxm")}
    assert {found.devices for found in times.values()} == {8}
    assert times["h200-sxm"].step_time_s < times["a100-sxm-40gb"].step_time_s
    assert not times["h200-sxm"].complete
    with pytest.raises(InputError, match=r"give --on NAME"):
        Session(path, Options()).lowered_alone()


def test_host_trace_alone(traces: Path) -> None:
    """Three steps of ResNet-50 training at batch 32, of which one counts: 53 convolutions and their gradients (the first
    has none to its input), one head."""
    program = et_program(read_et(traces / "param" / "rtx2080ti_resnet_et.json.gz"), Catalogue().device("rtx-2080-ti"))
    classes = Counter(program.table.rows[node.row].klass for node in program.body if isinstance(node, Kernel))
    assert classes[KernelClass.CONVOLUTION] == 3 * 53 - 1
    assert classes[KernelClass.MATMUL] == 3
    assert program.complete
    forward = [row for row in program.table.rows if row.klass == KernelClass.CONVOLUTION and row.direction == "fwd"]
    stem = next(row for row in forward if row.cr == 7)
    assert (stem.cn, stem.cc, stem.ch, stem.co, stem.stride, stem.pad) == (32, 3, 224, 64, 2, 3)


def test_host_trace_of_several_ranks(traces: Path) -> None:
    """Eight collectives; the lists of shares say that there are eight ranks."""
    program = et_program(read_et(traces / "param" / "v100x8_dlrm_rank0_et.json.gz"), Catalogue().device("v100-sxm2"))
    assert program.num_devices == 8
    spoken = [(node.kind, node.operand_bytes) for node in program.body if isinstance(node, Collective)]
    assert spoken == [
        ("all_to_all", 24576), ("all_to_all", 192), ("all_to_all", 1536), ("all_to_all", 13568),
        ("all_reduce", 1576964), ("all_to_all", 24576), ("all_reduce", 448), ("all_reduce", 907840),
    ]  # fmt: skip


def test_host_trace_lends_its_shapes(traces: Path) -> None:
    """The Kineto trace has no shapes and forty steps, the host trace has those of one."""
    names = [traces / "param" / f"rtx2080ti_linear_{kind}.json.gz" for kind in ("kineto", "et")]
    assert not _complete(validate(names[0], on="rtx-2080-ti"))
    report = validate(names[0], on="rtx-2080-ti", host_trace=names[1])
    assert _complete(report)
    assert report.matching is not None
    assert report.matching.matched_share == pytest.approx(1.0, abs=0.01)
    assert report.graph is not None
    assert report.graph.operators["gemm"] == (62, 62)
    with pytest.raises(InputError, match="different runs"):
        validate(names[0], on="rtx-2080-ti", host_trace=traces / "param" / "rtx2080ti_resnet_et.json.gz")


def _complete(report: ValidationReport) -> bool:
    assert report.prediction is not None
    return report.prediction.complete


def test_elements_of_an_elementwise_kernel_have_threads(traces: Path) -> None:
    """Custom operators whose tables are 2.6 GB do not stream them."""
    report = validate(traces / "param" / "v100x8_dlrm_rank0_kineto.json.gz", on="v100-sxm2")
    assert report.prediction is not None
    assert report.prediction.compute_s < 2e-3


def test_copies_from_the_host_are_no_kernels(traces: Path) -> None:
    """Two of 5 x 128 f32, whose operators state shapes as those of copies within the device do."""
    run = measure(read_trace(traces / "hta" / "mi250_minitoy_kineto.json.gz"))
    program = trace_program(run, run.typical_step, Catalogue().device("mi250"))
    assert not any(
        program.table.rows[node.row].label == "aten::copy_" for node in program.body if isinstance(node, Kernel)
    )
    assert any(f"left out: {2 * 5 * 128 * 4 / 1e6:.3g} MB" in note for note in program.notes), program.notes
