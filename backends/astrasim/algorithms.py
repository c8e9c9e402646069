"""Collective algorithms as state machines of one rank, message by message (rules 7 to 11)."""

from collections import deque
from functools import lru_cache
from typing import Any

from stablecast.backends.astrasim.engine import Rank, Stream
from stablecast.ir.errors import InputError


def begin(rank: Rank, stream: Stream) -> None:
    """Run the phase that `stream` has come to on `rank`."""
    phase = stream.phase
    assert phase is not None
    name = phase.impl.name
    if name == "doubleBinaryTree":
        Tree(rank, stream).step(None)
        return
    kinds: dict[str, type[Ring]] = {"ring": Ring, "direct": Direct, "halvingDoubling": HalvingDoubling}
    if name not in kinds:
        raise InputError(f"the algorithm {name} is not modelled")
    kinds[name](rank, stream).start()


class Ring:
    """Messages to the next neighbour, one in flight: each received one releases the next.

    `steps` messages are sent and received; the first of them, and one after each round, are not folded in.
    """

    def __init__(self, rank: Rank, stream: Stream) -> None:
        phase = stream.phase
        assert phase is not None
        self.rank, self.stream, self.kind = rank, stream, phase.kind
        members = rank.members(stream)
        self.members, self.n, self.index = members, len(members), members.index(rank.number)
        self.parallel = 1
        self.steps = self.count_steps()
        self.nbytes = phase.nbytes if phase.kind == "all_gather" else phase.nbytes // self.n
        self.target, self.source = members[(self.index + 1) % self.n], members[self.index - 1]
        self.delay = rank.delay(stream)
        self.packets: deque[tuple[int, int, int]] = deque()
        self.free = self.received = self.plain = self.folded = 0
        self.toggle = False

    def count_steps(self) -> int:
        """Messages that a rank sends."""
        if self.kind == "all_reduce":
            return 2 * (self.n - 1)
        return self.n * (self.n - 1) // 2 if self.kind == "all_to_all" else self.n - 1

    def round_length(self) -> int:
        """Messages of a round after its first."""
        return (self.n - 1) * self.parallel

    def start(self) -> None:
        for _ in range(self.parallel):
            self.insert()

    def insert(self) -> None:
        """Prepare a message; it is ready after the endpoint delay and, where one was received, its reduction."""
        if self.plain == 0 and self.folded == 0:
            self.plain, self.folded = self.parallel, self.round_length()
            self.toggle = not self.toggle
        fold = False
        if self.plain:
            self.plain -= 1
        else:
            self.folded -= 1
            fold = self.kind == "reduce_scatter" or (self.kind == "all_reduce" and self.toggle)
        self.packets.append((self.source, self.target, self.nbytes))
        self.rank.after(self.delay, self.fold if fold else self.ready, self.nbytes)
        self.turn()

    def turn(self) -> None:
        """Choose peers and size of the next message."""

    def fold(self, nbytes: int) -> None:
        self.rank.after(self.rank.machine.reduction(nbytes), self.ready, nbytes)

    def ready(self, _nbytes: int) -> None:
        """A message has been prepared (or the last received one dealt with)."""
        self.free += 1
        self.post()
        self.leave()

    def post(self) -> None:
        """Send the next message and wait for its counterpart."""
        if not self.packets or self.steps == 0 or self.free == 0:
            return
        source, target, nbytes = self.packets.popleft()
        self.rank.send(self.stream, target, nbytes)
        self.rank.receive(self.stream, source, nbytes, self.on_message)
        self.steps -= 1
        self.free -= 1

    def on_message(self, _stream: Any) -> None:
        self.received += 1
        self.insert()

    def leave(self) -> None:
        if self.steps == 0 and self.free == self.parallel:
            self.rank.advance(self.stream)


class Direct(Ring):
    """A message to each of the others, all at once or a window of them; a second round gathers an all-reduce."""

    def __init__(self, rank: Rank, stream: Stream) -> None:
        super().__init__(rank, stream)
        assert stream.phase is not None
        window = stream.phase.impl.window
        self.parallel = min(window, self.n - 1) if window else self.n - 1
        self.middle = self.n - 1
        self.ahead = 1

    def count_steps(self) -> int:
        return 2 * (self.n - 1) if self.kind == "all_reduce" else self.n - 1

    def round_length(self) -> int:
        return (self.n - 1) * self.parallel if self.stream.data.plan.local else self.parallel

    def turn(self) -> None:
        self.ahead = self.ahead % (self.n - 1) + 1
        self.target = self.members[(self.index + self.ahead) % self.n]
        self.source = self.members[self.index - self.ahead]

    def ready(self, _nbytes: int) -> None:
        self.free += 1
        if self.kind == "all_reduce" and self.steps <= self.middle:
            if self.received < self.middle:
                return
            for _ in range(self.parallel):
                self.post()
        else:
            self.post()
        self.leave()


