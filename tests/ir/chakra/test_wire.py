import contextlib
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.ir.chakra import (
    Attribute,
    IOInfo,
    MalformedMessage,
    Node,
    NodeType,
    Scalar,
    TraceMetadata,
    ValueKind,
    decode_metadata,
    decode_node,
    encode_metadata,
    encode_node,
    int32_attr,
)
from stablecast.ir.chakra import et_def_pb2 as pb
from stablecast.ir.chakra.wire import decode_varint, encode_varint, is_metadata

_BITS = {
    "INT32": (-(2**31), 2**31 - 1),
    "INT64": (-(2**63), 2**63 - 1),
    "UINT32": (0, 2**32 - 1),
    "UINT64": (0, 2**64 - 1),
}
_RANGES = {
    **{f"{prefix}{name}": span for name, span in _BITS.items() for prefix in ("", "S") if name.startswith("INT")},
    **{name: span for name, span in _BITS.items() if name.startswith("UINT")},
    "FIXED32": _BITS["UINT32"],
    "FIXED64": _BITS["UINT64"],
    "SFIXED32": _BITS["INT32"],
    "SFIXED64": _BITS["INT64"],
}


def _scalars(kind: ValueKind) -> st.SearchStrategy[Any]:
    name = kind.name.removeprefix("SINT") if kind.name.startswith("SINT") else kind.name
    if kind.name.startswith("SINT"):
        return st.integers(*_BITS["INT" + name])
    if kind.name in _RANGES:
        return st.integers(*_RANGES[kind.name])
    return {
        ValueKind.DOUBLE: st.floats(allow_nan=False),
        ValueKind.FLOAT: st.floats(allow_nan=False, width=32),
        ValueKind.BOOL: st.booleans(),
        ValueKind.STRING: st.text(max_size=20),
        ValueKind.BYTES: st.binary(max_size=20),
    }[kind]


def _attributes() -> st.SearchStrategy[Attribute]:
    def of_kind(kind: ValueKind) -> st.SearchStrategy[Attribute]:
        if kind is ValueKind.NONE:
            values: st.SearchStrategy[Any] = st.none()
        elif kind.is_list:
            values = st.lists(_scalars(ValueKind(kind - 1)), max_size=4).map(tuple)
        else:
            values = _scalars(kind)
        return st.builds(Attribute, st.text(max_size=8), st.just(kind), values, st.text(max_size=4))

    return st.sampled_from(ValueKind).flatmap(of_kind)


