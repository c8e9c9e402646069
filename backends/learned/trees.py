"""Boosted regression trees as plain arrays, evaluated by numpy alone.

A row's leaf is found without walking the tree: every inner node that the row leaves to the right rules out the leaves
on its left; of those that remain the leftmost is the row's. With features cut into at most 255 bins, what one tree
rules out by one feature is a table with an entry a bin (the method of Lucchese et al., "QuickScorer", SIGIR 2015).
"""

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stablecast.backends.estimates import FloatArray

LEAVES_MAX: Final = 32
CUTS_MAX: Final = 255
_CHUNK: Final = 1 << 14
_CHUNKS_FOR_THREADS: Final = 4
_THREADS: Final = 4
_ALL: Final = np.uint32(0xFFFFFFFF)
Tables = list[tuple[list[tuple[int, npt.NDArray[np.uint32]]], FloatArray]]


@dataclass(frozen=True)
class Trees:
    """A sum of trees over `features` columns, plus `base`.

    `cuts[f]`: ascending thresholds of feature f. Inner nodes, tree by tree: `tree`, `feature`, `cut` (index into
    `cuts[feature]`; values up to it go left) and `left` (bits of the leaves on its left). `leaf`: values of the leaves
    of all trees, left to right, `leaf_start[t]` the first of tree t.
    """

    base: float
    cuts: tuple[FloatArray, ...]
    tree: npt.NDArray[np.uint16]
    feature: npt.NDArray[np.uint8]
    cut: npt.NDArray[np.uint8]
    left: npt.NDArray[np.uint32]
    leaf: npt.NDArray[np.float32]
    leaf_start: npt.NDArray[np.int32]

    @property
    def count(self) -> int:
        """How many trees."""
        return len(self.leaf_start)

    def predict(self, columns: Sequence[FloatArray]) -> FloatArray:
        """The sum for every row; `columns`: one array a feature, all of one length."""
        rows = len(columns[0]) if columns else 0
        total = np.full(rows, self.base)
        tables = self._tables

        def add(start: int) -> None:
            part = slice(start, start + _CHUNK)
            total[part] += _sum_of(
                tables, [np.searchsorted(c, x[part]) for c, x in zip(self.cuts, columns, strict=True)]
            )

        starts = range(0, rows, _CHUNK)
        if len(starts) < _CHUNKS_FOR_THREADS:
            for start in starts:
                add(start)
        else:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(add, starts))
        return total

    @cached_property
    def _tables(self) -> Tables:
        """For each tree: by feature, the leaves that remain for each bin; and the values of its leaves."""
        rules: list[list[tuple[int, npt.NDArray[np.uint32]]]] = [[] for _ in range(self.count)]
        cut = self.cut.astype(np.intp) + 1
        for feature, cuts in enumerate(self.cuts):
            mine = np.flatnonzero(self.feature == feature)
            trees, row = np.unique(self.tree[mine], return_inverse=True)
            remain = np.full((len(trees), len(cuts) + 1), _ALL, dtype=np.uint32)
            np.bitwise_and.at(remain, (row, cut[mine]), ~self.left[mine])
            np.bitwise_and.accumulate(remain, axis=1, out=remain)
            for tree, table in zip(trees.tolist(), remain, strict=True):
                rules[tree].append((feature, table))
        leaves = np.split(self.leaf.astype(np.float64), self.leaf_start[1:])[: self.count]
        return list(zip(rules, leaves, strict=True))

    def arrays(self) -> dict[str, Any]:
        """Everything as arrays, for a file."""
        sizes = np.cumsum([0, *(len(cuts) for cuts in self.cuts)])
        flat = np.concatenate(self.cuts) if self.cuts else np.zeros(0)
        return {
            "base": np.array(self.base),
            "cuts": flat,
            "cut_start": sizes.astype(np.int32),
            "tree": self.tree,
            "feature": self.feature,
            "cut": self.cut,
            "left": self.left,
            "leaf": self.leaf,
            "leaf_start": self.leaf_start,
        }

    @staticmethod
    def of(arrays: Mapping[str, Any]) -> "Trees":
        """From what `arrays` gave."""
        starts = arrays["cut_start"].tolist()
        cuts = tuple(arrays["cuts"][a:b] for a, b in itertools.pairwise(starts))
        names = ("tree", "feature", "cut", "left", "leaf", "leaf_start")
        return Trees(float(arrays["base"]), cuts, *(arrays[name] for name in names))


def _sum_of(tables: Tables, bins: Sequence[npt.NDArray[np.intp]]) -> FloatArray:
    """The sum of all trees over the rows whose bins are given, a feature each."""
    total = np.zeros(len(bins[0]))
    left, more = np.empty(len(bins[0]), dtype=np.uint32), np.empty(len(bins[0]), dtype=np.uint32)
    for rules, values in tables:
        if not rules:
            total += values[0]
            continue
        feature, table = rules[0]
        table.take(bins[feature], out=left, mode="clip")
        for feature, table in rules[1:]:
            table.take(bins[feature], out=more, mode="clip")
            np.bitwise_and(left, more, out=left)
        total += values[np.bitwise_count((left & (~left + np.uint32(1))) - np.uint32(1))]
    return total


def pack(model: Any, features: int) -> Trees:
    """The trees of a fitted `HistGradientBoostingRegressor`; raises `ValueError` where they do not fit this form.

    Reads what scikit-learn's own pickles hold: `_predictors[i][0].nodes` and `_baseline_prediction`.
    """
    nodes_of = [stage[0].nodes for stage in model._predictors]
    cuts: list[FloatArray] = []
    for number in range(features):
        mine = [
            nodes["num_threshold"][(nodes["is_leaf"] == 0) & (nodes["feature_idx"] == number)] for nodes in nodes_of
        ]
        cuts.append(np.unique(np.concatenate(mine)) if mine else np.zeros(0))
        if len(cuts[-1]) > CUTS_MAX:
            raise ValueError(f"feature {number} is cut at {len(cuts[-1])} places, more than {CUTS_MAX}")
    tree: list[int] = []
    rows: list[tuple[int, int, int]] = []
    leaves: list[float] = []
    starts: list[int] = []
    for number, nodes in enumerate(nodes_of):
        starts.append(len(leaves))
        found, values = _flatten(nodes, cuts)
        tree += [number] * len(found)
        rows += found
        leaves += values
    columns = np.array(rows, dtype=np.uint32).reshape(-1, 3)
    return Trees(
        float(np.ravel(model._baseline_prediction)[0]),
        tuple(cuts),
        np.array(tree, dtype=np.uint16),
        columns[:, 0].astype(np.uint8),
        columns[:, 1].astype(np.uint8),
        columns[:, 2],
        np.array(leaves, dtype=np.float32),
        np.array(starts, dtype=np.int32),
    )


def _flatten(nodes: Any, cuts: Sequence[FloatArray]) -> tuple[list[tuple[int, int, int]], list[float]]:
    """Inner nodes as (feature, cut, bits of the leaves on the left), and the leaves' values from left to right."""
    inner: list[tuple[int, int, int]] = []
    values: list[float] = []

    def visit(index: int) -> int:
        node = nodes[index]
        if node["is_leaf"]:
            if len(values) == LEAVES_MAX:
                raise ValueError(f"a tree has more than {LEAVES_MAX} leaves")
            values.append(float(node["value"]))
            return 1 << (len(values) - 1)
        left = visit(int(node["left"]))
        feature = int(node["feature_idx"])
        inner.append((feature, int(np.searchsorted(cuts[feature], float(node["num_threshold"]))), left))
        return left | visit(int(node["right"]))

    visit(0)
    return inner, values
