"""What vTrain's single-node rows are sums of, beside our costs, and what the choice of a layout hangs on.

    python benchmarks/vtrain_layers.py [--data FOLDER] [--backend learned|analytical]

An analysis of a test set: the rows are taken apart by least squares, and nothing found is used by the package. Prints
the recovered costs of layers, and of embedding and head, beside ours; what a hop between stages and the largest
all-reduce come to; how often the layout ranked first is within 5 % of the measured best with recovered costs in the
place of ours, with noise on the recovered layers, and with layers that never cost less for more sequences; and which
layers cost most of the groups.
"""

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from stablecast.backends.registry import parse_choice
from stablecast.validation.suites import Data, megatron
from stablecast.validation.suites.megatron import Layout, Megatron, Parts, Pieces, Shape

ROOT = Path(__file__).parent.parent
FloatArray = npt.NDArray[np.float64]
Key = tuple[Any, ...]
NOISE = (0.02, 0.05, 0.08, 0.1, 0.15, 0.2)
DRAWS = 1000
HOSTS = (34e-6, 45e-6, 57e-6)


@dataclass
class Rows:
    """The rows, and the costs that they are sums of, in milliseconds."""

    records: Sequence[Mapping[str, str]]
    unknowns: dict[Key, int] = field(default_factory=dict[Key, int])

    @cached_property
    def layouts(self) -> list[Layout]:
        return [megatron.layout_of(record) for record in self.records]

    @cached_property
    def measured(self) -> FloatArray:
        return np.array([float(record["step_ms"]) for record in self.records])

    @cached_property
    def groups(self) -> list[list[int]]:
        return megatron.groups_of(self.records)

    @cached_property
    def sums(self) -> FloatArray:
        """How often each unknown is in each row. Head and embedding of one stage go together, as nothing parts them."""
        terms = [self._terms(layout) for layout in self.layouts]
        for row in terms:
            for key in row:
                self.unknowns.setdefault(key, len(self.unknowns))
        found = np.zeros((len(terms), len(self.unknowns)))
        for place, row in enumerate(terms):
            for key, count in row.items():
                found[place, self.unknowns[key]] = count
        return found

    @staticmethod
    def _terms(layout: Layout) -> dict[Key, float]:
        shape, batches, pp = layout.shape, layout.micro_batches, layout.pp
        ends: dict[Key, float] = {("embed", shape): 1.0, ("head", shape): float(batches)}
        return {
            ("layer", shape): layout.layers * (1 + (batches - 1) / pp),
            **(ends if pp > 1 else {("ends", shape): float(batches)}),
            ("hop byte",): 2.0 * (pp - 1) * 2 * shape.batch * shape.seq * shape.hidden,
            once_key(layout): 1.0,
        }

    @cached_property
    def costs(self) -> dict[Key, float]:
        solved = np.linalg.lstsq(self.sums, self.measured, rcond=None)[0]
        return {key: float(solved[place]) for key, place in self.unknowns.items()}

    @property
    def misfit(self) -> float:
        """Largest error of a row that is put together again."""
        together = self.sums @ np.array([self.costs[key] for key in self.unknowns])
        return float(np.max(np.abs(together / self.measured - 1)))

    def pieces(self, layout: Layout) -> Pieces:
        """The recovered costs of a layout."""
        shape, nbytes = layout.shape, 2 * layout.shape.batch * layout.shape.seq * layout.shape.hidden
        if layout.pp > 1:
            embed, head = self.costs["embed", shape], self.costs["head", shape]
        else:
            embed, head = 0.0, self.costs["ends", shape]
        parts = Parts(*(np.full(3, ms) for ms in (self.costs["layer", shape], embed, head)))
        return Pieces(parts, np.full(3, self.costs["hop byte",] * nbytes), np.full(3, self.costs[once_key(layout)]))


def once_key(layout: Layout) -> Key:
    """The unknown of optimiser and gradients."""
    return ("once", layout.shape.hidden, layout.shape.tp, layout.dp, layout.pp, layout.layers)


