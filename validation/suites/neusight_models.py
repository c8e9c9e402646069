"""NeuSight's models: operators within them, and whole models from its operator graphs.

FP32 with TF32 off, PyTorch, on one GPU and on four. A node of a graph becomes the kernels that PyTorch starts for it:
besides the peer's own parts the copies that `torch.matmul` makes of permuted operands, the gradients of biases, and the
memory-bound nodes that the graph leaves untyped. Views cost nothing. Whole models are sums over these (`path` is
`table`), each node as often as the model has it. No constant here was fitted; repetitions come from the column
`repeat` of the per-operator labels, whose times only score.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from stablecast.backends import kernel_specs as specs
from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.device import Device
from stablecast.backends.learned.rates import read_measured
from stablecast.backends.pricing import price
from stablecast.ir.errors import InputError
from stablecast.ir.groups import all_devices
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.validation.suites import neusight_programs
from stablecast.validation.suites.base import Data, Record, Row, is_fitted, number, whole
from stablecast.validation.suites.neusight import DEVICES, PEERS, kernel_rows
from stablecast.validation.suites.neusight_nodes import (
    FLOAT_BYTES,
    Node,
    backward_kernels,
    compiled,
    forward_kernels,
    parts_of,
    without_idle,
)

_MILLI: Final = 1e-3
_WORKERS: Final = 4
_COMMUNICATION: Final = frozenset({"ALLREDUCE", "ALLREDUCE_ASYNC", "SENDRECV"})
_SYSTEMS: Final[Mapping[str, str]] = {"a100-sxm-40gb": "hgx4-a100-40gb", "h100-sxm": "h100-sxm"}
_GROUPS: Final[Mapping[str, str]] = {
    "Linear": "op linear",
    "BMM": "op bmm",
    "VECln": "op ln",
    "VECsoftmax": "op softmax",
}


def run(data: Data) -> list[Row]:
    """Every row of the suite: kernels, operators, whole models from graphs, and from programs."""
    return [*kernel_rows(data), *operator_rows(data), *model_rows(data), *neusight_programs.run(data, DEVICES)]


def operator_rows(data: Data) -> list[Row]:
    """Operators of models, forward, with every peer's prediction beside them; sizes are those of the operator graph.

    Each was timed on its own, so that what the way of timing adds to the peer's kernel tables is added here too: labels
    of kernels of every length lie above these by the same time on a device.
    """
    nodes = {
        (record["config"], record["Name"]): Node.of(record)
        for record in data.read("neusight/opgraphs.csv.gz")
        if len(parts_of(record["FwOps"])) == 1
    }
    records = data.read("neusight/per_op_labels.csv.gz")
    rows: list[Row] = []
    for name, device in DEVICES.items():
        own = [record for record in records if record["device"] == name and number(record, "fw_ms") > 0]
        found = [(record, nodes.get((_config(record), record["node"]))) for record in own]
        timed = [(record, node) for record, node in found if node is not None and node.forward[0][0] != "MEM"]
        rows += _operators(data, device, timed)
    return rows


def _operators(data: Data, device: str, timed: Sequence[tuple[Record, Node]]) -> list[Row]:
    found = data.catalogue.device(device)
    kernels = [forward_kernels(found, node) for _, node in timed]
    sums = _sums(data, found, kernels, f"operators on {device}")
    if sums is None:
        return []
    rows: list[Row] = []
    known = read_measured()
    for (record, node), kernel, times in zip(timed, kernels, sums.tolist(), strict=True):
        if not kernel:
            continue
        kind = node.forward[0][0]
        extra = known.extra_s(f"neusight {kind.removeprefix('VEC').lower()}", found)
        peers = {
            name: number(record, f"{name}_fw_ms") * _MILLI for name in PEERS if number(record, f"{name}_fw_ms") > 0
        }
        rows.append(
            Row(
                "neusight",
                f"{_config(record)} {record['node']}",
                device,
                number(record, "fw_ms") * _MILLI,
                *(time + extra for time in times),
                peer=next(iter(peers), ""),
                peer_predicted_s=next(iter(peers.values()), None),
                peers=peers,
                group=_GROUPS.get(kind, "op elementwise"),
                key=f"{_config(record)} {record['node']}",
                basis=str(data.choice),
            )
        )
    return rows


def _sums(data: Data, device: Device, lists: Sequence[Sequence[KernelRow]], what: str) -> Any:
    """Time, low and high of each list of kernels, an array [lists, 3]; None where the device cannot run them."""
    flat = [row for rows in lists for row in rows]
    if not flat:
        return np.zeros((len(lists), 3))
    try:
        estimates = price(KernelTable.of(flat), device, data.choice).estimates
    except InputError as error:
        data.notes.append(f"neusight {what}: left out: {error.message}")
        return None
    owner = np.repeat(np.arange(len(lists)), [len(rows) for rows in lists])
    columns = (estimates.time_s, estimates.low_s, estimates.high_s)
    return np.stack([np.bincount(owner, weights=column, minlength=len(lists)) for column in columns], axis=1)


def _config(record: Record, option: str = "") -> str:
    sequence, batch = whole(record, "seqlen", "batch")
    return f"{record['model']}-{record['mode']}-{sequence}-{batch}" + (f"-{option}" if option else "")


@dataclass(frozen=True)
class Graph:
    """A model's nodes and how often each occurs in the whole model."""

    nodes: tuple[tuple[Node, int], ...]

    @cached_property
    def layers(self) -> int:
        return max(count for _, count in self.nodes)

    def compiled(self) -> "Graph":
        """The graph of a compiled model, as Inductor fuses it."""
        return Graph(tuple((node, 1) for node in compiled([node for node, _ in self.nodes])))


