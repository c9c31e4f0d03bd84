"""Sets of adjacent dropped storages, each with the cost of recomputing all of it.

Source: M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, section 4.1: sets are merged, never split.
"""

from __future__ import annotations

from collections.abc import Iterable


class EvictedSets:
    """A union-find of dropped storages. Cost: nearly constant per call."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._costs: list[float] = []
        self._nodes: dict[int, int] = {}  # of a storage that was ever dropped

    def find(self, storage: int) -> int:
        """Return the root of the set of a dropped storage."""
        parents, node = self._parents, self._nodes[storage]
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    def cost(self, root: int) -> float:
        """Return the cost of recomputing a set."""
        return self._costs[root]

    def add(self, storage: int, cost: float, neighbours: Iterable[int]) -> None:
        """Add a dropped storage, and merge it with the sets of its dropped neighbours."""
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
        """Subtract the cost of a storage that is back; no effect on a storage that was never dropped."""
        if storage not in self._nodes:
            return
        self._costs[self.find(storage)] -= cost
