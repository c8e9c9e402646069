"""Typed values of a Chakra execution trace: nodes, attributes, metadata (MLCommons `ChakraProtoMsg`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class NodeType(IntEnum):
    """What a node is."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CollectiveType(IntEnum):
    """Values of the attribute `comm_type`."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


class ValueKind(IntEnum):
    """Type of an attribute's value: the field number in `AttributeProto`; `NONE` where no value is set."""

    NONE = 0
    DOUBLE = 3
    DOUBLE_LIST = 4
    FLOAT = 5
    FLOAT_LIST = 6
    INT32 = 7
    INT32_LIST = 8
    INT64 = 9
    INT64_LIST = 10
    UINT32 = 11
    UINT32_LIST = 12
    UINT64 = 13
    UINT64_LIST = 14
    SINT32 = 15
    SINT32_LIST = 16
    SINT64 = 17
    SINT64_LIST = 18
    FIXED32 = 19
    FIXED32_LIST = 20
    FIXED64 = 21
    FIXED64_LIST = 22
    SFIXED32 = 23
    SFIXED32_LIST = 24
    SFIXED64 = 25
    SFIXED64_LIST = 26
    BOOL = 27
    BOOL_LIST = 28
    STRING = 29
    STRING_LIST = 30
    BYTES = 31
    BYTES_LIST = 32

    @property
    def is_list(self) -> bool:
        """Whether values of this kind are tuples."""
        return self != 0 and self % 2 == 0

    @property
    def field(self) -> str:
        """Name of the field in `AttributeProto`, such as `int64_val`."""
        if self is ValueKind.NONE:
            return "none"
        lowered = self.name.lower()
        return lowered if self.is_list else lowered + "_val"


INTEGER_KINDS = frozenset(kind for kind in ValueKind if 7 <= kind <= 25 and kind % 2)

Scalar = bool | int | float | str | bytes
Value = Scalar | tuple[Scalar, ...] | None


@dataclass(frozen=True, slots=True)
class Attribute:
    """One named attribute. `value` is a scalar, a tuple for the list kinds, or None for `ValueKind.NONE`."""

    name: str
    kind: ValueKind
    value: Value
    doc_string: str = ""


@dataclass(frozen=True, slots=True)
class IOInfo:
    """Inputs or outputs of an operator as PyTorch's execution traces write them: three JSON strings."""

    values: str = ""
    shapes: str = ""
    types: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a trace.

    `type` is a `NodeType`, or a plain number where the file holds one that the schema does not name.
    `data_deps`, `ctrl_deps`: ids of nodes that must be done before. Times are in whole microseconds.
    """

    id: int
    name: str = ""
    type: NodeType | int = NodeType.INVALID
    data_deps: tuple[int, ...] = ()
    ctrl_deps: tuple[int, ...] = ()
    start_time_micros: int = 0
    duration_micros: int = 0
    inputs: IOInfo | None = None
    outputs: IOInfo | None = None
    attributes: tuple[Attribute, ...] = ()

    def attribute(self, name: str) -> Attribute | None:
        """The attribute of that name (the last one where it is repeated, as the readers in C++ take it)."""
        for attribute in reversed(self.attributes):
            if attribute.name == name:
                return attribute
        return None

    def value(self, name: str) -> Value:
        """The value of an attribute, None where it is absent."""
        attribute = self.attribute(name)
        return None if attribute is None else attribute.value

    @property
    def type_name(self) -> str:
        """Name in the schema's spelling, such as `COMP_NODE`; the number where it has none."""
        return node_type_name(self.type)


@dataclass(frozen=True, slots=True)
class TraceMetadata:
    """The record at the head of a file."""

    version: str = "0.0.4"
    attributes: tuple[Attribute, ...] = ()


def node_type_name(number: int) -> str:
    """`COMP_NODE` for 4; the number itself where the schema names none."""
    try:
        return NodeType(number).name + "_NODE"
    except ValueError:
        return str(int(number))


def collective_name(number: Value) -> str:
    """`ALL_REDUCE` for 0; the value itself where the schema names none."""
    try:
        return CollectiveType(number).name if isinstance(number, int) else str(number)
    except ValueError:
        return str(number)


def bool_attr(name: str, value: bool) -> Attribute:
    """An attribute with a `bool_val`."""
    return Attribute(name, ValueKind.BOOL, value)