def read_graphs(data: Data) -> dict[str, Graph]:
    """Operator graphs by configuration; a node's repetition comes from the per-operator labels of the same model.

    Graphs of compiled models hold every layer. Nodes that only parallel models have occur once a layer, except for
    the embedding's, the last norm's and transfers between stages.
    """
    repeats: dict[tuple[str, str, str], int] = {}
    for record in data.read("neusight/per_op_labels.csv.gz"):
        repeats[record["model"], record["mode"], record["node"]] = whole(record, "repeat")[0]
    depth: dict[str, int] = {}
    for (model, _, _), count in repeats.items():
        depth[model] = max(depth.get(model, 1), count)
    configs: dict[str, Mapping[str, Any]] = {}
    found: dict[str, list[tuple[Node, int]]] = {}
    for record in data.read("neusight/opgraphs.csv.gz"):
        model, mode, *rest = record["config"].split("-")
        if model not in configs:
            configs[model] = neusight_programs.config_content(data, model)
        node = without_idle(Node.of(record), configs[model])
        if rest[-1] == "fusion":
            count: int | None = 1
        elif node.op in ("allreduce", "sendrecv"):
            count = _communication_count(node, depth.get(model, 1))
        else:
            count = repeats.get((model, mode, node.name))
        if count is not None:
            found.setdefault(record["config"], []).append((node, count))
    graphs = {key: Graph(tuple(nodes)) for key, nodes in found.items()}
    return {key: graph.compiled() if key.endswith("-fusion") else graph for key, graph in graphs.items()}


def _communication_count(node: Node, layers: int) -> int:
    if node.op == "sendrecv":
        return _WORKERS - 1
    once = node.name.endswith(("_region", "wte_grad", "wpe_grad", "ln_f_grad", "lm_head_grad"))
    return 1 if once else layers


def model_rows(data: Data) -> list[Row]:
    """Whole models: eager and compiled on one GPU, data, tensor and pipeline parallel on four."""
    labels = data.read("neusight/e2e_labels.csv")
    if not labels:
        return []
    graphs = read_graphs(data)
    rows: list[Row] = []
    for record in labels:
        device, key = DEVICES.get(record["device"], ""), _config(record, record["option"])
        if device and key in graphs:
            row = _model_row(data, record, device, graphs[key], key)
            rows += [row] if row else []
    return rows


def passes_of_training(data: Data) -> Iterator[tuple[Record, str, tuple[float, float]]]:
    """Labels of training steps on one GPU, their device, and predicted seconds of the forward and backward pass."""
    graphs = read_graphs(data)
    for record in data.read("neusight/e2e_labels.csv"):
        device, key = DEVICES.get(record["device"], ""), _config(record)
        if device and key in graphs and record["mode"] == "train" and not record["option"]:
            passes = _passes(data, record, device, graphs[key], key)
            if passes is not None:
                yield record, device, (float(passes[0][0]), float(passes[1][0]))


