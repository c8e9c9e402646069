"""Ranks that do the same at every moment, found by refining colours until nothing splits any more.

Two ranks are one role where their traces have the same shape, their groups have members of the same roles at the
same distances, and what they receive comes from the same node of the same roles. One rank then stands for its role.
Exact in the congestion-unaware backend, whose ranks meet in their own messages only.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from stablecast.backends.astrasim.isolated import Isolated
from stablecast.backends.astrasim.plan import Plan
from stablecast.backends.astrasim.programs import Act, RankProgram, Step
from stablecast.backends.astrasim.replay import Planner
from stablecast.ir.errors import InputError

Channel = tuple[int, int]
"""(role of the sender, first of its nodes that send to this peer with this tag and size)."""


@dataclass(slots=True)
class GroupUse:
    """A group as one rank uses it. `together`: all members are one role and end together. `key`: names the group."""

    members: tuple[int, ...] | None
    index: int
    uniform: bool = True
    together: bool = True
    key: int = 0


@dataclass(slots=True)
class RankView:
    """What a rank has to do with others; `slots`: group by collective node, -1 else."""

    rank: int
    program: RankProgram
    groups: list[GroupUse] = field(default_factory=list[GroupUse])
    slots: dict[int, int] = field(default_factory=dict[int, int])
    plans: dict[int, Plan] = field(default_factory=dict[int, Plan])
    sends: dict[tuple[int, int, int], int] = field(default_factory=dict[tuple[int, int, int], int])
    sources: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list[tuple[int, int, tuple[int, int]]])
    targets: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    first: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class Roles:
    """`of_rank`: role of each rank. `views`: of the rank that stands for each role."""

    of_rank: tuple[int, ...]
    views: tuple[RankView, ...]


def peer_of(step: Step, rank: int, ranks: int) -> int:
    """The peer of a send or receive. Raises `InputError` where there is no such rank."""
    if step.peer == rank:
        raise InputError(f"rank {rank} {step}: it sends to or receives from itself")
    if not 0 <= step.peer < ranks:
        raise InputError(f"rank {rank} {step}: its peer {step.peer} is none of {ranks} ranks")
    return step.peer


class RoleFinder:
    """Finds the roles of the ranks of one trace."""

    def __init__(self, planner: Planner, isolated: Isolated) -> None:
        self._planner, self._isolated = planner, isolated
        self._uniform: dict[tuple[Plan, int], bool] = {}

    def find(self, programs: Sequence[RankProgram], apart: bool = False) -> Roles:
        """The roles; with `apart` every rank is its own. Raises `InputError` for nodes that cannot run."""
        views = [self._view(rank, program) for rank, program in enumerate(programs)]
        for view in views:
            self._match(view, views)
        colours = self._refine(views, apart)
        numbers: dict[int, int] = {}
        of_rank = tuple(numbers.setdefault(colour, len(numbers)) for colour in colours)
        chosen: dict[int, RankView] = {}
        for view, role in zip(views, of_rank, strict=True):
            chosen.setdefault(role, view)
        return Roles(of_rank, tuple(chosen[role] for role in range(len(numbers))))

    def _view(self, rank: int, program: RankProgram) -> RankView:
        view = RankView(rank, program)
        by_group: dict[int, int] = {}
        ranks = self._planner.network.ranks
        for index in program.shape.comms:
            step = program.steps[index]
            if step.act is Act.COLLECTIVE:
                slot = by_group.get(step.group)
                if slot is None:
                    slot = by_group[step.group] = len(view.groups)
                    members = self._planner.members(rank, step)
                    view.groups.append(GroupUse(members, rank if members is None else members.index(rank)))
                use = view.groups[slot]
                view.slots[index] = slot
                plan = view.plans[index] = self._planner.plan(rank, step, use.members)
                use.uniform = use.uniform and self._same(plan, use.members)
            elif step.act is Act.SEND:
                key = (peer_of(step, rank, ranks), step.tag, step.nbytes)
                view.first[index] = view.sends.setdefault(key, index)
                view.targets.append(self._isolated.hops(rank, step.peer))
        return view

    def _same(self, plan: Plan, members: tuple[int, ...] | None) -> bool:
        key = (plan, id(members))
        found = self._uniform.get(key)
        if found is None:
            found = self._uniform[key] = self._isolated.uniform(plan, members)
        return found

    def _match(self, view: RankView, views: Sequence[RankView]) -> None:
        rank = view.rank
        for index in view.program.shape.comms:
            step = view.program.steps[index]
            if step.act is not Act.RECV:
                continue
            source = views[peer_of(step, rank, len(views))]
            first = source.sends.get((rank, step.tag, step.nbytes))
            if first is None:
                raise InputError(
                    f"rank {rank} {step}: rank {source.rank} sends nothing of tag {step.tag} and {step.nbytes} bytes",
                    "ASTRA-sim would wait for ever",
                )
            view.first[index] = first
            view.sources.append((source.rank, first, self._isolated.hops(source.rank, rank)))

    def _refine(self, views: Sequence[RankView], apart: bool) -> list[int]:
        colours = _numbered([self._first_colour(view, apart) for view in views])
        while True:
            self._group_colours(views, colours)
            marks: list[Hashable] = []
            for view in views:
                uses = tuple([use.key if use.together else (use.key, use.index) for use in view.groups])
                sources = tuple([(colours[source], first, hops) for source, first, hops in view.sources])
                marks.append((colours[view.rank], uses, sources))
            refined = _numbered(marks)
            if max(refined) == max(colours):
                return refined
            colours = refined

    def _first_colour(self, view: RankView, apart: bool) -> Hashable:
        where = view.rank if apart else -1
        pattern = tuple(view.slots.values())
        return (id(view.program.shape), pattern, tuple(view.first.values()), tuple(view.targets), where)

    def _group_colours(self, views: Sequence[RankView], colours: Sequence[int]) -> None:
        """Give every group a number by the colours and distances of its members."""
        numbers: dict[Hashable, int] = {}
        known: dict[tuple[tuple[int, ...] | None, bool], tuple[int, bool]] = {}
        for view in views:
            for use in view.groups:
                found = known.get((use.members, use.uniform))
                if found is None:
                    members = use.members if use.members is not None else range(len(views))
                    seen = tuple([colours[member] for member in members])
                    together = use.uniform and len(set(seen)) == 1
                    where: Hashable = None if use.uniform else members if isinstance(members, tuple) else "all"
                    mark = (use.members is None, where, seen)
                    found = known[(use.members, use.uniform)] = (numbers.setdefault(mark, len(numbers)), together)
                use.key, use.together = found


def _numbered(marks: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(mark, len(numbers)) for mark in marks]
