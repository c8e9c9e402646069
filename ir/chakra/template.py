"""Serialised templates: ranks that run the same program share their bytes, except group and peer fields."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from stablecast.ir.chakra.schema import Attribute, Node, Scalar, TraceMetadata, ValueKind
from stablecast.ir.chakra.wire import (
    attribute_head,
    encode_attribute,
    encode_metadata,
    encode_node,
    encode_scalar,
    encode_varint,
    frame,
    length_delimited,
    node_head,
    scalar_tag,
)
from stablecast.ir.errors import InputError

Slot = tuple[str, ValueKind]
_MAX_PLANS = 64


@dataclass(frozen=True, slots=True)
class _HoleField:
    """An attribute whose value is filled in per rank: its bytes up to the value, and the slot of the value."""

    head: bytes
    slot: int


_Piece = bytes | _HoleField


@dataclass(frozen=True, slots=True)
class _Plan:
    """Segments for one choice of value lengths: all length prefixes are settled, values go in between."""

    parts: list[bytes]
    pick: Callable[[list[bytes]], tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class TraceTemplate:
    """A rank's file with holes.

    `build` it from the nodes of any one rank and the places that differ; `render` gives the bytes of a file for
    the values of another, equal to encoding its nodes one by one.
    """

    holes: tuple[str, ...]
    nodes: int
    _slots: tuple[Slot, ...]
    _body: tuple[bytes | tuple[_Piece, ...], ...]
    _plans: dict[tuple[int, ...], _Plan] = field(
        default_factory=dict[tuple[int, ...], _Plan], repr=False, compare=False
    )

    @staticmethod
    def build(
        nodes: Iterable[Node], holes: Mapping[tuple[int, str], str], metadata: TraceMetadata | None = None
    ) -> "TraceTemplate":
        """Cut the nodes of a rank into segments.

        `holes` maps (node id, attribute name) to the name of the value that stands there. Raises `InputError`
        where a hole names a node or attribute that is absent or whose value is a list.
        """
        slots: dict[Slot, int] = {}
        body: list[bytes | tuple[_Piece, ...]] = []
        fixed = [frame(encode_metadata(metadata or TraceMetadata()))]
        left = dict(holes)
        by_node: dict[int, dict[str, str]] = {}
        for (node_id, attribute), name in holes.items():
            by_node.setdefault(node_id, {})[attribute] = name
        count = 0
        for node in nodes:
            count += 1
            here = by_node.get(node.id)
            if here is None:
                fixed.append(frame(encode_node(node)))
                continue
            body += [b"".join(fixed), _node_pieces(node, here, slots)]
            fixed = []
            for attribute in node.attributes:
                left.pop((node.id, attribute.name), None)
        body.append(b"".join(fixed))
        if left:
            node_id, attribute = next(iter(left))
            raise InputError(f"template: node {node_id} has no attribute {attribute} to leave open")
        return TraceTemplate(tuple(dict.fromkeys(name for name, _ in slots)), count, tuple(slots), tuple(body))

    def render(self, values: Mapping[str, Scalar]) -> bytes:
        """The bytes of the file of a rank. Raises `InputError` where a value is missing or does not fit."""
        encoded: list[bytes] = []
        for name, kind in self._slots:
            try:
                encoded.append(encode_scalar(kind, values[name]))
            except KeyError:
                raise InputError(f"template: no value for {name}", "needed: " + ", ".join(self.holes)) from None
            except ValueError as error:
                raise InputError(f"template: value of {name}: {error}") from None
        lengths = tuple(map(len, encoded))
        plan = self._plans.get(lengths)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[lengths] = self._plan(lengths)
        parts = plan.parts.copy()
        parts[1::2] = plan.pick(encoded)
        return b"".join(parts)

    def _plan(self, lengths: tuple[int, ...]) -> _Plan:
        parts, order = list[bytes](), list[int]()
        pending = bytearray()
        for item in self._body:
            if isinstance(item, bytes):
                pending += item
                continue
            pieces: list[bytes | int] = []
            size = 0
            for piece in item:
                if isinstance(piece, bytes):
                    pieces.append(piece)
                    size += len(piece)
                    continue
                value = lengths[piece.slot]
                prefix = b"\x52" + encode_varint(len(piece.head) + value) + piece.head
                pieces += [prefix, piece.slot]
                size += len(prefix) + value
            pending += encode_varint(size)
            for piece in pieces:
                if isinstance(piece, bytes):
                    pending += piece
                else:
                    parts += [bytes(pending), b""]
                    order.append(piece)
                    pending.clear()
        parts.append(bytes(pending))
        return _Plan(parts, _picker(order))


def _picker(order: list[int]) -> Callable[[list[bytes]], tuple[bytes, ...]]:
    if len(order) > 1:
        return itemgetter(*order)
    return lambda encoded: tuple(encoded[index] for index in order)


def _node_pieces(node: Node, holes: Mapping[str, str], slots: dict[Slot, int]) -> tuple[_Piece, ...]:
    pieces: list[_Piece] = []
    fixed = bytearray(node_head(node))
    for attribute in node.attributes:
        name = holes.get(attribute.name)
        if name is None:
            fixed += length_delimited(b"\x52", encode_attribute(attribute))
            continue
        if fixed:
            pieces.append(bytes(fixed))
            fixed.clear()
        pieces.append(_hole(node, attribute, name, slots))
    if fixed:
        pieces.append(bytes(fixed))
    return tuple(pieces)


def _hole(node: Node, attribute: Attribute, name: str, slots: dict[Slot, int]) -> _HoleField:
    kind = attribute.kind
    if kind is ValueKind.NONE or kind.is_list:
        raise InputError(f"template: attribute {attribute.name} of node {node.id} is {kind.field}, not a single value")
    slot = slots.setdefault((name, kind), len(slots))
    return _HoleField(attribute_head(attribute) + scalar_tag(kind), slot)
