"""Times worked out by hand on a device of 10 cores, 1e14 FLOP/s and 1e12 B/s."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from stablecast.backends import kernel_specs as specs
from stablecast.backends.analytical import AnalyticalBackend, uncovered_reasons
from stablecast.backends.analytical.constants import Constant, Constants
from stablecast.backends.analytical.tpu_attention import attention_time
from stablecast.backends.analytical.tpu_grouped import grouped_time
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device, Quantity
from stablecast.backends.estimates import Backend
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import COMPILED, KernelClass, KernelRow, KernelTable


def time_of(backend: AnalyticalBackend, device: Device, row: KernelRow) -> float:
    return float(backend.estimate(KernelTable.of([row]), device).time_s[0])


def product(m: int, n: int, k: int, batch: int = 1, math: str = "bf16") -> KernelRow:
    return KernelRow(
        klass="matmul", math=math, in_dtype="bf16", batch=batch, m=m, n=n, k=k, matmul_flops=2.0 * batch * m * n * k
    )


def test_it_is_a_backend(ideal: AnalyticalBackend) -> None:
    assert isinstance(ideal, Backend)
    assert ideal.name == "analytical"


def test_full_wave_runs_at_the_peak(ideal: AnalyticalBackend, device: Device) -> None:
    # 10 tiles of 128x128 on 10 cores: 2*1280*128*1000 / 1e14
    assert time_of(ideal, device, product(1280, 128, 1000)) == pytest.approx(3.2768e-6)


def test_partial_wave_costs_a_whole_one(ideal: AnalyticalBackend, device: Device) -> None:
    # 11 tiles of 128x128 would take 2 waves; 176 tiles of 32x32 take 18 of 2*32*32*1000 / 1e13
    assert time_of(ideal, device, product(1408, 128, 1000)) == pytest.approx(18 * 2.048e-7)


def test_edges_are_padded_to_the_tile(ideal: AnalyticalBackend, device: Device) -> None:
    assert time_of(ideal, device, product(1270, 120, 1000)) == pytest.approx(3.2768e-6)


def test_batch_multiplies_tiles(ideal: AnalyticalBackend, device: Device) -> None:
    assert time_of(ideal, device, product(128, 128, 1000, batch=10)) == pytest.approx(3.2768e-6)


def test_three_passes_take_three_times(ideal: AnalyticalBackend, device: Device) -> None:
    one, three = product(1280, 128, 1000), product(1280, 128, 1000, math="bf16x3")
    assert time_of(ideal, device, three) == pytest.approx(3 * time_of(ideal, device, one))


def test_plain_fma_runs_on_the_vector_lanes(ideal: AnalyticalBackend, device: Device) -> None:
    assert time_of(ideal, device, product(1280, 128, 1000, math="fp32")) == pytest.approx(3.2768e-5)


def test_memory_bound_kernel(ideal: AnalyticalBackend, device: Device) -> None:
    row = specs.elementwise(device, "bf16", 1000, 1000)
    estimates = ideal.estimate(KernelTable.of([row]), device)
    assert estimates.time_s[0] == pytest.approx(6e6 / 1e12)
    assert estimates.bound[0] == "memory"
    assert estimates.source[0] == "analytical"
    assert (estimates.low_s[0], estimates.high_s[0]) == pytest.approx((6e-6, 12e-6))


def test_vector_bound_kernel(ideal: AnalyticalBackend, device: Device) -> None:
    # 1e6 elements x (1 + 3 transcendentals of 10 operations) / 1e13, above 6 us of memory time
    row = replace(specs.elementwise(device, "bf16", 1000, 1000, transcendental=3), bytes_read=0.0, bytes_written=0.0)
    assert time_of(ideal, device, row) == pytest.approx(31e6 / 1e13)


def test_chains_of_accesses_are_waited_for(waiting: AnalyticalBackend, device: Device) -> None:
    """10 accesses of 0.3 us and 4 of 0.5 us, which copying hides behind; a reduction of two kernels has two trees."""
    gather = KernelRow(klass="gather", bytes_read=1e6, waits=10, row_waits=4)
    assert time_of(waiting, device, gather) == pytest.approx(5e-6)
    assert time_of(waiting, device, replace(gather, bytes_read=1e7)) == pytest.approx(1e-5)
    means = KernelRow(klass="reduction", bytes_read=1e3, launches=2)
    assert time_of(waiting, device, means) == pytest.approx(8e-6)
    assert time_of(waiting, device, replace(means, library=COMPILED)) == pytest.approx(1e-9)
    assert time_of(waiting, replace(device, kind="tpu"), gather) == pytest.approx(1e-6)


def test_launch_is_added_for_each_launch(ideal: AnalyticalBackend, device: Device) -> None:
    backend = AnalyticalBackend(launch_s=5e-6, constants_file=ideal.constants_file)
    row = replace(specs.elementwise(device, "bf16", 1000, 1000), launches=2)
    estimates = backend.estimate(KernelTable.of([row]), device)
    assert estimates.time_s[0] == pytest.approx(16e-6)
    assert estimates.bound[0] == "launch"


def test_strided_data_gradient_does_not_multiply_its_zeros(ideal: AnalyticalBackend, device: Device) -> None:
    forward = specs.conv2d(device, "bf16", 8, 32, 32, 128, 128, 1, 1, stride=2)
    gradient = specs.conv2d(device, "bf16", 8, 32, 32, 128, 128, 1, 1, stride=2, direction="dgrad")
    assert gradient.matmul_flops == forward.matmul_flops
    assert gradient.dilation_flops == 3 * forward.matmul_flops
    without_bytes = [replace(row, bytes_read=0.0, bytes_written=0.0) for row in (forward, gradient)]
    times = ideal.estimate(KernelTable.of(without_bytes), device).time_s
    # 2*2048*128*128 FLOP in 64 tiles of 64x64 on 10 cores: 7 waves; the gradient has 4 times the rows, a fourth of k
    assert times == pytest.approx([7 * 2 * 64 * 64 * 128 / 1e13, 26 * 2 * 64 * 64 * 32 / 1e13], rel=0.1)


def test_few_channels_are_padded(ideal: AnalyticalBackend, device: Device) -> None:
    rows = [specs.conv2d(device, "bf16", 1, 64, 64, c, 128, 3, 3, pad=1) for c in (2, 8)]
    times = ideal.estimate(KernelTable.of([replace(r, bytes_read=0.0, bytes_written=0.0) for r in rows]), device).time_s
    assert times[0] == pytest.approx(times[1])


def test_systolic_array_pads_to_its_edge(ideal: AnalyticalBackend, device: Device) -> None:
    tpu = replace(device, kind="tpu")
    # m to 8, n and k to 128: 2 * 16 * 128 * 256 / 1e14
    assert time_of(ideal, tpu, product(9, 100, 200)) == pytest.approx(2 * 16 * 128 * 256 / 1e14)


def test_attention_in_blocks_of_128_queries(ideal: AnalyticalBackend, device: Device) -> None:
    row = specs.attention(device, "bf16", 1, 10, 256, 256, 64, causal=1)
    row = replace(row, bytes_read=0.0, bytes_written=0.0)
    # 20 blocks, 2 waves; a block meets (128 + 256) / 2 keys: 4 * 128 * 192 * 64 / 1e13
    assert time_of(ideal, device, row) == pytest.approx(2 * 4 * 128 * 192 * 64 / 1e13)


def test_unknown_work_is_a_bound(ideal: AnalyticalBackend, device: Device) -> None:
    row = KernelRow(klass="custom", bytes_read=1e6, modelled=0)
    estimates = ideal.estimate(KernelTable.of([row]), device)
    assert estimates.source[0] == "bound"
    assert estimates.bound[0] == "unknown"
    assert estimates.high_s[0] == pytest.approx(10 * estimates.time_s[0])


def test_a_mode_without_a_peak_is_not_covered(ideal: AnalyticalBackend, device: Device) -> None:
    table = KernelTable.of([product(64, 64, 64, math="fp8_e4m3"), product(64, 64, 64)])
    assert ideal.covers(table, device).tolist() == [False, True]
    reasons = uncovered_reasons(table, device)
    assert len(reasons) == 1
    assert "testchip" in reasons[0]
    assert "fp8_e4m3" in reasons[0]
    with pytest.raises(InputError, match="testchip has no peak for math mode fp8_e4m3"):
        ideal.estimate(table, device)


def test_wide_integers_multiply_on_the_lanes(ideal: AnalyticalBackend, device: Device) -> None:
    assert ideal.covers(KernelTable.of([product(64, 64, 64, math="int32")]), device).all()


def test_empty_table(ideal: AnalyticalBackend, device: Device) -> None:
    assert len(ideal.estimate(KernelTable.of([]), device)) == 0


def test_unmeasured_architecture_is_said_and_wider(device: Device) -> None:
    backend = AnalyticalBackend()
    assert "no kernel of architecture sm_10 was measured" in " ".join(backend.assumptions(device))
    known = replace(device, architecture="Ampere (GA100, cc 8.0)")
    assert "no kernel of architecture" not in " ".join(backend.assumptions(known))
    row = KernelTable.of([specs.elementwise(device, "bf16", 10000, 10000)])
    unknown, measured = backend.estimate(row, device), backend.estimate(row, known)
    assert unknown.high_s[0] / unknown.time_s[0] > measured.high_s[0] / measured.time_s[0]


def test_constants_file_without_a_source(tmp_path: Path, device: Device) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("gpu:\n  launch: {value: 1.0}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"gpu\.launch needs a number `value` and a `source`"):
        AnalyticalBackend(constants_file=path).assumptions(device)


def test_f64_runs_at_its_own_vector_rate(ideal: AnalyticalBackend, device: Device) -> None:
    row = KernelRow(klass="elementwise", out_dtype="f64", vector_flops=1e7)
    slow = Quantity(1e12, "FLOP/s", "test", "high")
    other = replace(device, vector_flops={**device.vector_flops, "f64": slow})
    assert time_of(ideal, other, row) == pytest.approx(1e-5)
    assert np.isfinite(time_of(ideal, device, row))


def test_tpu_products_keep_either_operand_in_the_array() -> None:
    device = Catalogue().device("tpu-v5p")
    wide, tall = (
        AnalyticalBackend().estimate(KernelTable.of([specs.matmul(device, "bf16", *sizes)]), device).time_s[0]
        for sizes in ((128, 4096, 4096), (4096, 128, 4096))
    )
    assert wide == pytest.approx(tall)


TPU_KERNELS: Final = {
    "attention.forward": 1.0,
    "attention.block": 1e-6,
    "attention.lanes": 0.0,
    "attention.lanes.backward": 0.0,
    "grouped.share": 1.0,
    "grouped.summed": 0.5,
    "grouped.rows": 100.0,
    "grouped.mask": 0.0,
}


NOTHING: Final[Mapping[str, float]] = {}


def core_times(
    rows: Sequence[KernelRow], lane_rate: float = 1e12, changed: Mapping[str, float] = NOTHING
) -> list[float]:
    """Times on the core of a TPU of 256 x 256 cells at 1e14 FLOP/s, with the ideal constants of the kernels above."""
    values = TPU_KERNELS | {"overlap": 1000.0} | changed
    constants = Constants("test", "tpu", {name: Constant(value, "", "tpu") for name, value in values.items()}, True)
    table = KernelTable.of(list(rows))
    time = attention_time if rows[0].klass == KernelClass.ATTENTION else grouped_time
    every = np.ones(len(table), dtype=np.bool_)
    return time(table, every, np.full(len(table), 1e14), lane_rate, 256.0, constants).tolist()


def test_tpu_attention_pads_heads_and_counts_blocks(device: Device) -> None:
    """A block of 4,096 (or fewer) queries meets blocks of as many keys, for 1 us each."""
    sizes = ((4096, 64, 0), (4096, 256, 0), (4096, 512, 0), (8192, 64, 1))
    rows = [specs.attention(device, "bf16", 2, 8, s, s, d, causal=causal) for s, d, causal in sizes]
    narrow, padded, wide, causal = core_times(rows)
    pair = 2 * 2 * 256 / 1e14
    assert narrow == padded == pytest.approx(16 * (4096 * 4096 * pair + 1e-6))
    assert wide == pytest.approx(16 * (4096 * 4096 * 2 * pair + 1e-6))
    # of 8,192 positions: blocks of 2,048 meet 2.5 of 4 on average, 10 of 16; with blocks of 4,096 3 of 4
    costs = {block: n * (block**2 * pair + 1e-6) for block, n in ((4096, 3), (2048, 10), (1024, 36), (512, 136))}
    assert causal == pytest.approx(16 * min(costs.values()))


def test_tpu_attention_in_a_window_and_backward(device: Device) -> None:
    row = specs.attention(device, "bf16", 1, 4, 8192, 8192, 64, causal=1, window=128)
    back = specs.attention(device, "bf16", 1, 4, 8192, 8192, 64, causal=1, window=128, direction="bwd")
    pair = 2 * 2 * 256 / 1e14
    # a window of 128 touches two blocks of keys, whatever their size
    best = min(8192 / block * 2 * (block**2 * pair + 1e-6) for block in (256, 512, 1024, 2048, 4096))
    forward, backward = core_times([row, back])
    assert forward == pytest.approx(4 * best)
    best = min(8192 / block * 2 * (block**2 * 2.5 * pair + 1e-6) for block in (256, 512, 1024, 2048, 4096))
    assert backward == pytest.approx(4 * best)


def test_tpu_lanes_bound_softmax(device: Device) -> None:
    """Twenty operations on each of 4,096 x 4,096 pairs of 8 heads, whatever the mask hides in the block."""
    row = specs.attention(device, "bf16", 1, 8, 4096, 4096, 64)
    (time,) = core_times([row], changed={"attention.lanes": 20.0})
    assert time == pytest.approx(8 * (4096 * 4096 * 20 / 1e12 + 1e-6))


def test_tpu_groups_of_rows(device: Device) -> None:
    """4 groups cost 100 rows each; 300 is padded to 512; the gradient of the matrices sums over the rows."""
    row = specs.grouped(device, "bf16", 4, 1000, 256, 300)
    summed = replace(row, m=300, k=1000, elems=4 * 300 * 256)
    forward, gradient = core_times([row, summed])
    assert forward == pytest.approx(2 * 1400 * 256 * 512 / 1e14)
    assert gradient == pytest.approx(2 * forward)


def test_tpu_groups_of_odd_width_are_masked(device: Device) -> None:
    """Each side's tiles are masked once for every tile of the other: here one of 1,024 columns, 2 + 4 of 512 rows."""
    row = specs.grouped(device, "bf16", 4, 1024, 256, 300)
    whole = specs.grouped(device, "bf16", 4, 1024, 256, 384)
    odd, even = core_times([row, whole], 1e9, {"grouped.mask": 3.0})
    assert odd == pytest.approx(3 * (1024 * 300 + 6 * 256 * 300) / 1e9)
    assert even == pytest.approx(2 * 1424 * 256 * 512 / 1e14)


def test_tpu_casts_before_v6e() -> None:
    """Lanes without bf16 turn what a kernel reads and writes into f32 and back."""
    moved = KernelRow(
        klass=KernelClass.ELEMENTWISE,
        in_dtype="bf16",
        out_dtype="bf16",
        elems=1 << 24,
        vector_flops=200.0 * (1 << 24),
        bytes_read=2.0 * (1 << 24),
        bytes_written=2.0 * (1 << 24),
    )
    older = Catalogue().device("tpu-v5p")
    narrow, wide = (
        AnalyticalBackend()
        .estimate(KernelTable.of([moved, replace(moved, in_dtype="f32", out_dtype="f32")]), older)
        .time_s
    )
    assert narrow / wide == pytest.approx(202 / 200, rel=1e-3)
