"""How fast the reference mode is beside ASTRA-sim's analytical backend.

    python benchmarks/astrasim_speed.py [--data ../shared/data] [--json]

Collectives are those of the stored table `astrasim_golden/scaling.csv`; multi-role traces are made here, with the
ranks and nodes a rank of the table's rows, since the traces behind those rows are not stored. CPU seconds of one
process, warm: the best of several calls, reading of traces included. The links of the table's multi-dimensional rows
are not stored; ours are stated below, and change no count of messages.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stablecast.backends.astrasim import NetworkConfig, SystemConfig, collective_cycles, simulate
from stablecast.backends.astrasim.config import COLLECTIVES, Backend, implementation
from stablecast.ir.chakra import (
    CollectiveType,
    Node,
    collective_node,
    comp_node,
    encode_trace,
    recv_node,
    send_node,
)

MIB = 1 << 20
DIMS = ("Ring", "FullyConnected", "Switch")


@dataclass(frozen=True)
class Row:
    """One comparison. `theirs_s`: stored CPU seconds. `target`: the speed-up asked for."""

    case: str
    ranks: int
    cycles: int
    ours_s: float
    theirs_s: float
    target: float

    @property
    def speedup(self) -> float:
        return self.theirs_s / self.ours_s


def best(call: Callable[[], int], repeats: int) -> tuple[int, float]:
    answer, fastest = call(), float("inf")
    for _ in range(repeats):
        start = time.process_time()
        answer = call()
        fastest = min(fastest, time.process_time() - start)
    return answer, fastest


def system(*algorithms: str, roofline: bool = False) -> SystemConfig:
    impls = dict.fromkeys(COLLECTIVES, tuple(implementation(name) for name in algorithms))
    return SystemConfig(impls, 4, 1, 10, 3350.0 if roofline else 1600.0, True, roofline=roofline, peak_tflops=989.0)


def cube(size: int) -> NetworkConfig:
    return NetworkConfig(DIMS, (size,) * 3, (200.0, 100.0, 50.0), (250.0, 500.0, 500.0))


def ring(size: int) -> NetworkConfig:
    return NetworkConfig(("Ring",), (size,), (50.0,), (500.0,))


def collectives(stored: dict[tuple[str, str, int], float]) -> list[Row]:
    unaware, aware = "ASTRA-sim unaware", "ASTRA-sim aware"
    line = "all-reduce 1 MB, 1-D Ring, ring, 4 chunks"
    small = "all-reduce 1 MB, Ring 8 x FullyConnected 8 x Switch 8, ring"
    large = "all-reduce 1 MB, Ring 16 x FullyConnected 16 x Switch 16, ring"
    rings, mixed = ("ring",) * 3, ("ring", "direct", "halvingDoubling")
    cases: list[tuple[str, str, int, NetworkConfig, tuple[str, ...], Backend]] = [
        (unaware, small, 512, cube(8), rings, "congestion_unaware"),
        (unaware, large, 4096, cube(16), rings, "congestion_unaware"),
        (unaware, "same, ring|direct|halvingDoubling", 4096, cube(16), mixed, "congestion_unaware"),
        (unaware, line, 512, ring(512), ("ring",), "congestion_unaware"),
        (unaware, line, 4096, ring(4096), ("ring",), "congestion_unaware"),
        (aware, line, 512, ring(512), ("ring",), "congestion_aware"),
    ]
    rows: list[Row] = []
    for tool, case, ranks, network, algorithms, backend in cases:
        config = system(*algorithms)

        def call(network: NetworkConfig = network, config: SystemConfig = config, backend: Backend = backend) -> int:
            return collective_cycles("all_reduce", MIB, network, config, backend=backend).cycles_max

        cycles, seconds = best(call, 5)
        rows.append(Row(f"{case} ({backend})", ranks, cycles, seconds, stored[(tool, case, ranks)], 50.0))
    return rows


class _Chain:
    """Nodes of one rank, each after the one before it."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    @property
    def _next(self) -> tuple[int, list[int]]:
        at = len(self.nodes)
        return at, [at - 1] if at else []

    def work(self, ops: int) -> None:
        at, deps = self._next
        self.nodes.append(comp_node(at, f"COMP_NODE_{at}", ops * 10**9, 10**6, deps))

    def reduce(self, group: int, nbytes: int) -> None:
        at, deps = self._next
        name = f"COMM_COLL_NODE_{at}"
        self.nodes.append(collective_node(at, name, CollectiveType.ALL_REDUCE, nbytes, str(group), deps))

    def receive(self, peer: int, tag: int) -> None:
        at, deps = self._next
        self.nodes.append(recv_node(at, f"COMM_RECV_NODE_{at}", peer, tag, MIB, deps))

    def send(self, peer: int, tag: int) -> None:
        at, deps = self._next
        self.nodes.append(send_node(at, f"COMM_SEND_NODE_{at}", peer, tag, MIB, deps))