_U64 = st.integers(0, 2**64 - 1)
_INFO = st.none() | st.builds(IOInfo, st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
_NODES = st.builds(
    Node,
    _U64,
    st.text(max_size=200),
    st.sampled_from(NodeType) | st.integers(8, 2**31 - 1) | st.integers(-(2**31), -1),
    st.lists(_U64, max_size=5).map(tuple),
    st.lists(_U64, max_size=5).map(tuple),
    _U64,
    _U64,
    _INFO,
    _INFO,
    st.lists(_attributes(), max_size=4).map(tuple),
)


def _message(node: Node) -> pb.Node:
    message = pb.Node(
        id=node.id,
        name=node.name,
        type=node.type,  # type: ignore[arg-type]
        ctrl_deps=node.ctrl_deps,
        data_deps=node.data_deps,
        start_time_micros=node.start_time_micros,
        duration_micros=node.duration_micros,
    )
    for info, target in ((node.inputs, message.inputs), (node.outputs, message.outputs)):
        if info is not None:
            target.SetInParent()
            target.MergeFrom(pb.IOInfo(values=info.values, shapes=info.shapes, types=info.types))
    for attribute in node.attributes:
        _fill(message.attr.add(name=attribute.name, doc_string=attribute.doc_string), attribute)
    return message


def _fill(target: pb.AttributeProto, attribute: Attribute) -> None:
    if attribute.kind is ValueKind.NONE:
        return
    if isinstance(attribute.value, tuple):
        values = getattr(target, attribute.kind.field)
        values.SetInParent()
        values.values.extend(attribute.value)
    else:
        setattr(target, attribute.kind.field, attribute.value)


@settings(max_examples=200, deadline=None)
@given(_NODES)
def test_node_equals_protobuf_byte_for_byte(node: Node) -> None:
    data = encode_node(node)
    assert data == _message(node).SerializeToString()
    assert decode_node(data) == node
    assert encode_node(decode_node(data)) == data


@settings(max_examples=50, deadline=None)
@given(st.builds(TraceMetadata, st.text(max_size=9), st.lists(_attributes(), max_size=3).map(tuple)))
def test_metadata_equals_protobuf_byte_for_byte(metadata: TraceMetadata) -> None:
    message = pb.GlobalMetadata(version=metadata.version)
    for attribute in metadata.attributes:
        _fill(message.attr.add(name=attribute.name, doc_string=attribute.doc_string), attribute)
    data = encode_metadata(metadata)
    assert data == message.SerializeToString()
    assert decode_metadata(data) == metadata
    assert is_metadata(data)


@settings(max_examples=200, deadline=None)
@given(_NODES, st.data())
def test_damaged_node_is_read_or_refused_never_crashes(node: Node, data: st.DataObject) -> None:
    raw = bytearray(encode_node(node))
    if not raw:
        return
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessage):
        decode_node(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@given(st.integers(0, 2**64 - 1))
def test_varint_round_trip(number: int) -> None:
    data = encode_varint(number)
    assert decode_varint(data, 0) == (number, len(data))
    if len(data) > 1:
        with pytest.raises(MalformedMessage):
            decode_varint(data[:-1], 0)


def test_unpacked_and_unknown_fields_are_read() -> None:
    data = b"\x08\x07" + b"\x28\x01\x28\x02" + b"\x20\x03" + b"\xfa\x01\x02hi" + b"\xfd\x01abcd" + b"\x18\x04"
    assert decode_node(data) == Node(7, "", NodeType.COMP, (1, 2), (3,))


def test_repeated_list_value_is_joined() -> None:
    half = Attribute("dims", ValueKind.INT64_LIST, (1,))
    from stablecast.ir.chakra.wire import decode_attribute, encode_attribute

    both = encode_attribute(half) + encode_attribute(Attribute("", ValueKind.INT64_LIST, (2,)))
    assert decode_attribute(both) == Attribute("dims", ValueKind.INT64_LIST, (1, 2))


def test_text_that_is_no_utf8_survives() -> None:
    data = b"\x08\x01\x12\x02\xff\xfe\x18\x04"
    assert encode_node(decode_node(data)) == data


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ValueKind.INT32, 2**31),
        (ValueKind.UINT64, -1),
        (ValueKind.STRING, 3),
        (ValueKind.INT64, "3"),
        (ValueKind.FIXED32, 2**32),
        (ValueKind.DOUBLE, "x"),
        (ValueKind.INT64_LIST, 3),
        (ValueKind.INT64, (3,)),
        (ValueKind.BOOL, "yes"),
        (ValueKind.FLOAT, 1e300),
        (ValueKind.BYTES, "x"),
    ],
)
def test_value_that_does_not_fit_is_refused(kind: ValueKind, value: Scalar | tuple[Scalar, ...]) -> None:
    with pytest.raises(ValueError, match=r"node 1 .*attribute a"):
        encode_node(Node(1, "n", NodeType.COMP, attributes=(Attribute("a", kind, value),)))


def test_negative_id_is_refused() -> None:
    with pytest.raises(ValueError, match="unsigned"):
        encode_node(Node(-1))


def test_attribute_lookup() -> None:
    node = Node(1, attributes=(int32_attr("a", 1), int32_attr("a", 2)))
    assert node.value("a") == 2
    assert node.value("b") is None


def test_package_needs_no_protobuf_and_generated_code_has_its_own_pool() -> None:
    program = """
import sys
import stablecast.ir.chakra
assert not any(name.startswith("google.protobuf") for name in sys.modules)
from google.protobuf import descriptor_pb2, descriptor_pool
other = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
other.message_type.add(name="Node")
descriptor_pool.Default().Add(other) if hasattr(descriptor_pool.Default(), "Add") else None
from stablecast.ir.chakra import et_def_pb2
assert et_def_pb2.Node(id=3).SerializeToString() == bytes([8, 3])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
