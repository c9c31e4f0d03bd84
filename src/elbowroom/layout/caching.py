"""A model of PyTorch's caching allocator, which reserves more memory than it has allocated.

    segment 0  |block|block|......|block|      allocated from the device: 2 MiB, 20 MiB, or the size of a large request
    segment 1  |block.............|......|     adjacent free blocks of one segment are merged, never across segments

The rules are those of PyTorch's CUDA allocator with default settings. Inferred: segment addresses only increase. Left
out: multiple streams, and non-default settings. For expandable segments see `pools`.

Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp (`round_size`, `get_allocation_size`, `get_free_block`,
`should_split`, `free_block`, `release_cached_blocks`).
"""

from __future__ import annotations

import bisect
import dataclasses

from elbowroom.errors import TierFull, UsageError

MIN_BLOCK_BYTES = 512
"""Block sizes are multiples of this."""

SMALL_BYTES = 1 << 20
"""Blocks up to this size are allocated from separate segments."""

SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
LEAST_OWN_BYTES = 10 << 20
"""A request of at least this size gets a segment of its own."""

OWN_ROUND_BYTES = 2 << 20
"""Sizes of such segments are rounded up to a multiple of this."""


@dataclasses.dataclass(slots=True, eq=False)
class CachedBlock:
    """A contiguous part of a segment."""

    address: int
    nbytes: int
    is_small: bool
    is_free: bool = True
    before: CachedBlock | None = None  # its neighbours in the segment
    after: CachedBlock | None = None


class CachingAllocator:
    """Allocates segments from a device, and blocks from the segments.

    Args:
        capacity_bytes: limit on the total size of the segments; None for no limit.

    Attributes:
        reserved_bytes: total size of all segments.
        allocated_bytes: total size of allocated blocks; more than requested where a block was not split.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._capacity = capacity_bytes
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (bytes, address), by is_small
        self._blocks: dict[int, CachedBlock] = {}
        self._end = 0
        self.reserved_bytes = self.allocated_bytes = 0

    def take(self, nbytes: int) -> int:
        """Allocate a block of at least `nbytes` and return its address.

        Raises:
            TierFull: the capacity is exhausted, even after free segments are released.
            UsageError: `nbytes` is not positive.

        Cost: linear in the number of free blocks (a list insertion).
        """
        if nbytes <= 0:
            raise UsageError(f"no block has {nbytes} bytes")
        nbytes = round_up(nbytes, MIN_BLOCK_BYTES)
        is_small = self.is_small(nbytes)
        free = self._free[is_small]
        index = bisect.bisect_left(free, (nbytes, -1))  # best fit; ties go to the lowest address
        is_there = index < len(free)
        block = self._blocks[free.pop(index)[1]] if is_there else self._add_segment(nbytes, is_small)
        self._cut(block, nbytes)
        block.is_free = False
        self.allocated_bytes += block.nbytes
        return block.address

    def give(self, address: int) -> None:
        """Free a block, and merge it with its free neighbours.

        Raises:
            UsageError: no allocated block begins at `address`.
        """
        block = self._blocks.get(address)
        if block is None or block.is_free:
            raise UsageError(f"no block begins at {address}")
        self.allocated_bytes -= block.nbytes
        block.is_free = True
        if block.before is not None and block.before.is_free:
            block = self._join(block.before)
        if block.after is not None and block.after.is_free:
            self._join(block)
        bisect.insort(self._free[block.is_small], (block.nbytes, block.address))

    def release(self) -> int:
        """Release segments that are entirely free to the device; return their bytes."""
        released = 0
        for free in self._free.values():
            for nbytes, address in list(free):
                block = self._blocks[address]
                if block.before is None and block.after is None:
                    free.remove((nbytes, address))
                    del self._blocks[address]
                    released += nbytes
        self.reserved_bytes -= released
        return released

    def list_blocks(self) -> list[tuple[int, int, bool]]:
        """Return (address, bytes, is free) of every block, by address."""
        return [(block.address, block.nbytes, block.is_free) for _, block in sorted(self._blocks.items())]

    def is_small(self, nbytes: int) -> bool:
        """Tell whether a block of this size belongs to the small segments."""
        return nbytes <= SMALL_BYTES

    def size_segment(self, nbytes: int, is_small: bool) -> int:
        """Return the size of the segment to allocate for a block that no free block can hold."""
        if nbytes >= LEAST_OWN_BYTES:
            return round_up(nbytes, OWN_ROUND_BYTES)
        return SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES

    def is_worth_cutting(self, left: int, is_small: bool) -> bool:
        """Tell whether to split a block that has `left` bytes more than requested."""
        return left >= MIN_BLOCK_BYTES if is_small else left > SMALL_BYTES

    def _add_segment(self, nbytes: int, is_small: bool) -> CachedBlock:
        size = self.size_segment(nbytes, is_small)
        if self._capacity is not None and self.reserved_bytes + size > self._capacity:
            self.release()
            if self.reserved_bytes + size > self._capacity:
                free_bytes = self._capacity - self.reserved_bytes
                raise TierFull(
                    "the device", size, free_bytes,
                    f"{self.reserved_bytes - self.allocated_bytes} bytes more are free inside of segments that are in "
                    "use, in pieces that are too small; plan for a smaller budget.",
                )  # fmt: skip
        self.reserved_bytes += size
        block = CachedBlock(self._end, size, is_small)
        self._end += size
        self._blocks[block.address] = block
        return block

    def _cut(self, block: CachedBlock, nbytes: int) -> None:
        """Split a block, if the remainder is worth it."""
        left = block.nbytes - nbytes
        if not self.is_worth_cutting(left, block.is_small):
            return
        rest = CachedBlock(block.address + nbytes, left, block.is_small, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.nbytes = rest, nbytes
        self._blocks[rest.address] = rest
        bisect.insort(self._free[rest.is_small], (rest.nbytes, rest.address))

    def _join(self, block: CachedBlock) -> CachedBlock:
        """Merge a free block with the free block after it, and remove both from the free list."""
        other = block.after
        assert other is not None
        for each in (block, other):
            free = self._free[each.is_small]
            index = bisect.bisect_left(free, (each.nbytes, each.address))
            if index < len(free) and free[index] == (each.nbytes, each.address):  # else it is just being freed
                del free[index]
        del self._blocks[other.address]
        block.nbytes += other.nbytes
        block.after = other.after
        if block.after is not None:
            block.after.before = block
        return block


def round_up(nbytes: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-nbytes // multiple) * multiple
