"""PyTorch's CUDA caching allocator: what it has reserved from the driver after a sequence of requests and frees.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (PyTorch 2.5 to 2.13): sizes in multiples of 512 bytes;
requests up to 1 MiB from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments of
their own in multiples of 2 MiB; best fit among the free blocks of the same stream and pool; what is left of a block is
split off where it is large enough to be of use; neighbours that are free become one; what is freed stays reserved.
Where the device has no more, segments that are wholly free go back to the driver.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final

from stablecast.ir.allocations import Allocations

MIN_BLOCK: Final = 512
SMALL_SIZE: Final = 1 << 20
SMALL_SEGMENT: Final = 2 << 20
LARGE_SEGMENT: Final = 20 << 20
MIN_LARGE: Final = 10 << 20
ROUND_LARGE: Final = 2 << 20
"""`kMinBlockSize`, `kSmallSize`, `kSmallBuffer`, `kLargeBuffer`, `kMinLargeAlloc` and `kRoundLarge`."""

_SPACE: Final = LARGE_SEGMENT << 26
"""Addresses that an expandable segment has to grow into, whole pages: more than any device holds."""


def round_size(nbytes: int) -> int:
    """Bytes of the block that a request for `nbytes` gets (`round_size`)."""
    return max(-(-nbytes // MIN_BLOCK), 1) * MIN_BLOCK


def segment_size(nbytes: int) -> int:
    """Bytes that are asked of the driver for a block of `nbytes` (`get_allocation_size`)."""
    if nbytes <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if nbytes < MIN_LARGE else -(-nbytes // ROUND_LARGE) * ROUND_LARGE


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment. `before`, `after`: its neighbours there. `mapped`: of an expandable segment, has memory."""

    place: int
    size: int
    pool: "_Pool"
    used: bool = False
    mapped: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass(slots=True, eq=False)
class _Pool:
    """Blocks of one stream and kind of size. `free`: size and address of those in no use, ascending.

    `base`: where its expandable segment begins. `unmapped`: parts of that without memory, by address.
    """

    small: bool
    base: int
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    blocks: dict[int, _Block] = field(default_factory=dict[int, _Block])
    unmapped: dict[int, _Block] = field(default_factory=dict[int, _Block])

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def put(self, block: _Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.place))
            self.blocks[block.place] = block
        else:
            self.unmapped[block.place] = block

    def take(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.place))]
            del self.blocks[block.place]
        else:
            del self.unmapped[block.place]


@dataclass(slots=True)
class CachingAllocator:
    """The allocator of one device.

    `capacity`: bytes that the driver can give, None for no limit. `expandable`: as `expandable_segments:True` has it,
    one segment for each stream and pool, which grows by pages. `reserved`, `allocated`: bytes taken from the driver,
    and of these in blocks in use; `peak_reserved`, `peak_allocated`: the most so far. `retries`: requests that first
    made it give back what was free. `short`: bytes beyond `capacity` where even that was not enough.
    """

    capacity: int | None = None
    expandable: bool = False
    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    retries: int = 0
    short: int = 0
    _pools: dict[tuple[int, bool], _Pool] = field(default_factory=dict[tuple[int, bool], _Pool])
    _used: dict[int, _Block] = field(default_factory=dict[int, _Block])
    _next: int = 0

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """The address of a block for `nbytes`, from those of `stream`."""
        size = round_size(nbytes)
        pool = self._pool(stream, size <= SMALL_SIZE)
        block = self._best_fit(pool, size)
        if block is None:
            block = self._grown(pool, size) if self.expandable else self._segment(pool, size)
        rest = block.size - size
        if rest >= MIN_BLOCK and (pool.small or self.expandable or rest > SMALL_SIZE):
            pool.put(_cut(block, size))
        block.used = True
        self._used[block.place] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.place

    def free(self, place: int) -> None:
        """Give back the block at an address that `malloc` gave."""
        block = self._used.pop(place)
        block.used = False
        self.allocated -= block.size
        block.pool.put(_merged(block))

    def release(self) -> int:
        """Give the driver all that is wholly free (`release_cached_blocks`, as `empty_cache` does); the bytes of it."""
        before = self.reserved
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if self.expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved -= block.size
        return before - self.reserved

    def _pool(self, stream: int, small: bool) -> _Pool:
        key = (stream, small)
        if key not in self._pools:
            pool = self._pools[key] = _Pool(small, len(self._pools) * _SPACE)
            if self.expandable:
                pool.put(_Block(pool.base, _SPACE, pool, mapped=False))
        return self._pools[key]

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that is large enough, the lowest of equal ones (`get_free_block`).

        Of an expandable segment, the block at its end counts with all that it may grow to.
        """
        at = bisect_left(pool.free, (size, -1))
        if at == len(pool.free):
            return None
        block = pool.blocks[pool.free[at][1]]
        while self.expandable and at + 1 < len(pool.free):
            other = pool.blocks[pool.free[at + 1][1]]
            if _room(other) >= _room(block):
                break
            at, block = at + 1, other
        pool.take(block)
        return block

    def _segment(self, pool: _Pool, size: int) -> _Block:
        nbytes = segment_size(size)
        if self._lacks(nbytes):
            self.release()
        self._reserve(nbytes)
        block = _Block(self._next, nbytes, pool)
        self._next += nbytes
        return block

    def _lacks(self, nbytes: int) -> bool:
        lacks = self.capacity is not None and self.reserved + nbytes > self.capacity
        self.retries += lacks
        return lacks

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self.capacity is not None:
            self.short = max(self.short, self.reserved - self.capacity)

    def _grown(self, pool: _Pool, size: int) -> _Block:
        """A block with memory put behind it page by page where it has none (`try_allocate_expandable_block`)."""
        block = _candidate(pool, size)
        held = block.size if block.mapped else 0
        if self._lacks(-(-(size - held) // pool.page) * pool.page):
            self.release()
            block = _candidate(pool, size)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            after = block.after
            assert after is not None
            block = self._map(after, min(after.size, size - block.size))
        pool.take(block)
        return block

    def _map(self, block: _Block, size: int) -> _Block:
        """Put memory behind the first `size` bytes of a part without (`map_block`); the free block that it is then."""
        pool = block.pool
        pool.take(block)
        nbytes = min(-(-size // pool.page) * pool.page, block.size)
        if block.size > nbytes:
            pool.put(_cut(block, nbytes))
        block.mapped = True
        self._reserve(nbytes)
        found = _merged(block)
        pool.put(found)
        return found

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        """Take the whole pages of a free block away (`unmap_block`)."""
        begin = -(-block.place // pool.page) * pool.page
        end = (block.place + block.size) // pool.page * pool.page
        if end <= begin:
            return
        pool.take(block)
        if begin > block.place:
            rest = _cut(block, begin - block.place)
            pool.put(block)
            block = rest
        if block.size > end - begin:
            pool.put(_cut(block, end - begin))
        block.mapped = False
        self.reserved -= end - begin
        pool.put(_merged(block))


def _room(block: _Block) -> int:
    """Bytes that a free block may grow to."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _cut(block: _Block, size: int) -> _Block:
    """The part of `block` behind its first `size` bytes, as a block of its own."""
    rest = _Block(block.place + size, block.size - size, block.pool, False, block.mapped, block, block.after)
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size
    return rest


