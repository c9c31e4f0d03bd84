"""Sets of dropped storages that touch each other, each with what computing all of it would cost.

Source: M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, section 4.1: sets are joined, never split.
"""

from __future__ import annotations

from collections.abc import Iterable


class EvictedSets:
    """A union-find of dropped storages. Cost: nearly constant for each call."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._costs: list[float] = []
        self._nodes: dict[int, int] = {}  # of a storage that was ever dropped

    def find(self, storage: int) -> int:
        """The set of a storage that was dropped."""
        parents, node = self._parents, self._nodes[storage]
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    def cost(self, root: int) -> float:
        """What computing a set costs."""
        return self._costs[root]

    def add(self, storage: int, cost: float, neighbours: Iterable[int]) -> None:
        """A storage was dropped beside these dropped ones."""
        root = len(self._parents)
        self._parents.append(root)
        self._costs.append(cost)
        self._nodes[storage] = root
        for neighbour in neighbours:
            other = self.find(neighbour)
            if other != root:
                self._parents[root] = other
                self._costs[other] += self._costs[root]
                root = other

    def take(self, storage: int, cost: float) -> None:
        """A storage is back; nothing changes where it was not dropped but let go for good, and is made again."""
        if storage not in self._nodes:
            return
        self._costs[self.find(storage)] -= cost
