"""SCALE-Sim's report files, in its column order, written so that no half file ever bears its final name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

from stablecast.backends.systolic.records import LayerReport
from stablecast.ir.errors import InputError

Number = int | float

_COMPUTE = (
    "LayerID",
    "Total Cycles (incl. prefetch)",
    "Total Cycles",
    "Stall Cycles",
    "Overall Util %",
    "Mapping Efficiency %",
    "Compute Util %",
)
_SPARSE = (
    "LayerID",
    "Sparsity Representation",
    "Original Filter Storage",
    "New Storage (Filter+Metadata)",
    "Filter Metadata Storage",
    "Avg FILTER Metadata SRAM BW",
)


def compute_columns(report: LayerReport) -> list[Number]:
    """COMPUTE_REPORT of one layer, without its number."""
    return [
        report.overall_cycles,
        report.total_cycles,
        report.stall_cycles,
        report.overall_util,
        report.mapping_eff,
        report.compute_util,
    ]


def bandwidth_columns(report: LayerReport) -> list[Number]:
    """BANDWIDTH_REPORT of one layer, words per cycle; with metadata where the layer is sparse."""
    ifmap, filters, ofmap = report.sram_bandwidths()
    metadata = [] if report.sparse is None else [report.metadata_bandwidth]
    return [ifmap, filters, *metadata, ofmap, *report.dram_bandwidths()]


def detail_columns(report: LayerReport) -> list[Number]:
    """DETAILED_ACCESS_REPORT of one layer: start cycle, stop cycle (as floats, as upstream), words; six streams."""
    columns: list[Number] = []
    streams = (
        report.sram_ifmap,
        report.sram_filter,
        report.sram_ofmap,
        report.dram_ifmap,
        report.dram_filter,
        report.dram_ofmap,
    )
    for stream in streams:
        columns += [float(stream.start), float(stream.stop), stream.words]
    return columns


def _bandwidth_header(sparse: bool) -> tuple[str, ...]:
    sram = ("IFMAP", "FILTER", *(("FILTER Metadata",) if sparse else ()), "OFMAP")
    return (
        "LayerID",
        *(f"Avg {name} SRAM BW" for name in sram),
        *(f"Avg {name} DRAM BW" for name in ("IFMAP", "FILTER", "OFMAP")),
    )


def _detail_header() -> tuple[str, ...]:
    names = ["LayerID"]
    for level in ("SRAM", "DRAM"):
        for operand, action in (("IFMAP", "Reads"), ("Filter", "Reads"), ("OFMAP", "Writes")):
            names += [f"{level} {operand} Start Cycle", f"{level} {operand} Stop Cycle", f"{level} {operand} {action}"]
    return tuple(names)


def report_texts(reports: Sequence[LayerReport], sparse_form: str = "") -> dict[str, str]:
    """File name to content of the reports; `sparse_form` names the compression of a sparse run."""

    def table(header: Iterable[str], columns: Callable[[LayerReport], list[Number]]) -> str:
        lines = [", ".join(header) + ","]
        lines += [", ".join(map(str, [index, *columns(report)])) + "," for index, report in enumerate(reports)]
        return "\n".join(lines) + "\n"

    sparse = bool(sparse_form)
    texts = {
        "COMPUTE_REPORT.csv": table(_COMPUTE, compute_columns),
        "BANDWIDTH_REPORT.csv": table(_bandwidth_header(sparse), bandwidth_columns),
        "DETAILED_ACCESS_REPORT.csv": table(_detail_header(), detail_columns),
    }
    if sparse:
        lines = [", ".join(_SPARSE) + ", "]
        for index, report in enumerate(reports):
            if report.sparse is not None:
                storage = report.sparse
                values = (storage.original, storage.new, storage.metadata, report.metadata_bandwidth)
                lines.append(", ".join(map(str, (index, sparse_form, *values))) + ",")
        texts["SPARSE_REPORT.csv"] = "\n".join(lines) + "\n"
    return texts


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then give it that name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as handle:
            temporary = Path(handle.name)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", "choose another output folder") from error
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", "choose another output folder") from error
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` in one step."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
