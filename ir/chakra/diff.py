"""What differs between two traces: ranks, nodes, fields."""

import filecmp
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from stablecast.ir.chakra.files import TraceReader, find_traces
from stablecast.ir.chakra.schema import Attribute, Node, TraceMetadata


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference. `node` is None where the rank or its head record differs; a side is None where it has nothing.

    `what`: `rank`, `metadata`, `node`, the name of a field, or `attribute NAME`.
    """

    rank: int
    node: int | None
    what: str
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """All that differs, the first `limit` listed. `count`: how many were found; `nodes`: nodes that differ."""

    same: bool
    ranks: int
    differing_ranks: int
    nodes: int
    count: int
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        listed = [{name.name: getattr(one, name.name) for name in fields(one)} for one in self.differences]
        return {
            "same": self.same,
            "ranks": self.ranks,
            "differing_ranks": self.differing_ranks,
            "nodes": self.nodes,
            "count": self.count,
            "differences": listed,
        }

    def __str__(self) -> str:
        if self.same:
            return f"the same: {self.ranks} ranks"
        head = f"{self.differing_ranks} of {self.ranks} ranks differ, in {self.nodes} nodes and {self.count} places"
        lines = [head]
        for one in self.differences:
            place = f"rank {one.rank}" if one.node is None else f"rank {one.rank} node {one.node}"
            lines.append(f"{place}: {one.what}: {_side(one.left)} | {_side(one.right)}")
        if self.count > len(self.differences):
            lines.append(f"... {self.count - len(self.differences):,} more")
        return "\n".join(lines)


def _side(text: str | None) -> str:
    return "absent" if text is None else text


def diff_traces(left: str | Path, right: str | Path, *, limit: int = 100) -> TraceDiff:
    """Compare two prefixes (or files) rank by rank; nodes are matched by id. Raises `InputError`."""
    one, other = find_traces(left), find_traces(right)
    if one.single and other.single:
        ranks = {0: (next(iter(one.ranks.values())), next(iter(other.ranks.values())))}
    else:
        ranks = {rank: (one.ranks.get(rank), other.ranks.get(rank)) for rank in sorted({*one.ranks, *other.ranks})}
    found: list[Difference] = []
    count = nodes = differing = 0
    for rank, (path, peer) in ranks.items():
        here = _rank_differences(rank, path, peer)
        differing += bool(here)
        count += len(here)
        nodes += len({difference.node for difference in here if difference.node is not None})
        found += here[: max(0, limit - len(found))]
    return TraceDiff(count == 0, len(ranks), differing, nodes, count, tuple(found))


def _rank_differences(rank: int, left: Path | None, right: Path | None) -> list[Difference]:
    if left is None or right is None:
        return [Difference(rank, None, "rank", left and left.name, right and right.name)]
    if filecmp.cmp(left, right, shallow=False):
        return []
    head, nodes = _load(left)
    peer_head, peers = _load(right)
    found: list[Difference] = []
    if head != peer_head:
        found.append(Difference(rank, None, "metadata", _head_text(head), _head_text(peer_head)))
    for key, node in nodes.items():
        peer = peers.pop(key, None)
        if peer is None:
            found.append(Difference(rank, node.id, "node", _node_text(node), None))
        elif node != peer:
            found += _field_differences(rank, node, peer)
    found += (Difference(rank, peer.id, "node", None, _node_text(peer)) for peer in peers.values())
    return found


def _load(path: Path) -> tuple[TraceMetadata | None, dict[tuple[int, int], Node]]:
    """Nodes by (id, how often the id was seen before)."""
    nodes: dict[tuple[int, int], Node] = {}
    reader = TraceReader(path)
    for node in reader:
        again = 0
        while (node.id, again) in nodes:
            again += 1
        nodes[node.id, again] = node
    return reader.metadata, nodes


def _head_text(metadata: TraceMetadata | None) -> str | None:
    return None if metadata is None else f"version {metadata.version!r}, {_attributes_text(metadata.attributes)}"


def _attributes_text(attributes: tuple[Attribute, ...]) -> str:
    return ", ".join(map(_attribute_text, attributes)) or "no attributes"


def _attribute_text(attribute: Attribute) -> str:
    return f"{attribute.name}={attribute.value!r} ({attribute.kind.field})"


def _node_text(node: Node) -> str:
    return f"{node.type_name} {node.name}"


def _field_differences(rank: int, left: Node, right: Node) -> list[Difference]:
    found: list[Difference] = []
    for name in ("name", "type", "data_deps", "ctrl_deps", "start_time_micros", "duration_micros", "inputs", "outputs"):
        one, other = getattr(left, name), getattr(right, name)
        if one != other:
            found.append(Difference(rank, left.id, name, str(one), str(other)))
    one, other = _by_name(left.attributes), _by_name(right.attributes)
    found += (
        Difference(rank, left.id, f"attribute {name}", one.get(name), other.get(name))
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    )
    return found or [Difference(rank, left.id, "order of attributes", None, None)]


def _by_name(attributes: tuple[Attribute, ...]) -> Mapping[str, str]:
    texts: dict[str, str] = {}
    for attribute in attributes:
        text = f"{attribute.value!r} ({attribute.kind.field})" + (
            f" {attribute.doc_string}" if attribute.doc_string else ""
        )
        texts[attribute.name] = f"{texts[attribute.name]}, {text}" if attribute.name in texts else text
    return texts
