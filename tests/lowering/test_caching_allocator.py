"""PyTorch's caching allocator against its rules, block by block; every number is worked out by hand."""

import itertools
import random

import pytest

from stablecast.ir.allocations import Allocations
from stablecast.lowering.caching_allocator import CachingAllocator, replay, round_size, segment_size, workspace_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(asked: int, block: int, segment: int) -> None:
    assert (round_size(asked), segment_size(round_size(asked))) == (block, segment)
    allocator = CachingAllocator()
    allocator.malloc(asked)
    assert allocator.reserved == segment
    # the rest is split off beyond 1 MiB of a large segment, and of a small one always
    rest = segment - block
    assert allocator.allocated == (block if rest > MIB or segment == 2 * MIB else segment)


def test_small_blocks_share_a_segment_and_large_ones_do_not_use_it() -> None:
    allocator = CachingAllocator()
    places = [allocator.malloc(MIB) for _ in range(3)]
    assert places == [0, MIB, 2 * MIB]
    assert allocator.reserved == 4 * MIB
    allocator.malloc(2 * MIB)
    assert allocator.reserved == 24 * MIB


def test_best_fit_takes_the_smallest_block_then_the_lowest() -> None:
    allocator = CachingAllocator()
    large, first, second = allocator.malloc(40 * MIB), allocator.malloc(30 * MIB), allocator.malloc(30 * MIB)
    for place in (second, large, first):
        allocator.free(place)
    assert allocator.malloc(30 * MIB) == first
    assert allocator.malloc(29 * MIB) == second  # 1 MiB is left, which is no block of its own
    assert allocator.allocated == 60 * MIB
    assert allocator.malloc(28 * MIB) == large
    assert allocator.malloc(12 * MIB) == large + 28 * MIB
    assert allocator.reserved == 100 * MIB


def test_neighbours_become_one_within_a_segment_only() -> None:
    allocator = CachingAllocator()
    whole = allocator.malloc(60 * MIB)
    allocator.free(whole)
    parts = [allocator.malloc(20 * MIB) for _ in range(3)]
    other = allocator.malloc(20 * MIB)
    for place in (parts[0], parts[2], parts[1], other):
        allocator.free(place)
    assert allocator.malloc(60 * MIB) == whole
    assert allocator.reserved == 80 * MIB
    assert allocator.malloc(80 * MIB) not in (whole, other)
    assert allocator.reserved == 160 * MIB


def test_a_hole_that_is_too_small_costs_a_segment() -> None:
    allocator = CachingAllocator()
    whole = allocator.malloc(60 * MIB)
    allocator.free(whole)
    allocator.malloc(20 * MIB)
    allocator.malloc(42 * MIB)
    assert (allocator.allocated, allocator.reserved) == (62 * MIB, 102 * MIB)


def test_blocks_of_one_stream_serve_no_other() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB, stream=1))
    allocator.malloc(30 * MIB, stream=2)
    assert allocator.reserved == 60 * MIB
    allocator.malloc(30 * MIB, stream=1)
    assert allocator.reserved == 60 * MIB


def test_at_the_capacity_only_whole_segments_go_back() -> None:
    allocator = CachingAllocator(capacity=100 * MIB)
    split = allocator.malloc(40 * MIB)
    allocator.free(split)
    kept, gone = allocator.malloc(20 * MIB), allocator.malloc(30 * MIB)
    allocator.free(gone)
    assert allocator.reserved == 70 * MIB
    allocator.malloc(60 * MIB)  # 30 of 70 MiB can go back
    assert (allocator.reserved, allocator.retries, allocator.short) == (100 * MIB, 1, 0)
    allocator.free(kept)
    allocator.malloc(64 * MIB)
    assert (allocator.retries, allocator.reserved, allocator.short) == (2, 124 * MIB, 24 * MIB)


def test_expandable_segments_grow_by_pages_without_holes() -> None:
    allocator = CachingAllocator(expandable=True)
    first = allocator.malloc(30 * MIB)
    assert allocator.reserved == 40 * MIB
    second = allocator.malloc(15 * MIB)  # 10 MiB of the last page, and one more
    assert (second - first, allocator.reserved) == (30 * MIB, 60 * MIB)
    allocator.free(first)
    allocator.free(second)
    assert allocator.malloc(70 * MIB) == first  # what is free grows by the page that is lacking
    assert (allocator.reserved, allocator.allocated) == (80 * MIB, 70 * MIB)


def test_expandable_segments_give_back_pages() -> None:
    allocator = CachingAllocator(capacity=100 * MIB, expandable=True)
    first, second = allocator.malloc(50 * MIB), allocator.malloc(30 * MIB)
    allocator.free(first)
    assert allocator.reserved == 80 * MIB
    allocator.malloc(60 * MIB, stream=1)  # pages 1 and 2 of 4 go back; the third holds part of the second block
    assert (allocator.reserved, allocator.retries) == (100 * MIB, 1)
    allocator.free(second)
    assert allocator.release() == 40 * MIB
    assert allocator.reserved == 60 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_books_balance_whatever_happens(expandable: bool) -> None:
    draw = random.Random(7)
    allocator = CachingAllocator(capacity=3000 * MIB, expandable=expandable)
    held: dict[int, int] = {}
    for _ in range(3000):
        if held and draw.random() < 0.5:
            place = draw.choice(list(held))
            del held[place]
            allocator.free(place)
        else:
            size = int(2 ** draw.uniform(8, 27))
            place = allocator.malloc(size, draw.randrange(2))
            assert place not in held
            held[place] = size
        assert sum(held.values()) <= allocator.allocated <= allocator.reserved
    spans = sorted((place, place + size) for place, size in held.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for place in held:
        allocator.free(place)
    allocator.release()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_a_replayed_step_finds_the_state_that_the_first_one_laid_down() -> None:
    # 100 MiB parameters; activations of 60 MiB; a gradient of 100 MiB that lives on; state of 200 MiB at the end
    asked = Allocations(
        (60 * MIB, 100 * MIB), (0, 0), (1, 2), (0, 1, ~0), (2, 2), (100 * MIB,), (100 * MIB, 100 * MIB), 3
    )
    found = replay(asked)
    assert (found.allocated, found.reserved) == (460 * MIB, 460 * MIB)
    # two threads with a workspace of 32 MiB each
    assert replay(Allocations((), (), (), (), threads=2), workspace=32 * MIB).reserved == 64 * MIB


def test_a_step_that_only_fits_after_giving_back_says_so() -> None:
    asked = Allocations((60 * MIB, 80 * MIB), (0, 1), (1, 2), (0, ~0, 1, ~1))
    assert replay(asked).reserved == 140 * MIB
    tight = replay(asked, 100 * MIB)
    assert (tight.reserved, tight.retries, tight.short) == (80 * MIB, 2, 0)


def test_workspaces() -> None:
    assert workspace_bytes("Hopper (GH100, cc 9.0)") == 32 * MIB
    assert workspace_bytes("Ampere (GA100, cc 8.0)") == 2 * 4 * MIB + 8 * 16 * 1024
