"""Allocate and free offsets one at a time: at a given offset, or first fit over the free ranges."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

ALIGNMENT_BYTES = 512
"""Alignment of blocks in the tiers below the device."""


class FreeList:
    """An arena that grows up to its capacity.

    Args:
        capacity_bytes: offsets stay below this; None for no limit.
        alignment_bytes: every block begins at a multiple of this.

    Attributes:
        end_bytes: one past the highest byte allocated since `forget_end`.
    """

    def __init__(self, capacity_bytes: int | None = None, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        self._capacity, self._alignment = capacity_bytes, alignment_bytes
        self._offsets: list[int] = []  # of the free ranges below `end_bytes`, sorted, never adjacent
        self._sizes: list[int] = []
        self.end_bytes = 0

    def take(self, nbytes: int, least_offset: int = 0) -> int | None:
        """Allocate `nbytes` at the lowest offset where they fit, and return it; None if they do not fit.

        Args:
            least_offset: lower bound on the offset; a multiple of the alignment.

        Cost: linear in the number of free ranges.
        """
        nbytes = self._round(nbytes)
        for index, size in enumerate(self._sizes):
            offset = max(self._offsets[index], least_offset)
            if self._offsets[index] + size - offset >= nbytes:
                self._cut(index, offset, nbytes)
                return offset
        # Nothing fits: grow, starting in the last free range if that ends at `end_bytes`.
        offset = self.end_bytes
        if self._offsets and self._offsets[-1] + self._sizes[-1] == self.end_bytes:
            offset = self._offsets[-1]
        offset = max(offset, least_offset)
        return offset if self._grow(offset, nbytes) else None

    def take_at(self, offset: int, nbytes: int) -> bool:
        """Allocate `nbytes` at an aligned offset. Return False, without effect, unless all of them are free."""
        nbytes = self._round(nbytes)
        index = bisect.bisect_right(self._offsets, offset) - 1
        end = self._offsets[index] + self._sizes[index] if index >= 0 else 0
        if offset + nbytes <= end:
            self._cut(index, offset, nbytes)
            return True
        return (offset >= self.end_bytes or end == self.end_bytes > offset) and self._grow(offset, nbytes)

    def _grow(self, offset: int, nbytes: int) -> bool:
        """Allocate a block that extends beyond `end_bytes`, if the capacity allows it."""
        end = offset + nbytes
        if self._capacity is not None and end > self._capacity:
            return False
        begin, self.end_bytes = self.end_bytes, end
        self.give(begin, end - begin)
        self._cut(bisect.bisect_right(self._offsets, offset) - 1, offset, nbytes)
        return True

    def _cut(self, index: int, offset: int, nbytes: int) -> None:
        """Remove a block from a free range."""
        begin = self._offsets[index]
        end = begin + self._sizes[index]
        if begin < offset:
            self._sizes[index] = offset - begin
            index += 1
        else:
            del self._offsets[index], self._sizes[index]
        if offset + nbytes < end:
            self._offsets.insert(index, offset + nbytes)
            self._sizes.insert(index, end - offset - nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Free a block."""
        nbytes = self._round(nbytes)
        index = bisect.bisect_left(self._offsets, offset)
        if index < len(self._offsets) and offset + nbytes == self._offsets[index]:
            self._offsets[index] = offset
            self._sizes[index] += nbytes
        else:
            self._offsets.insert(index, offset)
            self._sizes.insert(index, nbytes)
        if index > 0 and self._offsets[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += self._sizes[index]
            del self._offsets[index], self._sizes[index]

    def restore(self, taken: Iterable[tuple[int, int]]) -> None:
        """Rebuild from the allocated (offset, bytes) blocks, after an exception interrupted a change."""
        self._offsets = []
        self._sizes = []
        self.end_bytes = 0
        for offset, nbytes in taken:
            self.take_at(offset, nbytes)

    def forget_end(self) -> int:
        """Return `end_bytes` and reset it to the end of the highest allocated block."""
        most = self.end_bytes
        if self._offsets and self._offsets[-1] + self._sizes[-1] == self.end_bytes:
            self.end_bytes = self._offsets.pop()
            self._sizes.pop()
        return most

    @property
    def free_bytes(self) -> int | None:
        """Bytes that are not allocated; None without a capacity."""
        if self._capacity is None:
            return None
        return self._capacity - self.end_bytes + sum(self._sizes)

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing is allocated."""
        return sum(self._sizes) == self.end_bytes

    def _round(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self._alignment)) * self._alignment
