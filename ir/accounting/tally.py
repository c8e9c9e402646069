"""Which ops run how often: what totals, shares and reports are made from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stablecast.ir.types import Count, Symbol
from stablecast.ir.work import Key

Runs = dict[int, float]
"""Op number -> how often it runs."""

Terms = dict[Key, Runs]
"""Runs by the symbols whose product multiplies them."""


@dataclass(slots=True)
class Tally:
    """Runs of distinct ops. `flops` and `nbytes` are the same terms until branches choose the dearest of each apart."""

    flops: Terms = field(default_factory=dict[Key, Runs])
    nbytes: Terms = field(default_factory=dict[Key, Runs])

    @staticmethod
    def of(runs: Runs) -> "Tally":
        terms: Terms = {(): runs} if runs else {}
        return Tally(terms, terms)

    @property
    def joined(self) -> bool:
        """Whether FLOPs and bytes count the same runs."""
        return self.flops is self.nbytes

    def times(self, count: Count | float) -> "Tally":
        """Every run `count` times; a symbol joins the key."""
        flops = _times(self.flops, count)
        return Tally(flops, flops if self.joined else _times(self.nbytes, count))

    def add(self, other: "Tally") -> "Tally":
        """The runs of both."""
        flops = _add(self.flops, other.flops)
        same = self.joined and other.joined
        return Tally(flops, flops if same else _add(self.nbytes, other.nbytes))


def _times(terms: Terms, count: Count | float) -> Terms:
    if isinstance(count, Symbol):
        return {tuple(sorted((*key, count), key=lambda symbol: symbol.name)): runs for key, runs in terms.items()}
    if not count:
        return {}
    return {key: {number: times * count for number, times in runs.items()} for key, runs in terms.items()}


def _add(left: Terms, right: Terms) -> Terms:
    terms = dict(left)
    for key, runs in right.items():
        if key not in terms:
            terms[key] = runs
            continue
        merged = dict(terms[key])
        for number, times in runs.items():
            merged[number] = merged.get(number, 0) + times
        terms[key] = merged
    return terms


def multiplier(key: Key, values: Mapping[str, int]) -> float:
    """The product of the symbols of `key`: given values, else their default, else their least."""
    product = 1
    for symbol in key:
        default = symbol.low if symbol.default is None else symbol.default
        product *= values.get(symbol.name, default)
    return product


def weigh(terms: Terms, values: Mapping[str, int], weight: Callable[[int], float]) -> float:
    """The sum of `weight(op number)` over all runs."""
    return sum(
        multiplier(key, values) * sum(times * weight(number) for number, times in runs.items())
        for key, runs in terms.items()
    )
