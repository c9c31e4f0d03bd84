"""The storages that a policy may evict, and random samples of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Candidates:
    """A set of storages with random sampling, reproducible between runs.

    Cost: O(1) per storage added, removed or drawn.
    """

    def __init__(self) -> None:
        self._storages: list[int] = []
        self._index: dict[int, int] = {}
        self._random = 1

    def __contains__(self, storage: int) -> bool:
        return storage in self._index

    def __iter__(self) -> Iterator[int]:
        return iter(self._storages)

    def __len__(self) -> int:
        return len(self._storages)

    def add(self, storage: int) -> None:
        """Add a storage that is not in the set."""
        self._index[storage] = len(self._storages)
        self._storages.append(storage)

    def discard(self, storage: int) -> None:
        """Remove a storage, if it is in the set."""
        index = self._index.pop(storage, None)
        if index is None:
            return
        last = self._storages.pop()
        if last != storage and index < len(self._storages):  # an interrupt may have come between two lines
            self._storages[index] = last
            self._index[last] = index

    def draw(self, most: int) -> Sequence[int]:
        """Return `most` storages, drawn with replacement; all of them if there are no more."""
        count = len(self._storages)
        if count <= most:
            return self._storages
        return [self._storages[index] for index in self.draw_numbers(count, most)]

    def draw_numbers(self, below: int, count: int) -> Iterator[int]:
        """Draw `count` numbers from range(`below`)."""
        for _ in range(count):
            self._random = (self._random * 25214903917 + 11) & 0xFFFFFFFFFFFF
            yield (self._random >> 16) % below
