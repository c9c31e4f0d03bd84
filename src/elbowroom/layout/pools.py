"""Memory pools without knowledge of lifetimes, as baselines: what programs use without a plan."""

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
"""Base address of the expandable segment for large blocks, far from the one for small blocks."""


class Pool(Protocol):
    """Allocates and frees blocks one at a time."""

    reserved_bytes: int

    def take(self, nbytes: int) -> int:
        """Allocate a block of at least `nbytes` and return its address."""
        ...

    def give(self, address: int) -> None:
        """Free a block."""
        ...


class BestFitPool(CachingAllocator):
    """A single best-fit pool, as in CnMem: blocks are always split, and sizes are not segregated.

    If no free block is large enough, the device allocates exactly the requested bytes. Source: NVIDIA/cnmem,
    src/cnmem.cpp (`findBestBlock`, `extractBlock`, `allocateBlock`), without an initial size.
    """

    def is_small(self, nbytes: int) -> bool:
        return False

    def size_segment(self, nbytes: int, is_small: bool) -> int:
        return nbytes

    def is_worth_cutting(self, left: int, is_small: bool) -> bool:
        return left > 0


class ExpandableAllocator(CachingAllocator):
    """PyTorch's allocator with `expandable_segments:True`: one growing segment for small blocks, one for large ones.

    If no block is large enough, the segment grows by pages of 2 MiB or 20 MiB, and a free block at its end is used
    together with them. There is no capacity limit, and nothing is released.
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
    """Blocks of power-of-two sizes; a freed block is reused for requests of its size only.

    Attributes:
        reserved_bytes: total size of all blocks, allocated and free.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}
        self.reserved_bytes = 0

    def take(self, nbytes: int) -> int:
        """Allocate a block of at least `nbytes` and return its address."""
        size = max(1 << (nbytes - 1).bit_length(), 512)
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        address = self.reserved_bytes
        self._sizes[address] = size
        self.reserved_bytes += size
        return address

    def give(self, address: int) -> None:
        """Free a block."""
        self._free[self._sizes[address]].append(address)


POOLS = {
    "caching": CachingAllocator,
    "expandable": ExpandableAllocator,
    "best_fit_pool": BestFitPool,
    "power_of_two": PowerOfTwoPool,
}
"""Pools by their names in reports."""
