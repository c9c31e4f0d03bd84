"""Pools that know nothing of lifetimes, to compare layouts with: what programs get from a device without a plan."""

from __future__ import annotations

from typing import Protocol

from elbowroom.layout.caching import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    CachedBlock,
    CachingAllocator,
    round_up,
)

LARGE_BASE = 1 << 60
"""Where the segment of the larger blocks begins, if segments grow: no two of them meet."""


class Pool(Protocol):
    """Hands out blocks, one at a time."""

    reserved_bytes: int

    def take(self, nbytes: int) -> int:
        """The address of a block of at least `nbytes`."""
        ...

    def give(self, address: int) -> None:
        """Take a block back."""
        ...


class BestFitPool(CachingAllocator):
    """One pool, in the way of CnMem: the smallest free block that is large enough, always split; no sizes apart.

    Where no block is large enough, the device is asked for exactly what is missing. Source: NVIDIA/cnmem, src/cnmem.cpp
    (`findBestBlock`, `extractBlock`, `allocateBlock`), with no initial size given.
    """

    def is_small(self, nbytes: int) -> bool:
        return False

    def size_segment(self, nbytes: int, is_small: bool) -> int:
        return nbytes

    def is_worth_cutting(self, left: int, is_small: bool) -> bool:
        return left > 0


class ExpandableAllocator(CachingAllocator):
    """PyTorch's allocator with `expandable_segments:True`: one segment for small blocks, one for others; both grow.

    Where no block is large enough, the segment grows by pages of 2 MiB or 20 MiB; a free block at its end is part of
    what is handed out. It takes as much as it needs, and gives nothing back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[bool, int] = {True: 0, False: LARGE_BASE}

    def is_worth_cutting(self, left: int, is_small: bool) -> bool:
        return left >= MIN_BLOCK_BYTES

    def _add_segment(self, nbytes: int, is_small: bool) -> CachedBlock:
        end = self._ends[is_small]
        free = self._free[is_small]
        last = next((self._blocks[address] for size, address in free if address + size == end), None)
        there = last.nbytes if last is not None else 0
        added = round_up(nbytes - there, SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES)
        self.reserved_bytes += added
        self._ends[is_small] += added
        if last is not None:
            free.remove((last.nbytes, last.address))
            last.nbytes += added
            return last
        block = self._blocks[end] = CachedBlock(end, added, is_small)
        before = next((each for each in self._blocks.values() if each.address + each.nbytes == end), None)
        if before is not None and before is not block:
            before.after, block.before = block, before
        return block


class PowerOfTwoPool:
    """Blocks of powers of two, each kept for the next request of its size.

    Attributes:
        reserved_bytes: taken from the device.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}
        self.reserved_bytes = 0

    def take(self, nbytes: int) -> int:
        """The address of a block of at least `nbytes`."""
        size = max(1 << (nbytes - 1).bit_length(), 512)
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        address = self.reserved_bytes
        self._sizes[address] = size
        self.reserved_bytes += size
        return address

    def give(self, address: int) -> None:
        """Take a block back."""
        self._free[self._sizes[address]].append(address)


POOLS = {
    "caching": CachingAllocator,
    "expandable": ExpandableAllocator,
    "best_fit_pool": BestFitPool,
    "power_of_two": PowerOfTwoPool,
}
"""What they are called in tables."""
