"""Trace files and custom layouts."""

import csv
from pathlib import Path

import numpy as np
import pytest

from stablecast.backends.systolic import DATAFLOWS, Dataflow, Layer, Layout, SramBanks, SystolicConfig, evaluate, run
from stablecast.backends.systolic.layout import OperandLayout, read_layout
from stablecast.backends.systolic.topology import Topology
from stablecast.ir.errors import InputError

COMPAT = "scalesim-3.0"
_LAYERS = (Layer.gemm("g", 20, 30, 45), Layer("c", 9, 8, 3, 2, 7, 10))


def _trace(path: Path) -> np.ndarray:
    with path.open(newline="") as handle:
        return np.array([[float(cell) for cell in row] for row in csv.reader(handle)])


@pytest.mark.parametrize("mode", ["CALC", "USER"])
@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_traces_add_up_to_the_reports(dataflow: Dataflow, mode: str, tmp_path: Path) -> None:
    config = SystolicConfig(
        8, 4, 1, 1, 1, dataflow, "USER" if mode == "USER" else "CALC", (3,), SramBanks(7), SramBanks(5), run_name="r"
    )
    result = run(config, Topology("t", "conv", _LAYERS), tmp_path, compat=COMPAT, traces=True)
    for index, report in enumerate(result.layers):
        folder = tmp_path / "r" / f"layer{index}"
        assert len(list(folder.iterdir())) == 6
        for name, sram, dram in (
            ("IFMAP", report.sram_ifmap, report.dram_ifmap),
            ("FILTER", report.sram_filter, report.dram_filter),
            ("OFMAP", report.sram_ofmap, report.dram_ofmap),
        ):
            lines = _trace(folder / f"{name}_SRAM_TRACE.csv")
            used = lines[(lines[:, 1:] >= 0).any(axis=1), 0]
            assert (used[0], used[-1]) == (sram.start, sram.stop)
            words = int((lines[:, 1:] >= 0).sum())
            # the report of an os run counts R + C results too many per fold
            assert words == sram.words or (dataflow == "os" and name == "OFMAP" and words < sram.words)
            cycles = _trace(folder / f"{name}_DRAM_TRACE.csv")[:, 0]
            assert (cycles.min(), cycles.max()) == (dram.start, dram.stop)


def test_traces_need_compatibility_mode(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="traces"):
        run(SystolicConfig(8, 4), Topology("t", "conv", _LAYERS), tmp_path, traces=True)


def _layout(words: int) -> Layout:
    ifmap = OperandLayout((1, words, 1), (3, 4, 5), (0, 1, 2))
    return Layout(ifmap, OperandLayout((1, 1, 1, 1), (0, 1, 2, 3), (4, 5, 6, 7)))


def test_bank_conflicts_by_hand() -> None:
    """A 4 x 8 input in lines of 8 words, one a row: the 4 rows of a fold ask for 4 lines of the one bank at a time.

    Each line of the array that k inputs enter then takes k cycles with one port: 1 2 3 4 4 4 4 4 3 2 1, 21 extra.
    """
    layer = Layer.gemm("g", 4, 4, 8)
    free = SystolicConfig(4, 4, dataflow="os", mode="USER", bandwidths=(100,), ifmap=SramBanks(8, 1, 1))
    banked = SystolicConfig(
        4, 4, dataflow="os", mode="USER", bandwidths=(100,), ifmap=SramBanks(8, 1, 1, custom_layout=True)
    )
    assert evaluate(layer, free, COMPAT).stall_cycles == 0
    assert evaluate(layer, banked, COMPAT, _layout(8)).stall_cycles == 21
    two_ports = SystolicConfig(
        4, 4, dataflow="os", mode="USER", bandwidths=(100,), ifmap=SramBanks(8, 1, 2, custom_layout=True)
    )
    # ceil(k / 2) - 1 each: 0 0 1 1 1 1 1 1 1 0 0
    assert evaluate(layer, two_ports, COMPAT, _layout(8)).stall_cycles == 7


def test_layout_files(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("Layer," * 21 + "\nA,1,4,1,1,2,1,0,1,2,3,4,5,0,1,2,3,4,5,6,7,\n")
    layout = read_layout(path)
    assert layout.ifmap == OperandLayout((1, 4, 2), (0, 1, 2), (3, 4, 5))
    assert layout.filter == OperandLayout((1, 2, 1, 1), (0, 1, 2, 3), (4, 5, 6, 7))
    path.write_text("Layer," * 21 + "\nA,1,4,1,1,2,1,0,1,1,3,4,5,0,1,2,3,4,5,6,7,\n")
    with pytest.raises(InputError, match=r"l.csv:2: ifmap orders"):
        read_layout(path)
    config = SystolicConfig(4, 4, mode="USER", filter=SramBanks(8, custom_layout=True))
    with pytest.raises(InputError, match="a filter line holds 1 words"):
        evaluate(_LAYERS[0], config, COMPAT, _layout(8))


def test_a_layout_that_is_not_modelled_is_noted() -> None:
    config = SystolicConfig(8, 4, ifmap=SramBanks(8, custom_layout=True))
    assert "no layout file" in "".join(run(config, Topology("t", "conv", _LAYERS), compat=COMPAT).notes)
    assert "CALC" in "".join(run(config, Topology("t", "conv", _LAYERS), layout=_layout(8), compat=COMPAT).notes)


def test_layers_side_by_side() -> None:
    topology, config = Topology("t", "conv", _LAYERS), SystolicConfig(8, 4)
    assert run(config, topology, jobs=2, compat=COMPAT) == run(config, topology, compat=COMPAT)
