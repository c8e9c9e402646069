"""vTrain: training steps of GPT decoders under tensor, data and pipeline parallelism, from `examples/torch_gpt.py`.

A micro-batch on one tensor-parallel rank is captured with one and with two layers for each distinct width, micro-batch
and split; their difference is a layer (a test shows that a third adds the same again), what the first has besides is
embedding and head. A stage is so many layers, the first with the embedding, the last with the head; 1F1B runs
`micro-batches - 1` times the slowest stage and once through all. Gradients are summed at the end in one all-reduce
(no buckets, says the data's README), then comes the optimiser, captured too.

The tables are read differently, each as its own numbers demand (`TABLES`):

- 512 GPUs: measured steps. Every layer runs again in the backward pass, as the data's README says of its
  configurations; in eager PyTorch a kernel takes at least the time that the host needs to dispatch it.
- one node: the rows are exactly linear in the number of micro-batches and of layers (to 1e-12), so they are sums of
  operators timed one by one (`benchmarks/vtrain_layers.py` takes them apart): what the host needs comes before each
  kernel, and no other kernel hides it. No layer runs again: from width 1,024 to 2,048 a sequence more costs a layer
  1.12 ms more, in which its products alone, run four times, would need 276 TFLOP/s, with nothing left for all else.
  99 % of the A100's large products in the training tables (m of 4,096 and more) stay below 271.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.device import System
from stablecast.backends.estimates import FloatArray
from stablecast.backends.pricing import price
from stablecast.frontends.script import load_module
from stablecast.ir.device_program import P2P, Collective, DeviceProgram, Kernel
from stablecast.ir.errors import StablecastError
from stablecast.ir.groups import over_axes
from stablecast.ir.workload import Workload
from stablecast.lowering.products import TF32_ARITHMETIC
from stablecast.lowering.target import Target
from stablecast.validation.suites.base import Data, Record, Row, number, whole
from stablecast.validation.suites.captures import example_kernels, kernels

DEVICE: Final = "a100-sxm-80gb"
HOST_S: Final = 34e-6
"""Seconds that the host needs for one eager launch: the median between launches of a thread in a training trace of
8 A100 (33 us; 34 us where the device waits for the host), and what PyTorch's own timing of small products on an A100
holds (35 us, docs/analytical.md)."""
HOST_COLLECTIVE_S: Final = 81e-6
"""The same for a collective: the median call of `c10d::allreduce_` in that trace (73 us at least, 84 us on average)."""
NODE_BYTES_PER_S: Final = 100e9
"""Between nodes, all adapters of one together: 800 Gbit/s, says the data's README."""
GPUS_OF_A_NODE: Final = 8
_MILLI: Final = 1e-3
_SCRIPT: Final = "torch_gpt.py"
_FP16: Final = 2
_TARGET: Final = Target("cuda", TF32_ARITHMETIC, combine=False, exec="eager", attention="as-written")
LEAST_LAYOUTS: Final = 8
CLOSE: Final = 1.05


@dataclass(frozen=True, slots=True)
class Table:
    """A table of steps and how it is read.

    `recompute`: layers run again in the backward pass. `alone`: operators were timed one by one, so that the host's
    dispatch adds to every kernel; else the longer of the two counts.
    """

    name: str
    file: str
    recompute: bool
    alone: bool


