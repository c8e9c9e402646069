"""SCALE-Sim's files: read leniently, refused with file, line and field, reports written whole."""

from pathlib import Path

import pytest

from stablecast.backends.systolic import read_config, read_topology, run
from stablecast.ir.errors import InputError

_CFG = "[architecture_presets]\nArrayHeight: 8\nArrayWidth = 4\n"
_CONV = "Layer name, IFMAP Height, IFMAP Width, Filter Height, Filter Width, Channels, Num Filter, Strides,\n"


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_only_the_array_is_required(tmp_path: Path) -> None:
    config = read_config(_write(tmp_path / "small.cfg", "arrayheight: 8\nARRAYWIDTH = 4\n"))
    assert (config.rows, config.cols, config.dataflow, config.mode, config.run_name) == (8, 4, "ws", "CALC", "small")


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    text = _CFG + "MemoryBanks: 2\nNewKey: 7\n[run_presets]\nUseRamulatorTrace: True\n"
    notes = "\n".join(read_config(_write(tmp_path / "c.cfg", text)).notes)
    for name in ("MemoryBanks (line 4)", "NewKey (line 5)", "UseRamulatorTrace", "IfmapSRAMBankBandwidth"):
        assert name in notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[general]\nrun_name = x\n", "no ArrayHeight"),
        (_CFG.replace("8", "-8"), r":2: ArrayHeight = '-8'; allowed: whole numbers from 1"),
        (_CFG + "Dataflow : rs\n", r":4: Dataflow = 'rs'; allowed: os, ws, is"),
        (_CFG + "Bandwidth : 4,x\n", r":4: Bandwidth = '4,x'"),
        (_CFG + "SparsitySupport : perhaps\n", r":4: SparsitySupport = 'perhaps'; allowed: True, False"),
        (_CFG + "nonsense\n", ":4: 'nonsense' is neither"),
        (_CFG + "run_name: ../x\n", ":4: run_name"),
    ],
)
def test_bad_configs(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_config(_write(tmp_path / "c.cfg", text))


def test_lenient_rows(tmp_path: Path) -> None:
    text = (
        "\ufeff"
        + _CONV.replace("Strides,", "Strides,,,Eh,")
        + ",,,,\nTitle,\nA,8,9,3,2,4,5,2,,,6\nB, 8,9,3,2,4,5,1\r\n"
    )
    topology = read_topology(_write(tmp_path / "t.csv", text))
    first, second = topology.layers
    assert (first.ifmap_h, first.ifmap_w, first.filter_h, first.filter_w) == (8, 9, 3, 2)
    assert (first.channels, first.filters, first.stride_h, first.stride_w, second.stride_h) == (4, 5, 2, 2, 1)
    assert "line 3: 'Title'" in topology.notes[0]
    assert "'Eh'" in topology.notes[1]


def test_named_columns_beyond_scalesim(tmp_path: Path) -> None:
    header = _CONV.rstrip("\n") + " Stride W, Padding, Dilation, Groups, Batch Size, Sparsity,\n"
    layer = read_topology(_write(tmp_path / "t.csv", header + "A,9,9,3,3,4,8,2,1,1,2,4,16,2:4,\n")).layers[0]
    assert (layer.stride_h, layer.stride_w, layer.pad_h, layer.dilation_w, layer.groups, layer.batch) == (
        2,
        1,
        1,
        2,
        4,
        16,
    )
    assert (layer.sparse_n, layer.sparse_m) == (2, 4)


def test_gemm_is_known_by_its_header(tmp_path: Path) -> None:
    topology = read_topology(_write(tmp_path / "t.csv", "Layer, M, N, K,\nA,5,6,7,\n"))
    layer = topology.layers[0]
    assert (topology.kind, layer.m, layer.n, layer.k) == ("gemm", 5, 6, 7)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("A,8,8,3,3,4,x,1,", r":2: number of filters = 'x'; allowed: whole numbers from 1"),
        ("A,8,8,3,3,4,5,-1,", r":2: stride = '-1'"),
        ("A,8,2,3,3,4,5,1,", r":2: filter width = 3 is larger than the input's 2; allowed: 1 to 2"),
        ("A,8,8,3,", r":2: no filter width; allowed: name, IFMAP height"),
        ("A,8,8,3,3,4,5,1,5:4,", r":2: sparsity = '5:4'"),
        ("", "no layer"),
    ],
)
def test_bad_rows(row: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_topology(_write(tmp_path / "t.csv", _CONV + row + "\n"))


def test_reports_under_the_run_name(tmp_path: Path) -> None:
    config = _write(tmp_path / "c.cfg", "[general]\nrun_name = mine\n" + _CFG)
    topology = _write(tmp_path / "t.csv", _CONV + "A,8,8,3,3,4,5,1,\nDPB,8,8,3,3,2,5,1,\n")
    result = run(config, topology, tmp_path / "out", compat="scalesim-3.0")
    names = {"COMPUTE_REPORT.csv", "BANDWIDTH_REPORT.csv", "DETAILED_ACCESS_REPORT.csv"}
    assert {path.name for path in (tmp_path / "out" / "mine").iterdir()} == names
    assert {path.name for path in result.files} == names
    lines = (tmp_path / "out" / "mine" / "COMPUTE_REPORT.csv").read_text().splitlines()
    assert lines[0].startswith("LayerID, Total Cycles (incl. prefetch), Total Cycles, Stall Cycles, Overall Util %,")
    # SCALE-Sim runs a layer named DP once per channel
    assert [layer.name for layer in result.layers] == ["A", "DPBChannel_0", "DPBChannel_1"]
    first = result.layers[0]
    assert lines[1].startswith(f"0, {first.overall_cycles}, {first.total_cycles}, 0, ")


def test_a_bad_layer_leaves_no_report(tmp_path: Path) -> None:
    config = _write(tmp_path / "c.cfg", _CFG)
    topology = _write(tmp_path / "t.csv", _CONV + "A,8,8,3,3,4,5,1,\nB,8,8,3,3,4,5,zero,\n")
    with pytest.raises(InputError):
        run(config, topology, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sparse_runs_write_a_fourth_report(tmp_path: Path) -> None:
    config = _write(tmp_path / "c.cfg", _CFG + "[sparsity]\nSparsitySupport : true\nSparseRep : csr\n")
    topology = _write(tmp_path / "t.csv", "Layer,M,N,K,\nA,5,6,8,2:4,\n")
    run(config, topology, tmp_path / "out", compat="scalesim-3.0")
    text = (tmp_path / "out" / "c" / "SPARSE_REPORT.csv").read_text().splitlines()
    # 6 filters of 8 words, half of them kept: 24 values, 24 indices, 8 + 1 row pointers
    assert text[1].startswith("0, csr, 48, 57, 33, ")


def test_all_shipped_inputs_are_read_or_named(scalesim_inputs: Path) -> None:
    configs = sorted((scalesim_inputs / "configs").glob("*.cfg"))
    assert len(configs) == 13
    for path in configs:
        read_config(path)
    refused: set[str] = set()
    named: list[bool] = []
    topologies = sorted((scalesim_inputs / "topologies").rglob("*.csv"))
    assert len(topologies) == 131
    for path in topologies:
        try:
            read_topology(path)
        except InputError as error:
            refused.add(path.name)
            named.append(f"{path}:" in error.message)
    # letters for sizes, and one row whose comma is misplaced
    assert all(named)
    assert refused == {"LSTM.csv", "LSTM_template.csv", "MLPERF.csv", "Sentimental_seqLSTM.csv"}
