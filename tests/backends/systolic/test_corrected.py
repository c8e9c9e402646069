"""The corrected model: by hand, and what must hold for any size."""

import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.backends.systolic import (
    CORRECTIONS,
    DATAFLOWS,
    Dataflow,
    Layer,
    Memory,
    SystolicConfig,
    compute_cycles,
    energy,
    estimate,
    evaluate,
    partitioned_cycles,
)
from stablecast.ir.errors import InputError

_SIZE = st.integers(1, 300)


@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_cycles_by_hand(dataflow: Dataflow) -> None:
    """One fold, M = N = K = R = C = 8: 8 + 2 * 8 + 8 - 2 cycles whatever is stationary."""
    assert int(compute_cycles(8, 8, 8, array_rows=8, array_cols=8, dataflow=dataflow)) == 30
    assert int(compute_cycles(8, 8, 8, batch=3, array_rows=8, array_cols=8, dataflow=dataflow)) == 90
    assert int(compute_cycles(16, 16, 16, array_rows=8, array_cols=8, dataflow=dataflow)) == 4 * 38


def test_stall_is_the_lateness() -> None:
    """ws, two row folds of 8 x 8: a fold streams 16 x 8 words in 38 cycles; at 2 words a cycle that takes 64."""
    memory = Memory(1024, 1024, 1024, 2, 100, 100)
    result = estimate(16, 8, 16, array_rows=8, array_cols=8, dataflow="ws", memory=memory)
    assert int(result.compute_cycles) == 2 * 38
    assert float(result.stall_cycles) == 2 * (64 - 38)
    assert float(result.fill_cycles) == 64
    # 16 x 8 results at 100 words a cycle
    assert float(result.drain_cycles) == 2
    assert float(result.total_cycles) == 2 * 64 + 64 + 2


def test_latency_stands_before_each_fetch() -> None:
    """The folds above with 10 cycles of latency: each fetch takes 74 cycles, the first one too."""
    result = estimate(
        16, 8, 16, array_rows=8, array_cols=8, dataflow="ws", memory=Memory(1024, 1024, 1024, 2, 100, 100, latency=10)
    )
    assert float(result.stall_cycles) == 2 * (74 - 38)
    assert float(result.fill_cycles) == 74


def test_partial_sums_stay_or_spill() -> None:
    on_eight = partial(estimate, array_rows=8, array_cols=8, dataflow="ws")
    stay = on_eight(100, 8, 24, memory=Memory(1 << 20, 1 << 20, 800))
    spill = on_eight(100, 8, 24, memory=Memory(1 << 20, 1 << 20, 799))
    assert (float(stay.ofmap_writes), float(stay.ofmap_reads)) == (800, 0)
    assert (float(spill.ofmap_writes), float(spill.ofmap_reads)) == (2400, 1600)


def test_an_operand_that_fits_is_fetched_once() -> None:
    on_eight = partial(estimate, array_rows=8, array_cols=8, dataflow="ws")
    fits = on_eight(10, 24, 10, memory=Memory(100, 1 << 20, 1 << 20))
    again = on_eight(10, 24, 10, memory=Memory(99, 1 << 20, 1 << 20))
    assert (float(fits.ifmap_reads), float(again.ifmap_reads)) == (100, 300)
    assert float(fits.filter_reads) == 240


@settings(deadline=None)
@given(_SIZE, _SIZE, _SIZE, st.sampled_from(DATAFLOWS), st.integers(0, 3))
def test_cycles_never_fall_with_size(m: int, n: int, k: int, dataflow: Dataflow, axis: int) -> None:
    step = [0, 0, 0]
    if axis < 3:
        step[axis] = 17
    sizes = ((m, n, k), (m + step[0], n + step[1], k + step[2]))
    small, large = (
        compute_cycles(*size, array_rows=16, array_cols=8, dataflow=dataflow, batch=1 + (axis == 3) * at)
        for at, size in enumerate(sizes)
    )
    assert int(small) <= int(large)


@settings(deadline=None)
@given(_SIZE, _SIZE, _SIZE, st.sampled_from(DATAFLOWS), st.integers(1, 40), st.integers(1, 20))
def test_more_bandwidth_never_hurts(m: int, n: int, k: int, dataflow: Dataflow, words: int, more: int) -> None:
    room = (4096, 4096, 4096)
    slow, fast = (
        estimate(m, n, k, array_rows=16, array_cols=8, dataflow=dataflow, memory=Memory(*room, rate, rate, rate))
        for rate in (words, words + more)
    )
    assert float(fast.total_cycles) <= float(slow.total_cycles)
    assert float(fast.stall_cycles) >= 0
    assert 0 < float(slow.overall_util) <= 1


@settings(deadline=None)
@given(_SIZE, _SIZE, _SIZE, st.sampled_from(DATAFLOWS))
def test_words_are_at_least_the_operands(m: int, n: int, k: int, dataflow: Dataflow) -> None:
    small, large = (
        estimate(m, n, k, array_rows=16, array_cols=8, dataflow=dataflow, memory=Memory(room, room, room))
        for room in (1024, 1 << 30)
    )
    assert float(large.ifmap_reads) == m * k
    assert float(large.filter_reads) == n * k
    assert float(large.ofmap_writes) == m * n
    for name in ("ifmap_reads", "filter_reads", "ofmap_writes", "ofmap_reads"):
        assert float(getattr(small, name)) >= float(getattr(large, name))