def in_ms(pieces: Pieces) -> Pieces:
    """Seconds to milliseconds."""
    found = pieces.parts
    parts = Parts(found.layer * 1e3, found.embed * 1e3, found.head * 1e3)
    return Pieces(parts, pieces.hop * 1e3, pieces.once * 1e3)


def mixed(ours: Pieces, theirs: Pieces, names: Sequence[str]) -> Pieces:
    """Our pieces with the named ones of the rows in their place."""
    parts = replace(ours.parts, **{name: getattr(theirs.parts, name) for name in names if hasattr(ours.parts, name)})
    outer = {name: getattr(theirs, name) for name in names if name in ("hop", "once")}
    return replace(ours, parts=parts, **outer)


def score(rows: Rows, pieces: Sequence[Pieces]) -> str:
    """Groups whose first layout is right, and the errors of the rows."""
    times = _times(rows, pieces)
    right, _ = megatron.hits(rows.groups, rows.measured, times)
    errors = np.abs(times / rows.measured - 1)
    return (
        f"{right:4.0%} of groups, rows off by a median {np.median(errors):.1%}, 90th percentile "
        f"{np.quantile(errors, 0.9):.1%}"
    )


def tables(rows: Rows, ours: Sequence[Pieces]) -> list[str]:
    """Recovered costs and ours, by width, split and micro-batch."""
    mine = {layout.shape: piece.parts for layout, piece in zip(rows.layouts, ours, strict=True)}
    lines: list[str] = []
    for name in ("layer", "ends"):
        lines.append(f"{'a layer' if name == 'layer' else 'embedding and head on one stage'}, ms: ours / recovered")
        errors: list[float] = []
        for hidden in sorted({shape.hidden for shape in mine}):
            for tp in sorted({shape.tp for shape in mine}):
                cells: list[str] = []
                for shape in sorted((s for s in mine if (s.hidden, s.tp) == (hidden, tp)), key=lambda s: s.batch):
                    parts, found = mine[shape], rows.costs[name, shape]
                    own = float((parts.layer if name == "layer" else parts.embed + parts.head)[0])
                    errors.append(own / found - 1)
                    cells.append(f"{own:6.2f} / {found:6.2f} ({own / found - 1:+4.0%})")
                lines.append(f"  width {hidden}, {tp} GPUs: " + "  ".join(cells))
        sizes = np.abs(errors)
        lines.append(f"  median {np.median(sizes):.1%}, mean {np.mean(sizes):.1%}, largest {np.max(sizes):.1%}")
    return lines


def oddities(rows: Rows) -> list[str]:
    """What of the recovered costs no machine of this kind does."""
    rate = 1e3 / rows.costs["hop byte",]
    layout = max((one for one in rows.layouts if one.pp == 1 and one.shape.tp == 1), key=lambda o: (o.dp, o.layers))
    hidden, layers, dp = layout.shape.hidden, layout.layers, layout.dp
    update = 2 * rows.costs["once", hidden, 2, 1, 1, layers]
    nbytes = 2 * (12 * hidden**2 * layers + 50257 * hidden)
    took = rows.costs[once_key(layout)] - update
    moved = 2 * (dp - 1) / dp * nbytes
    rates = [f"{tp} GPUs {_head_rate(rows, tp) / 1e12:.0f}" for tp in sorted({one.shape.tp for one in rows.layouts})]
    return [
        f"rows put together again from {len(rows.unknowns)} costs: within {rows.misfit:.2%}",
        f"a hop between stages: {rate / 1e9:.2f} GB/s, {rate / 2**30:.2f} GiB/s, without a latency",
        f"the all-reduce of {nbytes / 1e9:.2f} GB over {dp} GPUs: {took:.1f} ms (without an update twice that of two "
        f"GPUs): each would send {moved / took / 1e6:.0f} GB/s",
        f"TFLOP/s of the head's products, by what twice the width costs more: {', '.join(rates)}",
    ]


