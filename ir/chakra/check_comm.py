"""Rules across ranks: collectives of a group in the same order and size, every receive with its send."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from stablecast.ir.chakra.check_node import CollectiveUse, MessageUse
from stablecast.ir.chakra.report import FaultLog
from stablecast.ir.chakra.schema import collective_name
from stablecast.ir.chakra.surroundings import CommGroups

Issue = tuple[int, int]
GroupKey = tuple[str, tuple[bool, ...], tuple[int, ...]]

MISSING_MEMBER = "collective missing on a member"
_ALL: GroupKey = ("", (), ())
_KEPT_LACKING = 64


@dataclass(slots=True)
class _GroupState:
    first_rank: int
    issues: tuple[Issue, ...]
    agreed: bool = True


@dataclass(slots=True)
class CollectiveLedger:
    """Compares what each rank issues in each group with what the first rank seen there issues."""

    log: FaultLog
    groups: CommGroups | None
    npus_count: tuple[int, ...]
    _states: dict[GroupKey, _GroupState] = field(default_factory=dict[GroupKey, _GroupState])
    _lacking: dict[GroupKey, list[int]] = field(default_factory=dict[GroupKey, list[int]])
    _shared: dict[tuple[Issue, ...], tuple[Issue, ...]] = field(
        default_factory=dict[tuple[Issue, ...], tuple[Issue, ...]]
    )
    _groups_of: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    _complained: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        for key, members in self.groups.members.items() if self.groups else ():
            for rank in members:
                self._groups_of.setdefault(rank, []).append(key)

    def add(self, rank: int, uses: Sequence[tuple[int, CollectiveUse]]) -> None:
        """Take the collectives of a rank, (node id, use), in the order of issue."""
        by_group: dict[GroupKey, list[tuple[int, CollectiveUse]]] = {}
        for node_id, use in uses:
            key = self._key(rank, use)
            if key is not None:
                by_group.setdefault(key, []).append((node_id, use))
        for key, items in by_group.items():
            if not key[0] or self._belongs(rank, key[0], items[0][0]):
                self._compare(rank, key, items)
        for name in self._groups_of.get(rank, ()):
            if (name, (), ()) not in by_group:
                self._lack((name, (), ()), rank)
        if _ALL not in by_group:
            self._lack(_ALL, rank)

    def _lack(self, key: GroupKey, rank: int) -> None:
        ranks = self._lacking.setdefault(key, [])
        if len(ranks) < _KEPT_LACKING:
            ranks.append(rank)

    def _key(self, rank: int, use: CollectiveUse) -> GroupKey | None:
        """What the collective is matched within; None where that is not known."""
        flags = use.involved_dim
        if use.group or not flags or all(flags):
            return (use.group, (), ())
        if not self.npus_count:
            return None
        place: list[int] = []
        for axis, size in enumerate(self.npus_count):
            rank, digit = divmod(rank, size)
            place.append(-1 if axis < len(flags) and flags[axis] else digit)
        return ("", flags, tuple(place))

    def _belongs(self, rank: int, name: str, node: int) -> bool:
        members = self.groups.members.get(name) if self.groups else None
        if members is None:
            if name not in self._complained:
                self._complained.add(name)
                where = f"is not in {self.groups.path.name}" if self.groups else "is used, but there is no group file"
                self.log.add(rank, node, "group file", f'group "{name}" {where}')
            return False
        if rank not in members:
            self.log.add(rank, node, "rank outside its group", f'rank {rank} is not in group "{name}"')
            return False
        if len(members) == 1:
            self.log.add(rank, node, "one-rank group", f'group "{name}" has one rank: the collective never ends')
            return False
        return True

    def _compare(self, rank: int, key: GroupKey, items: Sequence[tuple[int, CollectiveUse]]) -> None:
        issues = tuple((use.comm_type, use.comm_size) for _, use in items)
        state = self._states.get(key)
        if state is None:
            if len(self._shared) > 4096:
                self._shared.clear()
            self._states[key] = _GroupState(rank, self._shared.setdefault(issues, issues))
        elif issues != state.issues:
            self._explain(rank, key, [node_id for node_id, _ in items], issues, state)

    def _explain(
        self, rank: int, key: GroupKey, nodes: Sequence[int], issues: tuple[Issue, ...], state: _GroupState
    ) -> None:
        group = f'group "{key[0]}"' if key[0] else "the ranks of its dimensions" if key[1] else "all ranks"
        other, at = state.first_rank, _first_difference(issues, state.issues)
        if len(issues) != len(state.issues):
            fewer, short, long = (rank, issues, state.issues)
            if len(issues) > len(state.issues):
                fewer, short, long = (other, state.issues, issues)
            node = nodes[at] if fewer == rank and at < len(nodes) else None
            absent = next(iter((Counter(long) - Counter(short)).elements()))
            text = f"{len(short)} collectives in {group} where rank {other if fewer == rank else rank} has {len(long)}"
            self.log.add(fewer, node, MISSING_MEMBER, f"{text}; lacks {_issue_text(absent)}")
            return
        mine, theirs = issues[at], state.issues[at]
        sizes_only = [kind for kind, _ in issues] == [kind for kind, _ in state.issues] and Counter(issues) != Counter(
            state.issues
        )
        kind = "collective size differs" if sizes_only else "collective order differs"
        text = f"number {at + 1} in {group} is {_issue_text(mine)}, on rank {other} {_issue_text(theirs)}"
        self.log.add(rank, nodes[at], kind, text)

    def finish(self, readable: Set[int]) -> None:
        """Say which members never issue the collectives of their group."""
        for key, state in self._states.items():
            group = f'group "{key[0]}"' if key[0] else "all ranks"
            for rank in self._lacking.get(key, ()):
                if rank in readable:
                    text = f"no collective in {group}, where rank {state.first_rank} has {len(state.issues)}"
                    self.log.add(rank, None, MISSING_MEMBER, text)


def _first_difference(left: Sequence[Issue], right: Sequence[Issue]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


def _issue_text(issue: Issue) -> str:
    return f"{collective_name(issue[0])} of {issue[1]} bytes"


MessageKey = tuple[int, int, int, int]


@dataclass(slots=True)
class MessageLedger:
    """Balances sends against receives on (source, destination, tag, size); only what is still open is kept."""

    log: FaultLog
    warnings: FaultLog
    highest_peer: int = -1
    _open: dict[MessageKey, tuple[int, int]] = field(default_factory=dict[MessageKey, tuple[int, int]])

    def add(self, rank: int, uses: Iterable[tuple[int, MessageUse]]) -> None:
        """Take the sends and receives of a rank, (node id, use)."""
        for node_id, use in uses:
            if use.own is not None and use.own != rank:
                name = "comm_src" if use.sends else "comm_dst"
                self.log.add(
                    rank, node_id, "foreign rank in a message", f"{name} is {use.own} in the file of rank {rank}"
                )
            if use.peer == rank:
                self.log.add(rank, node_id, "send to self", f"the peer is rank {rank} itself")
                continue
            self.highest_peer = max(self.highest_peer, use.peer)
            source, target = (rank, use.peer) if use.sends else (use.peer, rank)
            key = (source, target, use.tag, use.size)
            count, node = self._open.get(key, (0, node_id))
            count += 1 if use.sends else -1
            if count:
                self._open[key] = (count, node)
            else:
                del self._open[key]

    def finish(self, readable: Set[int]) -> None:
        """Say which receives have no send of their size (faults) and which sends no receive (warnings)."""
        sends: dict[tuple[int, int, int], list[int]] = {}
        for (source, target, tag, size), (count, _) in self._open.items():
            if count > 0:
                sends.setdefault((source, target, tag), []).append(size)
        answered: set[tuple[int, int, int]] = set()
        for (source, target, tag, size), (count, node) in self._open.items():
            if count > 0 or source not in readable:
                continue
            sizes = sends.get((source, target, tag))
            where = f"tag {tag}, {size} bytes from rank {source}"
            if sizes:
                answered.add((source, target, tag))
                text = f"receive of {where}: the send has {sizes[0]} bytes"
                self.log.add(target, node, "send/receive sizes differ", text)
            else:
                self.log.add(target, node, "receive without send", f"receive of {where}: no rank sends it")
        self._unreceived(answered, readable)

    def _unreceived(self, answered: set[tuple[int, int, int]], readable: Set[int]) -> None:
        for (source, target, tag, size), (count, node) in self._open.items():
            if count > 0 and (source, target, tag) not in answered and target in readable:
                text = f"send of tag {tag}, {size} bytes to rank {target}: nobody receives it"
                self.warnings.add(source, node, "send without receive", text)


def highest_member(members: Mapping[str, tuple[int, ...]]) -> int:
    """The highest rank that a group names, -1 where there is none."""
    return max((max(ranks) for ranks in members.values() if ranks), default=-1)