def test_arrays_and_scalars_agree() -> None:
    m, n, k = np.array([5, 700, 33]), np.array([900, 2, 64]), np.array([8, 8, 1000])
    flows = np.array(["os", "ws", "is"])
    table = estimate(
        m, n, k, array_rows=16, array_cols=[8, 16, 32], dataflow=flows, memory=Memory(999, 999, 999, 3, 4, 5)
    )
    for at in range(3):
        one = estimate(
            int(m[at]),
            int(n[at]),
            int(k[at]),
            array_rows=16,
            array_cols=8 << at,
            dataflow=str(flows[at]),
            memory=Memory(999, 999, 999, 3, 4, 5),
        )
        assert float(table.total_cycles[at]) == float(one.total_cycles)
        assert float(table.ifmap_reads[at]) == float(one.ifmap_reads)
    by_index = compute_cycles(m, n, k, array_rows=16, array_cols=8, dataflow=np.array([0, 1, 2]))
    assert by_index.tolist() == compute_cycles(m, n, k, array_rows=16, array_cols=8, dataflow=flows).tolist()


def test_depthwise_groups_batch_and_padding() -> None:
    config = SystolicConfig(16, 8, dataflow="ws")
    layer = Layer("conv", 14, 14, 3, 3, 32, 64, pad_h=1, pad_w=1, batch=4)
    whole = evaluate(layer, config)
    assert whole.total_cycles == int(compute_cycles(4 * 14 * 14, 64, 288, array_rows=16, array_cols=8, dataflow="ws"))
    depthwise = evaluate(replace(layer, groups=32), config)
    assert depthwise.total_cycles == int(
        compute_cycles(4 * 14 * 14, 2, 9, batch=32, array_rows=16, array_cols=8, dataflow="ws")
    )
    # a dilation of 2 makes the 3 x 3 window reach over 5 x 5
    assert replace(layer, pad_h=0, pad_w=0, dilation_h=2, dilation_w=2).whole_out_h == 10
    # 64 kB hold 65536 words: the 4 x 14 x 14 x 32 input is fetched once
    assert whole.dram_ifmap.words == 4 * 14 * 14 * 32


def test_energy_by_hand() -> None:
    """8 x 8 x 8 on one 8 x 8 fold with 32 kB SRAMs: 20 pJ for 8 bytes, 64 words of each operand."""
    layer, config = Layer.gemm("g", 8, 8, 8), SystolicConfig(8, 8, 32, 32, 32, "ws")
    result = energy(layer, evaluate(layer, config), config)
    assert result.compute_pj == pytest.approx(512 * 0.23)
    assert result.sram_pj == pytest.approx(3 * 64 * 20 / 8)
    assert result.low_pj == pytest.approx(result.compute_pj + result.sram_pj + 3 * 64 * 1300 / 8)
    assert result.high_pj - result.low_pj == pytest.approx(3 * 64 * 1300 / 8)


def test_what_cannot_be_is_refused() -> None:
    config = SystolicConfig(16, 8)
    with pytest.raises(InputError, match="larger than its padded input"):
        evaluate(Layer("conv", 2, 8, 3, 3, 4, 4), config)
    with pytest.raises(InputError, match="groups = 3"):
        evaluate(Layer("conv", 8, 8, 3, 3, 4, 4, groups=3), config)
    with pytest.raises(InputError, match="m = 0"):
        compute_cycles(0, 1, 1, array_rows=8, array_cols=8)
    with pytest.raises(InputError, match="batch = 0"):
        compute_cycles(1, 1, 1, batch=0, array_rows=8, array_cols=8)
    with pytest.raises(InputError, match="bandwidths 0, 1, 1"):
        Memory(1, 1, 1, 0, 1, 1)
    with pytest.raises(InputError, match="unknown dataflow"):
        compute_cycles([1, 2], 1, 1, array_rows=8, array_cols=8, dataflow=["os", "rs"])
    with pytest.raises(InputError, match="array height is 0"):
        SystolicConfig(0, 8)


def test_each_correction_is_documented() -> None:
    assert set(CORRECTIONS) >= {"full-last-cycle", "os-drain", "os-writes", "stall-once", "partial-sums"}


def test_a_million_products_at_once() -> None:
    sizes = np.random.default_rng(0).integers(1, 5000, (3, 1_000_000))
    began = time.perf_counter()
    cycles = compute_cycles(*sizes, array_rows=128, array_cols=128, dataflow="ws")
    # 0.02 s measured; the bound leaves room for a loaded machine
    assert time.perf_counter() - began < 1
    assert cycles.shape == (1_000_000,)


def test_products_over_several_arrays() -> None:
    """4 x 2 folds of 8 x 8 and 100 steps: a fold is 122 cycles, or 72 with half the steps."""
    shared = partial(partitioned_cycles, 100, 16, 32, array_rows=8, array_cols=8, dataflow="ws")
    assert int(shared()) == 8 * 122
    assert int(shared(row_parts=2, col_parts=2)) == 2 * 122
    assert int(shared(row_parts=3)) == 2 * 2 * 122
    assert int(shared(step_parts=2)) == 8 * 72
    with pytest.raises(InputError, match="row_parts = 0"):
        shared(row_parts=0)
