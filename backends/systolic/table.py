"""Tables of layers: one row a layer with its array, the report columns computed beside the inputs."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stablecast.backends.systolic.config import (
    SPARSE_FORMATS,
    BandwidthMode,
    SparseFormat,
    SparsityConfig,
    SramBanks,
    SystolicConfig,
)
from stablecast.backends.systolic.geometry import as_dataflow
from stablecast.backends.systolic.layers import Layer
from stablecast.backends.systolic.records import LayerReport
from stablecast.backends.systolic.reports import Number, write_atomically
from stablecast.backends.systolic.runner import COMPAT, Compat, evaluate
from stablecast.ir.errors import InputError

_OPERANDS = ("if", "fi", "of")


def dense_columns(report: LayerReport) -> dict[str, Number]:
    """Report columns of a dense row: COMPUTE, BANDWIDTH and DETAILED_ACCESS."""
    columns: dict[str, Number] = {
        "overall_cycles": report.overall_cycles,
        "total_cycles": report.total_cycles,
        "stall_cycles": report.stall_cycles,
        "overall_util": report.overall_util,
        "mapping_eff": report.mapping_eff,
        "compute_util": report.compute_util,
    }
    for level, values in (("sram", report.sram_bandwidths()), ("dram", report.dram_bandwidths())):
        columns.update({f"{name}_{level}_bw": value for name, value in zip(_OPERANDS, values, strict=True)})
    sram = (report.sram_ifmap, report.sram_filter, report.sram_ofmap)
    dram = (report.dram_ifmap, report.dram_filter, report.dram_ofmap)
    for level, streams in (("sram", sram), ("dram", dram)):
        for name, stream in zip(_OPERANDS, streams, strict=True):
            columns[f"{level}_{name}_start"] = stream.start
            columns[f"{level}_{name}_stop"] = stream.stop
            columns[f"{level}_{name}_n"] = stream.words
    return columns


def sparse_columns(report: LayerReport) -> dict[str, Number]:
    """Report columns of a sparse row: cycles, utilisations, SRAM words, storage."""
    columns: dict[str, Number] = {
        "total_cycles": report.total_cycles,
        "overall_util": report.overall_util,
        "mapping_eff": report.mapping_eff,
        "compute_util": report.compute_util,
        "sram_if_n": report.sram_ifmap.words,
        "sram_fi_n": report.sram_filter.words,
        "sram_of_n": report.sram_ofmap.words,
    }
    if report.sparse is not None:
        columns |= {
            "orig_filter_storage": report.sparse.original,
            "new_storage": report.sparse.new,
            "metadata_storage": report.sparse.metadata,
            "avg_meta_sram_bw": report.metadata_bandwidth,
        }
    return columns


def evaluate_table(rows_csv: str | Path, out_csv: str | Path, *, compat: Compat | None = COMPAT) -> int:
    """Compute the report columns of each row of `rows_csv` and write the table to `out_csv`; returns the rows.

    Inputs: rows, cols, dataflow; kind (conv or gemm); ifmap_h, ifmap_w, filt_h, filt_w, channels, num_filters, stride
    (conv, or SCALE-Sim's form of a product), or M, N, K; mode, ifmap_kb, filter_kb, ofmap_kb (64), bw_ofmap, bw_ifmap,
    bw_filter (10, USER only); a sparse table has nnz_n, block_m, optimized_mapping, block_size, rand_seed, sparse_rep.
    Report columns already in the table are overwritten in place, others are added. Raises InputError naming file, line
    and field; then nothing is written.
    """
    source = Path(rows_csv)
    try:
        with source.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle, skipinitialspace=True)
            fields = list(reader.fieldnames or ())
            rows = [_evaluated(_Row(source, reader.line_num, row), compat) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {source}: {error}", "give a CSV table") from error
    if not rows:
        raise InputError(f"{source}: no rows", "allowed: a header line, then one layer a line")
    fields += [name for name in rows[0] if name not in fields]

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="") as handle:
            writer = csv.DictWriter(handle, fields, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    write_atomically(Path(out_csv), write)
    return len(rows)


def _evaluated(row: _Row, compat: Compat | None) -> dict[str, str]:
    report = evaluate(row.layer(), row.config(), compat)
    columns = sparse_columns(report) if row.sparse else dense_columns(report)
    return {name: text for name, text in row.cells.items() if name} | {
        name: _text(value) for name, value in columns.items()
    }


def _text(value: Number) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class _Row:
    """One row of inputs."""

    def __init__(self, path: Path, line: int, cells: Mapping[str | None, str | None]) -> None:
        self.where = f"{path}:{line}"
        self.cells = {str(name): (text or "").strip() for name, text in cells.items() if isinstance(text, str | None)}
        self.sparse = bool(self.cells.get("nnz_n"))

    def number(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Whole number of column `name`; required without a default."""
        text = self.cells.get(name, "")
        if not text and default is not None:
            return default
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise InputError(f"{self.where}: {name} = {text!r}", f"allowed: whole numbers from {least}")
        return value

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        """One of `allowed`."""
        text = self.cells.get(name, "") or default
        if text not in allowed:
            raise InputError(f"{self.where}: {name} = {text!r}", "allowed: " + ", ".join(allowed))
        return text

    def layer(self) -> Layer:
        """The layer of this row."""
        name = self.cells.get("id") or self.where
        kind = self.choice("kind", "gemm" if "ifmap_h" not in self.cells else "conv", ("conv", "gemm"))
        layer = self._product(name) if kind == "gemm" else self._convolution(name)
        if not self.sparse:
            return layer
        kept, block = self.number("nnz_n"), self.number("block_m")
        if kept > block:
            raise InputError(f"{self.where}: nnz_n:block_m = {kept}:{block}", "allowed: nnz_n <= block_m")
        return replace(layer, sparse_n=kept, sparse_m=block)

    def _product(self, name: str) -> Layer:
        names = ("M", "N", "K") if self.cells.get("M") else ("ifmap_h", "num_filters", "ifmap_w")
        m, n, k = (self.number(column) for column in names)
        return Layer.gemm(name, m, n, k, where=self.where)

    def _convolution(self, name: str) -> Layer:
        sizes = ("ifmap_h", "ifmap_w", "filt_h", "filt_w", "channels", "num_filters", "stride")
        values = [self.number(column) for column in sizes]
        for window, size, column in ((values[2], values[0], "filt_h"), (values[3], values[1], "filt_w")):
            if window > size:
                raise InputError(f"{self.where}: {column} = {window} is larger than the input", f"allowed: 1 to {size}")
        ifmap_h, ifmap_w, filter_h, filter_w, channels, filters, stride = values
        stride_w = self.number("stride_w", stride)
        return Layer(name, ifmap_h, ifmap_w, filter_h, filter_w, channels, filters, stride, stride_w, where=self.where)

    def config(self) -> SystolicConfig:
        """The array of this row."""
        mode: BandwidthMode = "USER" if self.choice("mode", "CALC", ("CALC", "USER")) == "USER" else "CALC"
        try:
            dataflow = as_dataflow(self.cells.get("dataflow", "ws"))
        except InputError as error:
            raise InputError(f"{self.where}: {error.message}", error.hint) from error
        return SystolicConfig(
            rows=self.number("rows"),
            cols=self.number("cols"),
            ifmap_kb=self.number("ifmap_kb", 64),
            filter_kb=self.number("filter_kb", 64),
            ofmap_kb=self.number("ofmap_kb", 64),
            dataflow=dataflow,
            mode=mode,
            bandwidths=(self.number("bw_ofmap", 10),),
            ifmap=SramBanks(self.number("bw_ifmap", 10)),
            filter=SramBanks(self.number("bw_filter", 10)),
            sparsity=self._sparsity() if self.sparse else SparsityConfig(),
        )

    def _sparsity(self) -> SparsityConfig:
        form: SparseFormat = "ellpack_block"
        name = self.choice("sparse_rep", form, SPARSE_FORMATS)
        for option in SPARSE_FORMATS:
            if option == name:
                form = option
        return SparsityConfig(
            enabled=True,
            row_wise=self.choice("optimized_mapping", "0", ("0", "1")) == "1",
            block=self.number("block_size", 8, 2),
            seed=self.number("rand_seed", 40, 0),
            form=form,
        )