def _merged(block: _Block) -> _Block:
    """`block`, which is in no use and in no list, as one with the neighbours that are in no use either."""
    for other in (block.after, block.before):
        if other is None or other.used or other.mapped != block.mapped:
            continue
        block.pool.take(other)
        low, high = (other, block) if other is block.before else (block, other)
        low.size += high.size
        low.after = high.after
        if low.after is not None:
            low.after.before = low
        block = low
    return block


def _candidate(pool: _Pool, size: int) -> _Block:
    """The lowest place where memory behind free addresses gives `size` bytes (`find_expandable_block`)."""
    for place in sorted(pool.unmapped):
        block = pool.unmapped[place]
        if block.before is not None and not block.before.used:
            block = block.before
        room, at = 0, block
        while at is not None and not at.used and room < size:
            room, at = room + at.size, at.after
        if room >= size:
            return block
    raise AssertionError("an expandable segment has no end")


STEPS: Final = 3
"""Steps after which nothing changes: state is laid down in the first, and found there by the second."""
_WORKSPACE: Final = 8_519_680
_WORKSPACE_HOPPER: Final = 32 << 20
"""Bytes of cuBLAS's workspace of one thread and stream (`CublasHandlePool.cpp`: `:4096:2:16:8`, Hopper `:4096:8`)."""


def workspace_bytes(architecture: str) -> int:
    """Bytes of cuBLAS's workspace on a GPU of that architecture."""
    return _WORKSPACE_HOPPER if architecture.lower().startswith("hopper") else _WORKSPACE


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes at their most in a steady step: `reserved` from the driver, `allocated` of these in blocks in use.

    `retries`: requests of that step that first made the allocator give back what was free. `short`: bytes beyond the
    capacity where that was not enough.
    """

    reserved: int
    allocated: int
    retries: int = 0
    short: int = 0


def replay(
    asked: Allocations, capacity: int | None = None, *, expandable: bool = False, workspace: int = 0
) -> Reserved:
    """What the allocator has reserved after a few equal steps of `asked`.

    What outlives a step (gradients, results) is given back as the next one begins. `workspace`: bytes of each thread
    that calls a matrix library.
    """
    allocator = CachingAllocator(capacity, expandable)
    for nbytes in (*filter(None, asked.held), *([workspace] * asked.threads if workspace else ())):
        allocator.malloc(nbytes)
    places: dict[int, int] = {}
    before = 0
    for step in range(STEPS):
        for place in places.values():
            allocator.free(place)
        places.clear()
        allocator.peak_allocated, before = allocator.allocated, allocator.retries
        for at, one in enumerate((*asked.order, None)):
            if at == asked.late_at and not step:
                for nbytes in filter(None, asked.late):
                    allocator.malloc(nbytes)
            if one is None:
                break
            if one >= 0:
                places[one] = allocator.malloc(asked.nbytes[one], asked.streams[one])
            elif ~one in places:
                allocator.free(places.pop(~one))
    return Reserved(allocator.peak_reserved, allocator.peak_allocated, allocator.retries - before, allocator.short)
