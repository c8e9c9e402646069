"""Members that begin at different times or lie at different distances, without events (congestion-unaware).

A ring: let x_k(r) be when member r sends its k-th message, w(r) the time of a message from r to the next, e the
endpoint delay, p the reduction where one is due, S(r) the start. Then x_0(r) = S(r) + e and
x_k+1(r) = max(x_k(r - 1) + w(r - 1), x_k(r)) + e + p_k. Over k steps the delays and reductions add up whatever the
path, and of paths from one member the longest has most messages, so that

    x_k(r) = (k + 1) e + sum p + max over the last n values of j <= k of [S(r - j) + w(r - j) + ... + w(r - 1)].

Halving-doubling goes step by step with partners in place of neighbours; direct is one step with all as neighbours.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from stablecast.backends.astrasim.config import SystemConfig
from stablecast.backends.astrasim.links import UnawareLinks
from stablecast.backends.astrasim.plan import LOCAL_DELAY_NS, Phase, Plan, reduction_ns

IntArray = npt.NDArray[np.int64]


def without_events(plan: Plan) -> bool:
    """Whether `member_ends` takes the plan: one phase over one dimension of an algorithm that it knows."""
    if len(plan.phases) != 1 or len(plan.dims) != 1:
        return False
    phase = plan.phases[0]
    direct = phase.impl.name == "direct" and not phase.impl.window and phase.kind != "all_reduce"
    return direct or phase.impl.name in ("ring", "halvingDoubling")


def member_ends(
    plan: Plan, members: Sequence[int], starts: Sequence[int], links: UnawareLinks, system: SystemConfig
) -> tuple[tuple[int, int], ...]:
    """(end, when the event of the end was made) by member."""
    delay = LOCAL_DELAY_NS if plan.local else system.endpoint_delay_ns
    makers = {"ring": _ring_course, "direct": _direct_course, "halvingDoubling": _halving_course}
    course, last = makers[plan.phases[0].impl.name](plan.phases[0], members, links, system, delay)
    ends = _chunks(np.array(starts, dtype=np.int64), plan.streams, system.active_chunks, course)
    return tuple((int(end), int(end) - last) for end in ends)


Course = Callable[[IntArray], IntArray]
"""Ends of one chunk by member, from its starts."""


def _ring_course(
    phase: Phase, members: Sequence[int], links: UnawareLinks, system: SystemConfig, delay: int
) -> tuple[Course, int]:
    n = len(members)
    steps = {"all_reduce": 2 * (n - 1), "all_to_all": n * (n - 1) // 2}.get(phase.kind, n - 1)
    nbytes = phase.nbytes if phase.kind == "all_gather" else phase.nbytes // n
    folds = n - 1 if phase.kind in ("all_reduce", "reduce_scatter") else 0
    reduction = reduction_ns(nbytes, system)
    weights = np.array(
        [links.between(rank, members[(at + 1) % n], nbytes) for at, rank in enumerate(members)], dtype=np.int64
    )
    fixed = (steps + 1) * delay + folds * reduction
    last = reduction if phase.kind == "reduce_scatter" else delay
    return lambda starts: _ring(starts, weights, steps) + fixed, last


def _direct_course(
    phase: Phase, members: Sequence[int], links: UnawareLinks, system: SystemConfig, delay: int
) -> tuple[Course, int]:
    nbytes = phase.nbytes if phase.kind == "all_gather" else phase.nbytes // len(members)
    times = np.array(
        [
            [0 if source == target else links.between(source, target, nbytes) for source in members]
            for target in members
        ],
        dtype=np.int64,
    )
    reduction = reduction_ns(nbytes, system) if phase.kind == "reduce_scatter" else 0
    last = reduction if phase.kind == "reduce_scatter" else delay
    return lambda starts: (starts + times).max(axis=1) + 2 * delay + reduction, last


def _halving_course(
    phase: Phase, members: Sequence[int], links: UnawareLinks, system: SystemConfig, delay: int
) -> tuple[Course, int]:
    n = len(members)
    levels = n.bit_length() - 1
    down = [(1 << level, phase.nbytes >> level + 1) for level in range(levels)]
    if phase.kind == "all_gather":
        steps = [(n >> level + 1, phase.nbytes << level) for level in range(levels)]
    else:
        least = down[-1][1] // 2 * 2
        back = [(n >> level + 1, least << level) for level in range(levels)]
        steps = down + back if phase.kind == "all_reduce" else down
    places = np.arange(n, dtype=np.int64)
    plan: list[tuple[IntArray, IntArray, int]] = []
    for number, (distance, nbytes) in enumerate(steps):
        partner = places ^ distance
        times = [links.between(members[at], members[at ^ distance], nbytes) for at in range(n)]
        folds = phase.kind != "all_gather" and number + 1 < levels
        plan.append(
            (partner, np.array(times, dtype=np.int64), reduction_ns(steps[number + 1][1], system) if folds else 0)
        )

    def course(starts: IntArray) -> IntArray:
        now = starts + delay
        for partner, times, reduction in plan:
            now = np.maximum(now[partner] + times, now) + delay + reduction
        return now

    return course, delay


def _chunks(begin: IntArray, streams: int, active: int, course: Course) -> IntArray:
    """When each member has finished all chunks, of which it runs `active` at a time."""
    running: list[IntArray] = []
    ends = begin
    for number in range(streams):
        if number < active:
            start = begin
        else:
            table = np.sort(np.stack(running), axis=0)
            start, running = table[0], list(table[1:])
        done = course(start)
        running.append(done)
        ends = np.maximum(ends, done)
    return ends


def _ring(starts: IntArray, weights: IntArray, steps: int) -> IntArray:
    """max over the last n values of j <= steps of the start j members back and the j messages from there.

    With U(x) the messages from member 0 on to place x of the endless ring, those j messages are U(r) - U(r - j).
    """
    n = len(starts)
    width = min(steps, n - 1) + 1
    inside = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(weights)])
    places = np.arange(-steps, n + width - 1 - steps, dtype=np.int64)
    up_to = places // n * inside[n] + inside[places % n]
    return inside[:n] + _window_max(starts[places % n] - up_to, width)[:n]


def _window_max(values: IntArray, width: int) -> IntArray:
    """Maximum of `width` values from each place on (of fewer at the end), by doubling."""
    best, have = values.copy(), 1
    while have < width:
        step = min(have, width - have)
        best[:-step] = np.maximum(best[:-step], best[step:])
        have += step
    return best
