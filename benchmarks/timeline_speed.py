"""How long the timeline of a large step takes: 96 layers unrolled and as a loop, on 131,072 devices.

    python benchmarks/timeline_speed.py [--layers 96]

The program (examples/llama.py, 2,048 x 8 x 8 over data, fsdp and tensor) is captured, partitioned and lowered first and
kept in the disk cache; what is timed is CPU time of a warm process: schedule passes, pricing, streams with contention,
and the report's numbers.
"""

import argparse
import gc
import time
from pathlib import Path

import numpy as np

from stablecast._predict import Options, Session
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.predictor import PREDICTED, ProgramRole, Settings, predict_roles
from stablecast.backends.pricing import price
from stablecast.backends.registry import parse_choice
from stablecast.backends.schedule import schedule
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.ir.device_program import Body, Collective, DeviceProgram, Kernel, Loop, Node
from stablecast.ir.groups import over_axes
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.ir.work import SymbolicWork
from stablecast.lowering.passes import default_passes, run_passes

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "llama.py"
MESH = {"data": 2048, "fsdp": 8, "tensor": 8}


def layers(count: int) -> Body:
    """Kernels in a row, an asynchronous all-reduce over 131,072 devices after every nineteenth."""
    groups = over_axes("mesh", tuple(MESH.items()), ["data"])
    found: list[Node] = []
    for number in range(count):
        before = (number - 1 - (number % 20 == 0),) if number > 1 else ()
        if number % 20 == 19:
            found.append(Collective("all_reduce", groups, 1 << 25, 1 << 25, asynchronous=True, deps=(number - 1,)))
        else:
            found.append(Kernel(0, deps=before))
    return tuple(found)


def synthetic() -> None:
    """67,000 nodes, and 96 trips of 700: more than the lowered program of 67,000 ops has."""
    system = Catalogue().resolve("h100-sxm:131072")
    table = KernelTable((KernelRow(elems=1 << 22, bytes_read=1e8, bytes_written=1e8),), np.ones(1))
    estimates = price(table, system.device, parse_choice("analytical")).estimates
    for name, body in (("67,000 nodes", layers(67_000)), ("96 x 700 nodes", (Loop(layers(700), 96),))):
        program = DeviceProgram("step", body, table, SymbolicWork(), system.count)
        gc.collect()
        gc.disable()
        begun = time.process_time()
        found = schedule(program, estimates, system, settings=PREDICTED)
        spent = time.process_time() - begun
        gc.enable()
        print(f"{name:15} timeline with contention {spent:.3f} CPU s;  step {found.time_s * 1e3:.1f} ms")


def nodes(body: Body) -> int:
    return sum(1 + (nodes(node.body) if isinstance(node, Loop) else 0) for node in body)


def measure(layers: int, scan: bool) -> None:
    words = {"layers": layers, "d_model": 8192, "heads": 64, **({"scan": True} if scan else {}), **MESH}
    settings = ArgumentOptions(settings=tuple(f"{name}={value}" for name, value in words.items()))
    session = Session(f"{SCRIPT}:train_step", Options(arguments=settings))
    begun = time.process_time()
    system = Catalogue().resolve("h100-sxm:131072")
    program = session.device_program(system.device)
    lowered = time.process_time() - begun
    gc.collect()
    gc.disable()
    begun = time.process_time()
    passed = run_passes(program, default_passes(program.exec_model))
    passes = time.process_time() - begun
    begun = time.process_time()
    estimates = price(passed.table, system.device, parse_choice("analytical")).estimates
    priced = time.process_time() - begun
    begun = time.process_time()
    found = schedule(passed, estimates, system, settings=PREDICTED)
    streams = time.process_time() - begun
    begun = time.process_time()
    chosen = Settings(parse_choice("analytical"), {})
    made = predict_roles([ProgramRole("", passed)], system, chosen, "llama")
    whole = time.process_time() - begun
    gc.enable()
    ops = sum(len(body) for body in program.table.bodies)
    form = "scan" if scan else "unrolled"
    print(
        f"{form:9} {nodes(program.body):7,} nodes ({ops:,} distinct ops)  captured and lowered {lowered:.1f} s;  "
        f"passes {passes:.3f}, pricing {priced:.3f}, timeline {streams:.3f}, all {whole + passes:.3f} CPU s;  "
        f"step {found.time_s * 1e3:.1f} ms, exposed {made.exposed_communication_s * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    depth = parser.parse_args().layers
    synthetic()
    measure(depth, True)
    measure(depth, False)


if __name__ == "__main__":
    main()
