"""How fast the systolic model is, alone and beside SCALE-Sim.

    python benchmarks/systolic_speed.py [--topology Resnet50.csv] [--scalesim PYTHON] [--json]

`--scalesim` is a Python with scalesim 3.0.0 and numpy < 2.4; its time is that of the whole command less its start-up,
measured on the same layers.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stablecast.backends.systolic import (
    COMPAT,
    DATAFLOWS,
    Dataflow,
    Layer,
    SramBanks,
    SystolicConfig,
    compute_cycles,
    evaluate,
    run,
)

_GEMMS = tuple(Layer.gemm(f"g{size}", size, size, size) for size in (32, 64, 96, 128, 192))
_CONVS = (
    Layer("c1", 28, 28, 3, 3, 8, 16),
    Layer("c2", 14, 14, 3, 3, 16, 32),
    Layer("c3", 14, 14, 1, 1, 64, 32),
    Layer("c4", 30, 30, 5, 5, 3, 16, 2, 2),
    Layer("c5", 7, 7, 3, 3, 32, 32),
)


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Shortest of several runs."""
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def alone(topology: Path | None) -> dict[str, float]:
    """Seconds of the model's own targets."""
    sizes = np.random.default_rng(0).integers(1, 8192, (3, 1_000_000))
    results = {
        f"1e6 cycles {flow}": _seconds(
            lambda flow=flow: compute_cycles(*sizes, array_rows=128, array_cols=128, dataflow=flow)
        )
        for flow in DATAFLOWS
    }
    big = Layer.gemm("16384", 16384, 16384, 16384)
    for flow in DATAFLOWS:
        google = SystolicConfig(256, 256, 6144, 6144, 2048, flow, "USER", (10,), SramBanks(10), SramBanks(10))
        tpu = SystolicConfig(128, 128, 4096, 4096, 8192, flow, "USER", (60,), SramBanks(1024), SramBanks(1024))
        results[f"16384^3 USER 256x256 {flow}"] = _seconds(lambda config=google: evaluate(big, config, COMPAT), 1)
        results[f"16384^3 USER 128x128 {flow}"] = _seconds(lambda config=tpu: evaluate(big, config, COMPAT), 1)
    if topology is not None:
        for flow in DATAFLOWS:
            scale = SystolicConfig(32, 32, 64, 64, 64, flow)
            results[f"{topology.stem} 32x32 {flow} CALC"] = _seconds(
                lambda config=scale: run(config, topology, None, compat=COMPAT), 1
            )
    results["peak memory MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return results


def _config_text(config: SystolicConfig) -> str:
    return f"""[general]
run_name = bench
[architecture_presets]
ArrayHeight: {config.rows}
ArrayWidth: {config.cols}
IfmapSramSzkB: {config.ifmap_kb}
FilterSramSzkB: {config.filter_kb}
OfmapSramSzkB: {config.ofmap_kb}
IfmapOffset: 0
FilterOffset: 10000000
OfmapOffset: 20000000
Bandwidth: {config.bandwidth}
Dataflow: {config.dataflow}
ReadRequestBuffer: 32
WriteRequestBuffer: 32
[layout]
IfmapCustomLayout: False
IfmapSRAMBankBandwidth: {config.ifmap.bandwidth}
IfmapSRAMBankNum: 1
IfmapSRAMBankPort: 2
FilterCustomLayout: False
FilterSRAMBankBandwidth: {config.filter.bandwidth}
FilterSRAMBankNum: 1
FilterSRAMBankPort: 2
[sparsity]
SparsitySupport: false
[run_presets]
InterfaceBandwidth: {config.mode}
UseRamulatorTrace: False
"""


def _topology_text(layers: tuple[Layer, ...]) -> str:
    rows = [
        ",".join(
            map(
                str,
                (
                    layer.name,
                    layer.ifmap_h,
                    layer.ifmap_w,
                    layer.filter_h,
                    layer.filter_w,
                    layer.channels,
                    layer.filters,
                    layer.stride_h,
                ),
            )
        )
        for layer in layers
    ]
    return "Layer, H, W, FH, FW, C, N, S,\n" + "".join(f"{row},\n" for row in rows)


def _layout_text(layers: tuple[Layer, ...]) -> str:
    rows = [f"{layer.name},1,1,1,1,1,1,0,1,2,3,4,5,0,1,2,3,4,5,6,7,\n" for layer in layers]
    return "Layer," * 21 + "\n" + "".join(rows)


def _scalesim(python: str, config: SystolicConfig, layers: tuple[Layer, ...]) -> float:
    """Seconds of SCALE-Sim's command on `layers`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "c.cfg").write_text(_config_text(config))
        (folder / "t.csv").write_text(_topology_text(layers))
        (folder / "l.csv").write_text(_layout_text(layers))
        command = [python, "-m", "scalesim.scale", "-c", "c.cfg", "-t", "t.csv", "-l", "l.csv", "-p", "out"]
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return time.perf_counter() - began


def beside(python: str) -> dict[str, float]:
    """Median ratio of SCALE-Sim's time to ours, layer by layer."""
    tiny = (Layer.gemm("tiny", 1, 1, 1),)
    results: dict[str, float] = {}
    for kind, layers in (("gemm", _GEMMS), ("conv", _CONVS)):
        ratios: list[float] = []
        for flow in DATAFLOWS:
            config = _beside_config(flow)
            start_up = _scalesim(python, config, tiny)
            for layer in layers:
                theirs = max(1e-3, _scalesim(python, config, (layer,)) - start_up)
                ours = _seconds(lambda layer=layer, config=config: evaluate(layer, config, COMPAT))
                ratios.append(theirs / ours)
        results[f"{kind}: SCALE-Sim / ours, median of {len(ratios)}"] = statistics.median(ratios)
        results[f"{kind}: SCALE-Sim / ours, least"] = min(ratios)
    return results


def _beside_config(flow: Dataflow) -> SystolicConfig:
    mode = "CALC" if flow == "os" else "USER"
    return SystolicConfig(32, 32, 64, 64, 64, flow, mode, (10,), SramBanks(10), SramBanks(10))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="speed of the systolic model")
    parser.add_argument("--topology", type=Path)
    parser.add_argument("--scalesim", metavar="PYTHON")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = alone(options.topology)
    if options.scalesim:
        results |= beside(options.scalesim)
    if options.json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:45} {value:12.4g}")


if __name__ == "__main__":
    main()