def _head_rate(rows: Rows, tp: int) -> float:
    """FLOP/s of logits and their two gradients over a share of the vocabulary, all micro-batches together."""
    ends = {key[1]: cost for key, cost in rows.costs.items() if key[0] == "ends" and key[1].tp == tp}
    narrow, wide = (sum(cost for shape, cost in ends.items() if shape.hidden == width) for width in (1024, 2048))
    tokens = sum(shape.batch * shape.seq for shape in ends if shape.hidden == 1024)
    return 3 * 2.0 * tokens * 1024 * 50257 / tp / (wide - narrow) * 1e3


def never_less(costs: Mapping[Key, float]) -> dict[Key, float]:
    """The nearest layers (mean of logarithms) that never cost less for more sequences: neighbours are pooled."""
    found: dict[Key, float] = {}
    shapes = sorted((key[1] for key in costs if key[0] == "layer"), key=lambda s: (s.hidden, s.tp, s.batch))
    for hidden, tp in sorted({(shape.hidden, shape.tp) for shape in shapes}):
        pools: list[tuple[float, list[Shape]]] = []
        for shape in (s for s in shapes if (s.hidden, s.tp) == (hidden, tp)):
            pools.append((float(np.log(costs["layer", shape])), [shape]))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (low, those), (high, these) = pools.pop(-2), pools.pop()
                mean = (low * len(those) + high * len(these)) / (len(those) + len(these))
                pools.append((mean, those + these))
        found |= {("layer", shape): float(np.exp(mean)) for mean, members in pools for shape in members}
    return found


