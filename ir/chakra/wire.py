"""The wire format: nodes to bytes and back, byte for byte what protobuf's own serialiser writes.

Written out by hand since templates are spliced from encoded pieces and since a cache of attributes makes reading
several times faster than going through message objects. Text that is not valid UTF-8 survives a round trip.
"""

import struct
from collections.abc import Callable, Iterable

from stablecast.ir.chakra.schema import Attribute, IOInfo, Node, NodeType, Scalar, TraceMetadata, Value, ValueKind

Buffer = bytes | memoryview

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_SMALL = tuple(bytes([number]) for number in range(128))

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class MalformedMessage(ValueError):
    """Bytes that are no message of the schema."""


def encode_varint(number: int) -> bytes:
    """Base-128 varint of a non-negative integer below 2^64."""
    if 0 <= number < 128:
        return _SMALL[number]
    if not 0 <= number <= _MASK64:
        raise ValueError(f"{number} does not fit an unsigned 64-bit field")
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def decode_varint(data: Buffer, at: int) -> tuple[int, int]:
    """(number, position after it). Raises `MalformedMessage` at the end of the data or beyond ten bytes."""
    result = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            result |= (byte & 127) << shift
            if byte < 128:
                return result & _MASK64, at
            shift += 7
            if shift > 63:
                raise MalformedMessage("a varint is longer than ten bytes")
    except IndexError:
        raise MalformedMessage("a varint is cut off") from None


def _checked(value: Scalar, low: int, high: int, kind: str) -> int:
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{value!r} does not fit the type {kind}")
    return int(value)


def _signed(bits: int) -> tuple[Callable[[Scalar], bytes], Callable[[int], int]]:
    low, high, modulus = -(1 << bits - 1), (1 << bits - 1) - 1, 1 << bits

    def encode(value: Scalar) -> bytes:
        return encode_varint(_checked(value, low, high, f"int{bits}") & _MASK64)

    def decode(raw: int) -> int:
        raw &= modulus - 1
        return raw - modulus if raw > high else raw

    return encode, decode


def _unsigned(bits: int) -> tuple[Callable[[Scalar], bytes], Callable[[int], int]]:
    high = (1 << bits) - 1

    def encode(value: Scalar) -> bytes:
        return encode_varint(_checked(value, 0, high, f"uint{bits}"))

    def decode(raw: int) -> int:
        return raw & high

    return encode, decode


def _zigzag(bits: int) -> tuple[Callable[[Scalar], bytes], Callable[[int], int]]:
    low, high, mask = -(1 << bits - 1), (1 << bits - 1) - 1, (1 << bits) - 1

    def encode(value: Scalar) -> bytes:
        number = _checked(value, low, high, f"sint{bits}")
        return encode_varint((number << 1 ^ number >> bits - 1) & mask)

    def decode(raw: int) -> int:
        raw &= mask
        return raw >> 1 ^ -(raw & 1)

    return encode, decode


def _boolean() -> tuple[Callable[[Scalar], bytes], Callable[[int], bool]]:
    def encode(value: Scalar) -> bytes:
        if not isinstance(value, int):
            raise ValueError(f"{value!r} does not fit the type bool")
        return b"\x01" if value else b"\x00"

    return encode, bool


_VARINTS: dict[ValueKind, tuple[Callable[[Scalar], bytes], Callable[[int], Scalar]]] = {
    ValueKind.INT32: _signed(32),
    ValueKind.INT64: _signed(64),
    ValueKind.UINT32: _unsigned(32),
    ValueKind.UINT64: _unsigned(64),
    ValueKind.SINT32: _zigzag(32),
    ValueKind.SINT64: _zigzag(64),
    ValueKind.BOOL: _boolean(),
}
_FIXED: dict[ValueKind, struct.Struct] = {
    ValueKind.DOUBLE: struct.Struct("<d"),
    ValueKind.FLOAT: struct.Struct("<f"),
    ValueKind.FIXED32: struct.Struct("<I"),
    ValueKind.FIXED64: struct.Struct("<Q"),
    ValueKind.SFIXED32: struct.Struct("<i"),
    ValueKind.SFIXED64: struct.Struct("<q"),
}


def encode_text(text: str) -> bytes:
    """UTF-8; bytes that were not valid UTF-8 when read come out as they were."""
    return text.encode("utf-8", "surrogateescape")


