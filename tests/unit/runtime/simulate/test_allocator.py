"""torch's caching allocator, rule by rule."""

from __future__ import annotations

import pytest

from runtime.simulate.allocator import CachingAllocator

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(("asked", "allocated"), [(1, 512), (512, 512), (513, 1024), (0, 512)])
def test_allocations_are_rounded_up_to_512_bytes(asked: int, allocated: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.allocated_bytes == allocated


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),  # the small pool
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),  # the large one
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),  # a segment of its own
    ],
)
def test_the_segment_of_a_first_allocation(asked: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.reserved_bytes == reserved


def test_two_tensors_of_8_mib_fill_a_segment_of_20() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(8 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (32 * MIB, 40 * MIB)


def test_small_and_large_allocations_share_no_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(2 * MIB)  # leaves 18 MiB free
    allocator.allocate(512)
    assert allocator.reserved_bytes == 22 * MIB


def test_what_is_over_is_a_block_of_its_own_above_1_mib() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(12 * MIB))
    allocator.allocate(11 * MIB)  # 1 MiB is over: it stays with the block
    assert allocator.allocated_bytes == 12 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 32 * MIB


def test_in_the_small_pool_from_512_bytes_on() -> None:
    allocator = CachingAllocator()
    kept = [allocator.allocate(512 * KIB) for _ in range(4)]
    assert allocator.reserved_bytes == 2 * MIB
    allocator.release(kept[0])
    allocator.allocate(512 * KIB - 512)
    allocator.allocate(512)
    assert allocator.reserved_bytes == 2 * MIB


def test_the_smallest_free_block_that_does_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(12 * MIB)
    allocator.release(large)
    allocator.release(small)
    allocator.allocate(12 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 52 * MIB


def test_free_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]  # one segment
    for at in (0, 2, 1):  # the last joins both its neighbours
        allocator.release(blocks[at])
    allocator.allocate(12 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (20 * MIB, 20 * MIB)


def test_blocks_of_two_segments_never_become_one() -> None:
    allocator = CachingAllocator()
    for block in [allocator.allocate(12 * MIB), allocator.allocate(12 * MIB)]:
        allocator.release(block)
    allocator.allocate(24 * MIB)
    assert allocator.reserved_bytes == 48 * MIB


def test_segments_stay_reserved() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(12 * MIB))
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 12 * MIB)
    assert allocator.peak_allocated_bytes == 12 * MIB


def test_where_the_device_is_full_segments_that_are_free_are_given_back() -> None:
    allocator = CachingAllocator(room_bytes=40 * MIB)
    whole, part, kept = (
        allocator.allocate(size * MIB) for size in (12, 4, 2)
    )  # 12 MiB, and one segment of 20
    allocator.release(whole)
    allocator.release(part)
    allocator.allocate(18 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (38 * MIB, 38 * MIB)
    allocator.release(kept)
    allocator.allocate(22 * MIB)  # the segment of 20 is free as a whole now
    assert allocator.reserved_bytes == allocator.allocated_bytes == 40 * MIB
