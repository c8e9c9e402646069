"""Runs of a whole topology: SCALE-Sim's command as a function."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from stablecast.backends.systolic.compat import evaluate_layer
from stablecast.backends.systolic.config import SystolicConfig, read_config
from stablecast.backends.systolic.corrected_layers import evaluate_corrected
from stablecast.backends.systolic.layers import Layer, LayerKind
from stablecast.backends.systolic.layout import Layout, read_layout
from stablecast.backends.systolic.records import LayerReport
from stablecast.backends.systolic.reports import report_texts, write_text_atomically
from stablecast.backends.systolic.topology import Topology, depthwise, depthwise_as_scalesim, read_topology
from stablecast.backends.systolic.traces import write_traces
from stablecast.ir.errors import InputError

Compat = Literal["scalesim-3.0"]
COMPAT: Compat = "scalesim-3.0"


@dataclass(frozen=True, slots=True)
class RunResult:
    """Reports of a run, the files written, and notes on what was passed over or is not supported."""

    layers: tuple[LayerReport, ...]
    files: tuple[Path, ...]
    notes: tuple[str, ...]

    @property
    def total_cycles(self) -> int:
        """Cycles of all layers, stalls included, without the first fill."""
        return sum(layer.total_cycles for layer in self.layers)


def load(
    config: SystolicConfig | str | Path, topology: Topology | str | Path, kind: LayerKind | None
) -> tuple[SystolicConfig, Topology]:
    """Settings and layers, read from files where paths are given."""
    settings = config if isinstance(config, SystolicConfig) else read_config(config)
    layers = topology if isinstance(topology, Topology) else read_topology(topology, kind)
    return settings, layers


def evaluate(
    layer: Layer, config: SystolicConfig, compat: Compat | None = None, layout: Layout | None = None
) -> LayerReport:
    """Report of one layer: corrected by default, SCALE-Sim v3's own with `compat="scalesim-3.0"`.

    `layout` counts in compatibility mode where the configuration asks for custom layouts under USER bandwidth.
    """
    if compat is None:
        return evaluate_corrected(layer, config)
    if compat != COMPAT:
        raise InputError(f"unknown compat {compat!r}", f"allowed: {COMPAT}")
    return evaluate_layer(layer, config, layout)


def run(
    config: SystolicConfig | str | Path,
    topology: Topology | str | Path,
    out_dir: str | Path | None = None,
    *,
    layout: Layout | str | Path | None = None,
    kind: LayerKind | None = None,
    compat: Compat | None = None,
    traces: bool = False,
    jobs: int = 1,
) -> RunResult:
    """SCALE-Sim's command as a function: a .cfg, a topology CSV, reports under `out_dir`/<run_name>/.

    Without `out_dir` nothing is written. `kind` None takes conv or gemm from the topology's header. `traces` adds
    SCALE-Sim's six trace files per layer, in compatibility mode; `jobs` layers run side by side in processes of their
    own. Raises InputError naming file, line and field.
    """
    settings, network = load(config, topology, kind)
    placed = layout if isinstance(layout, Layout) or layout is None else read_layout(layout)
    if traces and (compat is None or out_dir is None):
        raise InputError("traces without compatibility mode or output folder", f"give compat={COMPAT} and a folder")
    notes = [*settings.notes, *network.notes, *_layout_notes(settings, placed, compat)]
    if settings.sparsity.enabled and settings.filter_offset == 0 and compat is not None:
        notes.append("FilterOffset 0 with sparsity: SCALE-Sim loses the word at address 0, which is not reproduced")
    layers: list[Layer] = []
    for layer in network.layers:
        if compat is None:
            layers.append(depthwise(layer))
        else:
            notes.extend(_unsupported(layer))
            layers.extend(depthwise_as_scalesim(layer))
    reports = _reports(layers, settings, compat, placed, jobs)
    form = settings.sparsity.form if settings.sparsity.enabled else ""
    files = list(write_reports(reports, out_dir, settings.run_name, form))
    if traces and out_dir is not None:
        for index, layer in enumerate(layers):
            files += write_traces(layer, settings, Path(out_dir) / settings.run_name / f"layer{index}", placed)
    return RunResult(reports, tuple(files), tuple(notes))


def _reports(
    layers: list[Layer], config: SystolicConfig, compat: Compat | None, layout: Layout | None, jobs: int
) -> tuple[LayerReport, ...]:
    work = partial(evaluate, config=config, compat=compat, layout=layout)
    if jobs <= 1 or len(layers) < 2:
        return tuple(map(work, layers))
    with ProcessPoolExecutor(min(jobs, len(layers)), mp_context=get_context("spawn")) as pool:
        return tuple(pool.map(work, layers))


def _layout_notes(config: SystolicConfig, layout: Layout | None, compat: Compat | None) -> list[str]:
    asked = [name for name, banks in (("Ifmap", config.ifmap), ("Filter", config.filter)) if banks.custom_layout]
    if not asked:
        return []
    keys = " and ".join(f"{name}CustomLayout" for name in asked)
    if compat is None:
        return [f"{keys}: bank conflicts are modelled in compatibility mode only"]
    if layout is None:
        return [f"{keys}: no layout file is given, so bank conflicts are not modelled"]
    if config.mode == "CALC":
        return [f"{keys}: no effect with InterfaceBandwidth CALC, as in SCALE-Sim"]
    if config.sparsity.enabled:
        return [f"{keys}: not modelled together with sparsity"]
    return []


def write_reports(
    reports: tuple[LayerReport, ...], out_dir: str | Path | None, run_name: str, sparse_form: str = ""
) -> tuple[Path, ...]:
    """Write the report files under `out_dir`/`run_name`; returns their paths."""
    if out_dir is None:
        return ()
    folder = Path(out_dir) / run_name
    files: list[Path] = []
    for name, text in report_texts(reports, sparse_form).items():
        write_text_atomically(folder / name, text)
        files.append(folder / name)
    return tuple(files)


def _unsupported(layer: Layer) -> list[str]:
    asked = {
        "batch": layer.batch != 1,
        "padding": bool(layer.pad_h or layer.pad_w),
        "dilation": layer.dilation_h != 1 or layer.dilation_w != 1,
        "groups": layer.groups != 1,
    }
    name = layer.where or layer.name
    found = [what for what, is_asked in asked.items() if is_asked]
    if not found:
        return []
    window_h, window_w = layer.filter_h, layer.filter_w
    if window_h > layer.ifmap_h or window_w > layer.ifmap_w:
        raise InputError(f"{name}: filter is larger than its input without padding", "use the corrected mode")
    return [f"{name}: {', '.join(found)} not part of SCALE-Sim's model, passed over in compatibility mode"]
