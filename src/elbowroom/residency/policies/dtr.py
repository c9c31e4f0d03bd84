"""Drops the storage that is cheapest to recompute, relative to its bytes and idle time.

Source: M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen, Z. Tatlock, "Dynamic Tensor
Rematerialization", ICLR 2021, its score over equivalence classes. Inferred: the neighbours of a storage are the saved
storages that it is computed from; its own cost is that of computing it from these. Ours: storages that cannot be
recomputed are offloaded, once no others are left.
"""

from __future__ import annotations

import math

from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.context import PolicyContext, list_leaves, replay_seconds
from elbowroom.residency.evicted_sets import EvictedSets
from elbowroom.residency.online import Online


class Policy(Online):
    """Score: (own cost + cost of the sets of its dropped neighbours) / (bytes x idle seconds)."""

    def __init__(self, context: PolicyContext, history: AccessHistory) -> None:
        super().__init__(context, history)
        self._evicted_sets = EvictedSets()
        self._costs: dict[int, float] = {}  # of dropped storages

    def rate(self, storage: int) -> float:
        context = self.context
        cost = replay_seconds(context, storage)
        if cost < math.inf:
            roots = {self._evicted_sets.find(each) for each in list_leaves(context, storage) if each in self._costs}
            cost += sum(map(self._evicted_sets.cost, roots))
        weight = context.nbytes(storage) * self.idle_seconds(storage)
        return cost / weight if weight > 0 else math.inf

    def drops(self, storage: int) -> bool:
        return True

    def left(self, storage: int, is_dropped: bool) -> None:
        if is_dropped:
            cost = replay_seconds(self.context, storage)
            self._evicted_sets.add(
                storage, cost, [each for each in list_leaves(self.context, storage) if each in self._costs]
            )
            self._costs[storage] = cost

    def came(self, storage: int) -> None:
        if storage in self._costs:
            self._evicted_sets.take(storage, self._costs.pop(storage))