def _decode_text(data: Buffer) -> str:
    return bytes(data).decode("utf-8", "surrogateescape")


def length_delimited(tag: bytes, payload: bytes) -> bytes:
    """Tag, length, payload."""
    return tag + encode_varint(len(payload)) + payload


def _tag(field: int, wire_type: int) -> bytes:
    return encode_varint(field << 3 | wire_type)


def encode_scalar(kind: ValueKind, value: Scalar) -> bytes:
    """The bytes of a scalar after its tag. Raises `ValueError` where the value does not fit the kind."""
    varint = _VARINTS.get(kind)
    if varint is not None:
        return varint[0](value)
    fixed = _FIXED.get(kind)
    if fixed is not None:
        if isinstance(value, str | bytes):
            raise ValueError(f"{value!r} does not fit the type {kind.name.lower()}")
        try:
            return fixed.pack(value)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{value!r} does not fit the type {kind.name.lower()}: {error}") from None
    if kind is ValueKind.STRING and isinstance(value, str):
        text = encode_text(value)
        return encode_varint(len(text)) + text
    if kind is ValueKind.BYTES and isinstance(value, bytes):
        return encode_varint(len(value)) + value
    raise ValueError(f"{value!r} does not fit the type {kind.name.lower()}")


def scalar_tag(kind: ValueKind) -> bytes:
    """The tag of a scalar value in an `AttributeProto`."""
    if kind in _VARINTS:
        return _tag(kind, VARINT)
    if kind in _FIXED:
        return _tag(kind, FIXED64 if _FIXED[kind].size == 8 else FIXED32)
    return _tag(kind, BYTES)


def _encode_list(kind: ValueKind, values: tuple[Scalar, ...]) -> bytes:
    element = ValueKind(kind - 1)
    if element in (ValueKind.STRING, ValueKind.BYTES):
        payload = b"".join(b"\x0a" + encode_scalar(element, value) for value in values)
    else:
        packed = b"".join(encode_scalar(element, value) for value in values)
        payload = length_delimited(b"\x0a", packed) if values else b""
    return length_delimited(_tag(kind, BYTES), payload)


def attribute_head(attribute: Attribute) -> bytes:
    """Name and documentation of an attribute, encoded."""
    head = length_delimited(b"\x0a", encode_text(attribute.name)) if attribute.name else b""
    return head + length_delimited(b"\x12", encode_text(attribute.doc_string)) if attribute.doc_string else head


def encode_attribute(attribute: Attribute) -> bytes:
    """An `AttributeProto` message. Raises `ValueError` where the value does not fit the kind."""
    kind, value = attribute.kind, attribute.value
    head = attribute_head(attribute)
    if kind is ValueKind.NONE:
        return head
    if isinstance(value, tuple) != kind.is_list or value is None:
        raise ValueError(f"attribute {attribute.name}: {value!r} does not fit the type {kind.name.lower()}")
    try:
        if isinstance(value, tuple):
            return head + _encode_list(kind, value)
        return head + scalar_tag(kind) + encode_scalar(kind, value)
    except ValueError as error:
        raise ValueError(f"attribute {attribute.name}: {error}") from None


def _encode_ids(tag: bytes, ids: tuple[int, ...]) -> bytes:
    return length_delimited(tag, b"".join(map(encode_varint, ids))) if ids else b""


def _encode_io(tag: bytes, info: IOInfo | None) -> bytes:
    if info is None:
        return b""
    texts = ((b"\x0a", info.values), (b"\x12", info.shapes), (b"\x1a", info.types))
    return length_delimited(tag, b"".join(length_delimited(mark, encode_text(text)) for mark, text in texts if text))


def node_head(node: Node) -> bytes:
    """Everything of a `Node` message that stands before its attributes."""
    parts: list[bytes] = []
    if node.id:
        parts += (b"\x08", encode_varint(node.id))
    if node.name:
        parts.append(length_delimited(b"\x12", encode_text(node.name)))
    if node.type:
        parts += (b"\x18", encode_varint(int(node.type) & _MASK64))
    parts += (_encode_ids(b"\x22", node.ctrl_deps), _encode_ids(b"\x2a", node.data_deps))
    if node.start_time_micros:
        parts += (b"\x30", encode_varint(node.start_time_micros))
    if node.duration_micros:
        parts += (b"\x38", encode_varint(node.duration_micros))
    parts += (_encode_io(b"\x42", node.inputs), _encode_io(b"\x4a", node.outputs))
    return b"".join(parts)