def pipeline_trace(rank: int, dp: int, tp: int, pp: int, layers: int) -> list[Node]:
    """A step of one rank: tensor-parallel all-reduces, sends between stages, an all-reduce a layer at the end."""
    step = dp * tp
    stage, column = rank // step, rank % step
    tensor, data = 1 + stage * dp + column // tp, 1 + pp * dp + stage * tp + column % tp
    chain = _Chain()
    for forward in (1, 0):
        ahead = step if forward else -step
        if 0 <= rank - ahead < step * pp:
            chain.receive(rank - ahead, forward)
        for _ in range(layers // pp):
            for _ in range(6 if forward else 12):
                chain.work(3 + stage)
            chain.reduce(tensor, MIB)
            chain.reduce(tensor, MIB)
        if 0 <= rank + ahead < step * pp:
            chain.send(rank + ahead, forward)
    for _ in range(layers // pp):
        chain.reduce(data, 4 * MIB)
        chain.work(1)
    return chain.nodes


def write_pipeline(folder: Path, dp: int, tp: int, pp: int, layers: int) -> Path:
    groups: dict[str, list[int]] = {}
    for stage in range(pp):
        base = stage * dp * tp
        for row in range(dp):
            groups[str(1 + stage * dp + row)] = [base + row * tp + column for column in range(tp)]
        for column in range(tp):
            groups[str(1 + pp * dp + stage * tp + column)] = [base + row * tp + column for row in range(dp)]
    (folder / "groups.json").write_text(json.dumps(groups))
    for rank in range(dp * tp * pp):
        (folder / f"w.{rank}.et").write_bytes(encode_trace(pipeline_trace(rank, dp, tp, pp, layers)))
    return folder / "w"


def traces(stored: dict[tuple[str, str, int], float]) -> list[Row]:
    rows: list[Row] = []
    for case, (dp, tp, pp, layers) in {"4 layers 16x16x4": (16, 16, 4, 8), "32 layers 32x8x4": (32, 8, 4, 64)}.items():
        ranks = dp * tp * pp
        network = NetworkConfig(("Switch",), (ranks,), (50.0,), (936.25,))
        with tempfile.TemporaryDirectory() as name:
            prefix = write_pipeline(Path(name), dp, tp, pp, layers)
            nodes = len(pipeline_trace(0, dp, tp, pp, layers))

            def call(prefix: Path = prefix, network: NetworkConfig = network) -> int:
                groups = prefix.parent / "groups.json"
                return simulate(prefix, network, system("ring", roofline=True), group_file=groups).cycles

            cycles, seconds = best(call, 2)
        theirs = stored[("ASTRA-sim unaware on STAGE traces", case, ranks)]
        rows.append(Row(f"traces like {case}, {nodes} nodes a rank", ranks, cycles, seconds, theirs, 10.0))
    return rows


def asymmetric() -> Row:
    """Groups of unequal sizes and distances on a ring, begun together; ASTRA-sim at 1.3 M messages a CPU second."""
    network = ring(512)
    groups = [list(range(0, 512, 4)), list(range(1, 512, 4)), list(range(2, 300, 4)), list(range(3, 200, 8))]
    groups[3] += [302, 306, 510]
    messages = sum(4 * 2 * (len(group) - 1) * len(group) for group in groups)

    def call() -> int:
        return collective_cycles("all_reduce", MIB, network, system("ring"), groups).cycles_max

    cycles, seconds = best(call, 3)
    case = "all-reduce in 4 unequal groups of a Ring 512 (theirs: messages / 1.3 M)"
    return Row(case, 512, cycles, seconds, messages / 1.3e6, 10.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with (options.data / "astrasim_golden" / "scaling.csv").open(newline="") as stream:
        stored = {(row["tool"], row["case"], int(row["ranks"])): float(row["cpu_s"]) for row in csv.DictReader(stream)}
    rows = [*collectives(stored), *traces(stored), asymmetric()]
    if options.json:
        print(json.dumps([{**vars(row), "speedup": row.speedup} for row in rows], indent=1))
        return
    for row in rows:
        mark = "" if row.speedup >= row.target else f"  below {row.target:g}x"
        times = f"{row.ours_s * 1e3:9.2f} ms  {row.theirs_s:8.2f} s  {row.speedup:7.0f}x"
        print(f"{times}  {row.cycles:>12,}  {row.case}{mark}")


if __name__ == "__main__":
    main()