def _passes(data: Data, record: Record, device: str, graph: Graph, key: str) -> list[Any] | None:
    """Time, low and high of the forward pass, and of the backward pass in training; None where it cannot be priced."""
    found = data.catalogue.device(device)
    passes = [[(forward_kernels(found, node), count) for node, count in graph.nodes]]
    if record["mode"] == "train":
        passes.append([(backward_kernels(found, node), count) for node, count in graph.nodes])
    totals: list[Any] = []
    for kernels in passes:
        sums = _sums(data, found, [rows for rows, _ in kernels], f"{key} on {device}")
        if sums is None:
            return None
        totals.append((sums * np.array([[count] for _, count in kernels])).sum(axis=0))
    return totals


def _model_row(data: Data, record: Record, device: str, graph: Graph, key: str) -> Row | None:
    totals = _passes(data, record, device, graph, key)
    if totals is None:
        return None
    times = _parallel(data, record["option"], device, graph, totals)
    peers = {name: number(record, f"{name}_e2e_ms") * _MILLI for name in PEERS if record.get(f"{name}_e2e_ms")}
    return Row(
        "neusight",
        key,
        device,
        number(record, "e2e_ms") * _MILLI,
        *times,
        peer="neusight",
        peer_predicted_s=peers.get("neusight"),
        peers=peers,
        group=_group(record),
        in_sample=is_fitted("neusight e2e"),
        key=key,
        basis=str(data.choice),
    )


def _group(record: Record) -> str:
    option = record["option"]
    if not option:
        return f"model {record['mode']}"
    return f"model {record['mode']} compiled" if option == "fusion" else "model train 4 GPUs"


def _parallel(data: Data, option: str, device: str, graph: Graph, passes: Sequence[Any]) -> list[float]:
    """Time, low and high of a step: passes one after the other, and what communication adds.

    `dp4`: Megatron-LM, with which these ran, sums all gradients in one buffer after the backward pass and divides them
    by the replicas, unless told to overlap (`--overlap-grad-reduce`, off by default). `tp4`: every sum waits.
    `pp4_M`: M microbatches through four stages, forward and backward.
    """
    total: Any = np.sum(passes, axis=0)
    if not option.startswith(("dp", "tp", "pp")):
        return [float(value) for value in total]
    parts = [
        (kind, dims[0] * FLOAT_BYTES, count, backward)
        for node, count in graph.nodes
        for backward, of in ((False, node.forward), (True, node.backward))
        for kind, dims in of
        if kind in _COMMUNICATION
    ]
    model = CollectiveModel(data.catalogue.resolve(f"{_SYSTEMS[device]}:{_WORKERS}"))
    if option.startswith("dp"):
        held = sum(nbytes * count for _, nbytes, count, _ in parts)
        found = data.catalogue.device(device)
        mean = _sums(data, found, [[specs.elementwise(found, "f32", held // FLOAT_BYTES, 1, 1)]], "gradients' mean")
        return [float(value) for value in total + mean[0] + np.array(_communication(model, "ALLREDUCE", held))]
    times = np.array([_communication(model, kind, nbytes) for kind, nbytes, _, _ in parts]).reshape(-1, 3)
    spent = (times * np.array([[count] for _, _, count, _ in parts])).sum(axis=0)
    if option.startswith("pp"):
        micro = int(option.rpartition("_")[2])
        stage = total / _WORKERS
        return [float(value) for value in stage * (_WORKERS + micro - 1) + spent]
    return [float(value) for value in total + spent]


def _communication(model: CollectiveModel, kind: str, nbytes: int) -> tuple[float, float, float]:
    name = "all_reduce" if kind.startswith("ALLREDUCE") else "collective_permute"
    time, low, high, _ = model.times(name, all_devices(_WORKERS), np.array([float(nbytes)]))
    return float(time[0]), float(low[0]), float(high[0])


def model_table(rows: Iterable[Row]) -> list[tuple[str, str, int, float, float, float, float, float | None]]:
    """Whole models: device, group, rows, then mean, median and 90th percentile of the error, its bias, and the peer's
    mean on the same rows, as shares."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.group.startswith("model"):
            groups.setdefault((row.device, row.group), []).append(row)
    found: list[tuple[str, str, int, float, float, float, float, float | None]] = []
    for (device, group), own in groups.items():
        signed = np.array([row.predicted_s / row.measured_s - 1.0 for row in own])
        theirs = [abs(row.peer_predicted_s / row.measured_s - 1.0) for row in own if row.peer_predicted_s]
        error = np.abs(signed)
        found.append(
            (
                device,
                group,
                len(own),
                float(error.mean()),
                float(np.median(error)),
                float(np.quantile(error, 0.9)),
                float(signed.mean()),
                float(np.mean(theirs)) if theirs else None,
            )
        )
    return found
