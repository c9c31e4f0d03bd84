"""Offsets handed out and taken back one at a time: first fit over the free stretches of an arena."""

from __future__ import annotations

import bisect


class FreeList:
    """An arena that grows as far as it is let.

    Args:
        capacity_bytes: offsets stay below this; None for no limit.
        alignment_bytes: every block begins at a multiple of this.

    Attributes:
        end_bytes: one past the highest byte ever handed out.
    """

    def __init__(self, capacity_bytes: int | None = None, alignment_bytes: int = 4096) -> None:
        self._capacity, self._alignment = capacity_bytes, alignment_bytes
        self._offsets: list[int] = []  # of the free stretches below `end_bytes`, sorted, never adjacent
        self._sizes: list[int] = []
        self.end_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """The lowest offset where `nbytes` fit, now taken; None if there is none.

        Cost: linear in the number of free stretches.
        """
        nbytes = self._round(nbytes)
        for index, size in enumerate(self._sizes):
            if size >= nbytes:
                offset = self._offsets[index]
                if size == nbytes:
                    del self._offsets[index], self._sizes[index]
                else:
                    self._offsets[index] += nbytes
                    self._sizes[index] -= nbytes
                return offset
        # Nothing fits: grow, from the last free stretch if it ends at the end.
        offset = self.end_bytes
        touches = bool(self._offsets) and self._offsets[-1] + self._sizes[-1] == self.end_bytes
        if touches:
            offset = self._offsets[-1]
        if self._capacity is not None and offset + nbytes > self._capacity:
            return None
        if touches:
            del self._offsets[-1], self._sizes[-1]
        self.end_bytes = offset + nbytes
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take a block back."""
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

    @property
    def free_bytes(self) -> int | None:
        """Bytes not handed out; None without a capacity."""
        if self._capacity is None:
            return None
        return self._capacity - self.end_bytes + sum(self._sizes)

    @property
    def is_empty(self) -> bool:
        """Whether everything has been given back."""
        return sum(self._sizes) == self.end_bytes

    def _round(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self._alignment)) * self._alignment
