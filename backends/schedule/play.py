"""Flat nodes in time: each begins when what it waits for and the node before it on its stream have ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stablecast.backends.schedule.flat import Flat, Kind
from stablecast.backends.schedule.meeting import Meetings


@dataclass(slots=True)
class Played:
    """Begin and end of every node in seconds; `cause`: the node whose end let it begin, -1 for none.

    `cause_role`: the role of that node.
    """

    begin_s: list[float]
    end_s: list[float]
    cause: list[int]
    cause_role: list[int]


@dataclass(slots=True)
class _State:
    flat: Flat
    durations: Sequence[float]
    played: Played
    free: list[float]
    last: list[int]
    at: int = 0
    came: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])


def play(
    flats: Sequence[Flat],
    durations: Sequence[Sequence[float]],
    meet: Meetings,
) -> tuple[list[Played], tuple[int, int] | None]:
    """All roles together; the second value is (role, node) where one waits for ever.

    A receive ends when its send has ended, a collective of several roles begins when the last has come to it.
    """
    states = [
        _State(
            flat,
            times,
            Played([0.0] * len(flat), [0.0] * len(flat), [-1] * len(flat), [role] * len(flat)),
            [0.0] * len(flat.streams),
            [-1] * len(flat.streams),
        )
        for role, (flat, times) in enumerate(zip(flats, durations, strict=True))
    ]
    waiting = list(range(len(states)))
    while waiting:
        moved = False
        for role in waiting:
            before = states[role].at
            _advance(role, states, meet)
            moved = moved or states[role].at > before
        waiting = [role for role in waiting if states[role].at < len(states[role].flat)]
        if waiting and not moved:
            return [state.played for state in states], (waiting[0], states[waiting[0]].at)
    return [state.played for state in states], None


def _advance(role: int, states: Sequence[_State], meet: Meetings) -> None:
    """Play `role` until it is done or waits for what another has not played."""
    state = states[role]
    flat, played, free, last = state.flat, state.played, state.free, state.last
    end_s, begin_s, cause = played.end_s, played.begin_s, played.cause
    kinds, streams, all_deps, durations = flat.kind, flat.stream, flat.deps, state.durations
    alone = not meet
    for index in range(state.at, len(kinds)):
        kind, stream = kinds[index], streams[index]
        begin, why = free[stream], last[stream]
        for dep in all_deps[index]:
            if end_s[dep] > begin:
                begin, why = end_s[dep], dep
        duration = durations[index]
        if kind is Kind.PAUSE:
            trips, second, third = flat.pauses[index]
            duration = trips * (end_s[third] - end_s[second])
        end = begin + duration
        if kind is Kind.COMM and not alone:
            others = meet.joined(role, index)
            if others:
                state.came[index] = (begin, why)
                if any(node not in states[peer].came for peer, node in others):
                    state.at = index
                    return
                for peer, node in others:
                    if states[peer].came[node][0] > begin:
                        begin, why = states[peer].came[node]
                        played.cause_role[index] = peer
                end = begin + duration
            sent = meet.send_of(role, index)
            if sent is not None:
                peer, node = sent
                if states[peer].at <= node:
                    state.at = index
                    return
                arrival = states[peer].played.end_s[node]
                if arrival > begin:
                    why = node
                    played.cause_role[index] = peer
                end = max(begin, arrival)
        begin_s[index], end_s[index], cause[index] = begin, end, why
        free[stream], last[stream] = end, index
        if kind is Kind.PAUSE:
            free[:], last[:] = [end] * len(free), [index] * len(last)
    state.at = len(kinds)
