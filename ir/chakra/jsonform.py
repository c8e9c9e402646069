"""The JSON forms in which Chakra traces are found, and the one that we write.

Read: (a) `{"workload_graph": [...]}`; (b) protobuf's JSON of each message, one after the other, as Chakra's
jsonizer writes; (c) `{"metadata": ..., "nodes": [...]}` with the same objects, which we write; (d) PyTorch's own
execution traces with the schema version `...-chakra...`.
"""

import base64
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from stablecast.ir.chakra.schema import (
    Attribute,
    IOInfo,
    Node,
    NodeType,
    Scalar,
    TraceMetadata,
    Value,
    ValueKind,
    bool_attr,
    node_type_name,
)
from stablecast.ir.errors import InputError

Json = Mapping[str, object]

_TYPES = {node_type_name(kind): kind for kind in NodeType}
_FIELDS = {kind.field: kind for kind in ValueKind if kind}
_FLOATS = (ValueKind.DOUBLE, ValueKind.FLOAT)
_WIDE = {ValueKind.INT64, ValueKind.UINT64, ValueKind.SINT64, ValueKind.FIXED64, ValueKind.SFIXED64}


def _camel(field: str) -> str:
    head, *rest = field.split("_")
    return head + "".join(word.capitalize() for word in rest)


_CAMEL = {_camel(field): kind for field, kind in _FIELDS.items()}


def nodes_of_json(data: bytes, source: str) -> tuple[TraceMetadata | None, list[Node]]:
    """Metadata (None where the form has none) and nodes of a JSON text, compressed or not. Raises `InputError`."""
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
        documents = list(_documents(text))
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{source}: not JSON: {error}") from None
    if not documents:
        raise InputError(f"{source}: empty")
    try:
        return _read_documents(documents)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source}: not a known JSON form of a Chakra trace: {error!r}") from None


def _documents(text: str) -> Iterator[object]:
    decoder, at = json.JSONDecoder(), 0
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if at >= len(text):
            return
        document, at = decoder.raw_decode(text, at)
        yield document


def _object(value: object) -> Json:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    return cast(Json, value)


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return cast(Sequence[object], value)


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"expected a whole number, found {value!r}")
    return int(value)


def _ints(value: object) -> tuple[int, ...]:
    return tuple(map(_int, _list(value)))


def _read_documents(documents: list[object]) -> tuple[TraceMetadata | None, list[Node]]:
    first = _object(documents[0])
    if "workload_graph" in first:
        return None, [_workload_node(_object(node)) for node in _list(first["workload_graph"])]
    if "nodes" in first and "schema" in first:
        return _pytorch_metadata(first), [_pytorch_node(_object(node)) for node in _list(first["nodes"])]
    if "nodes" in first:
        head = None if first.get("metadata") is None else _metadata(_object(first["metadata"]))
        return head, [_message_node(_object(node)) for node in _list(first["nodes"])]
    rest = [_object(document) for document in documents]
    head = None
    if "type" not in first and "id" not in first and "name" not in first:
        head, rest = _metadata(first), rest[1:]
    return head, [_message_node(node) for node in rest]


def _workload_node(item: Json) -> Node:
    kind = _int(item["NodeType"])
    attributes = (bool_attr("is_cpu_op", bool(item["is_cpu_op"])),) if "is_cpu_op" in item else ()
    return Node(
        _int(item["Id"]),
        str(item["Name"]),
        NodeType(kind) if kind in _TYPES.values() else kind,
        _ints(item.get("data_deps", [])),
        _ints(item.get("ctrlDeps", item.get("ctrl_deps", []))),
        duration_micros=_int(item.get("runtime", 0)),
        attributes=attributes,
    )


def _either(item: Json, name: str, default: object) -> object:
    return item.get(name, item.get(_camel(name), default))


def _node_type(value: object) -> NodeType | int:
    if isinstance(value, str) and value in _TYPES:
        return _TYPES[value]
    number = _int(value)
    return NodeType(number) if number in _TYPES.values() else number


def _io(value: object) -> IOInfo | None:
    if value is None:
        return None
    item = _object(value)
    return IOInfo(str(item.get("values", "")), str(item.get("shapes", "")), str(item.get("types", "")))


def _message_node(item: Json) -> Node:
    return Node(
        _int(item.get("id", 0)),
        str(item.get("name", "")),
        _node_type(item.get("type", 0)),
        _ints(_either(item, "data_deps", [])),
        _ints(_either(item, "ctrl_deps", [])),
        _int(_either(item, "start_time_micros", 0)),
        _int(_either(item, "duration_micros", 0)),
        _io(item.get("inputs")),
        _io(item.get("outputs")),
        tuple(_attribute(_object(one)) for one in _list(item.get("attr", []))),
    )


def _metadata(item: Json) -> TraceMetadata:
    attributes = tuple(_attribute(_object(one)) for one in _list(item.get("attr", [])))
    return TraceMetadata(str(item.get("version", "")), attributes)


def _attribute(item: Json) -> Attribute:
    name, doc = str(item.get("name", "")), str(_either(item, "doc_string", ""))
    for key, raw in item.items():
        kind = _CAMEL.get(key) or _FIELDS.get(key)
        if kind is None:
            continue
        if kind.is_list:
            element = ValueKind(kind - 1)
            values = tuple(_scalar(element, one) for one in _list(_object(raw).get("values", [])))
            return Attribute(name, kind, values, doc)
        return Attribute(name, kind, _scalar(kind, raw), doc)
    return Attribute(name, ValueKind.NONE, None, doc)


