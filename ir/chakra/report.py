"""What the validator found."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fault:
    """One finding. `rank` is None where it is about all files, `node` where it is about no single node."""

    rank: int | None
    node: int | None
    kind: str
    message: str

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        return {"rank": self.rank, "node": self.node, "kind": self.kind, "message": self.message}


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a check.

    `faults`: what a consumer would choke on or get wrong; `warnings`: what runs but may not be meant. Of each kind
    only the first ones are kept; `counts` has the number found, `warning_counts` likewise.
    """

    ok: bool
    ranks: int
    nodes: int
    faults: tuple[Fault, ...]
    warnings: tuple[Fault, ...]
    counts: Mapping[str, int]
    warning_counts: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "ok": self.ok,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "faults": [fault.to_json() for fault in self.faults],
            "warnings": [fault.to_json() for fault in self.warnings],
            "counts": dict(self.counts),
            "warning_counts": dict(self.warning_counts),
        }

    def __str__(self) -> str:
        head = f"{self.ranks} ranks, {self.nodes} nodes: " + ("ok" if self.ok else "not ok")
        lines = [head]
        for title, counts, found in (
            ("fault", self.counts, self.faults),
            ("warning", self.warning_counts, self.warnings),
        ):
            for kind, count in counts.items():
                lines.append(f"{title}: {kind} ({count})")
                lines += [f"  {_place(one)}{one.message}" for one in found if one.kind == kind][:5]
        return "\n".join(lines)


def _place(fault: Fault) -> str:
    rank = "" if fault.rank is None else f"rank {fault.rank}"
    node = "" if fault.node is None else f"node {fault.node}"
    place = " ".join(part for part in (rank, node) if part)
    return place + ": " if place else ""


@dataclass(slots=True)
class FaultLog:
    """Collects findings, keeping the first `limit` of each kind so that memory stays bounded."""

    limit: int
    found: list[Fault] = field(default_factory=list[Fault])
    counts: Counter[str] = field(default_factory=Counter[str])

    def add(self, rank: int | None, node: int | None, kind: str, message: str) -> None:
        """Note a finding."""
        self.counts[kind] += 1
        if self.counts[kind] <= self.limit:
            self.found.append(Fault(rank, node, kind, message))
