"""Runs of a whole topology: SCALE-Sim's command as a function."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stablecast.backends.systolic.compat import evaluate_layer
from stablecast.backends.systolic.config import SystolicConfig, read_config
from stablecast.backends.systolic.corrected_layers import evaluate_corrected
from stablecast.backends.systolic.layers import Layer, LayerKind
from stablecast.backends.systolic.records import LayerReport
from stablecast.backends.systolic.reports import report_texts, write_text_atomically
from stablecast.backends.systolic.topology import Topology, depthwise, depthwise_as_scalesim, read_topology
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


def evaluate(layer: Layer, config: SystolicConfig, compat: Compat | None = None) -> LayerReport:
    """Report of one layer: corrected by default, SCALE-Sim v3's own with `compat="scalesim-3.0"`."""
    if compat is None:
        return evaluate_corrected(layer, config)
    if compat != COMPAT:
        raise InputError(f"unknown compat {compat!r}", f"allowed: {COMPAT}")
    return evaluate_layer(layer, config)


def run(
    config: SystolicConfig | str | Path,
    topology: Topology | str | Path,
    out_dir: str | Path | None = None,
    *,
    kind: LayerKind | None = None,
    compat: Compat | None = None,
) -> RunResult:
    """SCALE-Sim's command as a function: a .cfg, a topology CSV, reports under `out_dir`/<run_name>/.

    Without `out_dir` nothing is written. `kind` None takes conv or gemm from the topology's header. Raises InputError
    naming file, line and field.
    """
    settings, network = load(config, topology, kind)
    notes = [*settings.notes, *network.notes]
    layers: list[Layer] = []
    for layer in network.layers:
        if compat is None:
            layers.append(depthwise(layer))
        else:
            notes.extend(_unsupported(layer))
            layers.extend(depthwise_as_scalesim(layer))
    reports = tuple(evaluate(layer, settings, compat) for layer in layers)
    form = settings.sparsity.form if settings.sparsity.enabled else ""
    files = write_reports(reports, out_dir, settings.run_name, form)
    return RunResult(reports, files, tuple(notes))


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
