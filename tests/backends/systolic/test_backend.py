"""The systolic backend: arrays of each device, folds by hand and by a slow count, the map to seconds, details."""

from dataclasses import replace
from itertools import product
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.conformance import check_backend
from stablecast.backends.device import Device
from stablecast.backends.kernel_specs import attention, conv2d, elementwise, layernorm, matmul, reduce, softmax
from stablecast.backends.pricing import price
from stablecast.backends.registry import get_backend, parse_choice
from stablecast.backends.systolic.backend import DETAILS, SystolicBackend
from stablecast.backends.systolic.machine import ArrayMachine, array_machine
from stablecast.backends.systolic.products import Products, array_work
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable

TPUS = ("tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x")
BACKEND = SystolicBackend()


def device(name: str) -> Device:
    return Catalogue().resolve(name).device


def machine_of(name: str) -> ArrayMachine:
    found = array_machine(device(name))
    assert found is not None
    return found


def products(*shapes: tuple[int, int, int, int]) -> Products:
    """Products of batch, m, n, k without bytes."""
    batch, m, n, k = np.array(shapes, dtype=np.float64).T
    none = np.zeros(len(shapes))
    return Products(batch, m, n, k, none, none, none, none)


def seconds(on: str, *rows: KernelRow) -> list[float]:
    return BACKEND.estimate(KernelTable.of(rows), device(on)).time_s.tolist()


@pytest.mark.parametrize(
    ("name", "rows", "cols", "arrays", "rate"),
    [
        ("tpu-v3", 128, 128, 2, 1),
        ("tpu-v4", 128, 128, 8, 1),
        ("tpu-v5e", 128, 128, 4, 1),
        ("tpu-v5p", 128, 128, 8, 1),
        ("tpu-v6e", 256, 256, 2, 2),
        ("tpu-v7x", 256, 256, 2, 2),
        ("a100-sxm-80gb", 32, 32, 108, 1),
        ("h100-sxm", 64, 32, 132, 1),
    ],
)
def test_arrays_meet_the_printed_peak(name: str, rows: int, cols: int, arrays: int, rate: int) -> None:
    machine = machine_of(name)
    assert (machine.rows, machine.cols, machine.arrays) == (rows, cols, arrays)
    assert device(name).peak("bf16").value / machine.cell_flops == pytest.approx(rate, rel=0.01)


def test_no_arrays_on_a_cpu() -> None:
    cpu = device("cpu")
    table = KernelTable.of([matmul(cpu, "f32", 64, 64, 64)])
    assert not BACKEND.covers(table, cpu).any()
    assert BACKEND.assumptions(cpu) == ()
    with pytest.raises(InputError, match="has no systolic arrays"):
        BACKEND.estimate(table, cpu)


def test_folds_by_hand() -> None:
    """On 8 arrays of 128 x 128, nothing hidden but what must be: T lines for each fold of the busiest array."""
    machine = machine_of("tpu-v4")
    edge = 2 * 128 + 128 - 2
    work = array_work(products((1, 1024, 1024, 128), (1, 1024, 1024, 256), (1, 512, 1000, 129)), machine, 0.0)
    # 8 column folds, one an array, of 1024 lines each; then twice as many row folds; 129 rows take two folds, and the
    # transposed order splits its 1000 lines over two arrays for each of 4 column folds, in whole sublanes
    assert work.cycles.tolist() == [1024 + edge, 2048 + edge, 2 * 504 + edge]
    assert work.mapping_eff.tolist() == pytest.approx([1.0, 1.0, 512 * 129 / (4 * 2 * 128 * 128)])
    shown = array_work(products((1, 1024, 1024, 128)), machine, 1.0)
    assert shown.cycles.tolist() == [1024 + edge]


def test_the_cheaper_order_is_taken() -> None:
    machine = machine_of("tpu-v4")
    wide, high = (array_work(products(shape), machine, 0.2) for shape in ((1, 128, 65536, 512), (1, 65536, 128, 512)))
    assert wide.cycles == high.cycles
    assert wide.swapped.tolist() != high.swapped.tolist()


