"""FSDP with its all-gathers reordered, beside what Flint published: gain, peak memory, and a sweep of bandwidth.

    python benchmarks/flint.py [--models 8b,70b] [--skip-sweep] [-o benchmarks/flint.txt]

Llama 3 of 8 and 70 billion parameters (examples/llama.py, unrolled: every weight is gathered in front of its product,
forward and backward), FSDP over 8 and 64 devices. `default`: each all-gather is issued where it is read (pass `async`);
`reordered`: all-gathers of parameters as early as their operands allow (`all-gather-reorder`, then `async`). Flint's
batch, device and dtype are not published; ours are: one sequence of 2,048 tokens a device, bf16, H100, and for the
sweep one switch with the rate that is varied. So its signs and its growth are what can be compared.

What its figures say of its own set-up: the four times of the sweep are bytes / rate + rest, so that the rest is what it
had to compute, 43 ms (a 70 B step that reads its weights three times from the memory of eight H100 needs 126). An order
hides no more than what there is to compute: `most` is that share of the step, of which its gains are 54 to 83 %. Ours
has forty times the computation for 2.5 times the bytes, hence more to hide. Hiding computation and one stream of
communication behind each other saves at most half a step, so that -50.9 % is more than an order alone can give:
ASTRA-sim's congestion-unaware network lets collectives that run at once have its whole rate each.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stablecast._predict import Options, Session
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Network, System
from stablecast.backends.prediction import Prediction
from stablecast.backends.predictor import PREDICTED, ProgramRole, Settings, predict_roles
from stablecast.backends.registry import parse_choice
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.ir.device_program import DeviceProgram
from stablecast.lowering.passes import run_passes

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "llama.py"
SHAPES = {"8b": {"layers": 32, "d_model": 4096, "heads": 32}, "70b": {"layers": 80, "d_model": 8192, "heads": 64}}
ORDERS = {"default": ("async",), "reordered": ("all-gather-reorder", "async")}
GAINS = {("8b", 8): 14.6, ("8b", 64): 50.9, ("70b", 8): 7.2, ("70b", 64): 19.7}
SWEEP = {12.5: (17.947, 0.13), 25.0: (8.995, 0.26), 50.0: (4.520, 0.52), 500.0: (0.493, 7.2)}
"""GB/s -> seconds by default order, gain in percent, as published."""


def program(model: str, ranks: int, system: System) -> DeviceProgram:
    words = {**SHAPES[model], "fsdp": ranks, "seq": 2048}
    settings = ArgumentOptions(settings=tuple(f"{name}={value}" for name, value in words.items()))
    return Session(f"{SCRIPT}:train_step", Options(arguments=settings)).device_program(system.device)


def both(program: DeviceProgram, system: System) -> tuple[Prediction, Prediction]:
    settings = Settings(parse_choice("analytical"), {}, PREDICTED)
    made = [
        predict_roles([ProgramRole("", run_passes(program, passes))], system, settings, name)
        for name, passes in ORDERS.items()
    ]
    return made[0], made[1]


def flat(system: System, gigabytes: float) -> System:
    """The devices of `system` at one switch of that rate, which large messages reach."""
    dim = system.network.dims[-1]
    rate = replace(dim.bytes_per_s, value=gigabytes * 1e9, source="assumption", note="varied")
    whole = replace(dim.efficiency, value=1.0)
    one = replace(
        dim, name="switch", kind="switch", size=system.count, bytes_per_s=rate, efficiency=whole, efficiency_by_kind={}
    )
    return replace(system, network=Network((replace(one, pair_bytes_per_s=None),)))


def gains(models: list[str]) -> Iterator[str]:
    yield "model  ranks   default  reordered    gain  published   peak memory  reordered"
    for model in models:
        for ranks in (8, 64):
            system = Catalogue().resolve(f"h100-sxm:{ranks}")
            default, reordered = both(program(model, ranks, system), system)
            gain = 100.0 * (1.0 - reordered.step_time_s / default.step_time_s)
            yield (
                f"{model:5} {ranks:6} {default.step_time_s * 1e3:7.1f} ms {reordered.step_time_s * 1e3:7.1f} ms "
                f"{-gain:6.1f} % {-GAINS[(model, ranks)]:7.1f} %  {default.peak_memory_bytes / 1e9:9.1f} GB "
                f"{reordered.peak_memory_bytes / 1e9:7.1f} GB"
            )


def rest(slow: float, fast: float) -> float:
    """Seconds of the published sweep that no rate of the network shortens, from two of its rates in GB/s."""
    times = SWEEP[slow][0], SWEEP[fast][0]
    gigabytes = (times[0] - times[1]) / (1.0 / slow - 1.0 / fast)
    return times[0] - gigabytes / slow


def sweep() -> Iterator[str]:
    system = Catalogue().resolve("h100-sxm:8")
    lowered = program("70b", 8, system)
    computed = rest(12.5, 25.0)
    yield ""
    yield f"published: {computed * 1e3:.0f} ms beside communication"
    yield "70b on 8 ranks      default  published       gain     most  published     most"
    for rate, (seconds, gain) in SWEEP.items():
        default, reordered = both(lowered, flat(system, rate))
        ours = 100.0 * (1.0 - reordered.step_time_s / default.step_time_s)
        times = f"{default.step_time_s * 1e3:9.0f} ms {seconds * 1e3:7.0f} ms"
        most = 100.0 * min(default.compute_s / default.step_time_s, 0.5), 100.0 * min(computed / seconds, 0.5)
        yield f"{rate:7.1f} GB/s   {times}   {ours:6.2f} % {most[0]:6.2f} % {gain:8.2f} % {most[1]:6.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,70b")
    parser.add_argument("--skip-sweep", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    lines: list[str] = []
    for line in (*gains(chosen.models.split(",")), *(() if chosen.skip_sweep else sweep())):
        print(line)
        sys.stdout.flush()
        lines.append(line)
    if chosen.output:
        chosen.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
