"""Matching of a measured step and a prediction, item by item; what has no partner stays visible on its side."""

import difflib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from stablecast.validation.items import Item
from stablecast.validation.kernel_names import MeasuredClass

_LONG: Final = 3000


@dataclass(frozen=True, slots=True)
class Pair:
    """Item numbers of both sides, and by what: `collective`, `operator`, `scope`, `shape` or `order`.

    `firm`: both sides had as many of that kind, so that the k-th of one is the k-th of the other.
    """

    measured: int
    predicted: int
    how: str
    firm: bool = True


@dataclass(frozen=True)
class Matching:
    """Pairs, and the numbers of the items without a partner."""

    measured: tuple[Item, ...]
    predicted: tuple[Item, ...]
    pairs: tuple[Pair, ...]
    only_measured: tuple[int, ...]
    only_predicted: tuple[int, ...]

    @property
    def matched_share(self) -> float:
        """Share of the measured device time that has a predicted partner, copies between host and device apart."""
        total = sum(item.time_s for item in self.measured if item.klass is not MeasuredClass.MEMCPY)
        own = (self.measured[pair.measured] for pair in self.pairs)
        return sum(item.time_s for item in own if item.klass is not MeasuredClass.MEMCPY) / total if total else 0.0

    @property
    def predicted_share(self) -> float:
        """Share of the predicted time that has a measured partner."""
        total = sum(item.time_s for item in self.predicted)
        return sum(self.predicted[pair.predicted].time_s for pair in self.pairs) / total if total else 0.0


def match(measured: Sequence[Item], predicted: Sequence[Item]) -> Matching:
    """Pairs of items, by these rules in turn, each on what the former left:

    collectives by kind, message and group, then by kind; kernels by operator, scope and shape; by operator and scope
    where both sides have the same number; the same by class in place of operator; by class and shape; by operator where
    both sides have the same number; at last by the order of classes, with gaps.
    """
    work = _Work(measured, predicted)
    work.by_key(lambda item: (item.kind, item.nbytes, item.group) if item.is_collective else None, "collective")
    work.by_key(lambda item: (item.kind, item.nbytes) if item.is_collective and item.nbytes else None, "collective")
    work.by_key(lambda item: item.kind if item.is_collective else None, "collective")
    work.by_key(lambda item: (item.op, item.scope, item.shape) if item.op and item.shape else None, "operator")
    work.by_key(lambda item: (item.op, item.scope) if item.op and item.scope else None, "operator", equal_numbers=True)
    work.by_key(lambda item: (item.klass, item.scope, item.shape) if item.scope and item.shape else None, "scope")
    work.by_key(lambda item: (item.klass, item.scope) if item.scope else None, "scope", equal_numbers=True)
    work.by_key(lambda item: (item.op, item.shape) if item.op and item.shape else None, "operator")
    work.by_key(lambda item: (item.klass, item.shape) if item.shape else None, "shape")
    work.by_key(lambda item: item.op or None, "operator", equal_numbers=True)
    work.by_key(lambda item: item.op or None, "order")
    work.by_order()
    return work.done()


class _Work:
    def __init__(self, measured: Sequence[Item], predicted: Sequence[Item]) -> None:
        self._measured, self._predicted = tuple(measured), tuple(predicted)
        self._left = list(range(len(measured)))
        self._right = list(range(len(predicted)))
        self._pairs: list[Pair] = []
        self._taken_left: set[int] = set()
        self._taken_right: set[int] = set()

    def by_key(self, key: Callable[[Item], Hashable | None], how: str, *, equal_numbers: bool = False) -> None:
        """Pair items of equal key in their order; with `equal_numbers`, only where both sides have as many."""
        ours, theirs = self._groups(self._measured, self._left, key), self._groups(self._predicted, self._right, key)
        for found, left in ours.items():
            right = theirs.get(found, [])
            if equal_numbers and len(left) != len(right):
                continue
            self._take(zip(left, right, strict=False), how, firm=len(left) == len(right))
        self._refresh()

    def by_order(self) -> None:
        """Align what is left by the sequence of classes."""
        names = [self._measured[index].klass.value for index in self._left]
        wanted = [self._predicted[index].klass.value for index in self._right]
        for low in range(0, max(len(names), 1), _LONG):
            share = len(wanted) / max(len(names), 1)
            ours = names[low : low + _LONG]
            first = int(low * share)
            theirs = wanted[first : int((low + _LONG) * share) + 1]
            matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
            for block in matcher.get_matching_blocks():
                pairs = ((self._left[low + block.a + i], self._right[first + block.b + i]) for i in range(block.size))
                self._take(pairs, "order")
        self._refresh()
        self.by_key(lambda item: item.klass, "order")

    @staticmethod
    def _groups(
        items: Sequence[Item], indices: Sequence[int], key: Callable[[Item], Hashable | None]
    ) -> dict[Hashable, list[int]]:
        found: dict[Hashable, list[int]] = {}
        for index in indices:
            value = key(items[index])
            if value is not None:
                found.setdefault(value, []).append(index)
        return found

    def _take(self, pairs: Iterable[tuple[int, int]], how: str, *, firm: bool = False) -> None:
        for left, right in pairs:
            if left not in self._taken_left and right not in self._taken_right:
                self._pairs.append(Pair(left, right, how, firm))
                self._taken_left.add(left)
                self._taken_right.add(right)

    def _refresh(self) -> None:
        self._left = [index for index in self._left if index not in self._taken_left]
        self._right = [index for index in self._right if index not in self._taken_right]

    def done(self) -> Matching:
        """The result; pairs in the order of the measurement."""
        pairs = tuple(sorted(self._pairs, key=lambda pair: pair.measured))
        return Matching(self._measured, self._predicted, pairs, tuple(self._left), tuple(self._right))
