"""Device memory over the issue order: what is alive when, and which updates may happen in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stablecast.ir.device_program import Buffers
from stablecast.ir.scopes import family, parse_scope
from stablecast.ir.types import TensorType, ValueType
from stablecast.lowering.categories import Category
from stablecast.lowering.graph import EXTERNAL, Graph
from stablecast.lowering.group import Group

UNNAMED = "without a scope"
_UPDATES = frozenset({"stablehlo.dynamic_update_slice", "stablehlo.scatter"})


@dataclass(slots=True)
class Residents:
    """Arguments of a body: `kept` must not be overwritten, `donated` may be after their last use."""

    kept: set[int]
    donated: set[int]

    def buffers(self, graph: Graph, temp: int, by_scope: Mapping[str, int]) -> Buffers:
        """Memory of the whole step whose temporaries peak at `temp` bytes, by scope as said."""
        arguments = sum(graph.types[value].nbytes for value in graph.arguments)
        outputs = sum(graph.types[value].nbytes for value in graph.returns)
        alias = sum(graph.types[value].nbytes for value in self.donated)
        return Buffers(arguments, outputs, min(alias, outputs), temp, by_scope)


@dataclass(slots=True)
class Liveness:
    """Walks the kernels of a graph in issue order.

    `granule`: every buffer takes a multiple of so many bytes. `afresh`: launches that write new memory though an
    operand dies with them, as PyTorch's calls do but for those in place. `peak`: the largest total of live temporaries
    so far, in bytes; arguments and results of the body are not counted.
    """

    graph: Graph
    groups: Sequence[Group]
    residents: Residents
    granule: int = 1
    afresh: frozenset[int] = frozenset()
    peak: int = 0
    _peak_at: int = -1
    _peak_inner: int = 0
    _born: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _last: dict[int, int] = field(default_factory=dict[int, int])
    _dying: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    _live: int = 0
    _index: int = 0

    def __post_init__(self) -> None:
        for index, group in enumerate(self.groups):
            for value in group.reads:
                self._last[value] = index
        for value in self.graph.returns:
            self._last[value] = len(self.groups)

    def in_place(self, group: Group) -> tuple[int, ...]:
        """Updates of the kernel at the current step whose operand nobody needs afterwards."""
        graph = self.graph
        found: list[int] = []
        for node in group.roots:
            if graph.ops[node].name not in _UPDATES or not graph.inputs[node]:
                continue
            operand = graph.inputs[node][0]
            producer = graph.producer[operand]
            if producer in group.members:
                continue
            if self._last.get(operand) != self._index or operand in self.residents.kept:
                continue
            if producer == EXTERNAL and operand not in self.residents.donated:
                continue
            found.append(node)
        return tuple(found)

    def step(self, index: int, inner: int) -> int:
        """Account the kernel at `index`, which itself needs `inner` bytes of temporaries.

        Gives the bytes of its results that are freed after their last reader.
        """
        group = self.groups[index]
        before = self._live
        taken_over = self._taken_over(group)
        returned = len(self.groups)
        for root in group.roots:
            for value in self.graph.outputs[root]:
                last = self._last.get(value)
                if last is None or last == returned or value in taken_over:
                    continue
                size = self._size(value)
                self._live += size
                self._dying.setdefault(last, []).append(size)
                self._born.append((value, index))
        held = self._live - before
        freed = sum(self._dying.pop(index, ()))
        needed = self._live + inner - self._reused(group, held)
        if needed > self.peak:
            self.peak, self._peak_at, self._peak_inner = needed, index, inner
        self._live -= freed
        self._index = index + 1
        return held

    def _size(self, value: int) -> int:
        if value in self.graph.near:
            return 0
        return -(-self.graph.types[value].nbytes // self.granule) * self.granule

    def _reused(self, group: Group, held: int) -> int:
        """Bytes of results that take the place of operands of the same type, which are read for the last time here.

        Element-wise kernels only: each element is read before it is overwritten. XLA takes over no buffer that is seen
        under other extents.
        """
        graph = self.graph
        if not held or group.hero >= 0 or group.rows or group.block or group.launch in self.afresh:
            return 0
        written = [value for root in group.roots for value in graph.outputs[root] if value in self._last]
        results = [_extents(graph.types[value]) for value in written]
        free = 0
        for value in group.reads:
            producer = graph.producer[value]
            kept = producer == EXTERNAL and value not in self.residents.donated
            kind = _extents(graph.types[value])
            if not kept and self._last.get(value) == self._index and kind in results:
                results.remove(kind)
                free += self._size(value)
        return min(free, held)

    def by_scope(self) -> dict[str, int]:
        """Bytes at the peak by scope, largest first; what the forward pass keeps for the backward pass is marked."""
        found: dict[str, int] = {}
        for value, born in self._born:
            last = self._last.get(value, -1)
            if born <= self._peak_at <= last:
                label = self._label(value, last)
                found[label] = found.get(label, 0) + self._size(value)
        if self._peak_inner:
            label = family(parse_scope(self._scope_of(self.groups[self._peak_at])).label) + " (inside)"
            found[label] = found.get(label, 0) + self._peak_inner
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _label(self, value: int, last: int) -> str:
        made = parse_scope(self.graph.scopes[self.graph.producer[value]])
        reader = parse_scope(self._scope_of(self.groups[last])) if last < len(self.groups) else made
        saved = reader.backward and not made.backward and not made.recomputed
        return (family(made.label) or UNNAMED) + (" (saved)" if saved else "")

    def _scope_of(self, group: Group) -> str:
        return self.graph.scopes[group.roots[0]] if group.roots else ""

    def _taken_over(self, group: Group) -> set[int]:
        """Results that live in the buffer of an operand: loop carries and updates in place."""
        graph, root = self.graph, group.roots[0] if group.roots else -1
        if root < 0 or graph.categories[root] is not Category.CONTROL:
            return {graph.outputs[node][0] for node in self.in_place(group)}
        taken: set[int] = set()
        for value, operand in zip(graph.outputs[root], graph.inputs[root], strict=False):
            if self._last.get(operand) == self._index and operand not in self.residents.kept:
                taken.add(value)
                last = self._last.get(value)
                if last is not None and last < len(self.groups) and graph.producer[operand] != EXTERNAL:
                    self._extend(operand, last)
        return taken

    def _extend(self, operand: int, last: int) -> None:
        size = self._size(operand)
        due = self._dying.get(self._index, [])
        if size in due:
            due.remove(size)
            self._dying.setdefault(last, []).append(size)


def _extents(kind: ValueType) -> tuple[str, tuple[int, ...]]:
    """Element type and sizes, but for dimensions of one."""
    if isinstance(kind, TensorType):
        return kind.dtype.name, tuple(size for size in kind.shape if size != 1)
    return str(kind), ()
