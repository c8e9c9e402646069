"""What an emission wrote."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from stablecast.ir.chakra import Node, NodeType, Value


@dataclass(frozen=True, slots=True)
class RoleCount:
    """A role: ranks, nodes of one rank, runs that these stand for (more where loops are compact), bytes of a rank.

    `compute_s`: compute of a rank as the whole microseconds of its nodes; `exact_compute_s`: before rounding, loops
    counted in full.
    """

    name: str
    ranks: int
    nodes: int
    nodes_unrolled: int
    bytes_per_rank: float
    compute_s: float
    exact_compute_s: float


@dataclass(frozen=True, slots=True)
class ClassCount:
    """Nodes of one class over all ranks. `kind`: node type or collective; `axes`: mesh axes; `nbytes`: in messages."""

    kind: str
    axes: str
    nodes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class EmitReport:
    """Everything that was written. `bytes` leaves the manifest out; `wall_s`: seconds that it took."""

    prefix: str
    ranks: int
    nodes: int
    bytes: int
    groups: int
    roles: tuple[RoleCount, ...]
    classes: tuple[ClassCount, ...]
    notes: tuple[str, ...] = ()
    target: str = "files"
    wall_s: float = 0.0

    def timed(self, wall_s: float) -> "EmitReport":
        return replace(self, wall_s=wall_s)

    def to_json(self) -> dict[str, object]:
        """The fields that the manifest holds besides its own."""
        return {
            "groups": self.groups,
            "roles": [asdict(role) for role in self.roles],
            "classes": [asdict(one) for one in self.classes],
            "notes": list(self.notes),
        }

    def to_dict(self) -> dict[str, object]:
        """All fields."""
        return asdict(self)

    def __str__(self) -> str:
        what = {"dry-run": "not written: ", "tar": "one tar file: "}.get(self.target, "")
        lines = [
            f"{self.prefix}: {what}{self.ranks:,} ranks, {self.nodes:,} nodes, {self.bytes:,} bytes, "
            f"{self.groups:,} groups in {self.wall_s:.2f} s"
        ]
        for role in self.roles:
            loops = f" ({role.nodes_unrolled:,} with loops unrolled)" if role.nodes_unrolled != role.nodes else ""
            time = f", compute {role.compute_s * 1e3:.3f} ms" if role.compute_s else ""
            lines.append(
                f"  role {role.name}: {role.ranks:,} ranks of {role.nodes:,} nodes{loops}, "
                f"{role.bytes_per_rank:,.0f} bytes{time}"
            )
        for one in self.classes:
            over = f" over {one.axes}" if one.axes else ""
            size = f", {one.nbytes:,} bytes" if one.nbytes else ""
            lines.append(f"  {one.kind}{over}: {one.nodes:,} nodes{size}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def count_classes(
    into: dict[tuple[str, str], ClassCount], nodes: Sequence[Node], ranks: int, collective_name: Callable[[Value], str]
) -> None:
    """Add `nodes` of each of `ranks` ranks to the counts by class."""
    found: dict[tuple[str, str], list[int]] = {}
    for node in nodes:
        kind, axes = str(node.type_name).removesuffix("_NODE"), ""
        if node.type == NodeType.COMM_COLL:
            kind = collective_name(node.value("comm_type")).lower()
        if node.type in (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV):
            axes = str(node.value("axes") or node.value("axis") or "")
        sums = found.setdefault((kind, axes), [0, 0])
        sums[0] += 1
        size = node.value("comm_size")
        sums[1] += size if isinstance(size, int) else 0
    for key, (count, nbytes) in found.items():
        held = into.get(key, ClassCount(*key, 0, 0))
        into[key] = replace(held, nodes=held.nodes + count * ranks, nbytes=held.nbytes + nbytes * ranks)