def int32_attr(name: str, value: int) -> Attribute:
    """An attribute with an `int32_val`."""
    return Attribute(name, ValueKind.INT32, value)


def int64_attr(name: str, value: int) -> Attribute:
    """An attribute with an `int64_val`."""
    return Attribute(name, ValueKind.INT64, value)


def uint64_attr(name: str, value: int) -> Attribute:
    """An attribute with a `uint64_val`."""
    return Attribute(name, ValueKind.UINT64, value)


def double_attr(name: str, value: float) -> Attribute:
    """An attribute with a `double_val`."""
    return Attribute(name, ValueKind.DOUBLE, value)


def string_attr(name: str, value: str) -> Attribute:
    """An attribute with a `string_val`."""
    return Attribute(name, ValueKind.STRING, value)


def comp_node(
    node_id: int,
    name: str,
    num_ops: int,
    tensor_size: int,
    deps: Sequence[int] = (),
    duration_micros: int = 0,
    extra: Sequence[Attribute] = (),
) -> Node:
    """A compute node with the attribute types that every known consumer reads.

    `num_ops` in FLOP, `tensor_size` in bytes, both at least 1 for a consumer with a roofline model.
    """
    attributes = (
        bool_attr("is_cpu_op", False),
        int64_attr("num_ops", num_ops),
        uint64_attr("tensor_size", tensor_size),
        *extra,
    )
    return Node(node_id, name, NodeType.COMP, tuple(deps), duration_micros=duration_micros, attributes=attributes)


def collective_node(
    node_id: int,
    name: str,
    kind: CollectiveType,
    comm_size: int,
    pg_name: str = "",
    deps: Sequence[int] = (),
    duration_micros: int = 0,
    extra: Sequence[Attribute] = (),
) -> Node:
    """A collective. `comm_size`: bytes a rank contributes (all-gather) or holds before (all others).

    `pg_name`: key of the group file, a positive integer in digits; empty means all ranks.
    """
    group = (string_attr("pg_name", pg_name),) if pg_name else ()
    attributes = (
        bool_attr("is_cpu_op", False),
        int64_attr("comm_type", int(kind)),
        int64_attr("comm_size", comm_size),
        *group,
        *extra,
    )
    return Node(node_id, name, NodeType.COMM_COLL, tuple(deps), duration_micros=duration_micros, attributes=attributes)


def send_node(
    node_id: int,
    name: str,
    dst: int,
    tag: int,
    comm_size: int,
    deps: Sequence[int] = (),
    extra: Sequence[Attribute] = (),
) -> Node:
    """A send of `comm_size` bytes to rank `dst`."""
    return _peer_node(NodeType.COMM_SEND, "comm_dst", node_id, name, dst, tag, comm_size, deps, extra)


def recv_node(
    node_id: int,
    name: str,
    src: int,
    tag: int,
    comm_size: int,
    deps: Sequence[int] = (),
    extra: Sequence[Attribute] = (),
) -> Node:
    """A receive of `comm_size` bytes from rank `src`."""
    return _peer_node(NodeType.COMM_RECV, "comm_src", node_id, name, src, tag, comm_size, deps, extra)


def _peer_node(
    node_type: NodeType,
    peer_name: str,
    node_id: int,
    name: str,
    peer: int,
    tag: int,
    comm_size: int,
    deps: Sequence[int],
    extra: Sequence[Attribute],
) -> Node:
    attributes = (
        bool_attr("is_cpu_op", False),
        int32_attr(peer_name, peer),
        int32_attr("comm_tag", tag),
        int64_attr("comm_size", comm_size),
        *extra,
    )
    return Node(node_id, name, node_type, tuple(deps), attributes=attributes)


def memory_node(
    node_id: int,
    name: str,
    node_type: NodeType,
    tensor_size: int,
    deps: Sequence[int] = (),
    extra: Sequence[Attribute] = (),
) -> Node:
    """A load from or store to remote memory of `tensor_size` bytes (`MEM_LOAD` or `MEM_STORE`)."""
    attributes = (bool_attr("is_cpu_op", False), uint64_attr("tensor_size", tensor_size), *extra)
    return Node(node_id, name, node_type, tuple(deps), attributes=attributes)
