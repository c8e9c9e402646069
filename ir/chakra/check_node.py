"""Rules about a single node: what both readers of ASTRA-sim need to find in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stablecast.ir.chakra.schema import INTEGER_KINDS, CollectiveType, Node, NodeType, Value, ValueKind, collective_name

MISSING = "missing attribute"
WRONG_TYPE = "attribute type"
ZERO = "zero size or work"
NO_COST = "compute without cost"

_EXACT: Mapping[str, frozenset[ValueKind]] = {
    "is_cpu_op": INTEGER_KINDS | {ValueKind.BOOL},
    "num_ops": frozenset({ValueKind.INT64}),
    "tensor_size": frozenset({ValueKind.UINT64, ValueKind.INT64}),
    "comm_type": frozenset({ValueKind.INT64}),
    "comm_size": frozenset({ValueKind.INT64}),
    "comm_priority": frozenset({ValueKind.INT32}),
    "pg_name": frozenset({ValueKind.STRING}),
    "comm_src": frozenset({ValueKind.INT32}),
    "comm_dst": frozenset({ValueKind.INT32}),
    "comm_tag": frozenset({ValueKind.INT32}),
}
_READ: Mapping[int, tuple[str, ...]] = {
    NodeType.COMP: ("is_cpu_op", "num_ops", "tensor_size"),
    NodeType.COMM_COLL: ("is_cpu_op", "comm_type", "comm_size", "pg_name", "comm_priority"),
    NodeType.COMM_SEND: ("is_cpu_op", "comm_src", "comm_dst", "comm_tag", "comm_size"),
    NodeType.COMM_RECV: ("is_cpu_op", "comm_src", "comm_dst", "comm_tag", "comm_size"),
    NodeType.MEM_LOAD: ("is_cpu_op", "tensor_size"),
    NodeType.MEM_STORE: ("is_cpu_op", "tensor_size"),
}
_SUPPORTED = frozenset(
    {
        CollectiveType.ALL_REDUCE,
        CollectiveType.ALL_GATHER,
        CollectiveType.REDUCE_SCATTER,
        CollectiveType.ALL_TO_ALL,
        CollectiveType.BROADCAST,
    }
)


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """A collective as a rank issues it. `group`: key of the group file, empty for all ranks."""

    group: str
    comm_type: int
    comm_size: int
    involved_dim: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class MessageUse:
    """A send or receive. `own`: the rank that the node names as its own, None where it names none."""

    sends: bool
    peer: int
    tag: int
    size: int
    own: int | None


@dataclass(slots=True)
class NodeFacts:
    """What the checks across nodes and ranks need of a node, and what is wrong with it by itself.

    `uncosted`: what a compute node lacks for a roofline model, empty where that does not matter; `skipped`: a
    compute node that consumers skip, so that its children never run.
    """

    id: int
    structure: tuple[int, tuple[int, ...], tuple[int, ...]]
    faults: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    warnings: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    uncosted: str = ""
    skipped: bool = False
    collective: CollectiveUse | None = None
    message: MessageUse | None = None


def node_facts(node: Node, roofline: bool | None, dimensions: int) -> NodeFacts:
    """Judge a node by itself.

    `roofline`: whether consumers time compute by `num_ops` and `tensor_size` (None: not known). `dimensions`:
    number of network dimensions, 0 where not known.
    """
    facts = NodeFacts(node.id, (node.id, node.data_deps, node.ctrl_deps))
    if len(set(node.data_deps)) < len(node.data_deps):
        facts.faults.append(("repeated dependency", "an id stands twice in data_deps: the older reader never frees it"))
    readable = _READ.get(node.type)
    if readable is None:
        facts.faults.append(("node type no consumer takes", f"type {node.type_name} aborts or hangs the simulation"))
        return facts
    values = _typed_values(node, readable, facts)
    on_cpu = bool(values.get("is_cpu_op", False))
    if node.type == NodeType.COMP:
        _compute(node, values, on_cpu, roofline, facts)
    elif node.type in (NodeType.MEM_LOAD, NodeType.MEM_STORE):
        if _need(values, "tensor_size", facts) == 0:
            facts.faults.append((ZERO, "tensor_size is 0"))
    elif on_cpu:
        facts.faults.append(("cpu flag on communication", "is_cpu_op is true on a communication node"))
    elif node.type == NodeType.COMM_COLL:
        _collective(node, values, dimensions, facts)
    else:
        _message(node.type == NodeType.COMM_SEND, values, facts)
    return facts


def _typed_values(node: Node, names: tuple[str, ...], facts: NodeFacts) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for attribute in node.attributes:
        name = attribute.name
        if name not in names:
            continue
        values[name] = attribute.value
        if attribute.kind not in _EXACT[name]:
            wanted = " or ".join(
                sorted(kind.field for kind in _EXACT[name] if kind.name != "INT64" or len(_EXACT[name]) < 3)
            )
            facts.faults.append((WRONG_TYPE, f"{name} is {attribute.kind.field}, read as {wanted}"))
    return values


def _need(values: Mapping[str, Value], name: str, facts: NodeFacts) -> int | None:
    """The number, None where it is absent (a fault) or of a type already complained about."""
    value = values.get(name)
    if name not in values:
        facts.faults.append((MISSING, f"{name} is missing"))
    return int(value) if isinstance(value, int) else None


def _compute(node: Node, values: Mapping[str, Value], on_cpu: bool, roofline: bool | None, facts: NodeFacts) -> None:
    absent = [name for name in ("num_ops", "tensor_size") if name not in values]
    by_roofline = not on_cpu and roofline is not False
    costed = by_roofline and not absent
    if by_roofline and absent:
        message = " and ".join(absent) + " missing, which a roofline model needs"
        if roofline or len(absent) == 1:
            facts.faults.append((MISSING, message))
        else:
            facts.uncosted = message + "; where durations are meant, say that roofline is off"
    elif by_roofline:
        facts.skipped = values["tensor_size"] == 0
        if values["num_ops"] == 0 and not facts.skipped:
            facts.faults.append((ZERO, "num_ops is 0: the time becomes 2^63 cycles"))
    if node.duration_micros == 0 and not costed and not roofline:
        if node.attribute("runtime") is not None:
            facts.faults.append(
                ("attribute ignored by consumers", "the time stands in the attribute runtime, duration_micros is 0")
            )
        elif not facts.faults:
            facts.warnings.append((NO_COST, "duration_micros is 0, which counts as 1 ns"))


def _collective(node: Node, values: Mapping[str, Value], dimensions: int, facts: NodeFacts) -> None:
    comm_type, size = _need(values, "comm_type", facts), _need(values, "comm_size", facts)
    if comm_type is not None and comm_type not in _SUPPORTED:
        name = collective_name(comm_type)
        facts.faults.append(("unsupported collective", f"{name} is none of the collectives that consumers know"))
        return
    if size is not None and size < 0:
        facts.faults.append((ZERO, f"comm_size is {size}"))
    elif size == 0:
        facts.warnings.append((ZERO, "comm_size is 0: the smallest size is charged"))
    group = values.get("pg_name", "")
    if isinstance(group, str) and group and not (group.isascii() and group.isdigit()):
        facts.faults.append(("group name", f'pg_name "{group}" is not a number in digits'))
        return
    involved = _involved(node, dimensions, facts)
    if comm_type is not None and size is not None and isinstance(group, str):
        key = str(int(group)) if group and int(group) else ""
        facts.collective = CollectiveUse(key, comm_type, size, () if key else involved)
    if comm_type == CollectiveType.BROADCAST and node.duration_micros == 0:
        facts.warnings.append(("broadcast without duration", "a broadcast takes duration_micros, 0 counts as 1 ns"))


def _involved(node: Node, dimensions: int, facts: NodeFacts) -> tuple[bool, ...]:
    attribute = node.attribute("involved_dim")
    if attribute is None:
        return ()
    kind = "involved_dim"
    if attribute.kind is not ValueKind.BOOL_LIST or not isinstance(attribute.value, tuple):
        facts.faults.append((kind, f"involved_dim is {attribute.kind.field}, read as bool_list"))
        return ()
    flags = tuple(bool(flag) for flag in attribute.value)
    if not any(flags):
        facts.faults.append((kind, "involved_dim is false for all dimensions: the collective never ends"))
        return ()
    if len(flags) < dimensions:
        facts.faults.append((kind, f"involved_dim has {len(flags)} flags for {dimensions} network dimensions"))
    return flags


def _message(sends: bool, values: Mapping[str, Value], facts: NodeFacts) -> None:
    peer = _need(values, "comm_dst" if sends else "comm_src", facts)
    tag, size = _need(values, "comm_tag", facts), _need(values, "comm_size", facts)
    if size is not None and size <= 0:
        facts.faults.append((ZERO, f"comm_size is {size}"))
        return
    if peer is None or tag is None or size is None:
        return
    own = values.get("comm_src" if sends else "comm_dst")
    facts.message = MessageUse(sends, peer, tag, size, int(own) if isinstance(own, int) else None)
