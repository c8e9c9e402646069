"""The captured step as values: functional nodes over numbered tensors, with the place that each came from.

Nothing here needs torch: names, shapes and element types are plain values, so that emission can be tested alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VIEWS = ("view.", "scatter.")
"""Namespaces of the nodes that stand for views of memory, read and written through."""


class Ref(int):
    """A value of a graph, by number."""

    __slots__ = ()


class Spec(NamedTuple):
    """Shape and element type (StableHLO spelling) of a value."""

    shape: tuple[int, ...]
    dtype: str


class Place(NamedTuple):
    """Where an op came from: scope path, source file and line."""

    scope: str
    file: str
    line: int


@dataclass(slots=True)
class Node:
    """One functional op.

    `op`: namespace, name and overload, as `aten.add.Tensor`; `args`, `kwargs`: plain values in which a `Ref` stands
    for a tensor. `outs`: the values made, None for a result that is no tensor. `launch`: the dispatched call that it
    belongs to. `place`: number in `Graph.places`. `keep`: it runs even where nobody reads its results.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[Ref | None, ...]
    launch: int = -1
    place: int = 0
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: the ranks in it, in order. `name`: torch's. `axes`: mesh axes, where the group follows them."""

    name: str
    ranks: tuple[int, ...]
    axes: tuple[str, ...] = ()


@dataclass(slots=True)
class Graph:
    """Nodes in order over the values that `specs` describes; `inputs` and `outputs` are the arguments and results."""

    specs: list[Spec] = field(default_factory=list[Spec])
    nodes: list[Node] = field(default_factory=list[Node])
    places: list[Place] = field(default_factory=lambda: [Place("", "", 0)])
    inputs: list[Ref] = field(default_factory=list[Ref])
    outputs: list[Ref] = field(default_factory=list[Ref])
    groups: dict[str, Group] = field(default_factory=dict[str, Group])

    def value(self, spec: Spec) -> Ref:
        """A new value."""
        self.specs.append(spec)
        return Ref(len(self.specs) - 1)

    def add(
        self,
        op: str,
        args: tuple[Any, ...],
        specs: tuple[Spec | None, ...],
        kwargs: Mapping[str, Any] | None = None,
        launch: int = -1,
        place: int = 0,
        keep: bool = False,
    ) -> tuple[Ref | None, ...]:
        """A new node; returns the values that it makes."""
        outs = tuple([None if spec is None else self.value(spec) for spec in specs])
        self.nodes.append(Node(op, args, kwargs or {}, outs, launch, place, keep))
        return outs

    def live(self) -> list[Node]:
        """The nodes that some output or kept node needs, in order."""
        needed = bytearray(len(self.specs))
        for ref in self.outputs:
            needed[ref] = 1
        found: list[Node] = []
        for node in reversed(self.nodes):
            if node.keep or any(out is not None and needed[out] for out in node.outs):
                found.append(node)
                for ref in refs_in(node.args):
                    needed[ref] = 1
                if node.kwargs:
                    for ref in refs_in(tuple(node.kwargs.values())):
                        needed[ref] = 1
        found.reverse()
        return found


def refs_in(args: tuple[Any, ...] | list[Any]) -> list[Ref]:
    """Every value that is named in `args`, nested lists included."""
    found: list[Ref] = []
    for arg in args:
        if isinstance(arg, Ref):
            found.append(arg)
        elif isinstance(arg, (list, tuple)) and not isinstance(arg, Spec):
            found.extend(refs_in(arg))  # type: ignore[arg-type]
    return found


def replace_refs(arg: Any, mapping: Mapping[int, Any]) -> Any:
    """`arg` with every value in it looked up in `mapping`."""
    if isinstance(arg, Ref):
        return mapping[arg]
    if isinstance(arg, (list, tuple)):
        return [replace_refs(item, mapping) for item in arg]  # type: ignore[misc]
    return arg
