"""A device program as JSON and back, but for the op bodies of its kernel table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from stablecast.ir.attributes import Shift
from stablecast.ir.chakra.program_file import (
    collective_of_json,
    collective_to_json,
    groups_of_json,
    groups_to_json,
    program_of_json,
    program_to_json,
)
from stablecast.ir.device_program import P2P, Body, Branch, Collective, DeviceProgram, Kernel, Loop, MicroBatches, Node
from stablecast.ir.groups import Groups
from stablecast.ir.types import Count, Location, Symbol


def device_program_to_json(program: DeviceProgram) -> dict[str, Any]:
    """Everything of `program` but the ops behind its kernels and its schedule."""
    writer = _Writer()
    body = writer.body(program.body)
    return {
        **program_to_json(program),
        "body": body,
        "texts": list(writer.texts),
        "groups": [groups_to_json(groups) for groups in writer.groups],
    }


def device_program_of_json(held: Mapping[str, Any]) -> DeviceProgram:
    """The program that `device_program_to_json` wrote. Raises `InputError`, `KeyError` or `IndexError` for others."""
    reader = _Reader(held["texts"], [groups_of_json(groups) for groups in held["groups"]])
    return program_of_json(held, reader.body(held["body"]), "a cached program")


class _Writer:
    """Nodes as lists; scopes, files and groups by number."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.groups: dict[Groups, int] = {}

    def body(self, body: Body) -> list[Any]:
        return [self._node(node) for node in body]

    def _text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def _common(self, node: Node) -> list[Any]:
        place = node.location
        where = [self._text(place.scope), self._text(place.file), place.line]
        ahead = isinstance(node, Kernel | Collective) and node.ahead
        read = [] if isinstance(node, P2P) else list(node.arguments)
        return [self._text(node.scope), where, list(node.deps), list(node.after), node.held_bytes, int(ahead), read]

    def _node(self, node: Node) -> list[Any]:
        common = self._common(node)
        if isinstance(node, Kernel):
            return ["k", common, node.row, list(node.ops), node.launch, node.stream]
        if isinstance(node, Collective):
            number = self.groups.setdefault(node.groups, len(self.groups))
            shift = None if node.shift is None else asdict(node.shift)
            return ["c", common, collective_to_json(node, number), shift]
        if isinstance(node, P2P):
            return ["p", common, node.direction, node.axis, node.shift, node.tag, node.nbytes, node.stream]
        if isinstance(node, Loop):
            count = node.count if isinstance(node.count, int) else asdict(node.count)
            passing = None if node.micro_batches is None else asdict(node.micro_batches)
            return ["l", common, self.body(node.body), count, passing]
        chances = None if node.probability is None else list(node.probability)
        return ["b", common, [self.body(body) for body in node.bodies], chances]


class _Reader:
    def __init__(self, texts: list[str], groups: list[Groups]) -> None:
        self._texts = texts
        self._groups = groups
        self._places: dict[tuple[int, int, int], Location] = {}

    def body(self, held: Sequence[Any]) -> Body:
        return tuple([self._reading(*entry) for entry in held])

    def _reading(self, kind: str, common: Sequence[Any], *own: Any) -> Node:
        """A node with the arguments that it reads."""
        node = self._node(kind, common, *own)
        return replace(node, arguments=tuple(common[6])) if common[6] and not isinstance(node, P2P) else node

    def _place(self, where: Sequence[int]) -> Location:
        key = (where[0], where[1], where[2])
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = Location(self._texts[where[0]], self._texts[where[1]], where[2])
        return found

    def _node(self, kind: str, common: Sequence[Any], *own: Any) -> Node:
        scope: str = self._texts[int(common[0])]
        location = self._place(common[1])
        deps, after, size = tuple(common[2]), tuple(common[3]), int(common[4])
        if kind == "k":
            row, ops, launch, stream = own
            return Kernel(row, tuple(ops), launch, scope, location, stream, deps, after, size, bool(common[5]))
        if kind == "c":
            placed = replace(self._collective(own), location=location, deps=deps, after=after)
            return replace(placed, held_bytes=size, ahead=bool(common[5]))
        if kind == "p":
            direction, axis, shift, tag, nbytes, stream = own
            return P2P(direction, axis, shift, tag, nbytes, stream, scope, location, deps, after, size)
        if kind == "l":
            passing = None if own[2] is None else MicroBatches(**own[2])
            return Loop(self.body(own[0]), _count(own[1]), scope, location, deps, after, passing, size)
        chances = None if own[1] is None else tuple(own[1])
        return Branch(tuple(map(self.body, own[0])), chances, scope, location, deps, after, size)

    def _collective(self, own: Sequence[Any]) -> Collective:
        held: Mapping[str, Any] = own[0]
        node = collective_of_json(held, self._groups[int(held["partition"])])
        shift = None if own[1] is None else Shift(**own[1])
        return replace(node, shift=shift)


def _count(held: Any) -> Count:
    return held if isinstance(held, int) else Symbol(**held)