def encode_node(node: Node) -> bytes:
    """A `Node` message. Raises `ValueError` where a number or value does not fit its field."""
    try:
        return node_head(node) + b"".join(length_delimited(b"\x52", encode_attribute(a)) for a in node.attributes)
    except ValueError as error:
        raise ValueError(f"node {node.id} ({node.name}): {error}") from None


def encode_metadata(metadata: TraceMetadata) -> bytes:
    """A `GlobalMetadata` message."""
    version = length_delimited(b"\x0a", encode_text(metadata.version)) if metadata.version else b""
    return version + b"".join(length_delimited(b"\x12", encode_attribute(a)) for a in metadata.attributes)


def frame(message: bytes) -> bytes:
    """A message with its length before it, as it stands in a file."""
    return encode_varint(len(message)) + message


def fields(data: Buffer) -> Iterable[tuple[int, int, int | bytes]]:
    """(field number, wire type, raw value) of each field of a message; raw is an int for varints, else bytes."""
    at, end = 0, len(data)
    while at < end:
        tag, at = decode_varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        if number == 0:
            raise MalformedMessage("a field has the number 0")
        if wire_type == VARINT:
            value, at = decode_varint(data, at)
            yield number, wire_type, value
            continue
        if wire_type == BYTES:
            length, at = decode_varint(data, at)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise MalformedMessage(f"a field has the wire type {wire_type}")
        if at + length > end:
            raise MalformedMessage("a field is cut off")
        yield number, wire_type, bytes(data[at : at + length])
        at += length


def _decode_elements(element: ValueKind, payload: bytes) -> tuple[Scalar, ...]:
    values: list[Scalar] = []
    for number, wire_type, raw in fields(payload):
        if number != 1:
            continue
        if element in _VARINTS:
            decode = _VARINTS[element][1]
            if isinstance(raw, int):
                values.append(decode(raw))
            elif wire_type == BYTES:
                at = 0
                while at < len(raw):
                    one, at = decode_varint(raw, at)
                    values.append(decode(one))
        elif element in _FIXED and isinstance(raw, bytes):
            if len(raw) % _FIXED[element].size:
                raise MalformedMessage("a packed list is cut off")
            values += (one for (one,) in _FIXED[element].iter_unpack(raw))
        elif isinstance(raw, bytes):
            values.append(_decode_text(raw) if element is ValueKind.STRING else raw)
    return tuple(values)


def _decode_value(kind: ValueKind, wire_type: int, raw: int | bytes) -> Value:
    """The value, None where the wire type does not suit the kind (such a field counts as unknown)."""
    if kind in _VARINTS:
        return _VARINTS[kind][1](raw) if isinstance(raw, int) else None
    if isinstance(raw, int):
        return None
    if kind in _FIXED:
        fits = wire_type == (FIXED64 if _FIXED[kind].size == 8 else FIXED32)
        return _FIXED[kind].unpack(raw)[0] if fits else None
    if wire_type != BYTES:
        return None
    if kind.is_list:
        return _decode_elements(ValueKind(kind - 1), raw)
    return _decode_text(raw) if kind is ValueKind.STRING else raw


def decode_attribute(data: Buffer) -> Attribute:
    """Read an `AttributeProto` message. Raises `MalformedMessage`."""
    name = doc_string = ""
    kind = ValueKind.NONE
    value: Value = None
    for number, wire_type, raw in fields(data):
        if number in (1, 2):
            if isinstance(raw, bytes) and wire_type == BYTES:
                text = _decode_text(raw)
                name, doc_string = (text, doc_string) if number == 1 else (name, text)
        elif 3 <= number <= 32:
            read = _decode_value(ValueKind(number), wire_type, raw)
            if read is not None:
                if isinstance(read, tuple) and isinstance(value, tuple) and kind == number:
                    value = value + read
                else:
                    kind, value = ValueKind(number), read
    return Attribute(name, kind, value, doc_string)


def _decode_io(data: bytes) -> IOInfo:
    texts = {
        number: _decode_text(raw) for number, wire, raw in fields(data) if wire == BYTES and isinstance(raw, bytes)
    }
    return IOInfo(texts.get(1, ""), texts.get(2, ""), texts.get(3, ""))


