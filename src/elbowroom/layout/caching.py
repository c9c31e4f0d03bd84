"""Blocks handed out by a caching allocator: what a device gives up for good is more than what is in use.

    segment 0  |block|block|......|block|      taken from the device 2 MiB, 20 MiB or a large request at a time
    segment 1  |block.............|......|     free neighbours of one segment are one; nothing joins two segments

The rules are those of PyTorch's allocator for CUDA in its default settings. Inferred, and left out: more streams than
one, and the settings that change the rules; addresses of segments only ever go up. For segments that grow see `pools`.

Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp (`round_size`, `get_allocation_size`, `get_free_block`,
`should_split`, `free_block`, `release_cached_blocks`).
"""

from __future__ import annotations

import bisect
import dataclasses

from elbowroom.errors import TierFull, UsageError

MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this."""

SMALL_BYTES = 1 << 20
"""Blocks up to this come from segments of their own."""

SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
LEAST_OWN_BYTES = 10 << 20
"""A request of this much and more gets a segment of its size,"""

OWN_ROUND_BYTES = 2 << 20
"""rounded up to a multiple of this."""


@dataclasses.dataclass(slots=True, eq=False)
class CachedBlock:
    """A stretch of a segment."""

    address: int
    nbytes: int
    is_small: bool
    is_free: bool = True
    before: CachedBlock | None = None  # its neighbours in the segment
    after: CachedBlock | None = None


class CachingAllocator:
    """Takes segments from a device and hands blocks of them out.

    Args:
        capacity_bytes: what the segments may take together; None for any amount.

    Attributes:
        reserved_bytes: taken from the device now.
        allocated_bytes: in blocks that are handed out now; more than was asked for, where a block was not worth a cut.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._capacity = capacity_bytes
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (bytes, address), by is_small
        self._blocks: dict[int, CachedBlock] = {}
        self._end = 0
        self.reserved_bytes = self.allocated_bytes = 0

    def take(self, nbytes: int) -> int:
        """The address of a block of at least `nbytes`.

        Raises:
            TierFull: the capacity is used up, and there are no free segments to give back.
            UsageError: 0 bytes or fewer are asked for, which no block is needed for.

        Cost: linear in the free blocks at worst, in moving entries of one list.
        """
        if nbytes <= 0:
            raise UsageError(f"no block has {nbytes} bytes")
        nbytes = round_up(nbytes, MIN_BLOCK_BYTES)
        is_small = self.is_small(nbytes)
        free = self._free[is_small]
        index = bisect.bisect_left(free, (nbytes, -1))  # the smallest that is large enough, of those the lowest
        is_there = index < len(free)
        block = self._blocks[free.pop(index)[1]] if is_there else self._add_segment(nbytes, is_small)
        self._cut(block, nbytes)
        block.is_free = False
        self.allocated_bytes += block.nbytes
        return block.address

    def give(self, address: int) -> None:
        """Take a block back, and join it with its free neighbours.

        Raises:
            UsageError: no block that is handed out begins there.
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
        """Give the segments without blocks back to the device; returns their bytes."""
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
        """Address, bytes and whether it is free of every block, by address."""
        return [(block.address, block.nbytes, block.is_free) for _, block in sorted(self._blocks.items())]

    def is_small(self, nbytes: int) -> bool:
        """Whether a block of these bytes comes from the segments for small ones."""
        return nbytes <= SMALL_BYTES

    def size_segment(self, nbytes: int, is_small: bool) -> int:
        """What is taken from the device for a block that no free one is large enough for."""
        if nbytes >= LEAST_OWN_BYTES:
            return round_up(nbytes, OWN_ROUND_BYTES)
        return SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES

    def is_worth_cutting(self, left: int, is_small: bool) -> bool:
        """Whether what a request leaves of a free block becomes a free block."""
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
        """Leave the end of a block free, where that is worth it."""
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
        """Make one of a free block and the free one after it, neither of which is in the list any more afterwards."""
        other = block.after
        assert other is not None
        for each in (block, other):
            free = self._free[each.is_small]
            index = bisect.bisect_left(free, (each.nbytes, each.address))
            if index < len(free) and free[index] == (each.nbytes, each.address):  # else it has just been given back
                del free[index]
        del self._blocks[other.address]
        block.nbytes += other.nbytes
        block.after = other.after
        if block.after is not None:
            block.after.before = block
        return block


def round_up(nbytes: int, multiple: int) -> int:
    """The next multiple."""
    return -(-nbytes // multiple) * multiple
