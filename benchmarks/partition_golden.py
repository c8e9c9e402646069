"""Golden counts for partitioning, made by XLA's own partitioner on virtual CPU devices.

    python benchmarks/partition_golden.py [--fresh | --small] [--only FAMILY] [--compare]

Compiles every family of `partition_families.py` (or `partition_fresh.py`, `partition_small.py`) on up to 64 virtual
devices, stops right after SPMD partitioning, and writes collectives by kind and axes and matrix FLOPs, raw and after
the two rewrites that both sides get, to `tests/lowering/partition/golden/<family>.json`. `--compare` prints
stablecast's own numbers beside them instead.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

DUMP = tempfile.mkdtemp(prefix="partition_golden_")
DEVICES = 64
ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "lowering" / "partition" / "golden"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={DEVICES} --xla_dump_to={DUMP} --xla_dump_hlo_pass_re=spmd-partitioning"
)
sys.path.insert(0, str(ROOT / "benchmarks"))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.extend import xla as jax_xla  # noqa: E402
from jax.sharding import AbstractMesh, Mesh  # noqa: E402
from partition_families import FAMILIES, lowered  # noqa: E402
from partition_fresh import FRESH  # noqa: E402
from partition_small import SMALL  # noqa: E402

from stablecast.ir import mlir  # noqa: E402
from stablecast.ir.program import Mesh as LogicalMesh  # noqa: E402
from stablecast.ir.program import Program  # noqa: E402
from stablecast.ir.reader import read  # noqa: E402
from stablecast.lowering.partition import partition  # noqa: E402
from stablecast.lowering.partition.rewrite import two_rewrites, with_calls_inlined  # noqa: E402
from stablecast.lowering.partition.tally import Tally, tally  # noqa: E402

ALL = {**FAMILIES, **FRESH, **SMALL}


class _Stop(Exception):
    """Ends a compilation once the partitioned module is on disk."""


def _stop(_: bytes) -> None:
    raise _Stop


def xla_program(name: str) -> Program:
    """The family as XLA partitions it."""
    sizes = ALL[name].mesh
    count = math.prod(sizes.values())
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(tuple(sizes.values())), tuple(sizes))
    try:
        lowered(name, ALL[name], mesh).compile()
    except Exception as error:
        if "_Stop" not in repr(error) and "Stop" not in str(error):
            raise
    found = sorted(Path(DUMP).glob(f"*jit_{name}.*after_spmd-partitioning*.txt"))
    text = found[-1].read_bytes()
    return with_calls_inlined(read(mlir.hlo_to_stablehlo(text, name), name))


def our_program(name: str) -> Program:
    """The family as stablecast partitions it, on an abstract mesh."""
    sizes = ALL[name].mesh
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return partition(mlir.write_bytecode(lowered(name, ALL[name], mesh).compiler_ir("stablehlo")), name)


def logical(name: str) -> LogicalMesh:
    return LogicalMesh(f"logical_{name}", tuple(ALL[name].mesh.items()))


def describe(counts: Tally) -> dict[str, Any]:
    """A tally as JSON."""
    lines = [
        {
            "kind": line.kind,
            "axes": line.axes,
            "count": line.count,
            "operand_bytes": line.operand_bytes,
            "result_bytes": line.result_bytes,
            "wire_bytes": line.wire_bytes,
        }
        for line in counts.traffic
    ]
    return {"matmul_flops": counts.matmul_flops, "wire_bytes": counts.wire_bytes, "collectives": lines}


def both(program: Program, name: str) -> dict[str, Any]:
    meshes = [logical(name)]
    return {
        "raw": describe(tally(program, meshes)),
        "rewritten": describe(tally(two_rewrites(program), meshes)),
    }


def make(name: str) -> dict[str, Any]:
    """What XLA says of one family."""
    family = ALL[name]
    return {
        "family": name,
        "mesh": dict(family.mesh),
        "expected_miss": family.expected_miss,
        **both(xla_program(name), name),
    }


def by_axes(counts: dict[str, Any]) -> dict[str, float]:
    """Bytes on the wire over each set of axes."""
    sums: dict[str, float] = {}
    for line in counts["collectives"]:
        sums[line["axes"]] = sums.get(line["axes"], 0.0) + line["wire_bytes"]
    return sums


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal matrix FLOPs, and equal bytes on the wire over each set of axes."""
    left, right = by_axes(one), by_axes(other)
    wires = left.keys() == right.keys() and all(math.isclose(left[axes], right[axes]) for axes in left)
    return wires and math.isclose(one["matmul_flops"], other["matmul_flops"])


def compare(name: str) -> bool:
    """Print both sides of one family; whether wire bytes and FLOPs are equal after the rewrites."""
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    program = our_program(name)
    ours = both(program, name)
    equal = same(golden["rewritten"], ours["rewritten"])
    print(f"{name:24s} {'equal' if equal else 'DIFFERENT'}")
    for side, held in (("XLA", golden), ("stablecast", ours)):
        for form in ("raw", "rewritten"):
            part = held[form]
            counts = ", ".join(
                f"{line['count']} {line['kind']}[{line['axes']}] {line['operand_bytes']}B"
                for line in part["collectives"]
            )
            sums = f"{part['matmul_flops']:.6g} FLOP {part['wire_bytes']:.0f} B on the wire"
            print(f"  {side:10s} {form:9s} {sums}: {counts}")
    for note in program.notes:
        print(f"  note: {note}")
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(ALL))
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="the families of partition_fresh.py")
    parser.add_argument("--small", action="store_true", help="the single ops of partition_small.py")
    options = parser.parse_args()
    names = options.only or list(SMALL if options.small else FRESH if options.fresh else FAMILIES)
    if options.compare:
        results = [compare(name) for name in names]
        print(f"{sum(results)} of {len(results)} families equal")
        return
    jax_xla.register_hlo_module_transformation(
        _stop, name="stop", stage=jax_xla.PipelineStage.PRE_SCHEDULER, platforms="cpu"
    )
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in names:
        (GOLDEN / f"{name}.json").write_text(json.dumps(make(name), indent=1) + "\n")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
