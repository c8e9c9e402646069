"""The order in which a rank issues its nodes: ready ones by ascending id, one a slot (rule 12)."""

from collections.abc import Callable
from heapq import heappop, heappush

from stablecast.backends.astrasim.programs import RankProgram, Slot, Step

_NONE = 1 << 62


class Issuer:
    """A rank's nodes: what is ready, what is under way, what is left.

    `start(issuer, index)` is called for each node issued. `issued`: collectives by group, for error messages.
    `events`: (time, "issue" or "callback", node) where `keep` is set.
    """

    __slots__ = (
        "_busy",
        "_children",
        "_ready",
        "_slots",
        "_waits",
        "active",
        "events",
        "finished_at",
        "issued",
        "keep",
        "left",
        "program",
        "rank",
        "start",
        "steps",
    )

    def __init__(self, rank: int, program: RankProgram, start: Callable[["Issuer", int], None]) -> None:
        shape = program.shape
        self.rank, self.program, self.steps, self.start = rank, program, program.steps, start
        self._children, self._slots = shape.children, shape.slots
        self._waits = list(shape.waits)
        self._ready: tuple[list[int], ...] = ([], [], [], [])
        self._busy = [False, False, False]
        self.left = len(self.steps)
        self.active: set[int] = set()
        self.finished_at = -1
        self.issued: dict[int, list[Step]] = {}
        self.keep = False
        self.events: list[tuple[int, str, int]] = []
        for index, count in enumerate(self._waits):
            if count == 0:
                heappush(self._ready[self._slots[index]], index)

    def issue(self, now: int) -> int:
        """Issue whatever can be at `now`; the answer has bit `1 << slot` set for each slot it filled."""
        cpu, compute, comm, free = self._ready
        busy = self._busy
        filled = 0
        while True:
            best, slot = _NONE, 0
            if free:
                best, slot = free[0], 3
            if cpu and not busy[0] and cpu[0] < best:
                best, slot = cpu[0], 0
            if compute and not busy[1] and compute[0] < best:
                best, slot = compute[0], 1
            if comm and not busy[2] and comm[0] < best:
                best, slot = comm[0], 2
            if best == _NONE:
                return filled
            heappop(self._ready[slot])
            if slot != Slot.NONE:
                busy[slot] = True
            filled |= 1 << slot
            self.active.add(best)
            if self.keep:
                self.events.append((now, "issue", best))
            self.start(self, best)

    def release(self, index: int, now: int) -> int:
        """Node `index` is done at `now`; the answer has bit `1 << slot` set for each slot with a newly ready node."""
        slot = self._slots[index]
        if slot != 3:
            self._busy[slot] = False
        self.active.discard(index)
        if self.keep:
            self.events.append((now, "callback", index))
        self.left -= 1
        if self.left == 0:
            self.finished_at = now
        readied = 0
        waits, slots = self._waits, self._slots
        for child in self._children[index]:
            waits[child] -= 1
            if waits[child] == 0:
                slot = slots[child]
                heappush(self._ready[slot], child)
                readied |= 1 << slot
        return readied

    def stuck(self) -> Step:
        """A node that was issued and never ended, else the first never issued."""
        if self.active:
            return self.steps[min(self.active)]
        ready = [index for heap in self._ready for index in heap]
        return self.steps[min(ready)] if ready else self.steps[0]
