"""Every real file is read, and what it says agrees with its README."""

from pathlib import Path

import numpy as np
import pytest

from stablecast.frontends.traces import detect, read_ranks, read_trace
from stablecast.frontends.traces.pytorch_et import link, read_et
from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import DEVICE_WORK, Category

KERNELS = {
    "hta/a100_8ranks_rank3_kineto.json.gz": (8568, 3, "NVIDIA A100-PG509-200"),
    "hta/a100_2ranks_nccl_rank0_kineto.json.gz": (2700, 0, "NVIDIA A100-PG509-200"),
    "hta/mi250_minitoy_kineto.json.gz": (14, 0, "AMD Radeon Graphics"),
    "param/rtx2080ti_resnet_kineto.json.gz": (9628, 0, "NVIDIA GeForce RTX 2080 Ti"),
    "param/v100x8_dlrm_rank5_kineto.json.gz": (245, 5, "Tesla V100-SXM2-32GB"),
}


@pytest.mark.parametrize(("folder", "files"), [("chakra", 4), ("hta", 7), ("param", 20), ("tpu_v4_jax", 16)])
def test_every_file_is_read(traces: Path, folder: str, files: int) -> None:
    paths = sorted((traces / folder).iterdir())
    assert len(paths) == files
    for path in paths:
        events = read_trace(path)
        assert len(events) > 0
        assert (events.damage, events.skipped) == ("", 0)
        assert (np.diff(events.start_s) >= 0).all()


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_rank_and_device(traces: Path, name: str) -> None:
    events = read_trace(traces / name)
    kernels, rank, device = KERNELS[name]
    assert int(events.is_a(Category.KERNEL).sum()) == kernels
    assert (events.rank, events.device) == (rank, device)


def test_xplane_and_trace_json_agree(traces: Path) -> None:
    """The device time of one program is the same in both files, to 1 %."""
    for path in sorted((traces / "tpu_v4_jax").glob("*.xplane.pb")):
        both = [read_trace(path), read_trace(path.with_name(path.name.replace("xplane.pb", "trace.json.gz")))]
        times = [float(events.duration_s[events.is_a(*DEVICE_WORK)].sum()) for events in both]
        assert times[1] == pytest.approx(times[0], rel=0.01)
        assert both[0].device == "TPU v4"
        assert {int(device) for device in both[0].device_index[both[0].on_device]} == {0, 1}


def test_chakra_forms_agree(traces: Path) -> None:
    """The protobuf and the JSON form hold the same nodes and durations."""
    binary, text = (read_trace(traces / "chakra" / f"chakra_rank0.{kind}.gz") for kind in ("et", "json"))
    assert len(binary) == len(text) == 3664
    assert int(binary.on_device.sum()) == int(text.on_device.sum()) == 1216
    assert float(binary.duration_s.sum()) == pytest.approx(float(text.duration_s.sum()))


def test_ranks_in_order(traces: Path) -> None:
    paths = [traces / "param" / f"v100x8_dlrm_rank{rank}_kineto.json.gz" for rank in (3, 0, 7)]
    assert [events.rank for events in read_ranks(paths)] == [0, 3, 7]
    with pytest.raises(InputError, match="both of rank 3"):
        read_ranks([paths[0], paths[0]])


@pytest.mark.parametrize(
    ("stem", "share", "how"),
    [
        ("param/v100x8_dlrm_rank0", 0.99, "order"),
        ("param/rtx2080ti_linear", 0.95, "order"),
        ("hta/a100_simple_add_small", 0.99, "order"),
    ],
)
def test_execution_trace_links_to_kineto(traces: Path, stem: str, share: float, how: str) -> None:
    trace = read_et(traces / f"{stem}_et.json.gz")
    found = link(trace, read_trace(traces / f"{stem}_kineto.json.gz"))
    assert (found.how, found.share > share) == (how, True)


def test_execution_trace_of_another_model_links_badly(traces: Path) -> None:
    """The execution trace is a ResNet-50 of 53 convolutions, the Kineto trace a ResNet-18 of 20."""
    trace = read_et(traces / "param" / "rtx2080ti_resnet_et.json.gz")
    assert sum(op.name == "aten::conv2d" for op in trace.ops) == 3 * 53
    events = read_trace(traces / "param" / "rtx2080ti_resnet_kineto.json.gz")
    names = [events.name_of(int(index)) for index in np.nonzero(events.is_a(Category.OP))[0]]
    assert names.count("aten::conv2d") == 30 * 20
    assert link(trace, events).share < 0.6


def test_formats_are_told_from_content(traces: Path) -> None:
    wanted = {
        "chakra/chakra_rank0.et.gz": "chakra",
        "chakra/chakra_small_rank0.json": "chakra",
        "chakra/pytorch_et_1.0.2-chakra.0.0.4.json.gz": "pytorch-et",
        "hta/a100_alexnet_kineto.json.gz": "chrome",
        "tpu_v4_jax/matmul_1024x1024x1024.trace.json.gz": "chrome",
        "tpu_v4_jax/matmul_1024x1024x1024.xplane.pb": "xplane",
    }
    assert {name: detect(traces / name) for name in wanted} == wanted
