"""torch's caching allocator on CUDA, as arithmetic: what it reserves of a device for a sequence of allocations.

    allocation          is rounded up to 512 bytes                  until 1 MiB of the small pool, above of the large one
    block               the smallest free one of the pool that does, of equal ones the first in memory; what it has too much
                        stays free as a block of its own: from 512 bytes on in the small pool, above 1 MiB in the large one
    segment             where no block does: 2 MiB for the small pool; 20 MiB for less than 10 MiB; else the size itself,
                        rounded up to 2 MiB. It is reserved from then on: all that are free are given back where the
                        device is full
    release             the block becomes one with its free neighbours in the segment

    allocated  bytes of the blocks in use           reserved  bytes of all segments

Source: pytorch/pytorch, v2.11, c10/cuda/CUDACachingAllocator.cpp (round_size, get_free_block, should_split,
get_allocation_size, try_merge_blocks, release_cached_blocks), with its default settings.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

ROUND_BYTES = 512
"""kMinBlockSize."""
SMALL_BYTES = 1 << 20
"""kSmallSize."""
SMALL_SEGMENT_BYTES = 2 << 20
"""kSmallBuffer."""
LARGE_SEGMENT_BYTES = 20 << 20
"""kLargeBuffer."""
OWN_SEGMENT_BYTES = 10 << 20
"""kMinLargeAlloc: from this size on an allocation has a segment of its own."""
ROUND_SEGMENT_BYTES = 2 << 20
"""kRoundLarge."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A piece of a segment; ``before`` and ``after`` are its neighbours there."""

    size_bytes: int
    address: int
    small: bool
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    free: bool = False


class CachingAllocator:
    """The allocator of one process on one device. ``room_bytes``: what the device has for it."""

    def __init__(self, room_bytes: float = math.inf) -> None:
        self.room_bytes = room_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._end = 0
        """The first address behind all segments."""
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        """(bytes, address) of each free block of the large and of the small pool, rising."""
        self._at: dict[int, MemoryBlock] = {}

    def allocate(self, size_bytes: int) -> MemoryBlock:
        """Return a block for a tensor of so many bytes."""
        size = max(1, -(-size_bytes // ROUND_BYTES)) * ROUND_BYTES
        small = size <= SMALL_BYTES
        pool = self._free[small]
        fitting = bisect_left(pool, (size, 0))
        block = self._at[pool.pop(fitting)[1]] if fitting < len(pool) else self._segment(size, small)
        left = block.size_bytes - size
        if left >= ROUND_BYTES if small else left > SMALL_BYTES:
            rest = MemoryBlock(left, block.address + size, small, block, block.after, free=True)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size_bytes = rest, size
            self._at[rest.address] = rest
            insort(pool, (left, rest.address))
        block.free = False
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: MemoryBlock) -> None:
        """Take a block back."""
        self.allocated_bytes -= block.size_bytes
        before, after = block.before, block.after
        if after is not None and after.free:
            self._take(after)
            self._merge(block, after)
        if before is not None and before.free:
            self._take(before)
            self._merge(before, block)
            block = before
        block.free = True
        insort(self._free[block.small], (block.size_bytes, block.address))

    def _segment(self, size: int, small: bool) -> MemoryBlock:
        """Reserve a segment for an allocation of ``size`` bytes."""
        if small:
            reserved = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            reserved = LARGE_SEGMENT_BYTES
        else:
            reserved = -(-size // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES
        if self.reserved_bytes + reserved > self.room_bytes:
            self._give_back()
        block = MemoryBlock(reserved, self._end, small)
        self._at[block.address] = block
        self._end += reserved
        self.reserved_bytes += reserved
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _give_back(self) -> None:
        """Give all segments back that are free as a whole."""
        for pool in self._free:
            for _, address in list(pool):
                block = self._at[address]
                if block.before is None and block.after is None:
                    self._take(block)
                    del self._at[address]
                    self.reserved_bytes -= block.size_bytes

    def _take(self, block: MemoryBlock) -> None:
        """Take a block off the free ones of its pool."""
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size_bytes, block.address))]

    def _merge(self, first: MemoryBlock, second: MemoryBlock) -> None:
        """Make one block of two neighbours."""
        first.size_bytes += second.size_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._at[second.address]