class HalvingDoubling(Ring):
    """Exchanges with the ranks at distance 1, 2, 4, ...; an all-gather the other way, an all-reduce there and back."""

    def __init__(self, rank: Rank, stream: Stream) -> None:
        super().__init__(rank, stream)
        assert stream.phase is not None
        nbytes = stream.phase.nbytes
        gather = self.kind == "all_gather"
        self.nbytes, self.distance = (nbytes, self.n // 2) if gather else (nbytes // 2, 1)
        self.widening = not gather
        self.aim()

    def count_steps(self) -> int:
        steps = self.n.bit_length() - 1
        return 2 * steps if self.kind == "all_reduce" else steps

    def round_length(self) -> int:
        return self.n.bit_length() - 2

    def aim(self) -> None:
        ahead = self.distance == 0 or self.index // self.distance % 2 == 0
        step = max(self.distance, 1) if ahead else -self.distance
        self.target = self.source = self.members[(self.index + step) % self.n]

    def turn(self) -> None:
        self.scale()
        if self.distance == self.n and self.kind == "all_reduce":
            self.widening = False
            self.scale()
        self.aim()

    def scale(self) -> None:
        if self.widening:
            self.distance, self.nbytes = self.distance * 2, self.nbytes // 2
        else:
            self.distance, self.nbytes = self.distance // 2, self.nbytes * 2


@lru_cache(maxsize=64)
def trees(n: int) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    """(parent, children) by place in two trees over n = 2^k places: one with the last, one with the first as root."""
    found: list[tuple[tuple[int, tuple[int, ...]], ...]] = []
    for first in (0, 1):
        parent, children = [-1] * n, [list[int]() for _ in range(n)]
        root = 0 if first else n - 1

        def link(low: int, high: int, above: int, parent: list[int], children: list[list[int]]) -> None:
            if low >= high:
                return
            middle = (low + high) // 2
            parent[middle] = above
            children[above].append(middle)
            link(low, middle, middle, parent, children)
            link(middle + 1, high, middle, parent, children)

        link(first, n - 1 + first, root, parent, children)
        found.append(tuple((parent[place], tuple(children[place])) for place in range(n)))
    return tuple(found)


class Tree:
    """All-reduce over a binary tree: the whole chunk up to the root and down again; chunks take turns at two trees."""

    def __init__(self, rank: Rank, stream: Stream) -> None:
        phase = stream.phase
        assert phase is not None
        self.rank, self.stream, self.nbytes = rank, stream, phase.nbytes
        members = rank.members(stream)
        parent, children = trees(len(members))[stream.number % 2][members.index(rank.number)]
        self.parent = members[parent] if parent >= 0 else -1
        self.children = tuple(members[child] for child in children)
        self.delay = rank.delay(stream)
        self.state = "begin"
        self.reductions = 0

    def step(self, _argument: Any) -> None:
        """Go on: a message has come, or the endpoint is done with one."""
        if not self.children:
            self.leaf()
        else:
            self.inner()

    def fold(self, nbytes: int) -> None:
        self.rank.after(self.rank.machine.reduction(nbytes), self.step, nbytes)

    def leaf(self) -> None:
        if self.state == "begin":
            self.state = "up"
            self.rank.after(self.delay, self.step, None)
        elif self.state == "up":
            self.state = "waiting"
            self.rank.send(self.stream, self.parent, self.nbytes)
            self.rank.receive(self.stream, self.parent, self.nbytes, self.step)
        elif self.state == "waiting":
            self.state = "end"
            self.rank.after(self.delay, self.step, None)
        else:
            self.rank.advance(self.stream)

    def inner(self) -> None:
        if self.state == "begin":
            self.state = "children"
            for child in self.children:
                self.rank.receive(self.stream, child, self.nbytes, self.on_child)
        elif self.state == "down":
            for child in self.children:
                self.rank.send(self.stream, child, self.nbytes)
            self.rank.advance(self.stream)
        elif self.state == "parent":
            self.state = "down"
            self.rank.after(self.delay, self.fold, self.nbytes)

    def on_child(self, _argument: Any) -> None:
        self.rank.after(self.delay, self.fold_child, self.nbytes)

    def fold_child(self, nbytes: int) -> None:
        self.rank.after(self.rank.machine.reduction(nbytes), self.on_folded, nbytes)

    def on_folded(self, _argument: Any) -> None:
        self.reductions += 1
        if self.reductions < len(self.children):
            return
        if self.parent < 0:
            self.state = "down"
            self.inner()
            return
        self.state = "parent"
        self.rank.send(self.stream, self.parent, self.nbytes)
        self.rank.receive(self.stream, self.parent, self.nbytes, self.step)
