"""Traces through one rank a role: nodes are followed, messages inside a collective are not.

A collective ends for each member as it would by itself (`Isolated`), from the times at which its members begin. In the
congestion-aware backend that holds where all members begin together, on links that nothing else uses meanwhile.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from stablecast.backends.astrasim.config import MemoryConfig
from stablecast.backends.astrasim.isolated import Isolated
from stablecast.backends.astrasim.issue import Issuer
from stablecast.backends.astrasim.memory import RemoteMemory
from stablecast.backends.astrasim.plan import Plan, StuckError
from stablecast.backends.astrasim.programs import Act, Step
from stablecast.backends.astrasim.roles import GroupUse, Roles
from stablecast.ir.errors import InputError


class UnsuitedError(Exception):
    """This trace needs the reference machine: what happens first on the same ns would decide, or slices differ."""


@dataclass(slots=True)
class _Meeting:
    """A collective that some members have begun: by member, when, who stands for it, and which node."""

    plan: Plan
    use: GroupUse
    step: Step
    size: int
    begun: dict[int, tuple[int, int, int]] = field(default_factory=dict[int, tuple[int, int, int]])


class FastReplay:
    """The roles' nodes, by time."""

    def __init__(self, roles: Roles, isolated: Isolated, memory: MemoryConfig) -> None:
        self.roles, self._isolated = roles, isolated
        self._events: list[tuple[int, int, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self.now = 0
        self._made = 0
        self.memory = RemoteMemory(memory, self._after, self._end)
        self.issuers = [Issuer(role, view.program, self._start) for role, view in enumerate(roles.views)]
        self._ties: list[tuple[int, int, int]] = [(-1, -1, 0)] * len(self.issuers)
        self._collectives: list[dict[int, int]] = [{} for _ in self.issuers]
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._arrived: set[tuple[int, int, int]] = set()
        self._waiting: defaultdict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
        self._received: dict[tuple[int, int, int, int], int] = {}

    def run(self, keep: bool = False) -> list[Issuer]:
        """The issuer of every rank; with `keep` each has its events.

        Raises `InputError` where a rank never ends, `UnsuitedError` where the reference machine must decide.
        """
        for issuer in self.issuers:
            issuer.keep = keep
            issuer.issue(0)
        events = self._events
        while events:
            self.now, self._made, _, action, argument = heappop(events)
            action(argument)
        for issuer in self.issuers:
            if issuer.left:
                raise InputError(*self._stuck(issuer))
        return [self.issuers[role] for role in self.roles.of_rank]

    def _push(self, time: int, made: int, action: Callable[[Any], None], argument: Any) -> None:
        self._count += 1
        heappush(self._events, (time, made, self._count, action, argument))

    def _after(self, _role: int, delay: int, action: Callable[[Any], None], key: Any) -> None:
        self._push(self.now + delay, self.now, action, key)

    def _end(self, key: tuple[int, int]) -> None:
        role, index = key
        issuer = self.issuers[role]
        readied = issuer.release(index, self.now)
        time, made, filled = self._ties[role]
        tied = time == self.now and made == self._made
        if tied and readied & filled & 0b111:
            raise UnsuitedError
        issued = issuer.issue(self.now)
        self._ties[role] = (self.now, self._made, issued | filled if tied else issued)

    def _start(self, issuer: Issuer, index: int) -> None:
        step, role = issuer.steps[index], issuer.rank
        if step.act is Act.WAIT:
            self._push(self.now + max(step.time_ns, 0), self.now, self._end, (role, index))
        elif step.act is Act.COLLECTIVE:
            self._collective(role, index, step)
        elif step.act is Act.SEND:
            self._send(role, index, step)
        elif step.act is Act.RECV:
            self._receive(role, index, step)
        else:
            self.memory.request(self.roles.views[role].rank, index, step.nbytes, str(step))

    def _collective(self, role: int, index: int, step: Step) -> None:
        view = self.roles.views[role]
        use, plan = view.groups[view.slots[index]], view.plans[index]
        if use.together:
            try:
                time, made = self._isolated.together(plan, use.members)
            except StuckError as error:
                raise InputError(f"rank {view.rank} {step}: {error.message}", error.hint) from None
            self._push(self.now + time, self.now + made, self._end, (role, index))
            return
        if self._isolated.aware:
            raise UnsuitedError
        number = self._collectives[role].get(use.key, 0)
        self._collectives[role][use.key] = number + 1
        meeting = self._meetings.get((use.key, number))
        if meeting is None:
            size = len(use.members) if use.members else len(self.roles.of_rank)
            meeting = self._meetings[(use.key, number)] = _Meeting(plan, use, step, size)
            if use.members is None and not _covers_all(plan, size):
                raise UnsuitedError
        elif (meeting.step.kind, meeting.step.nbytes) != (step.kind, step.nbytes):
            raise InputError(
                f"rank {view.rank} {step} of {step.nbytes} bytes meets {meeting.step.kind} of {meeting.step.nbytes} "
                f"bytes on rank {self._member(meeting, next(iter(meeting.begun)))}",
                "members of a group must issue the same collectives in the same order: ASTRA-sim would wait for ever",
            )
        meeting.begun[use.index] = (self.now, role, index)
        if len(meeting.begun) == meeting.size:
            self._finish(meeting)

    def _finish(self, meeting: _Meeting) -> None:
        starts = [meeting.begun[position][0] for position in range(meeting.size)]
        try:
            ends = self._isolated.ends(meeting.plan, meeting.use.members, starts)
        except StuckError as error:
            raise InputError(f"{meeting.step}: {error.message}", error.hint) from None
        for position in sorted(meeting.begun):
            _, role, index = meeting.begun[position]
            time, made = ends[position]
            if time < self.now:
                raise UnsuitedError
            self._push(time, made, self._end, (role, index))

    @staticmethod
    def _member(meeting: _Meeting, position: int) -> int:
        return meeting.use.members[position] if meeting.use.members else position

    def _send(self, role: int, index: int, step: Step) -> None:
        if not self._isolated.has_own_links:
            raise UnsuitedError
        view = self.roles.views[role]
        first = view.first[index]
        number = self._sent.get((role, first), 0)
        self._sent[(role, first)] = number + 1
        time = self.now + self._isolated.between(view.rank, step.peer, step.nbytes)
        self._push(time, self.now, self._arrive, (role, index, (role, first, number)))

    def _arrive(self, argument: tuple[int, int, tuple[int, int, int]]) -> None:
        role, index, message = argument
        self._end((role, index))
        self._arrived.add(message)
        for key in self._waiting.pop(message, ()):
            self._end(key)

    def _receive(self, role: int, index: int, step: Step) -> None:
        view = self.roles.views[role]
        first = view.first[index]
        counter = (role, step.peer, step.tag, step.nbytes)
        number = self._received.get(counter, 0)
        self._received[counter] = number + 1
        message = (self.roles.of_rank[step.peer], first, number)
        if message in self._arrived:
            self._push(self.now, self.now, self._end, (role, index))
        else:
            self._waiting[message].append((role, index))

    def _stuck(self, issuer: Issuer) -> tuple[str, str]:
        view = self.roles.views[issuer.rank]
        step = issuer.stuck()
        for meeting in self._meetings.values():
            absent = [position for position in range(meeting.size) if position not in meeting.begun]
            for _, role, index in meeting.begun.values():
                if role == issuer.rank and issuer.steps[index] is step and absent:
                    rank = self._member(meeting, absent[0])
                    return (
                        f"rank {view.rank} {step} never ends: rank {rank} does not begin it",
                        "every member of a group must issue its collectives in the same order",
                    )
        return stuck_message(view.rank, step, step in [issuer.steps[index] for index in issuer.active])


def stuck_message(rank: int, step: Step, active: bool) -> tuple[str, str]:
    """What to say of a rank that never ends."""
    where = f"rank {rank} {step} "
    if not active:
        return where + "is never issued", "what it waits for never ends"
    if step.act is Act.RECV:
        return where + f"never ends: rank {step.peer} sends no further message of tag {step.tag}", ""
    return where + "never ends", "ASTRA-sim would wait for ever"


def _covers_all(plan: Plan, ranks: int) -> bool:
    covered = 1
    for dim in {phase.dim for phase in plan.phases}:
        covered *= plan.dims[dim]
    return covered == ranks