def decode_metadata(data: Buffer) -> TraceMetadata:
    """Read a `GlobalMetadata` message. Raises `MalformedMessage`."""
    version, attributes = "", list[Attribute]()
    for number, wire_type, raw in fields(data):
        if wire_type == BYTES and isinstance(raw, bytes):
            if number == 1:
                version = _decode_text(raw)
            elif number == 2:
                attributes.append(decode_attribute(raw))
    return TraceMetadata(version, tuple(attributes))


def is_metadata(data: Buffer) -> bool:
    """Whether a message is a `GlobalMetadata` and not a `Node` (a node has a varint `type`)."""
    try:
        return all(number in (1, 2) and wire_type == BYTES for number, wire_type, _ in fields(data))
    except MalformedMessage:
        return False


class NodeDecoder:
    """Reads `Node` messages; equal attributes are decoded once and shared (a bounded number of them is kept)."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._attributes: dict[bytes, Attribute] = {}

    def _attribute(self, data: bytes) -> Attribute:
        found = self._attributes.get(data)
        if found is None:
            if len(self._attributes) >= self._limit:
                self._attributes.clear()
            found = self._attributes[data] = decode_attribute(data)
        return found

    def decode(self, data: bytes) -> Node:
        """Read one message. Raises `MalformedMessage`."""
        numbers = [0, 0, 0, 0]
        name = ""
        deps: tuple[list[int], list[int]] = ([], [])
        infos: list[IOInfo | None] = [None, None]
        attributes: list[Attribute] = []
        at, end = 0, len(data)
        while at < end:
            tag = data[at]
            at += 1
            if tag in _NODE_BYTES:
                length, at = (data[at], at + 1) if at < end and data[at] < 128 else decode_varint(data, at)
                raw = data[at : at + length]
                at += length
                if at > end:
                    raise MalformedMessage("a field is cut off")
                if tag == 0x52:
                    attributes.append(self._attribute(raw))
                elif tag == 0x12:
                    name = raw.decode("utf-8", "surrogateescape")
                elif tag in (0x22, 0x2A):
                    _append_ids(raw, deps[tag == 0x2A])
                else:
                    infos[tag == 0x4A] = _decode_io(raw)
            elif tag in _NODE_VARINTS:
                number, at = (data[at], at + 1) if at < end and data[at] < 128 else decode_varint(data, at)
                slot = _NODE_VARINTS[tag]
                if slot < 0:
                    deps[slot + 2].append(number)
                else:
                    numbers[slot] = number
            else:
                at = _skip(data, at - 1)
        return Node(
            numbers[0],
            name,
            _node_type(numbers[1]),
            tuple(deps[1]),
            tuple(deps[0]),
            numbers[2],
            numbers[3],
            infos[0],
            infos[1],
            tuple(attributes),
        )


_NODE_BYTES = frozenset((0x12, 0x22, 0x2A, 0x42, 0x4A, 0x52))
_NODE_VARINTS = {0x08: 0, 0x18: 1, 0x30: 2, 0x38: 3, 0x20: -2, 0x28: -1}
_NODE_TYPES: dict[int, NodeType | int] = {int(kind): kind for kind in NodeType}


def _node_type(raw: int) -> NodeType | int:
    known = _NODE_TYPES.get(raw)
    if known is not None:
        return known
    raw &= _MASK32
    return raw - (1 << 32) if raw >> 31 else raw


def _append_ids(raw: bytes, ids: list[int]) -> None:
    at, end = 0, len(raw)
    while at < end:
        number = raw[at]
        at += 1
        if number > 127:
            number, at = decode_varint(raw, at - 1)
        ids.append(number)


def _skip(data: bytes, at: int) -> int:
    """Position after the field of unknown number or type that begins at `at`."""
    tag, at = decode_varint(data, at)
    if tag >> 3 == 0:
        raise MalformedMessage("a field has the number 0")
    wire_type = tag & 7
    if wire_type == VARINT:
        return decode_varint(data, at)[1]
    if wire_type == BYTES:
        length, at = decode_varint(data, at)
    elif wire_type in (FIXED64, FIXED32):
        length = 8 if wire_type == FIXED64 else 4
    else:
        raise MalformedMessage(f"a field has the wire type {wire_type}")
    if at + length > len(data):
        raise MalformedMessage("a field is cut off")
    return at + length


def decode_node(data: bytes) -> Node:
    """Read one `Node` message. Raises `MalformedMessage`."""
    return NodeDecoder(1).decode(data)
