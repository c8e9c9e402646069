"""How fast traces of many ranks are rendered, written, read and checked, beside plain write calls on the same disk.

    python benchmarks/chakra_codec_speed.py [--ranks 1024] [--tp 8] [--pp 4] [--layers 32] [--folder DIR] [--json]

The trace is a stand-in for a step of a decoder-only model: every layer has matrix products and two all-reduces over
tensor-parallel ranks, forward and backward, then an all-reduce over data-parallel ranks, with a send and a receive at
the borders of pipeline stages. Its size (`nodes`, `bytes_per_rank`) is printed.
"""

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stablecast.ir.chakra import (
    CollectiveType,
    Node,
    NodeDecoder,
    PrefixWriter,
    Scalar,
    TraceMetadata,
    TraceTemplate,
    check,
    collective_node,
    comp_node,
    double_attr,
    encode_trace,
    find_traces,
    read_messages,
    recv_node,
    send_node,
    string_attr,
)

METADATA = TraceMetadata("0.0.4")
WEIGHTS = ("query", "key", "value", "proj", "up", "gate", "down")
_ATTENTION = ("norm1", "query", "key", "value", "rope", "scores", "softmax", "context", "proj", "add1")
FORWARD = (*_ATTENTION, "norm2", "up", "gate", "silu", "multiply", "down", "add2")
Values = Mapping[str, Scalar]


def stage_nodes(layers: int, stage: int, stages: int) -> tuple[list[Node], dict[tuple[int, str], str]]:
    """Nodes of one pipeline stage and its holes."""
    nodes: list[Node] = []
    holes: dict[tuple[int, str], str] = {}

    def link() -> list[int]:
        return [nodes[-1].id] if nodes else []

    def compute(name: str) -> None:
        extra = (
            double_attr("duration_nanos", 123456.5),
            string_attr("scope", f"stage/{name}"),
            string_attr("dtype", "bf16"),
        )
        nodes.append(comp_node(len(nodes), f"COMP_NODE_{name}", 4_000_000_000, 50_331_648, link(), 124, extra))

    def reduce(name: str, hole: str) -> None:
        kind = CollectiveType.ALL_REDUCE
        nodes.append(collective_node(len(nodes), f"COMM_COLL_NODE_{name}", kind, 33_554_432, "1", link()))
        holes[nodes[-1].id, "pg_name"] = hole

    def peer(sends: bool, hole: str, tag: int) -> None:
        make, name = (send_node, "COMM_SEND_NODE") if sends else (recv_node, "COMM_RECV_NODE")
        nodes.append(make(len(nodes), name, 1, tag, 33_554_432, link()))
        holes[nodes[-1].id, "comm_dst" if sends else "comm_src"] = hole

    if stage > 0:
        peer(False, "previous", 1)
    for layer in range(layers):
        for part in FORWARD:
            compute(f"layer{layer}/forward/{part}")
            if part in ("proj", "down"):
                reduce(f"layer{layer}/forward/{part}", "tp")
    if stage < stages - 1:
        peer(True, "next", 1)
        peer(False, "next", 2)
    for layer in reversed(range(layers)):
        for part in reversed(FORWARD):
            compute(f"layer{layer}/backward/{part}")
            if part in WEIGHTS:
                compute(f"layer{layer}/backward/{part}_weight")
            if part in ("gate", "query"):
                reduce(f"layer{layer}/backward/{part}", "tp")
        reduce(f"layer{layer}/gradient", "dp")
    if stage > 0:
        peer(True, "previous", 2)
    return nodes, holes


