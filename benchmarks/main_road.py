"""The figures of the main road: how fast and how large a prediction is, and how near to measured steps.

    python benchmarks/main_road.py --data ../shared/data [--only speed|accuracy]

Speed: each command runs in a process of its own; "after imports" is CPU time of the same work in a warm process.
Peers' figures are stored ones, from the machine and day that the notes name. Accuracy: no constant was fitted on these
rows; Llama rows are predicted for one device, without the communication of the measured runs.
"""

import argparse
import csv
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
RESNET = "hespas/resnet_50_train_step_4_devices_1024_batch.mlir.gz"


def command(*words: str) -> tuple[float, float]:
    """Wall seconds and peak MB of a command."""
    code = (
        "import sys, time, resource, subprocess\n"
        "t = time.perf_counter()\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(time.perf_counter() - t, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)\n"
    )
    full = [sys.executable, "-m", "stablecast", *words]
    done = subprocess.run([sys.executable, "-c", code, *full], check=True, capture_output=True, text=True)
    wall, peak = map(float, done.stdout.split())
    return wall, peak


def after_imports(path: Path, on: str) -> float:
    """CPU seconds of a prediction in a process that has imported everything it needs."""
    from stablecast._predict import Options, Session
    from stablecast.backends import prediction_text
    from stablecast.backends.registry import get_backend
    from stablecast.ir import mlir

    mlir.make_context()
    get_backend("analytical")
    gc.disable()
    started = time.process_time()
    prediction = Session(path, Options()).predict(on)
    prediction_text.prediction_text(prediction)
    prediction.to_json()
    spent = time.process_time() - started
    gc.enable()
    return spent


def line(what: str, got: str, target: str, peer: str = "") -> None:
    print(f"{what:58} {got:>22}   {target:22} {peer}")


def speed(data: Path) -> None:
    """The speed and memory rows."""
    line("what", "measured", "target", "peer (stored figure)")
    best = min(command("--help")[0] for _ in range(3))
    line("stablecast --help", f"{best:.2f} s", "<= 0.5 s")
    path = data / RESNET
    if path.exists():
        runs = [command("predict", str(path), "--on", "a100-sxm-40gb") for _ in range(3)]
        wall, peak = min(run[0] for run in runs), max(run[1] for run in runs)
        line(
            "ResNet-50 train fixture, whole predict command",
            f"{wall:.2f} s, {peak:.0f} MB",
            "<= 3 s, <= 350 MB",
            "HeSPaS 3.3-9 s, 304 MiB",
        )
        cpu = min(after_imports(path, "a100-sxm-40gb") for _ in range(1))
        line("the same, CPU after imports", f"{cpu:.2f} s", "<= 0.4 s", "HeSPaS 1.1-3.3 s")
    with tempfile.TemporaryDirectory() as folder:
        large(Path(folder))


def large(folder: Path) -> None:
    """Modules of many ops."""
    from stablecast.ir import capture_file, mlir
    from stablecast.ir.reader import read

    mlir.make_context()
    for name, settings in (("3b", ["size=3b"]), ("96 layers, d 12288", ["size=3b", "layers=96", "d_model=12288"])):
        path = folder / "step.sc"
        flags = [word for setting in settings for word in ("--set", setting)]
        command("capture", f"{EXAMPLES}/llama.py:train_step", *flags, "-o", str(path))
        workload = capture_file.read(path)
        started = time.perf_counter()
        program = read(workload.modules[0].data)
        reading = time.perf_counter() - started
        wall, peak = command("predict", str(path), "--on", "h100-sxm")
        ops = f"{program.num_ops:,} ops"
        line(f"{name} unrolled ({ops}), read", f"{reading:.2f} s", "<= 3 s (67,000 ops)")
        line(f"{name} unrolled ({ops}), file to prediction", f"{wall:.2f} s, {peak:.0f} MB", "<= 4 s (22,000 ops)")


def predicted_ms(source: str, on: str, *settings: str) -> float:
    """Step time of an input on a system, by the command line."""
    flags = [word for setting in settings for word in ("--set", setting)]
    words = [sys.executable, "-m", "stablecast", "predict", source, "--on", on, "--json", *flags]
    answer: dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return answer["step_time_s"] * 1e3


def accuracy(data: Path) -> None:
    """Predicted beside measured steps; the same constants serve every row."""
    print(f"\n{'step':38} {'predicted ms':>13} {'measured ms':>12} {'error':>8}")

    def row(what: str, predicted: float, measured: float) -> None:
        print(f"{what:38} {predicted:13.1f} {measured:12.1f} {predicted / measured - 1:+8.1%}")

    row("ResNet-50 fixture, 4 x A100-40", predicted_ms(str(data / RESNET), "a100-sxm-40gb"), 101.2)
    for entry in rows(data / "hespas/refs/resnet_train.csv"):
        depth = entry["workload"].removeprefix("resnet")
        ours = predicted_ms(f"{EXAMPLES}/resnet.py:train_step", "a100-sxm-40gb", f"depth={depth}")
        row(f"ResNet-{depth}, one of 4 x A100-40", ours, float(entry["runtime_s"]) * 1e3)
    devices = {"A100_40GB_4GPU": "a100-sxm-40gb", "H100_80GB_4GPU": "h100-sxm", "B200_180GB_4GPU": "b200-sxm"}
    for entry in rows(data / "hespas/refs/llama3_train.csv"):
        size = entry["workload"].removeprefix("llama3-")
        on = devices[entry["system"]]
        ours = predicted_ms(f"{EXAMPLES}/llama.py:train_step", on, f"size={size}")
        row(f"Llama {size}, one of 4 x {on}", ours, float(entry["runtime_s"]) * 1e3)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--only", choices=("speed", "accuracy"))
    given = parser.parse_args()
    if given.only != "accuracy":
        speed(given.data)
    if given.only != "speed":
        if not given.data.is_dir():
            sys.exit(f"there is no data at {given.data}: give --data")
        accuracy(given.data)
    print(f"\npeak of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
