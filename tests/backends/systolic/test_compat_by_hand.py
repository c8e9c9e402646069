"""Compatibility mode against figures that follow from SCALE-Sim's rules by hand."""

import pytest

from stablecast.backends.systolic import DATAFLOWS, Dataflow, Layer, SystolicConfig, compute_cycles, evaluate

COMPAT = "scalesim-3.0"


def test_one_multiply_on_one_element() -> None:
    """1 x 1 x 1 on 1 x 1, output-stationary: one line, index 0 is the last, written in the line it is computed."""
    report = evaluate(Layer.gemm("one", 2, 1, 3), SystolicConfig(2, 2, dataflow="os"), COMPAT)
    # L = T + R + C - 2 = 5 lines, one fold; total is the index of the last
    assert report.total_cycles == 4
    assert report.stall_cycles == 0
    # M N + R + C
    assert report.sram_ofmap.words == 2 + 4
    # rows 0 and 1 enter at lines 0 and 1, K = 3: last word at line 3, read one cycle later
    assert (report.sram_ifmap.start, report.sram_ifmap.stop, report.sram_ifmap.words) == (1, 4, 6)
    assert report.mapping_eff == 50
    assert report.compute_util == pytest.approx(100 * 2 * 3 / (4 * 5))
    # 64 kB in hundredths of 655 words: 6 words take one set, 66 cycles at 10 words a cycle, done at cycle -1
    assert (report.dram_ifmap.start, report.dram_ifmap.stop, report.dram_ifmap.words) == (-66, -1, 6)


def test_weight_stationary_first_lines() -> None:
    """R = 4: weights of K = 3 rows load bottom up in lines 1 to 3; inputs follow from line R, results from 2R - 1."""
    report = evaluate(Layer.gemm("ws", 5, 2, 3), SystolicConfig(4, 2, dataflow="ws"), COMPAT)
    assert report.total_cycles == 5 + 8 + 2 - 2 - 1
    assert (report.sram_filter.start, report.sram_filter.stop, report.sram_filter.words) == (2, 4, 6)
    assert (report.sram_ifmap.start, report.sram_ifmap.words) == (5, 15)
    assert (report.sram_ofmap.start, report.sram_ofmap.stop, report.sram_ofmap.words) == (7, 12, 10)


def test_partial_windows_are_kept() -> None:
    """Stride 3 over 7 with a filter of 3: SCALE-Sim counts ceil(7/3) = 3 windows a side, frameworks 2."""
    layer = Layer("conv", 8, 8, 3, 3, 1, 1, 3, 3)
    assert (layer.out_h, layer.whole_out_h, layer.m) == (3, 2, 9)
    assert layer.partial_windows


@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_closed_form_is_the_run_without_stalls(dataflow: Dataflow) -> None:
    config = SystolicConfig(8, 16, dataflow=dataflow)
    cycles = compute_cycles(70, 33, 45, array_rows=8, array_cols=16, dataflow=dataflow, compat=COMPAT)
    assert evaluate(Layer.gemm("g", 70, 33, 45), config, COMPAT).total_cycles == int(cycles)


def test_large_product_with_bandwidth_limits_ends() -> None:
    config = SystolicConfig(256, 256, 6144, 6144, 2048, "os", "USER")
    report = evaluate(Layer.gemm("g", 4096, 4096, 4096), config, COMPAT)
    assert report.total_cycles == 16 * 16 * (4096 + 510) - 1 + report.stall_cycles
    assert report.stall_cycles > 0