class Layout:
    """Ranks of a dp x pp x tp mesh, tp fastest: group names and peers by arithmetic."""

    def __init__(self, ranks: int, tp: int, pp: int) -> None:
        self.ranks, self.tp, self.pp = ranks, tp, pp
        self.dp = ranks // (tp * pp)

    def values(self, rank: int) -> tuple[int, Values]:
        """(stage, values of the holes)."""
        dp_index, rest = divmod(rank, self.tp * self.pp)
        stage, tp_index = divmod(rest, self.tp)
        groups = self.dp * self.pp
        return stage, {
            "tp": str(1 + dp_index * self.pp + stage),
            "dp": str(1 + groups + stage * self.tp + tp_index),
            "previous": rank - self.tp,
            "next": rank + self.tp,
        }

    def groups(self) -> dict[str, list[int]]:
        """The group file."""
        out = {str(1 + row): list(range(row * self.tp, row * self.tp + self.tp)) for row in range(self.dp * self.pp)}
        stride = self.tp * self.pp
        for column in range(stride):
            out[str(1 + self.dp * self.pp + column)] = list(range(column, self.ranks, stride))
        return out


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def plain_write(folder: Path, ranks: int, blobs: list[bytes]) -> None:
    """The same bytes by open, write, close, nothing else."""
    for rank in range(ranks):
        with (folder / f"plain.{rank}.et").open("wb", buffering=0) as stream:
            stream.write(blobs[rank % len(blobs)])


def measure(ranks: int, tp: int, pp: int, layers: int, folder: Path) -> dict[str, object]:
    """All figures."""
    layout = Layout(ranks, tp, pp)
    built = [stage_nodes(layers, stage, pp) for stage in range(pp)]
    start = time.perf_counter()
    templates = [TraceTemplate.build(nodes, holes, METADATA) for nodes, holes in built]
    build_s = time.perf_counter() - start

    def rendered() -> Iterator[tuple[int, bytes, int]]:
        for rank in range(ranks):
            stage, values = layout.values(rank)
            yield rank, templates[stage].render(values), templates[stage].nodes

    def emit() -> None:
        with PrefixWriter(folder / "emit" / "step") as writer:
            for item in rendered():
                writer.write_rank(*item)
            writer.write_groups(layout.groups())

    total = sum(len(data) for _, data, _ in rendered())
    blobs = [templates[stage].render(layout.values(stage * tp)[1]) for stage in range(pp)]
    render_s, _ = timed(lambda: sum(len(data) for _, data, _ in rendered()))
    (folder / "plain").mkdir()
    os.sync()
    plain_s, plain_cpu = timed(lambda: plain_write(folder / "plain", ranks, blobs))
    shutil.rmtree(folder / "plain")
    os.sync()
    emit_s, emit_cpu = timed(emit)
    encode_s, _ = timed(lambda: encode_trace(built[0][0], METADATA))
    return {
        "ranks": ranks,
        "bytes_per_rank": total / ranks,
        "template_build_s": build_s,
        "encode_one_rank_s": encode_s,
        "render_s": render_s,
        "render_ranks_per_s": ranks / render_s,
        "emit_s": emit_s,
        "emit_cpu_s": emit_cpu,
        "emit_ranks_per_s": ranks / emit_s,
        "emit_bytes_per_s": total / emit_s,
        "plain_write_s": plain_s,
        "plain_write_cpu_s": plain_cpu,
        "plain_write_bytes_per_s": total / plain_s,
        "emit_over_plain": plain_s / emit_s,
        **measure_reading(folder / "emit" / "step"),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def measure_reading(prefix: Path) -> dict[str, object]:
    """Figures of reading and checking what was written."""
    read_s, _ = timed(lambda: read_all(prefix))
    start = time.perf_counter()
    report = check(prefix)
    check_s = time.perf_counter() - start
    return {
        "nodes": report.nodes,
        "nodes_per_rank": report.nodes / report.ranks,
        "read_nodes_per_s": report.nodes / read_s,
        "check_s": check_s,
        "check_nodes_per_s": report.nodes / check_s,
        "check_ok": report.ok,
    }


def read_all(prefix: Path) -> None:
    """Decode every node of every rank."""
    decoder = NodeDecoder()
    for path in find_traces(prefix).ranks.values():
        messages = read_messages(path)
        next(messages)
        for message in messages:
            decoder.decode(message)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--layers", type=int, default=32, help="layers of the whole model")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder by default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.ranks % (options.tp * options.pp) or options.layers % options.pp:
        parser.error("ranks must be a multiple of tp x pp, layers of pp")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        layers = options.layers // options.pp
        figures = measure(options.ranks, options.tp, options.pp, layers, Path(folder))
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:26} {value:,.4g}" if isinstance(value, float) else f"{name:26} {value}")


if __name__ == "__main__":
    main()
