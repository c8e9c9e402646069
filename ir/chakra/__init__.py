"""Chakra execution traces: schema, reader, writer, rank templates, validator.

The codec is written out by hand and equals protobuf byte for byte; `et_def_pb2`, made from the vendored
`et_def.proto`, is there for programs that want message objects and is not imported from here.
"""

from stablecast.ir.chakra.check import check
from stablecast.ir.chakra.diff import Difference, TraceDiff, diff_traces
from stablecast.ir.chakra.files import (
    Trace,
    TraceError,
    TraceFiles,
    TraceReader,
    TraceWriter,
    find_traces,
    load_trace,
    read_messages,
)
from stablecast.ir.chakra.jsonform import json_lines, metadata_to_json, node_to_json, nodes_of_json
from stablecast.ir.chakra.picture import trace_svg
from stablecast.ir.chakra.prefix import PrefixWriter, encode_trace
from stablecast.ir.chakra.report import CheckReport, Fault
from stablecast.ir.chakra.schema import (
    Attribute,
    CollectiveType,
    IOInfo,
    Node,
    NodeType,
    Scalar,
    TraceMetadata,
    Value,
    ValueKind,
    bool_attr,
    collective_name,
    collective_node,
    comp_node,
    double_attr,
    int32_attr,
    int64_attr,
    memory_node,
    node_type_name,
    recv_node,
    send_node,
    string_attr,
    uint64_attr,
)
from stablecast.ir.chakra.show import open_rank, trace_dot, trace_json, trace_table
from stablecast.ir.chakra.sink import CountingWriter, TarWriter, TraceSink
from stablecast.ir.chakra.stats import CollectiveRow, TraceStats, trace_stats
from stablecast.ir.chakra.surroundings import CommGroups, Surroundings, find_surroundings, read_comm_groups
from stablecast.ir.chakra.template import TraceTemplate
from stablecast.ir.chakra.wire import (
    MalformedMessage,
    NodeDecoder,
    decode_metadata,
    decode_node,
    encode_metadata,
    encode_node,
)

__all__ = [
    "Attribute",
    "CheckReport",
    "CollectiveRow",
    "CollectiveType",
    "CommGroups",
    "CountingWriter",
    "Difference",
    "Fault",
    "IOInfo",
    "MalformedMessage",
    "Node",
    "NodeDecoder",
    "NodeType",
    "PrefixWriter",
    "Scalar",
    "Surroundings",
    "TarWriter",
    "Trace",
    "TraceDiff",
    "TraceError",
    "TraceFiles",
    "TraceMetadata",
    "TraceReader",
    "TraceSink",
    "TraceStats",
    "TraceTemplate",
    "TraceWriter",
    "Value",
    "ValueKind",
    "bool_attr",
    "check",
    "collective_name",
    "collective_node",
    "comp_node",
    "decode_metadata",
    "decode_node",
    "diff_traces",
    "double_attr",
    "encode_metadata",
    "encode_node",
    "encode_trace",
    "find_surroundings",
    "find_traces",
    "int32_attr",
    "int64_attr",
    "json_lines",
    "load_trace",
    "memory_node",
    "metadata_to_json",
    "node_to_json",
    "node_type_name",
    "nodes_of_json",
    "open_rank",
    "read_comm_groups",
    "read_messages",
    "recv_node",
    "send_node",
    "string_attr",
    "trace_dot",
    "trace_json",
    "trace_stats",
    "trace_svg",
    "trace_table",
    "uint64_attr",
]