def _scalar(kind: ValueKind, raw: object) -> Scalar:
    if kind is ValueKind.STRING:
        return str(raw)
    if kind is ValueKind.BYTES:
        return base64.b64decode(str(raw))
    if kind is ValueKind.BOOL:
        if not isinstance(raw, bool):
            raise TypeError(f"expected true or false, found {raw!r}")
        return raw
    if kind in _FLOATS:
        if not isinstance(raw, int | float | str):
            raise TypeError(f"expected a number, found {raw!r}")
        return float(raw)
    return _int(raw)


def _pytorch_metadata(item: Json) -> TraceMetadata:
    attributes = tuple(
        Attribute(key, ValueKind.STRING if isinstance(value, str) else ValueKind.UINT64, value)
        for key, value in item.items()
        if key != "nodes" and isinstance(value, str | int)
    )
    return TraceMetadata("", attributes)


def _pytorch_node(item: Json) -> Node:
    """An operator of PyTorch's host-side trace; what has no operator schema is a label, not work."""
    attributes = tuple(_pytorch_attribute(_object(one)) for one in _list(item["attrs"]))
    schema = next((one.value for one in attributes if one.name == "op_schema"), "")
    node_id, parent = _int(item["id"]), item.get("ctrl_deps")
    root = parent is None or _int(parent) == node_id
    return Node(
        node_id,
        str(item["name"]),
        NodeType.COMP if schema else NodeType.METADATA,
        ctrl_deps=() if root else (_int(parent),),
        inputs=_pytorch_io(item.get("inputs")),
        outputs=_pytorch_io(item.get("outputs")),
        attributes=(bool_attr("is_cpu_op", True), *attributes),
    )


def _pytorch_io(value: object) -> IOInfo | None:
    if value is None:
        return None
    item = _object(value)
    return IOInfo(*(json.dumps(item.get(key, [])) for key in ("values", "shapes", "types")))


_PYTORCH_KINDS = {
    "uint64": ValueKind.UINT64,
    "int64": ValueKind.INT64,
    "double": ValueKind.DOUBLE,
    "bool": ValueKind.BOOL,
}


def _pytorch_attribute(item: Json) -> Attribute:
    kind = _PYTORCH_KINDS.get(str(item["type"]), ValueKind.STRING)
    return Attribute(str(item["name"]), kind, _scalar(kind, item["value"]))


def _json_scalar(kind: ValueKind, value: Scalar) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value) if kind in _WIDE else value


def _json_value(kind: ValueKind, value: Value) -> object:
    if isinstance(value, tuple):
        element = ValueKind(kind - 1)
        return {"values": [_json_scalar(element, one) for one in value]} if value else {}
    return None if value is None else _json_scalar(kind, value)


def _json_attributes(attributes: Iterable[Attribute]) -> list[dict[str, object]]:
    out: list[dict[str, object]] = []
    for one in attributes:
        item: dict[str, object] = {"name": one.name} if one.name else {}
        if one.doc_string:
            item["docString"] = one.doc_string
        if one.kind:
            item[_camel(one.kind.field)] = _json_value(one.kind, one.value)
        out.append(item)
    return out


def _json_io(info: IOInfo) -> dict[str, object]:
    pairs = (("values", info.values), ("shapes", info.shapes), ("types", info.types))
    return {key: text for key, text in pairs if text}


def node_to_json(node: Node) -> dict[str, object]:
    """A node as protobuf's JSON mapping writes it (64-bit numbers as strings, defaults left out)."""
    item: dict[str, object] = {}
    if node.id:
        item["id"] = str(node.id)
    if node.name:
        item["name"] = node.name
    if node.type:
        item["type"] = node.type_name if isinstance(node.type, NodeType) else node.type
    if node.ctrl_deps:
        item["ctrlDeps"] = [str(one) for one in node.ctrl_deps]
    if node.data_deps:
        item["dataDeps"] = [str(one) for one in node.data_deps]
    if node.start_time_micros:
        item["startTimeMicros"] = str(node.start_time_micros)
    if node.duration_micros:
        item["durationMicros"] = str(node.duration_micros)
    if node.inputs is not None:
        item["inputs"] = _json_io(node.inputs)
    if node.outputs is not None:
        item["outputs"] = _json_io(node.outputs)
    if node.attributes:
        item["attr"] = _json_attributes(node.attributes)
    return item


def metadata_to_json(metadata: TraceMetadata) -> dict[str, object]:
    """The head record in the same mapping."""
    item: dict[str, object] = {"version": metadata.version} if metadata.version else {}
    if metadata.attributes:
        item["attr"] = _json_attributes(metadata.attributes)
    return item


def json_lines(metadata: TraceMetadata | None, nodes: Iterable[Node]) -> Iterator[str]:
    """A trace as one valid JSON document, a line at a time; `nodes_of_json` reads it back to the same graph."""
    head = "null" if metadata is None else json.dumps(metadata_to_json(metadata))
    yield '{"metadata": ' + head + ', "nodes": ['
    pending: str | None = None
    for node in nodes:
        if pending is not None:
            yield pending + ","
        pending = json.dumps(node_to_json(node))
    if pending is not None:
        yield pending
    yield "]}"