def cheaper(rows: Rows, pieces: Sequence[Pieces]) -> str:
    """Groups whose measured best has layers that the rows price below those with half the sequences, and the others."""
    costs = rows.costs
    odd = {
        key[1]
        for key in costs
        if key[0] == "layer" and costs[key] < costs.get(("layer", replace(key[1], batch=key[1].batch // 2)), 0.0)
    }
    best = [rows.layouts[group[int(np.argmin(rows.measured[group]))]] for group in rows.groups]
    others = [group for group, layout in zip(rows.groups, best, strict=True) if layout.shape not in odd]
    right, _ = megatron.hits(others, rows.measured, _times(rows, pieces))
    return (
        f"in {len(rows.groups) - len(others)} of {len(rows.groups)} groups the measured best has layers that cost less "
        f"than those with half the sequences; ours are right in {right:.0%} of the other {len(others)}"
    )


@dataclass(frozen=True)
class Layers:
    """Steps as a function of their layers alone: `rest` is what they take besides."""

    rows: Rows
    rest: FloatArray

    @classmethod
    def of(cls, rows: Rows, pieces: Sequence[Pieces]) -> Self:
        """With all but the layers as `pieces` have it."""
        bare = [replace(one, parts=replace(one.parts, layer=np.zeros(3))) for one in pieces]
        return cls(rows, _times(rows, bare))

    @cached_property
    def keys(self) -> list[Key]:
        return [key for key in self.rows.unknowns if key[0] == "layer"]

    @cached_property
    def counts(self) -> FloatArray:
        """How often each layer is in each row."""
        return self.rows.sums[:, [self.rows.unknowns[key] for key in self.keys]]

    def right(self, costs: Mapping[Key, float]) -> float:
        """Share of groups whose first layout is right where layers cost this much."""
        times = self.rest + self.counts @ np.array([costs[key] for key in self.keys])
        return megatron.hits(self.rows.groups, self.rows.measured, times)[0]


def _times(rows: Rows, pieces: Sequence[Pieces]) -> FloatArray:
    return np.array([float(one.step(layout)[0]) for one, layout in zip(pieces, rows.layouts, strict=True)])


def noise(layers: Layers) -> list[str]:
    """Groups that are right with noise on the recovered layers."""
    draws = np.random.default_rng(0)
    costs = layers.rows.costs
    lines = [f"layers that never cost less for more sequences: {layers.right(never_less(costs)):.0%} of groups"]
    for spread in NOISE:
        found = [
            layers.right({key: costs[key] * float(np.exp(draws.normal(0.0, spread))) for key in layers.keys})
            for _ in range(DRAWS)
        ]
        low, high = np.quantile(found, (0.1, 0.9))
        enough = float(np.mean(np.array(found) >= 0.9))
        lines.append(
            f"recovered layers with {spread:.0%} of noise: {np.mean(found):.0%} of groups (80 % of draws {low:.0%} to "
            f"{high:.0%}; at least 90 % in {enough:.0%} of draws)"
        )
    return lines


def dearest(layers: Layers, ours: Mapping[Key, float], steps: int = 4) -> list[str]:
    """Our layers that cost most groups: replaced one after the other by the recovered ones, the best first."""
    costs, lines = dict(ours), [f"our layers: {layers.right(ours):.0%} of groups"]
    theirs = layers.rows.costs
    for _ in range(steps):
        best = max(layers.keys, key=lambda key: layers.right(costs | {key: theirs[key]}))
        lines.append(
            f"  {best[1].hidden} wide, {best[1].tp} GPUs, {best[1].batch} sequences: {ours[best]:.2f} ms is "
            f"{theirs[best]:.2f}: {layers.right(costs | {best: theirs[best]}):.0%}"
        )
        costs[best] = theirs[best]
    return lines


def hidden_dispatch(rows: Rows, model: Megatron) -> list[str]:
    """How close layers come, and how often the first is right, where a kernel takes at least its dispatch."""
    lines: list[str] = []
    for host_s in HOSTS:
        table = replace(model.table, alone=False)
        other = replace(model, table=table, host_s=host_s, _parts={}, _updates={})
        made = [in_ms(other.pieces(layout)) for layout in rows.layouts]
        layers = {layout.shape: float(piece.parts.layer[0]) for layout, piece in zip(rows.layouts, made, strict=True)}
        errors = [abs(own / rows.costs["layer", shape] - 1) for shape, own in layers.items()]
        lines.append(
            f"dispatch of {host_s * 1e6:.0f} us that kernels hide: layers off by a median {np.median(errors):.1%}; "
            f"{score(rows, made)}"
        )
    return lines


def report(rows: Rows, ours: Sequence[Pieces]) -> list[str]:
    """All of it."""
    theirs = [rows.pieces(layout) for layout in rows.layouts]
    lines = [*oddities(rows), *tables(rows, ours)]
    swaps = ((), ("layer",), ("embed", "head"), ("layer", "embed", "head"), ("hop",), ("once",))
    for names in swaps:
        what = " and ".join(names) or "nothing"
        both = [mixed(own, their, names) for own, their in zip(ours, theirs, strict=True)]
        lines.append(f"ours, recovered {what}: {score(rows, both)}")
    lines.append(f"all recovered: {score(rows, theirs)}")
    own = {("layer", one.shape): float(piece.parts.layer[0]) for one, piece in zip(rows.layouts, ours, strict=True)}
    exact, mine = Layers.of(rows, theirs), Layers.of(rows, ours)
    return [*lines, *noise(exact), "ours but for the layers:", *dearest(mine, own), cheaper(rows, ours)]


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--backend", default="analytical")
    arguments = parser.parse_args()
    data = Data(arguments.data, parse_choice(arguments.backend))
    if data.examples is None:
        parser.error("the example programs are not at hand")
    table = megatron.TABLES[0]
    with (arguments.data / table.file).open(encoding="utf-8", newline="") as file:
        rows = Rows(list(csv.DictReader(file)))
    model = Megatron(data, data.examples, table)
    ours = [in_ms(model.pieces(layout)) for layout in rows.layouts]
    print("\n".join([*report(rows, ours), *hidden_dispatch(rows, model)]))


if __name__ == "__main__":
    main()
