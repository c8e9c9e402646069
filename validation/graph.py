"""A predicted graph against the graph that ran: operators, collectives, order, streams."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from stablecast.validation.items import Item
from stablecast.validation.kernel_names import MeasuredClass
from stablecast.validation.match import Matching

_FAMILIES: Final[Mapping[MeasuredClass, str]] = {
    MeasuredClass.MATMUL: "gemm",
    MeasuredClass.CONVOLUTION: "convolution",
    MeasuredClass.ATTENTION: "attention",
    MeasuredClass.ELEMENTWISE: "elementwise",
    MeasuredClass.REDUCTION: "elementwise",
    MeasuredClass.COMMUNICATION: "collective",
}
_LISTED: Final = 50
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class GraphCheck:
    """What differs between the graph that was predicted and the one that ran.

    `operators`: family (`gemm`, `convolution`, `attention`, `elementwise`, `collective`, `other`) -> (measured,
    predicted) numbers. `collectives`: (kind, group size, bytes) -> both numbers. `missing`: predicted but not measured;
    `extra`: measured but not predicted; each as text with its scope. `order_faults`: of `order_checked` predicted
    dependencies between matched items, those where the later one began before the earlier one. `streams`: used on
    either side. `apart`: whether collectives have streams on which nothing else runs, None without collectives.
    """

    operators: Mapping[str, tuple[int, int]]
    collectives: Mapping[tuple[str, int, int], tuple[int, int]]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    order_checked: int
    order_faults: tuple[str, ...]
    streams: tuple[int, int]
    apart: tuple[bool | None, bool | None] = (None, None)

    @property
    def collectives_agree(self) -> bool:
        return all(ours == theirs for ours, theirs in self.collectives.values())

    @property
    def ok(self) -> bool:
        """Products, convolutions, attention and collectives are equal in number, and no dependency is broken."""
        strict = ("gemm", "convolution", "attention", "collective")
        counts = all(self.operators.get(name, (0, 0))[0] == self.operators.get(name, (0, 0))[1] for name in strict)
        return counts and self.collectives_agree and not self.order_faults

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "operators": [{"family": k, "measured": a, "predicted": b} for k, (a, b) in self.operators.items()],
            "collectives": [
                {"kind": kind, "group_size": group, "bytes": nbytes, "measured": a, "predicted": b}
                for (kind, group, nbytes), (a, b) in self.collectives.items()
            ],
            "missing": list(self.missing),
            "extra": list(self.extra),
            "order_checked": self.order_checked,
            "order_faults": list(self.order_faults),
            "streams": {"measured": self.streams[0], "predicted": self.streams[1]},
            "collectives_on_own_streams": {"measured": self.apart[0], "predicted": self.apart[1]},
        }


def check_graph(matching: Matching) -> GraphCheck:
    """Compare the two sides of a matching as graphs."""
    families = _both(matching, lambda item: _FAMILIES.get(item.klass, "other"))
    spoken = _both(matching, lambda item: (item.kind, item.group, int(item.nbytes)) if item.is_collective else None)
    checked, faults = _order(matching)
    streams = tuple(len({item.stream for item in side}) for side in (matching.measured, matching.predicted))
    return GraphCheck(
        families,
        spoken,
        _texts(matching.predicted, matching.only_predicted),
        _texts(matching.measured, matching.only_measured),
        checked,
        faults,
        (streams[0], streams[1]),
        (_apart(matching.measured), _apart(matching.predicted)),
    )


def _apart(items: Sequence[Item]) -> bool | None:
    spoken = {item.stream for item in items if item.is_collective}
    return not spoken & {item.stream for item in items if not item.is_collective} if spoken else None


def _both(matching: Matching, key: Callable[[Item], K | None]) -> dict[K, tuple[int, int]]:
    ours: Counter[K] = Counter()
    theirs: Counter[K] = Counter()
    for counter, side in ((ours, matching.measured), (theirs, matching.predicted)):
        for item in side:
            found = key(item)
            if found is not None:
                counter[found] += int(item.count)
    return {name: (ours[name], theirs[name]) for name in sorted(set(ours) | set(theirs), key=str)}


def _texts(items: Sequence[Item], indices: Sequence[int]) -> tuple[str, ...]:
    """The dearest ones without a partner."""
    chosen = sorted(indices, key=lambda index: -items[index].time_s)[:_LISTED]
    texts: list[str] = []
    for index in chosen:
        item = items[index]
        texts.append(f"{item.label}" + (f" in {item.scope}" if item.scope else ""))
    return tuple(texts)


def _order(matching: Matching) -> tuple[int, tuple[str, ...]]:
    """Predicted dependencies whose ends are both matched, and those that the measurement breaks."""
    partner = {pair.predicted: pair.measured for pair in matching.pairs if pair.firm and pair.how != "order"}
    checked, faults = 0, list[str]()
    for number, item in enumerate(matching.predicted):
        for dep in item.deps:
            if number in partner and dep in partner:
                checked += 1
                later, earlier = matching.measured[partner[number]], matching.measured[partner[dep]]
                if later.start_s < earlier.start_s - 1e-9:
                    faults.append(f"{later.label} began before {earlier.label}")
    return checked, tuple(faults[:_LISTED])