TABLES: Final = (
    Table("single node", "distributed_steps/vtrain_a100_single_node.csv", recompute=False, alone=True),
    Table("512 GPUs", "distributed_steps/vtrain_a100_multi_node.csv", recompute=True, alone=False),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the program of a micro-batch: sizes, and the tensor-parallel split."""

    hidden: int
    heads: int
    seq: int
    batch: int
    tp: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Time, low and high in seconds of one micro-batch: of a layer, of the embedding, and of head and loss."""

    layer: FloatArray
    embed: FloatArray
    head: FloatArray


@dataclass(frozen=True, slots=True)
class Layout:
    """One row: the model, its batch, and how it is split."""

    shape: Shape
    layers: int
    global_batch: int
    dp: int
    pp: int
    gpus: int

    @property
    def micro_batches(self) -> int:
        return self.global_batch // self.dp // self.shape.batch


def layout_of(record: Record) -> Layout:
    """The layout of a row of either table."""
    hidden, heads, seq, batch, tp = whole(record, "hidden", "heads", "seq_len", "micro_batch", "tp")
    layers, everything, dp, pp, gpus = whole(record, "layers", "global_batch", "dp", "pp", "gpus")
    return Layout(Shape(hidden, heads, seq, batch, tp), layers, everything, dp, pp, gpus)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Time, low and high in seconds of a micro-batch, of a hop between stages, and of what a step does once."""

    parts: Parts
    hop: FloatArray
    once: FloatArray

    def step(self, layout: Layout) -> FloatArray:
        """1F1B: all stages once, and the slowest for every other micro-batch."""
        stages = [layout.layers // layout.pp * self.parts.layer for _ in range(layout.pp)]
        stages[0] = stages[0] + self.parts.embed
        stages[-1] = stages[-1] + self.parts.head
        slowest = max(stages, key=lambda stage: float(stage[0]))
        through = np.sum(stages, axis=0) + 2 * (layout.pp - 1) * self.hop
        return through + (layout.micro_batches - 1) * slowest + self.once


@dataclass
class Megatron:
    """Prices the layouts of a table; keeps what captured programs cost.

    `host_s`, `host_collective_s`: seconds that the host needs to dispatch a kernel and a collective.
    """

    data: Data
    folder: Path
    table: Table
    host_s: float = HOST_S
    host_collective_s: float = HOST_COLLECTIVE_S
    _parts: dict[Shape, Parts] = field(default_factory=dict[Shape, Parts])
    _updates: dict[tuple[int, int, int], Parts] = field(default_factory=dict[tuple[int, int, int], Parts])
    _systems: dict[int, System] = field(default_factory=dict[int, System])

    @cached_property
    def module(self) -> Any:
        """The example's functions."""
        return load_module(self.folder / _SCRIPT)

    def step(self, layout: Layout) -> FloatArray:
        """Time, low and high of a step in seconds."""
        return self.pieces(layout).step(layout)

    def pieces(self, layout: Layout) -> Pieces:
        """What a step is put together from."""
        own = layout.layers // layout.pp
        once = self._gradients(layout, own) + self._update(layout, own)
        return Pieces(self.parts(layout.shape), self._hop(layout), once)

    def parts(self, shape: Shape) -> Parts:
        """What one micro-batch costs."""
        if shape not in self._parts:
            one, two = (self.program(shape, layers, "micro_step") for layers in (1, 2))
            costs = [self._node_costs(program, shape.tp) for program in (one, two)]
            layer = costs[1].sum(axis=0) - costs[0].sum(axis=0)
            embed = costs[0][_embedding(one)].sum(axis=0)
            self._parts[shape] = Parts(layer, embed, costs[0].sum(axis=0) - layer - embed)
        return self._parts[shape]

    def program(self, shape: Shape, layers: int, step: str) -> DeviceProgram:
        """The kernels of one device's `micro_step` or `update`."""
        choices = (_SCRIPT, step, shape, layers, self.table.recompute, _TARGET)
        return example_kernels(
            self.folder, "torch", choices, lambda: kernels(self._capture(shape, layers, step), _SCRIPT, _TARGET)
        )

    def _capture(self, shape: Shape, layers: int, step: str) -> Workload:
        function: Any = getattr(self.module, step)
        from stablecast.frontends.torch import capture_torch

        sizes = {"hidden": shape.hidden, "heads": shape.heads, "seq": shape.seq, "layers": layers}
        flags = {"recompute": self.table.recompute, "accumulate": True}
        given = partial(self.module.inputs, shape.batch, shape.seq) if step == "micro_step" else ()
        split = shape.tp > 1
        build: Any = partial(self.module.build_parallel if split else self.module.build, **sizes, **flags)
        return capture_torch(build, function, given, mesh={"tp": shape.tp} if split else None)

    def _node_costs(self, program: DeviceProgram, tp: int) -> FloatArray:
        """Time, low and high of every node with the host's dispatch."""
        system = self.system(max(tp, 2))
        estimates = price(program.table, system.device, self.data.choice).estimates
        model = CollectiveModel(system)
        rows: list[tuple[float, float, float]] = []
        kinds = [isinstance(node, Collective) for node in program.body]
        host = np.where(kinds, self.host_collective_s, self.host_s)[:, None]
        for node in program.body:
            if isinstance(node, Kernel):
                at = node.row
                rows.append((float(estimates.time_s[at]), float(estimates.low_s[at]), float(estimates.high_s[at])))
            elif isinstance(node, Collective):
                found = model.estimate(node)
                rows.append((found.time_s, found.low_s, found.high_s))
            else:
                rows.append((0.0, 0.0, 0.0))
        costs = np.array(rows)
        return np.where(costs > 0, costs + host, 0.0) if self.table.alone else np.maximum(costs, host)

    def system(self, gpus: int) -> System:
        """So many A100, eight to a node, 100 GB/s between nodes."""
        if gpus not in self._systems:
            found = self.data.catalogue.resolve(f"{DEVICE}:{gpus}")
            dims = tuple(
                replace(dim, bytes_per_s=replace(dim.bytes_per_s, value=NODE_BYTES_PER_S / GPUS_OF_A_NODE))
                if dim.name == "scale-out"
                else dim
                for dim in found.network.dims
            )
            self._systems[gpus] = replace(found, network=replace(found.network, dims=dims))
        return self._systems[gpus]

    def _hop(self, layout: Layout) -> FloatArray:
        """Activations from one stage to the next."""
        shape = layout.shape
        nbytes = shape.batch * shape.seq * shape.hidden * _FP16
        axes = [("pp", layout.pp), ("dp", layout.dp), ("tp", shape.tp)]
        groups = over_axes("gpus", axes, ["pp"])
        found = CollectiveModel(self.system(layout.gpus)).p2p(P2P("send", "pp", 1, 0, nbytes), groups)
        return np.array([found.time_s, found.low_s, found.high_s])

    def _gradients(self, layout: Layout, layers: int) -> FloatArray:
        """One all-reduce of every gradient over the data-parallel group; ranks count tensor, data, pipeline."""
        if layout.dp == 1:
            return np.zeros(3)
        axes = [("pp", layout.pp), ("dp", layout.dp), ("tp", layout.shape.tp)]
        groups = over_axes("gpus", axes, ["dp"])
        nbytes = np.array([float(_FP16 * self._parameters(layout, layers))])
        model = CollectiveModel(self.system(layout.gpus))
        time, low, high, _ = model.times("all_reduce", groups, nbytes)
        return np.array([time[0], low[0], high[0]])

    def _parameters(self, layout: Layout, layers: int) -> int:
        """Parameters of one device of the first stage."""
        shape = layout.shape
        multiple = self.module.VOCAB_MULTIPLE * shape.tp
        vocab = -(-self.module.VOCAB // multiple) * multiple
        return (layers * 12 * shape.hidden**2 + vocab * shape.hidden) // shape.tp + shape.seq * shape.hidden

    def _update(self, layout: Layout, layers: int) -> FloatArray:
        """The optimiser of the first stage."""
        shape = layout.shape
        key = (shape.hidden, shape.tp, shape.seq)
        if key not in self._updates:
            one, two = (self.program(shape, count, "update") for count in (1, 2))
            costs = [self._node_costs(program, shape.tp).sum(axis=0) for program in (one, two)]
            self._updates[key] = Parts(costs[1] - costs[0], 2 * costs[0] - costs[1], np.zeros(3))
        return self._updates[key].embed + layers * self._updates[key].layer


def _embedding(program: DeviceProgram) -> list[int]:
    """Nodes before the layers' first and after their last."""
    inside = [
        place
        for place, node in enumerate(program.body)
        if isinstance(node, Kernel | Collective) and "/layers/" in node.scope
    ]
    return [*range(inside[0]), *range(inside[-1] + 1, len(program.body))]


def vtrain(data: Data) -> list[Row]:
    """Every row of both tables."""
    rows: list[Row] = []
    for table in TABLES:
        records = data.read(table.file)
        if data.examples is None:
            data.notes.append("vtrain: the example programs are not at hand")
            return []
        try:
            rows += _table(Megatron(data, data.examples, table), records)
        except StablecastError as error:
            data.notes.append(f"vtrain is left out: {error.message}")
            return []
    return rows


def _table(model: Megatron, records: Sequence[Record]) -> list[Row]:
    group = model.table.name
    steps = [model.step(layout_of(record)) for record in records]
    if records:
        model.data.notes.append(ranking(group, records, [float(step[0]) for step in steps]))
    return [_row(group, record, step) for record, step in zip(records, steps, strict=True)]


def groups_of(records: Sequence[Record]) -> list[list[int]]:
    """Places of the rows of one model, number of GPUs and global batch, where there are `LEAST_LAYOUTS` of them."""
    sets: dict[tuple[str, ...], list[int]] = {}
    names = ("hidden", "layers", "heads", "seq_len", "gpus", "global_batch")
    for place, record in enumerate(records):
        sets.setdefault(tuple(record[name] for name in names), []).append(place)
    return [places for places in sets.values() if len(places) >= LEAST_LAYOUTS]


def hits(groups: Sequence[Sequence[int]], measured: FloatArray, predicted: FloatArray) -> tuple[float, float]:
    """Share of groups whose layout ranked first is within 5 % of the measured best; the same for a random layout."""
    close = [measured[group] <= CLOSE * measured[group].min() for group in map(list, groups)]
    first = [near[int(np.argmin(predicted[list(group)]))] for near, group in zip(close, groups, strict=True)]
    return float(np.mean(first)), float(np.mean([near.mean() for near in close]))


def ranking(group: str, records: Sequence[Record], predicted: Sequence[float]) -> str:
    """How often the layout ranked first is within 5 % of the measured best, and how often a random one is."""
    large = groups_of(records)
    if not large:
        return f"vtrain, {group}: no group of {LEAST_LAYOUTS} layouts"
    measured = np.array([number(record, "step_ms") for record in records])
    right, chance = hits(large, measured, np.array(predicted))
    return (
        f"vtrain, {group}: the layout ranked first is within 5 % of the measured best in {right:.0%} of "
        f"{len(large)} groups of {LEAST_LAYOUTS} layouts or more; a random one in {chance:.0%}"
    )


def _row(group: str, record: Mapping[str, str], step: FloatArray) -> Row:
    split = f"tp{record['tp']} dp{record['dp']} pp{record['pp']} mb{record['micro_batch']}"
    model = f"h{record['hidden']} l{record['layers']} b{record['global_batch']}"
    return Row(
        "vtrain",
        f"{model} {split}, {record['gpus']} GPUs",
        DEVICE,
        number(record, "step_ms") * _MILLI,
        float(step[0]),
        float(step[1]),
        float(step[2]),
        group=f"{group} pp{1 if record['pp'] == '1' else 'n'} tp{1 if record['tp'] == '1' else 'n'}"
        if group == "single node"
        else group,
        path="program",
        basis="program",
    )