def slow_count(shape: tuple[int, int, int, int], machine: ArrayMachine, fill: float) -> float:
    """Folds dealt out one by one, the least over both orders and all ways of splitting the streamed rows."""
    batch, m, n, k = shape
    edge, best = 2 * machine.rows + machine.cols - 2, float("inf")
    for (streamed, columns), parts in product(((m, n), (n, m)), range(1, machine.arrays + 1)):
        if machine.arrays % parts:
            continue
        piles = [0] * (machine.arrays // parts)
        for fold in range(batch * ceil(columns / machine.cols)):
            piles[fold % len(piles)] += ceil(k / machine.rows)
        lines = max(ceil(ceil(streamed / parts) / 8) * 8, machine.rows)
        best = min(best, max(piles) * (lines + fill * edge) + (1 - fill) * edge)
    return best


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 900), st.integers(1, 900), st.integers(1, 700)),
    name=st.sampled_from(TPUS),
    fill=st.sampled_from([0.0, 0.3, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_cycles_equal_a_slow_count(shape: tuple[int, int, int, int], name: str, fill: float) -> None:
    machine = machine_of(name)
    assert array_work(products(shape), machine, fill).cycles[0] == pytest.approx(slow_count(shape, machine, fill))


def test_what_is_covered() -> None:
    tpu, gpu = device("tpu-v5p"), device("h100-sxm")
    rows = [
        matmul(tpu, "bf16", 256, 256, 256, 4),
        conv2d(tpu, "bf16", 8, 28, 28, 64, 128, 3, 3, 2, 1),
        attention(tpu, "bf16", 2, 8, 512, 512, 64, 2, 1),
        elementwise(tpu, "bf16", 1024, 1024),
        softmax(tpu, "f32", 128, 4096),
        KernelRow(klass=KernelClass.SORT, in_dtype="f32", out_dtype="f32", elems=1024, bytes_read=4096.0),
        KernelRow(klass=KernelClass.CUSTOM, modelled=0),
        replace(matmul(tpu, "f32", 64, 64, 64), math="vector"),
    ]
    table = KernelTable.of(rows)
    assert BACKEND.covers(table, tpu).tolist() == [True] * 5 + [False] * 3
    assert BACKEND.covers(table, gpu).tolist() == [True] * 2 + [False] * 6
    with pytest.raises(InputError, match="no model for sort"):
        BACKEND.estimate(table, tpu)
    priced = price(table, tpu, parse_choice("matmul=systolic,default=analytical"))
    assert priced.backend.tolist() == ["systolic"] + ["analytical"] * 6 + ["analytical"]


@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", ["tpu-v4", "h100-sxm"])
def test_convolutions_in_every_direction(direction: str, name: str) -> None:
    chip = device(name)
    small, large = (
        conv2d(chip, "bf16", batch, 28, 28, 256, 256, 3, 3, 1, 1, direction=direction) for batch in (16, 64)
    )
    few, many = seconds(name, small, large)
    assert few < many < 4.5 * few
    flops = large.useful_flops
    assert 0.3 < flops / chip.peak("bf16").value / many < 1.0


def test_dilated_zeros_are_streamed_on_arrays_only() -> None:
    for name, factor in (("tpu-v4", 3.0), ("h100-sxm", 0.9)):
        chip = device(name)
        forward, back = (
            conv2d(chip, "bf16", 64, 56, 56, 256, 256, 3, 3, 2, 1, direction=direction)
            for direction in ("fwd", "dgrad")
        )
        one, other = seconds(name, forward, back)
        assert other > factor * one
        if name == "h100-sxm":
            assert other < 2.5 * one


def test_depthwise_runs_on_the_lanes() -> None:
    chip = device("tpu-v5e")
    deep = conv2d(chip, "bf16", 32, 56, 56, 256, 256, 3, 3, 1, 1, groups=256)
    alone = seconds("tpu-v5e", deep)[0]
    assert alone < 0.2 * seconds("tpu-v5e", replace(deep, groups=1))[0]


@pytest.mark.parametrize("name", [*TPUS, "h100-sxm", "b200-sxm", "mi300x", "cpu"])
def test_conforms(name: str) -> None:
    assert check_backend(BACKEND, [name]) == []
    assert get_backend("systolic").name == "systolic"


@pytest.mark.parametrize("element", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v6e"])
def test_more_work_takes_no_less_time(name: str, element: str) -> None:
    chip = device(name)
    sizes = [8, 96, 128, 256, 640, 1024, 2048, 4096, 8192]
    for make in (
        lambda size: matmul(chip, element, size, 512, 512),
        lambda size: matmul(chip, element, 512, size, 512),
        lambda size: matmul(chip, element, 512, 512, size),
        lambda size: matmul(chip, element, 128, 128, 128, size),
        lambda size: layernorm(chip, element, size, 1024),
        lambda size: reduce(chip, element, size, 1024),
    ):
        times = np.array(seconds(name, *map(make, sizes)))
        # f16 has constants of its own in each of three sizes, which meet within a few percent
        assert (times[1:] >= times[:-1] * (0.9 if element == "f16" else 1.0)).all(), times


def test_misaligned_products_cost_whole_tiles() -> None:
    chip = device("tpu-v6e")
    aligned, over, half = seconds(
        "tpu-v6e",
        matmul(chip, "bf16", 4096, 4096, 4096),
        matmul(chip, "bf16", 4097, 4097, 4096),
        matmul(chip, "bf16", 4096, 4096, 4096 + 128),
    )
    # 17 column folds over two arrays: nine on the busiest, or half of the lines on each
    assert 17 / 16 < over / aligned < 9.1 / 8
    assert half == pytest.approx(aligned * 17 / 16, rel=0.02)


def test_f16_is_converted_and_said_so() -> None:
    chip = device("tpu-v4")
    half, brain = seconds("tpu-v4", matmul(chip, "f16", 4096, 4096, 4096), matmul(chip, "bf16", 4096, 4096, 4096))
    assert half == pytest.approx(967e-6, rel=0.1)
    assert brain < 0.65 * half
    assert any("f16 is converted" in text and "carried" not in text for text in BACKEND.assumptions(chip))
    assert any("carried to tpu-v5p by ratio" in text for text in BACKEND.assumptions(device("tpu-v5p")))
    own, carried = (
        BACKEND.estimate(KernelTable.of([matmul(device(name), "bf16", 4096, 4096, 4096)]), device(name))
        for name in ("tpu-v6e", "tpu-v5p")
    )
    assert (carried.high_s / carried.time_s)[0] > 1.2 * (own.high_s / own.time_s)[0]


def test_turned_misaligned_products_are_slower() -> None:
    chip = device("tpu-v4")
    wide, high = seconds("tpu-v4", matmul(chip, "f16", 1789, 2978, 2326), matmul(chip, "f16", 2978, 1789, 2326))
    assert wide > 1.8 * high


def test_details_of_rows() -> None:
    chip = device("tpu-v6e")
    table = KernelTable.of(
        [
            matmul(chip, "bf16", 8192, 8192, 8192),
            matmul(chip, "bf16", 1, 4096, 4096),
            matmul(chip, "bf16", 4096, 100, 100),
            elementwise(chip, "bf16", 1024, 1024),
        ]
    )
    found = BACKEND.detail(table, chip)
    assert tuple(found) == DETAILS
    large, thin, small, lanes = range(4)
    assert 0.85 < found["utilisation"][large] <= 1.0
    assert found["utilisation"][thin] < 0.02
    assert found["stall_cycles"][thin] > 0.3 * found["cycles"][thin]
    assert found["mapping_efficiency"][small] == pytest.approx(100 * 100 / 256**2)
    assert np.isnan([found[name][lanes] for name in DETAILS if name != "bandwidth_bytes_per_s"]).all()
    assert (found["bandwidth_bytes_per_s"] <= chip.hbm_bytes_per_s.value * 1.000001).all()
    assert (found["stall_cycles"][:3] >= 0).all()


def test_attention_counts_what_is_seen() -> None:
    chip = device("tpu-v5p")
    full, causal, windowed = seconds(
        "tpu-v5p",
        attention(chip, "bf16", 4, 32, 4096, 4096, 128),
        attention(chip, "bf16", 4, 32, 4096, 4096, 128, 0, 1),
        attention(chip, "bf16", 4, 32, 4096, 4096, 128, 0, 1, 512),
    )
    assert 0.5 < causal / full < 0.6
    assert windowed < 0.5 * causal
